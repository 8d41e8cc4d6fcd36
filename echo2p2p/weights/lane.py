"""The asking side of the chunk protocol: one lane to one source, and manifests.

Guarantees:

* Nothing is handed on before it hashes to the digest that the signed manifest gives it.
* Every wait has a deadline: a dial, a silent source, a chunk that trickles.
* Chunks are asked for no faster than the cap, so that what was asked for can be read at once.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass

from blake3 import blake3

from echo2p2p.errors import ChunkError, DeadlineExceeded, ManifestError, PeerUnreachable, ProtocolError
from echo2p2p.swarm.budget import MessageBudget
from echo2p2p.swarm.identity import PeerId
from echo2p2p.swarm.messages import protocol_id, receive, send
from echo2p2p.swarm.network import Network, Stream
from echo2p2p.weights.coding import decode
from echo2p2p.weights.holding import set_within
from echo2p2p.weights.manifest import Manifest, digest
from echo2p2p.weights.rate import TokenBucket
from echo2p2p.weights.schedule import Schedule
from echo2p2p.weights.wire import (
    CHUNK_PROTOCOL,
    MAX_MESSAGE_BYTES,
    MAX_WANTS,
    Body,
    Cancel,
    Chunk,
    GetManifest,
    LaneReply,
    ManifestReply,
    Missing,
    OpenLane,
    Refused,
    Want,
)


@dataclass(frozen=True)
class FetchLimits:
    """How long a fetch waits for what, and how much it asks for at once.

    Attributes:
        manifest_s: until a source that may itself wait for a manifest begins to send it.
        stall_s: silence after which a source that owes an answer counts as stalled.
        patience_s: others are asked too for what a source has not sent for so long while they did send.
        rescue_s: if all sources together sent less than ``min_bytes_per_s`` for so long, the learner is asked too.
            Longer than an honest source lets others wait while nothing comes to it (``ServerLimits.chunk_wait_s``).
        starved_s: without a single chunk from anybody for so long, the fetch fails.
        idle_s: a lane without work is closed after this; well before the other end does it.
        min_bytes_per_s: a chunk or manifest that comes slower breaks its stream.
        window_bytes, window_s: so much is asked for ahead on one lane, or what it brings in so long if that is more.
        retry_s: pause before a failed source is dialled again, times its failures.
        tick_s: how often slow lanes are looked for.
        slow_s: a lane is slow only if it would need longer than this for the rest.
        backlog_s: and only if its source has had more ready for it than it can send in this time.
        download_mbit: chunks are asked for no faster than this, from all sources together.
    """

    dial_s: float = 10.0
    manifest_s: float = 15.0
    stall_s: float = 8.0
    patience_s: float = 20.0
    rescue_s: float = 35.0
    starved_s: float = 60.0
    idle_s: float = 30.0
    min_bytes_per_s: float = 16 * 1024
    window_bytes: int = 4 * 2**20
    window_s: float = 0.1
    retry_s: float = 1.0
    close_s: float = 1.0
    tick_s: float = 0.5
    slow_s: float = 2.0
    backlog_s: float = 0.75
    download_mbit: float = math.inf


DEFAULT_FETCH_LIMITS = FetchLimits()

_IDLE_BURST = 64
_IDLE_PER_S = 4.0


class Lane:
    """All that one source is asked for, over a few streams that share it: one alone is held up by long round trips.

    Args:
        cap: on what this peer asks for, the same for all its lanes.
        streams: how many.
        deliver: called with source, index and verified bytes of every chunk, which are good during the call only;
            says whether it was needed.
        rerouted: called when chunks have been turned over to other sources.

    Attributes:
        nbytes: chunk bytes received since ``started_s``; ``last_chunk_s`` is when the last needed one came.
    """

    def __init__(
        self,
        network: Network,
        source: PeerId,
        manifest: Manifest,
        version: str,
        schedule: Schedule,
        limits: FetchLimits,
        cap: TokenBucket,
        *,
        streams: int,
        deliver: Callable[[PeerId, int, memoryview], bool],
        rerouted: Callable[[], None],
    ) -> None:
        self.source = source
        self.nbytes = 0
        self.started_s = self.last_chunk_s = network.clock.monotonic()
        self._network = network
        self._manifest = manifest
        self._version = version
        self._schedule = schedule
        self._deliver = deliver
        self._rerouted = rerouted
        self._limits = limits
        self._cap = cap
        self._strands = [_Strand(_reply_budget(network, source)) for _ in range(streams)]

    @property
    def n_ready(self) -> int:
        """Chunks that the source had ready for this lane when it sent the last ones."""
        return sum(strand.n_ready for strand in self._strands)

    def wake(self) -> None:
        """The schedule has new work for this source."""
        for strand in self._strands:
            strand.wake.set()

    def cancel(self, chunk: int) -> None:
        """Tell the source, with the next message, that ``chunk`` is not needed from it any more."""
        for strand in self._strands:
            if chunk in strand.open:
                strand.open.remove(chunk)
                strand.cancelled.append(chunk)

    async def run(self) -> None:
        """Ask and receive until cancelled, or until there was nothing to ask for ``idle_s``.

        Raises:
            ChunkError: the source sent bytes that are not the chunk they claim to be.
            PeerUnreachable, DeadlineExceeded, ProtocolError: the lane broke, stalled, or was refused.
        """
        try:
            async with asyncio.TaskGroup() as tasks:
                for strand in list(self._strands):
                    tasks.create_task(self._run(strand))
        except BaseExceptionGroup as group:
            # A lie is worth more than the breaks that it may have caused.
            lies = group.subgroup(ChunkError)
            raise (lies or group).exceptions[0] from None

    async def _run(self, strand: _Strand) -> None:
        async with _opened(self._network, self.source, self._limits) as stream:
            await send(stream, OpenLane(self._version, self._manifest.version))
            self.started_s = self.last_chunk_s = self._network.clock.monotonic()
            while True:
                strand.wake.clear()
                await self._ask(strand, stream)
                if strand.open:
                    await self._take(strand, stream)
                elif not await self._rest(strand):
                    # What comes later is shared among those that are left.
                    self._strands.remove(strand)
                    return

    async def _ask(self, strand: _Strand, stream: Stream) -> None:
        while strand.cancelled:
            await send(stream, Cancel(tuple(strand.cancelled[:MAX_WANTS])))
            del strand.cancelled[:MAX_WANTS]
        window = self._window()
        room = window - len(strand.open)
        # Topped up by quarters of the window, not chunk by chunk: fewer messages for the same flow.
        if not strand.open or room >= window // 4:
            if not self._schedule.open_at(self.source):
                self.last_chunk_s = self._network.clock.monotonic()
            # The streams share what there is, so that the chunks come in about the order in which they are planned.
            fair = -(-self._schedule.load(self.source) // len(self._strands)) - len(strand.open)
            for wait, chunks in self._next(max(0, min(room, fair))).items():
                strand.open.update(chunks)
                strand.asked.update(chunks)
                await send(stream, Want(tuple(chunks), wait))

    def _window(self) -> int:
        """How many chunks one stream asks for ahead."""
        elapsed_s = max(self._limits.window_s, self._network.clock.monotonic() - self.started_s)
        nbytes = max(self._limits.window_bytes, int(self.nbytes * self._limits.window_s / elapsed_s))
        return max(2, min(MAX_WANTS // 2, nbytes // self._manifest.chunk_bytes // len(self._strands)))

    def _next(self, limit: int) -> dict[bool, list[int]]:
        """Up to ``limit`` chunks to ask for, as many as the cap lets this peer ask for now; by whether to wait."""
        if not self._cap.capped:
            return self._schedule.take(self.source, limit)
        asked: dict[bool, list[int]] = {}
        for _ in range(limit):
            now = self._network.clock.monotonic()
            if self._cap.missing_s(self._manifest.chunk_bytes, now) > 0:
                break
            for wait, chunks in self._schedule.take(self.source, 1).items():
                asked.setdefault(wait, []).extend(chunks)
                spans = (self._manifest.chunk_span(at) for at in chunks)
                self._cap.reserve(sum(end - start for start, end in spans), now)
        return asked

    async def _rest(self, strand: _Strand) -> bool:
        """Nothing is open: wait for work, or until the cap lets this peer ask for it; False after ``idle_s``.

        A wait of that length for the cap ends the lane too: the source would not keep it open for ever.
        """
        clock = self._network.clock
        until = clock.monotonic() + self._limits.idle_s
        while (left_s := until - clock.monotonic()) > 0:
            if self._schedule.load(self.source) > self._schedule.open_at(self.source):
                missing_s = self._cap.missing_s(self._manifest.chunk_bytes, clock.monotonic())
                if missing_s <= 0:
                    return True
                await asyncio.sleep(min(missing_s, left_s))
                strand.wake.clear()
            elif await set_within(strand.wake, left_s):
                return True
        return False

    async def _take(self, strand: _Strand, stream: Stream) -> None:
        reply: LaneReply = await receive(
            stream, LaneReply, max_bytes=MAX_MESSAGE_BYTES, timeout_s=self._limits.stall_s
        )
        if isinstance(reply, Chunk):
            strand.n_ready = reply.n_ready
            await self._take_chunk(strand, stream, reply)
        elif isinstance(reply, Missing):
            if strand.asked.isdisjoint(reply.chunks):
                strand.budget.spend(self._network.clock.monotonic())
            strand.asked.difference_update(reply.chunks)
            lacking = [index for index in reply.chunks if index in strand.open]
            if lacking:
                strand.open.difference_update(lacking)
                self._schedule.lacks(self.source, lacking)
                self._rerouted()
        elif isinstance(reply, Refused):
            raise PeerUnreachable(f"{self.source} refused a lane: {reply.reason}")
        else:
            strand.budget.spend(self._network.clock.monotonic())

    async def _take_chunk(self, strand: _Strand, stream: Stream, reply: Chunk) -> None:
        index = reply.index
        if index not in strand.asked:
            raise ProtocolError(f"{self.source} sent chunk {index}, which it was not asked for")
        strand.asked.discard(index)
        start, end = self._manifest.chunk_span(index)
        if reply.coded and reply.coded >= end - start:
            raise ProtocolError(f"{self.source} sent chunk {index} coded in more bytes than it has")
        data = strand.room(reply.coded or end - start)
        await _read_body(stream, data, self._limits)
        if reply.coded:
            self._cap.give_back(end - start - reply.coded)
            data = memoryview(decode(data, end - start))
        if blake3(data).digest() != self._manifest.chunk_digest(index):
            raise ChunkError(
                f"{self.source} sent bytes for chunk {index} of version {self._manifest.version} "
                "that are not what the learner signed for"
            )
        strand.open.discard(index)
        self.nbytes += len(data)
        if self._deliver(self.source, index, data):
            self.last_chunk_s = self._network.clock.monotonic()


class _Strand:
    """One stream of a lane: the chunks that are open on it, those to be cancelled, and where one becomes whole.

    What was ``asked`` for may still come, also after it was cancelled; once, and nothing else. ``budget`` is for
    messages that answer nothing.
    """

    def __init__(self, budget: MessageBudget) -> None:
        self._room = memoryview(bytearray())
        self.wake = asyncio.Event()
        self.budget = budget
        self.open: set[int] = set()
        self.asked: set[int] = set()
        self.n_ready = 0
        self.cancelled: list[int] = []

    def room(self, nbytes: int) -> memoryview:
        """The same bytes every time, or more of them: what comes is hashed while the processor's caches have it."""
        if len(self._room) < nbytes:
            self._room = memoryview(bytearray(nbytes))
        return self._room[:nbytes]


