"""Serves what this peer holds: manifests, assets and chunks, also of a version that is still arriving here.

Guarantees:

* A chunk leaves only if its bytes were verified, and within the same moment in which they were: a peer
  that waits for a chunk gets it as soon as it is here.
* Every stream is bounded: requests by size and number, waits and writes by deadlines, streams by peer.
"""

from __future__ import annotations

import asyncio
from collections import Counter, deque
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from echo2p2p.errors import DeadlineExceeded, PeerUnreachable, ProtocolError
from echo2p2p.swarm.clock import Clock
from echo2p2p.swarm.identity import PeerId
from echo2p2p.swarm.messages import protocol_id, receive, send
from echo2p2p.swarm.network import Network, Stream
from echo2p2p.weights.manifest import Manifest
from echo2p2p.weights.store import ChunkStore
from echo2p2p.weights.wire import (
    CHUNK_PROTOCOL,
    MAX_MESSAGE_BYTES,
    MAX_WANTS,
    Blob,
    Cancel,
    Chunk,
    FirstRequest,
    GetBlob,
    LaneRequest,
    Missing,
    OpenLane,
    Refused,
    Waiting,
    Want,
)


@dataclass(frozen=True)
class ServerLimits:
    """What one peer puts up with from the others.

    ``heartbeat_s`` must stay well below the silence that askers tolerate (``FetchLimits.stall_s``).
    """

    max_streams: int = 1024
    max_streams_per_peer: int = 8
    first_request_s: float = 5.0
    unknown_version_s: float = 10.0
    """How long a request may wait for a version that this peer has not heard of yet."""
    chunk_wait_s: float = 30.0
    """How long a request may wait for one chunk."""
    heartbeat_s: float = 1.0
    idle_s: float = 120.0
    write_s: float = 30.0


class Holding:
    """One version as far as this peer has it.

    While it arrives, chunks are read from ``buffer``, the snapshot in the making; afterwards from the store.
    """

    def __init__(
        self,
        manifest: Manifest,
        body: bytes,
        store: ChunkStore,
        clock: Clock,
        *,
        buffer: bytearray | None = None,
    ) -> None:
        self.manifest = manifest
        self.body = body
        self._store = store
        self._clock = clock
        self._buffer = memoryview(buffer).toreadonly() if buffer is not None else None
        self._here = bytearray(manifest.n_chunks) if buffer is not None else b"\1" * manifest.n_chunks
        self._lanes: set[_OutgoingLane] = set()
        self.assets_here = asyncio.Event()
        if buffer is None:
            self.assets_here.set()

    @property
    def arriving(self) -> bool:
        return self._buffer is not None

    def holds(self, index: int) -> bool:
        return bool(self._here[index])

    def add(self, index: int) -> None:
        """Chunk ``index`` lies verified in the buffer: pass it on to whoever waits for it."""
        assert isinstance(self._here, bytearray)
        self._here[index] = 1
        for lane in self._lanes:
            lane.arrived(index)

    def complete(self) -> None:
        """Every chunk and asset is in the store; the buffer is no longer read."""
        self._here = b"\1" * self.manifest.n_chunks
        self._buffer = None
        self.assets_here.set()

    async def read(self, index: int) -> bytes | memoryview | None:
        """The bytes of a chunk that is held; None if the store has lost it."""
        if self._buffer is not None:
            start, end = self.manifest.chunk_span(index)
            return self._buffer[start:end]
        digest = self.manifest.chunk_digest(index)
        return await self._clock.offload(lambda: self._store.get(digest))

    def attach(self, lane: _OutgoingLane) -> None:
        self._lanes.add(lane)

    def detach(self, lane: _OutgoingLane) -> None:
        self._lanes.discard(lane)


class _OutgoingLane:
    """What one peer wants of one version, and which of it can be sent now."""

    def __init__(self, holding: Holding, clock: Clock) -> None:
        self.wake = asyncio.Event()
        self.closed = False
        self._holding = holding
        self._clock = clock
        self._ready: deque[int] = deque()
        self._waiting: dict[int, float] = {}
        self._missing: list[int] = []
        self._wanted: set[int] = set()

    def want(self, request: Want) -> None:
        """Raises :class:`~echo2p2p.errors.ProtocolError` if that is more than a lane may ask for."""
        for index in request.chunks:
            if index >= self._holding.manifest.n_chunks or len(self._wanted) >= MAX_WANTS:
                raise ProtocolError(f"chunk {index} is past the end, or too many chunks are open")
            if index in self._wanted:
                continue
            self._wanted.add(index)
            if self._holding.holds(index):
                self._ready.append(index)
            elif request.wait and self._holding.arriving:
                self._waiting[index] = self._clock.monotonic()
            else:
                self._missing.append(index)
        self.wake.set()

    def cancel(self, indices: Iterable[int]) -> None:
        self._wanted.difference_update(indices)
        for index in indices:
            self._waiting.pop(index, None)

    def arrived(self, index: int) -> None:
        if self._waiting.pop(index, None) is not None:
            self._ready.append(index)
            self.wake.set()

    def next_ready(self) -> int | None:
        """The next chunk to send; it is no longer wanted after this."""
        while self._ready:
            index = self._ready.popleft()
            if index in self._wanted:
                self._wanted.discard(index)
                return index
        return None

    def give_up(self, since: float) -> tuple[int, ...]:
        """Chunks that are not here and that nobody waits for longer; they are no longer wanted."""
        for index in [index for index, asked in self._waiting.items() if asked <= since]:
            del self._waiting[index]
            self._missing.append(index)
        missing = tuple(index for index in self._missing if index in self._wanted)
        self._missing.clear()
        self._wanted.difference_update(missing)
        return missing

    @property
    def waits(self) -> bool:
        return bool(self._waiting)


