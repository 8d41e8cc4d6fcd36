"""Brings one version here: lanes to all its sources at once, every chunk verified, passed on and stored.

Guarantees:

* The buffer holds only verified chunks; a chunk can be forwarded the moment it is in the buffer, and is
  written to the store behind that. A fetch that was cut off goes on from what the store has.
* A source that is absent, slow, stalled or lying costs time: what it owes is asked from others, from the
  learner last.
* A fetch ends: with everything, or with an error that names what is missing and who was asked.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection, Iterator
from functools import partial

from echo2p2p.errors import (
    ChunkError,
    DeadlineExceeded,
    Echo2p2pError,
    PeerUnreachable,
    SwarmError,
)
from echo2p2p.swarm.identity import PeerId
from echo2p2p.swarm.network import Network
from echo2p2p.weights.holding import Holding, set_within
from echo2p2p.weights.lane import FetchLimits, Lane
from echo2p2p.weights.plan import RelayPlan, relay_plan
from echo2p2p.weights.rate import TokenBucket
from echo2p2p.weights.reports import tell
from echo2p2p.weights.schedule import Schedule
from echo2p2p.weights.standing import Standing
from echo2p2p.weights.store import ChunkStore
from echo2p2p.weights.timeline import Timeline
from echo2p2p.weights.wire import MAX_WANTS, Report

_STORE_BATCH = 32
_STORE_PAUSE_S = 0.02
"""For chunks to gather in: handing them to another thread one by one costs more than storing them."""
_STREAMS = 8
"""To all sources together: a stream's window in flight (256 KiB in libp2p) is all that one round trip brings."""
_MAX_STREAMS_PER_SOURCE = 4
_RESCUED = 8
"""Chunks that the learner is asked for when next to nothing came; twice as many the next time."""
_NAMED = 5
"""Chunks and sources that an error names before it only counts."""