async def get_manifest(
    network: Network, source: PeerId, version: str, number: int, *, max_bytes: int, limits: FetchLimits
) -> bytes:
    """Ask ``source`` for the signed manifest of version ``number``, whose digest is ``version``.

    Raises:
        ManifestError: what came does not hash to that.
        PeerUnreachable, DeadlineExceeded, ProtocolError: the stream broke, stalled, or was refused.
    """
    async with _opened(network, source, limits) as stream:
        await send(stream, GetManifest(version, number))
        reply = await _manifest_reply(stream, limits, network)
        if reply.nbytes > max_bytes:
            raise ProtocolError(
                f"{source} offers a manifest of {reply.nbytes} bytes, {max_bytes} are allowed"
            )
        buffer = bytearray(reply.nbytes)
        await _read_body(stream, memoryview(buffer), limits)
    body = bytes(buffer)
    if digest(body) != version:
        raise ManifestError(f"{source} sent {len(body)} bytes that are not the manifest {version}")
    return body


async def _manifest_reply(stream: Stream, limits: FetchLimits, network: Network) -> Body:
    budget = _reply_budget(network, stream.remote)
    try:
        async with asyncio.timeout(limits.manifest_s):
            while True:
                reply: ManifestReply = await receive(
                    stream, ManifestReply, max_bytes=MAX_MESSAGE_BYTES, timeout_s=limits.stall_s
                )
                if isinstance(reply, Body):
                    return reply
                if isinstance(reply, Refused):
                    raise PeerUnreachable(f"{stream.remote} does not give the manifest: {reply.reason}")
                budget.spend(network.clock.monotonic())
    except TimeoutError:
        raise DeadlineExceeded(f"no manifest from {stream.remote} in {limits.manifest_s:g} s") from None


def _reply_budget(network: Network, source: PeerId) -> MessageBudget:
    """For what a source says on one stream that answers nothing: a sign of life now and then is enough."""
    return MessageBudget(source, burst=_IDLE_BURST, per_s=_IDLE_PER_S, now=network.clock.monotonic())


async def _read_body(stream: Stream, target: memoryview, limits: FetchLimits) -> None:
    allowed_s = limits.stall_s + len(target) / limits.min_bytes_per_s
    try:
        async with asyncio.timeout(allowed_s):
            await stream.read_into(target)
    except TimeoutError:
        raise DeadlineExceeded(
            f"{stream.remote} did not send {len(target)} bytes in {allowed_s:.0f} s"
        ) from None


@asynccontextmanager
async def _opened(network: Network, source: PeerId, limits: FetchLimits) -> AsyncIterator[Stream]:
    stream = await network.open_stream(source, protocol_id(CHUNK_PROTOCOL), timeout_s=limits.dial_s)
    try:
        yield stream
    finally:
        try:
            # A source that has fallen silent must not hold up the end of a fetch.
            async with asyncio.timeout(limits.close_s):
                await stream.close()
        except TimeoutError:
            pass
