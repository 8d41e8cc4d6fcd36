"""What a peer holds of a version, also while it arrives, and what another peer wants of it.

The whole of a version and its patches are chunks alike; a peer may hold or expect some of them without the others.

Guarantee: a chunk that somebody waits for is handed to all who wait in the moment that it is verified.
"""

from __future__ import annotations

import asyncio
from collections.abc import Collection, Iterable

from echo2p2p.errors import ManifestError, ProtocolError
from echo2p2p.swarm.clock import Clock
from echo2p2p.swarm.identity import PeerId
from echo2p2p.weights.coding import word_bytes
from echo2p2p.weights.manifest import DEFAULT_LIMITS, Manifest, ManifestLimits, ManifestVerifier, digest
from echo2p2p.weights.store import ChunkStore
from echo2p2p.weights.wire import MAX_WANTS, Suspects, Want

_STORED, _IN_BUFFER = 1, 2


class Holding:
    """One version as far as this peer has it.

    Chunks are read from ``buffer`` where they lie in it, all others, and after :meth:`leave_buffer` they too, from
    the store.

    Args:
        here: the chunks that are in the store already and are not to arrive.
        buffer: the version from its beginning, long enough for all that is to arrive; where chunks are held it is
            verified and no longer changes. None if nothing lies in memory.
        in_buffer: the chunks that lie in ``buffer``, and in the store, already.

    Attributes:
        suspects: members that should not relay it, as the learner says; they are served when nobody else wants
            anything.
        trees: over how many the whole and the patches are relayed.
    """

    def __init__(
        self,
        manifest: Manifest,
        body: bytes,
        store: ChunkStore,
        clock: Clock,
        *,
        here: Iterable[int] = (),
        buffer: memoryview | None = None,
        in_buffer: Iterable[int] = (),
    ) -> None:
        self.manifest = manifest
        self.body = body
        self.word_bytes = word_bytes(manifest.layout)
        self._store = store
        self._clock = clock
        self._buffer = buffer.toreadonly() if buffer is not None else None
        self.last_arrival_s = clock.monotonic()
        self._expected = range(0)
        self._renounced: set[int] = set()
        self._here = bytearray(manifest.n_chunks)
        for index in here:
            self._here[index] = _STORED
        for index in in_buffer:
            self._here[index] = _IN_BUFFER
        # In the order in which they opened, so that a run under virtual time can be repeated.
        self._lanes: dict[OutgoingLane, None] = {}
        self.suspects: frozenset[PeerId] = frozenset()
        self.trees = manifest.trees, manifest.patch_trees
        self._serial = -1

    def suspect(self, said: Suspects) -> None:
        """The learner's word on who should not relay it; an older one than the last counts for nothing."""
        if said.serial > self._serial:
            relays = self.manifest.members
            self.suspects = frozenset(relays[at].peer for at in said.members if at < len(relays))
            self.trees = said.trees, said.patch_trees
            self._serial = said.serial

    @property
    def busy(self) -> bool:
        """Whether anybody who is no suspect waits here for anything.

        Also for what is still to arrive: a link that passes on what comes in has nothing to spare in between, only
        buffers in which it would pile up.
        """
        return any(lane.sending or lane.wants for lane in self._lanes if lane.peer not in self.suspects)

    def holds(self, index: int) -> bool:
        return bool(self._here[index])

    def expects(self, index: int) -> bool:
        return index in self._expected and index not in self._renounced

    def add(self, index: int) -> None:
        """Chunk ``index`` lies verified in the buffer: pass it on to whoever waits for it."""
        self._here[index] = _IN_BUFFER
        self.last_arrival_s = self._clock.monotonic()
        for lane in self._lanes:
            lane.arrived(index)

    def complete(self) -> None:
        """Every chunk that is here is in the store, and nothing more will arrive."""
        self.expect(range(0))

    def leave_buffer(self) -> None:
        """Let the buffer go and read from the store from now on; for a version that is complete."""
        self._buffer = None

    def renounce(self, indices: Collection[int]) -> None:
        """These chunks may come from anybody now, also from those who wait for them here: they wait no longer."""
        if indices:
            self._renounced.update(indices)
            for lane in self._lanes:
                lane.expect_less()

    def expect(self, indices: range) -> None:
        """Nothing but ``indices`` may still arrive: nobody needs to wait for others."""
        self._expected = indices
        self._renounced.clear()
        for lane in self._lanes:
            lane.expect_less()

    async def read(self, index: int) -> bytes | memoryview | None:
        """The bytes of a chunk that is held; None if the store has lost it."""
        if self._buffer is not None and self._here[index] == _IN_BUFFER:
            start, end = self.manifest.chunk_span(index)
            return self._buffer[start:end]
        digest = self.manifest.chunk_digest(index)
        data = await self._clock.offload(lambda: self._store.get(digest))
        if data is None:
            # Pruned since: who asks again is told at once.
            self._here[index] = 0
        return data

    @property
    def is_asked(self) -> bool:
        """Whether any lane is open."""
        return bool(self._lanes)

    def attach(self, lane: OutgoingLane) -> None:
        self._lanes[lane] = None

    def detach(self, lane: OutgoingLane) -> None:
        self._lanes.pop(lane, None)