class Fetch:
    """The fetch of one version into ``buffer``, which is the buffer of ``holding`` too.

    Args:
        wanted: the chunks to fetch; the others are left alone.
        cap: on what is asked for.
        others: peers that are not in the plan and may have the version; asked when nobody else has a chunk.
        timeline: is told of every arrival.
        stored: called off the loop, from one thread at a time, when more chunks are in the buffer and the store.

    Attributes:
        bytes_from_learner, bytes_from_peers: chunk bytes that came over the network.
    """

    def __init__(
        self,
        network: Network,
        store: ChunkStore,
        learner: PeerId,
        version: str,
        holding: Holding,
        buffer: memoryview,
        wanted: range,
        standing: Standing,
        limits: FetchLimits,
        cap: TokenBucket,
        timeline: Timeline,
        stored: Callable[[], None] = lambda: None,
        others: Collection[PeerId] = (),
    ) -> None:
        self._network = network
        self._clock = network.clock
        self._store = store
        self._learner = learner
        self._version = version
        self._holding = holding
        self._manifest = holding.manifest
        self._buffer = buffer
        self._wanted = wanted
        spans = [self._manifest.chunk_span(index) for index in (*wanted[:1], *wanted[-1:])]
        nbytes = spans[-1][1] - spans[0][0] if spans else 0
        self._mean_chunk_bytes = max(1.0, nbytes / max(1, len(wanted)))
        self._standing = standing
        self._limits = limits
        self._cap = cap
        self._timeline = timeline
        self._others = others
        self._stored = stored
        self._lanes: dict[PeerId, Lane] = {}
        self._tasks: dict[PeerId, asyncio.Task[None]] = {}
        self._reports: list[asyncio.Task[None]] = []
        # Only indices, each once: the bytes wait in the buffer. None ends it.
        self._to_store: asyncio.Queue[int | None] = asyncio.Queue(self._manifest.n_chunks + 1)
        self._all_here = asyncio.Event()
        self._over = False
        self._asked: set[PeerId] = set()
        self._last_chunk_s = self._clock.monotonic()
        self._suspects: frozenset[PeerId] = frozenset()
        self._reported: set[PeerId] = set()
        self.bytes_from_learner = 0
        self.bytes_from_peers = 0

    async def run(self) -> None:
        """Fetch what is missing. Every wanted chunk is in the buffer and in the store afterwards.

        Raises:
            PeerUnreachable: nobody is left to be asked for something.
            DeadlineExceeded: nothing came from anybody for ``starved_s``.
            OutOfDisk, ResourceError: the store could not keep a chunk.
        """
        here = await self._clock.offload(self._load_from_store)
        for index in here:
            self._holding.add(index)
        self._schedule = await self._clock.offload(partial(self._plan, here))
        self._last_chunk_s = self._clock.monotonic()
        try:
            async with asyncio.TaskGroup() as self._group:
                storing = self._group.create_task(self._write_to_store())
                sources = max(1, len(self._schedule.busy_sources()))
                self._streams = max(1, min(_MAX_STREAMS_PER_SOURCE, _STREAMS // sources))
                self._open_lanes()
                relaying = {member.peer for member in self._manifest.members if member.upload_mbit > 0}
                self._report(lied=relaying & self._standing.banned.keys())
                try:
                    await self._watch()
                finally:
                    self._over = True
                for task in [*self._tasks.values(), *self._reports]:
                    task.cancel()
                self._to_store.put_nowait(None)
                await storing
        except BaseExceptionGroup as group:
            raise _cause(group) from None
        finally:
            # Tasks that were cancelled keep their frames, and with them all of this, until the garbage collector
            # comes by, which it seldom does; a whole version must not wait for that.
            self._buffer = memoryview(b"")

    def _load_from_store(self) -> list[int]:
        """Copy what the store already has into the buffer: an earlier try, or chunks that did not change."""
        here = []
        for index in self._wanted:
            if self._holding.holds(index):
                # Another way to this version was tried before, and may have ended before this was stored.
                self._store_chunks([index])
                here.append(index)
                continue
            start, end = self._manifest.chunk_span(index)
            data = self._store.get(self._manifest.chunk_digest(index))
            if data is not None and len(data) == end - start:
                self._buffer[start:end] = data
                here.append(index)
        return here

    def _plan(self, here: list[int]) -> Schedule:
        """Off the loop, too: it takes a while with a hundred thousand chunks."""
        manifest = self._manifest
        return Schedule(
            manifest.n_chunks,
            self._relay_plan(),
            me=self._network.peer_id,
            learner=self._learner,
            have=(set(range(manifest.n_chunks)) - set(self._wanted)).union(here),
            unreliable=self._standing.unreliable(),
            banned=self._standing.banned,
            others=self._others,
        )

    def _relay_plan(self) -> RelayPlan:
        manifest = self._manifest
        n_whole = manifest.whole.stop
        return relay_plan(manifest.n_chunks, n_whole, manifest.members, *self._holding.trees, self._suspects)

    @property
    def missing_bytes(self) -> int:
        """Of the wanted chunks, what is not here yet."""
        spans = (self._manifest.chunk_span(index) for index in self._wanted if not self._holding.holds(index))
        return sum(end - start for start, end in spans)

    # --- lanes ------------------------------------------------------------------------------------------

    def _open_lanes(self) -> None:
        """See to it that every source with work has a lane that knows of it, and who waits here for nothing, too."""
        self._holding.renounce(self._schedule.take_renounced())
        if self._over:
            # What breaks when the lanes are cancelled is nothing to be made good.
            return
        for source in self._schedule.busy_sources():
            if source in self._lanes:
                self._lanes[source].wake()
            elif source not in self._tasks or self._tasks[source].done():
                self._tasks[source] = self._group.create_task(self._keep_lane(source))

    async def _keep_lane(self, source: PeerId) -> None:
        """Run lanes to ``source``, one after another, until it has nothing more to do or is given up."""
        self._asked.add(source)
        while self._schedule.load(source):
            failures = self._schedule.failures(source)
            await asyncio.sleep(failures * self._limits.retry_s)
            lane = Lane(
                self._network,
                source,
                self._manifest,
                self._version,
                self._schedule,
                self._limits,
                self._cap,
                streams=self._streams,
                deliver=self._deliver,
                rerouted=self._open_lanes,
            )
            self._lanes[source] = lane
            try:
                await lane.run()
                del self._lanes[source]
            except ChunkError as error:
                self._standing.lied(source, error.message)
                self._report(lied={source})
                self._give_up(source, for_good=source != self._learner)
            except SwarmError:
                self._standing.failed(source)
                self._give_up(source, for_good=False)

    def _give_up(self, source: PeerId, *, for_good: bool) -> None:
        del self._lanes[source]
        self._schedule.failed(source, for_good=for_good)
        self._open_lanes()

    def _report(self, lied: Collection[PeerId] = (), slow: Collection[PeerId] = ()) -> None:
        """Tell the learner of members that nobody should rely on, of each once."""
        places = {member.peer: at for at, member in enumerate(self._manifest.members)}
        new = [
            tuple(sorted(places[peer] for peer in peers if peer in places and peer not in self._reported))
            for peers in (lied, slow)
        ]
        if any(new) and not self._over:
            self._reported.update(lied, slow)
            message = Report(self._version, *(indices[:MAX_WANTS] for indices in new))
            self._reports.append(self._group.create_task(tell(self._network, self._learner, message)))

    async def _heed_suspects(self) -> None:
        """Turn away from those whom the learner has come to suspect."""
        if self._suspects == self._holding.suspects:
            return
        self._suspects = self._holding.suspects
        plan = await self._clock.offload(self._relay_plan)
        for source, chunks in self._schedule.replan(plan).items():
            for chunk in chunks if source in self._lanes else ():
                self._lanes[source].cancel(chunk)

    def _deliver(self, source: PeerId, index: int, data: memoryview) -> bool:
        self._timeline.add(source, len(data))
        if source == self._learner:
            self.bytes_from_learner += len(data)
        else:
            self.bytes_from_peers += len(data)
        for other in self._schedule.arrived(index):
            if other != source and other in self._lanes:
                self._lanes[other].cancel(index)
        if self._holding.holds(index):
            return False
        start, end = self._manifest.chunk_span(index)
        self._buffer[start:end] = data
        self._holding.add(index)
        self._to_store.put_nowait(index)
        self._last_chunk_s = self._clock.monotonic()
        if self._schedule.done:
            self._all_here.set()
        return True

    async def _write_to_store(self) -> None:
        """Write chunks behind their forwarding, in batches; None is the last."""
        last = False
        while not last:
            batch = [await self._to_store.get()]
            if self._to_store.qsize() < _STORE_BATCH:
                await set_within(self._all_here, _STORE_PAUSE_S)
            while not self._to_store.empty() and len(batch) < _STORE_BATCH:
                batch.append(self._to_store.get_nowait())
            last = batch[-1] is None
            indices = [index for index in batch if index is not None]
            try:
                await self._clock.offload(partial(self._store_chunks, indices))
            except BaseException:
                self._over = True
                raise

    def _store_chunks(self, indices: list[int]) -> None:
        for index in indices:
            start, end = self._manifest.chunk_span(index)
            self._store.put_verified(self._manifest.chunk_digest(index), self._buffer[start:end])
        self._stored()

    # --- watching ---------------------------------------------------------------------------------------

    async def _watch(self) -> None:
        """Return when every chunk is here; meanwhile relieve slow lanes, and fail when nothing can come."""
        started_s = seen_s = rescued_s = self._clock.monotonic()
        seen_bytes, n_rescued = self.missing_bytes, _RESCUED
        while not self._schedule.done:
            await set_within(self._all_here, self._limits.tick_s)
            if self._schedule.unobtainable:
                raise PeerUnreachable(f"{self._what_is_missing()}: nobody is left to ask")
            now = self._clock.monotonic()
            if now - self._last_chunk_s > self._limits.starved_s:
                raise DeadlineExceeded(
                    f"{self._what_is_missing()}: nothing came for {self._limits.starved_s:g} s"
                )
            await self._heed_suspects()
            self._schedule.next_round()
            slow = dict(self._slow_lanes(now, now - started_s))
            self._schedule.relieve({lane.source: keep for lane, keep in slow.items()})
            for lane, keep in slow.items():
                if not keep and now - lane.last_chunk_s > self._limits.patience_s:
                    self._report(slow={lane.source})
            silent = now - max(self._last_chunk_s, rescued_s) > self._limits.rescue_s
            if silent or now - seen_s > self._limits.rescue_s:
                missing_bytes = self.missing_bytes
                if silent or self._is_little(seen_bytes - missing_bytes):
                    waited = {source for source in self._lanes if self._schedule.open_at(source)}
                    # Who waited for the learner names itself: it is no fault of its own.
                    self._report(
                        slow={self._network.peer_id if each == self._learner else each for each in waited}
                    )
                    self._schedule.rescue(n_rescued)
                    n_rescued *= 2
                    rescued_s = now
                seen_s, seen_bytes = now, missing_bytes
            self._open_lanes()

    def _is_little(self, nbytes: int) -> bool:
        """Whether ``nbytes`` in ``rescue_s`` are so few that those who sent them are not to be relied on."""
        enough = self._limits.min_bytes_per_s * self._limits.rescue_s
        return nbytes < enough and self._cap.seconds(int(enough)) < self._limits.rescue_s / 2

    def _slow_lanes(self, now: float, elapsed_s: float) -> Iterator[tuple[Lane, int]]:
        """Lanes whose chunks others should be asked for too, with how many chunks each may keep to itself.

        What is slow is a source that has more ready than it can send, or that others have left behind; one that
        sends on whatever it gets waits as we do. The learner is never relieved: there is nobody behind it.
        """
        at_work = [lane for lane in self._lanes.values() if lane.nbytes or self._schedule.load(lane.source)]
        idle = sum(not self._schedule.load(lane.source) for lane in at_work)
        left_behind = 2 * idle >= len(at_work) - 1 > 0
        for lane in at_work:
            load = self._schedule.load(lane.source)
            if not load or (self._cap.capped and not self._schedule.open_at(lane.source)):
                # It has nothing to do, or the cap has not let it be asked for anything yet.
                continue
            silent_s = now - lane.last_chunk_s
            per_s = lane.nbytes / max(1e-9, now - lane.started_s) / self._mean_chunk_bytes
            if silent_s > self._limits.patience_s and self._last_chunk_s > lane.last_chunk_s:
                yield lane, 0
            elif (
                lane.source != self._learner
                and elapsed_s > self._limits.slow_s
                and (left_behind or lane.n_ready > per_s * self._limits.backlog_s)
                and load > per_s * max(self._limits.slow_s, elapsed_s / 2)
            ):
                yield lane, int(per_s)

    def _what_is_missing(self) -> str:
        missing = sorted(self._schedule.missing)
        return (
            f"version {self._manifest.version} lacks {len(missing)} of {self._manifest.n_chunks} chunks "
            f"({_some(missing)}), asked from {_some(sorted(self._asked))}"
        )


def _some(items: list[int] | list[PeerId]) -> str:
    named = ", ".join(str(item) for item in items[:_NAMED])
    return named + (f" and {len(items) - _NAMED} more" if len(items) > _NAMED else "")


def _cause(group: BaseExceptionGroup[BaseException]) -> BaseException:
    """The one error that a group of failed tasks comes down to: our own kind, if there is one."""
    first = group.exceptions[0]
    ours = group.subgroup(Echo2p2pError)
    if ours is not None:
        first = ours.exceptions[0]
    return _cause(first) if isinstance(first, BaseExceptionGroup) else first