class ChunkServer:
    """Answers requests on the chunk protocol out of its holdings.

    Attributes:
        bytes_sent: chunk bytes sent, by version and then by peer.
    """

    def __init__(self, network: Network, store: ChunkStore, limits: ServerLimits = ServerLimits()) -> None:  # noqa: B008
        self._clock = network.clock
        self._network = network
        self._store = store
        self._limits = limits
        self._holdings: dict[str, Holding] = {}
        self._changed = asyncio.Event()
        self._streams: Counter[PeerId] = Counter()
        self.bytes_sent: dict[int, Counter[PeerId]] = {}

    async def start(self) -> None:
        await self._network.handle(protocol_id(CHUNK_PROTOCOL), self._serve)

    def serve(self, digest: str, holding: Holding) -> None:
        """Answer for a version, by the digest of its signed manifest. Replaces what was served under it."""
        self._holdings[digest] = holding
        self.bytes_sent.setdefault(holding.manifest.version, Counter())
        self._changed.set()
        self._changed = asyncio.Event()

    def drop(self, digest: str) -> None:
        """No longer answer for a version. Lanes that are open for it get what is here, then nothing."""
        self._holdings.pop(digest, None)

    def keep_newest(self, count: int) -> None:
        """Drop all but the newest ``count`` versions, and their counters."""
        newest = sorted(self._holdings.items(), key=lambda item: item[1].manifest.version)
        for digest, holding in newest[:-count]:
            self.drop(digest)
            self.bytes_sent.pop(holding.manifest.version, None)

    async def _serve(self, stream: Stream) -> None:
        peer = stream.remote
        if self._streams[peer] >= self._limits.max_streams_per_peer or (
            self._streams.total() >= self._limits.max_streams
        ):
            await self._reply(stream, Refused("too many streams"))
            return
        self._streams[peer] += 1
        try:
            request: FirstRequest = await receive(
                stream, FirstRequest, max_bytes=MAX_MESSAGE_BYTES, timeout_s=self._limits.first_request_s
            )
            if isinstance(request, GetBlob):
                await self._serve_blob(stream, request)
            else:
                await self._serve_lane(stream, request)
        finally:
            self._streams[peer] -= 1
            if not self._streams[peer]:
                del self._streams[peer]

    async def _holding(self, digest: str, *, wait: bool) -> Holding | None:
        deadline = self._clock.monotonic() + self._limits.unknown_version_s
        while digest not in self._holdings and wait:
            remaining = deadline - self._clock.monotonic()
            if remaining <= 0 or not await _set_within(self._changed, remaining):
                break
        return self._holdings.get(digest)

    async def _serve_blob(self, stream: Stream, request: GetBlob) -> None:
        holding = await self._holding(request.version, wait=request.wait)
        data: bytes | None = None
        if holding is not None and request.digest.hex() == request.version:
            data = holding.body
        elif holding is not None and any(request.digest == each.digest for each in holding.manifest.assets):
            if request.wait:
                await _set_within(holding.assets_here, self._limits.chunk_wait_s)
            data = await self._clock.offload(lambda: self._store.get(request.digest))
        if data is None:
            await self._reply(stream, Missing())
        else:
            await self._reply(stream, Blob(len(data)), data)

    async def _serve_lane(self, stream: Stream, request: OpenLane) -> None:
        holding = await self._holding(request.version, wait=True)
        if holding is None:
            await self._reply(stream, Refused("no such version here"))
            return
        lane = _OutgoingLane(holding, self._clock)
        holding.attach(lane)
        try:
            async with asyncio.TaskGroup() as tasks:
                tasks.create_task(self._take_requests(stream, lane))
                await self._send_chunks(stream, lane, holding)
        except* (PeerUnreachable, DeadlineExceeded):
            # The asker has gone, or takes nothing any more: both end the lane and concern nobody else.
            pass
        finally:
            holding.detach(lane)

    async def _take_requests(self, stream: Stream, lane: _OutgoingLane) -> None:
        try:
            while True:
                request: LaneRequest = await receive(
                    stream, LaneRequest, max_bytes=MAX_MESSAGE_BYTES, timeout_s=self._limits.idle_s
                )
                if isinstance(request, Want):
                    lane.want(request)
                else:
                    lane.cancel(request.chunks)
        finally:
            lane.closed = True
            lane.wake.set()

    async def _send_chunks(self, stream: Stream, lane: _OutgoingLane, holding: Holding) -> None:
        sent = self.bytes_sent.setdefault(holding.manifest.version, Counter())
        while not lane.closed:
            lane.wake.clear()
            missing = lane.give_up(self._clock.monotonic() - self._limits.chunk_wait_s)
            if missing:
                await self._reply(stream, Missing(missing))
            index = lane.next_ready()
            if index is not None:
                data = await holding.read(index)
                if data is None:
                    await self._reply(stream, Missing((index,)))
                else:
                    await self._reply(stream, Chunk(index), data)
                    sent[stream.remote] += len(data)
            elif not await _set_within(lane.wake, self._limits.heartbeat_s) and lane.waits:
                await self._reply(stream, Waiting())

    async def _reply(self, stream: Stream, message: Any, data: bytes | memoryview = b"") -> None:
        try:
            async with asyncio.timeout(self._limits.write_s):
                await send(stream, message)
                if data:
                    await stream.write(data)
        except TimeoutError:
            raise DeadlineExceeded(f"{stream.remote} took nothing for {self._limits.write_s:g} s") from None


async def _set_within(event: asyncio.Event, seconds: float) -> bool:
    try:
        async with asyncio.timeout(seconds):
            await event.wait()
    except TimeoutError:
        return False
    return True