class OutgoingLane:
    """What ``peer`` wants of one version, and which of it can be sent now; ``sending``: whether some of it is."""

    def __init__(self, holding: Holding, peer: PeerId, clock: Clock) -> None:
        self.wake = asyncio.Event()
        self.peer = peer
        self.sending = False
        self._holding = holding
        self._clock = clock
        self._ready: dict[int, None] = {}
        self._waiting: dict[int, float] = {}
        self._missing: dict[int, None] = {}
        self._wanted: set[int] = set()

    def want(self, request: Want) -> None:
        """Raises :class:`~echo2p2p.errors.ProtocolError` if that is more than a lane may ask for."""
        n_chunks = self._holding.manifest.n_chunks
        for index in request.chunks:
            if index >= n_chunks or len(self._wanted) >= MAX_WANTS:
                raise ProtocolError(f"chunk {index} is past the end, or too many chunks are open")
            if index in self._wanted:
                continue
            self._wanted.add(index)
            if self._holding.holds(index):
                self._ready[index] = None
            elif request.wait and self._holding.expects(index):
                self._waiting[index] = self._clock.monotonic()
            else:
                self._missing[index] = None
        self.wake.set()

    def cancel(self, indices: Iterable[int]) -> None:
        for index in self._wanted.intersection(indices):
            self._wanted.discard(index)
            for place in (self._waiting, self._ready, self._missing):
                place.pop(index, None)
        self.wake.set()

    def arrived(self, index: int) -> None:
        if self._waiting.pop(index, None) is not None:
            self._ready[index] = None
            self.wake.set()

    def expect_less(self) -> None:
        for index in [index for index in self._waiting if not self._holding.expects(index)]:
            del self._waiting[index]
            self._missing[index] = None
        self.wake.set()

    def peek(self) -> int | None:
        """The next chunk to send."""
        return next(iter(self._ready), None)

    def next_ready(self) -> int | None:
        """The next chunk to send; it is no longer wanted after this."""
        index = self.peek()
        if index is not None:
            del self._ready[index]
            self._wanted.discard(index)
        return index

    def give_up(self, since: float) -> tuple[int, ...]:
        """Chunks that are not here and that are not worth waiting for; they are no longer wanted.

        Not worth it are those asked for before ``since`` if nothing at all has arrived here since then: where
        links are slow, a chunk may be a long way down a queue that moves.
        """
        if self._holding.last_arrival_s <= since:
            for index in [index for index, asked in self._waiting.items() if asked <= since]:
                del self._waiting[index]
                self._missing[index] = None
        missing = tuple(self._missing)
        self._missing.clear()
        self._wanted.difference_update(missing)
        return missing

    @property
    def n_ready(self) -> int:
        return len(self._ready)

    @property
    def wants(self) -> bool:
        return bool(self._wanted)

    @property
    def waits(self) -> bool:
        return bool(self._waiting)


def restore(
    run: str, store: ChunkStore, clock: Clock, limits: ManifestLimits = DEFAULT_LIMITS
) -> dict[str, Holding]:
    """The versions that an earlier life left whole in the store, by the digest of their manifests."""
    verifier = ManifestVerifier(run, limits)
    found: dict[str, Holding] = {}
    for body in store.manifests().values():
        try:
            manifest = verifier.accept(body)
        except ManifestError:
            # Another run's, or damaged: it is not served, and goes when the store is pruned.
            continue
        here = [index for index in range(manifest.n_chunks) if store.has(manifest.chunk_digest(index))]
        if here[: len(manifest.whole)] == list(manifest.whole):
            found[digest(body)] = Holding(manifest, body, store, clock, here=here)
    return found


async def set_within(event: asyncio.Event, seconds: float) -> bool:
    """Whether ``event`` is set, waiting for it no longer than ``seconds``."""
    try:
        async with asyncio.timeout(seconds):
            await event.wait()
    except TimeoutError:
        return event.is_set()
    return True
