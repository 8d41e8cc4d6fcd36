"""Serves what this peer holds: manifests and chunks, also of a version that is still arriving here.

Guarantees:

* Only verified bytes leave, and a chunk that a peer waits for leaves as soon as it is here.
* Every stream is bounded: requests by size and number, waits and writes by deadlines, streams by peer.
* Chunks and manifests leave no faster than the cap, first come, first served; who waits for its turn is told so.
"""

from __future__ import annotations

import asyncio
import math
from collections import Counter
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any

from echo2p2p.errors import DeadlineExceeded, Echo2p2pError
from echo2p2p.swarm.clock import Clock
from echo2p2p.swarm.identity import PeerId
from echo2p2p.swarm.messages import protocol_id, receive, send
from echo2p2p.swarm.network import Network, Stream
from echo2p2p.weights.holding import Holding, OutgoingLane, set_within
from echo2p2p.weights.rate import TokenBucket
from echo2p2p.weights.wire import (
    CHUNK_PROTOCOL,
    MAX_MESSAGE_BYTES,
    Body,
    Chunk,
    FirstRequest,
    GetManifest,
    LaneRequest,
    Missing,
    OpenLane,
    Refused,
    Report,
    Suspects,
    Waiting,
    Want,
)


@dataclass(frozen=True)
class ServerLimits:
    """What one peer puts up with from the others.

    ``heartbeat_s`` must stay well below the silence that askers tolerate (``FetchLimits.stall_s``).
    """

    max_streams: int = 2048
    """Half of them for peers that are members of no version that is served."""
    max_streams_per_peer: int = 32
    """Several times what one fetch opens, for those of the fetch before may still be closing."""
    first_request_s: float = 5.0
    unknown_version_s: float = 10.0
    """How long a request may wait for a version that this peer has not heard of yet."""
    chunk_wait_s: float = 30.0
    """How long a request may wait for chunks while none arrive here."""
    heartbeat_s: float = 1.0
    idle_s: float = 120.0
    write_s: float = 30.0
    suspect_wait_s: float = 10.0
    """A suspect gets something after this, however much the others want: it may be an honest one."""
    min_bytes_per_s: float = 16 * 1024
    """An asker that takes a chunk more slowly than this, beyond ``write_s``, loses its lane."""
    upload_mbit: float = math.inf
    """Chunks and manifests leave no faster than this, to all askers together."""


_BURST_S = 0.05
"""What leaves at once under a cap waits in front of the line, and other messages behind it."""
_SLICE_BYTES = 16 * 1024
_MAX_TURN_S = 2.0
"""A chunk is sent within this, however low the cap: its asker waits for the rest of what has begun to come."""
_LOOK_S = 0.05
"""How often is looked whether somebody whom the learner suspects can have its turn."""
_INSTANT_S = 1e-6
"""A wait that is shorter than this is rounding."""
DEFAULT_SERVER_LIMITS = ServerLimits()


class ChunkServer:
    """Answers requests on the chunk protocol out of its holdings.

    Args:
        learner: whose word on suspects is taken.
        on_report: called with every report and its sender; who takes none refuses them.

    Attributes:
        bytes_sent: chunk bytes sent, by version and then by peer.
    """

    def __init__(
        self,
        network: Network,
        learner: PeerId,
        limits: ServerLimits = DEFAULT_SERVER_LIMITS,
        *,
        on_report: Callable[[PeerId, Report], Awaitable[None]] | None = None,
    ) -> None:
        self._clock = network.clock
        self._learner = learner
        self._on_report = on_report
        self._suspects: Suspects | None = None
        self._network = network
        self._limits = limits
        self._holdings: dict[str, Holding] = {}
        self._members: frozenset[PeerId] = frozenset()
        self._changed = asyncio.Event()
        self._streams: Counter[PeerId] = Counter()
        self._cap = TokenBucket(limits.upload_mbit, network.clock.monotonic(), burst_s=_BURST_S)
        self.bytes_sent: dict[int, Counter[PeerId]] = {}

    async def start(self) -> None:
        await self._network.handle(protocol_id(CHUNK_PROTOCOL), self._serve)

    def serve(self, digest: str, holding: Holding) -> None:
        """Answer for a version, by the digest of its signed manifest. Replaces what was served under it."""
        self._holdings[digest] = holding
        self._members = self._relaying()
        self._pass_on_suspects()
        self.bytes_sent.setdefault(holding.manifest.version, Counter())
        self._changed.set()
        self._changed = asyncio.Event()

    def _pass_on_suspects(self) -> None:
        """The word on a version may be here before its manifest."""
        said = self._suspects
        if said is not None and said.version in self._holdings:
            self._holdings[said.version].suspect(said)

    def holding(self, digest: str) -> Holding | None:
        """What is served of a version; None if nothing is."""
        return self._holdings.get(digest)

    def drop(self, digest: str) -> None:
        """No longer answer for a version. Lanes that are open for it get what is here, then nothing."""
        holding = self._holdings.pop(digest, None)
        if holding is not None:
            holding.expect(range(0))
            self._members = self._relaying()

    def keep_newest(self, count: int) -> None:
        """Drop all but the newest ``count`` versions, and their counters."""
        newest = sorted(self._holdings.items(), key=lambda item: item[1].manifest.version)
        for digest, holding in newest[:-count]:
            self.drop(digest)
            self.bytes_sent.pop(holding.manifest.version, None)

    def _relaying(self) -> frozenset[PeerId]:
        return frozenset(
            member.peer for holding in self._holdings.values() for member in holding.manifest.members
        )

    async def _serve(self, stream: Stream) -> None:
        peer = stream.remote
        # Identities cost nothing: however many strangers there are, half of the streams is left to the members.
        allowed = self._limits.max_streams // (1 if peer in self._members else 2)
        if self._streams[peer] >= self._limits.max_streams_per_peer or self._streams.total() >= allowed:
            await self._reply(stream, Refused("too many streams"))
            return
        self._streams[peer] += 1
        try:
            request: FirstRequest = await receive(
                stream, FirstRequest, max_bytes=MAX_MESSAGE_BYTES, timeout_s=self._limits.first_request_s
            )
            match request:
                case GetManifest():
                    await self._serve_manifest(stream, request)
                case OpenLane():
                    await self._serve_lane(stream, request)
                case Report() if self._on_report is not None:
                    await self._on_report(peer, request)
                case Suspects() if peer == self._learner:
                    self._suspects = request
                    self._pass_on_suspects()
                case _:
                    await self._reply(stream, Refused("that is not for me, or not for you to say"))
        finally:
            self._streams[peer] -= 1
            if not self._streams[peer]:
                del self._streams[peer]

    async def _holding(self, stream: Stream, request: GetManifest | OpenLane) -> Holding | None:
        """The version that ``stream`` asks for; the news of it may reach this peer later than the asker.

        For one older than what is served here nobody waits: it will not come any more.
        """
        digest = request.version
        deadline = self._clock.monotonic() + self._limits.unknown_version_s
        while digest not in self._holdings and self._clock.monotonic() < deadline:
            if 0 <= request.number < self._newest():
                break
            if not await set_within(self._changed, self._limits.heartbeat_s):
                await self._reply(stream, Waiting())
        return self._holdings.get(digest)

    def _newest(self) -> int:
        return max((holding.manifest.version for holding in self._holdings.values()), default=-1)

    async def _serve_manifest(self, stream: Stream, request: GetManifest) -> None:
        holding = await self._holding(stream, request)
        if holding is None:
            await self._reply(stream, Refused("no such version here"))
            return
        turn = _Turn(self._cap, self._clock, len(holding.body))
        try:
            while (wait_s := turn.wait_s) > 0:
                await asyncio.sleep(min(wait_s, self._limits.heartbeat_s))
                await self._reply(stream, Waiting())
            await self._reply(stream, Body(len(holding.body)), holding.body, turn)
        finally:
            turn.end()

    async def _serve_lane(self, stream: Stream, request: OpenLane) -> None:
        holding = await self._holding(stream, request)
        if holding is None:
            await self._reply(stream, Refused("no such version here"))
            return
        lane = OutgoingLane(holding, stream.remote, self._clock)
        holding.attach(lane)
        failure: Echo2p2pError | None = None
        try:
            async with asyncio.TaskGroup() as tasks:
                tasks.create_task(self._take_requests(stream, lane))
                await self._send_chunks(stream, lane, holding)
        except* Echo2p2pError as group:
            # Of what both directions say about the end of one lane, the first is the cause.
            failure = next(each for each in group.exceptions if isinstance(each, Echo2p2pError))
        finally:
            holding.detach(lane)
        if failure is not None:
            raise failure

    async def _take_requests(self, stream: Stream, lane: OutgoingLane) -> None:
        """Until the asker ends the stream, which ends the lane."""
        while True:
            request: LaneRequest = await receive(
                stream, LaneRequest, max_bytes=MAX_MESSAGE_BYTES, timeout_s=self._limits.idle_s
            )
            if isinstance(request, Want):
                lane.want(request)
            else:
                lane.cancel(request.chunks)

    async def _send_chunks(self, stream: Stream, lane: OutgoingLane, holding: Holding) -> None:
        sent = self.bytes_sent.setdefault(holding.manifest.version, Counter())
        turn: _Turn | None = None
        said_s = served_s = self._clock.monotonic()
        try:
            while True:
                lane.wake.clear()
                missing = lane.give_up(self._clock.monotonic() - self._limits.chunk_wait_s)
                if missing:
                    await self._reply(stream, Missing(missing))
                    said_s = self._clock.monotonic()
                postponed = (
                    lane.peer in holding.suspects
                    and self._clock.monotonic() - served_s < self._limits.suspect_wait_s
                    and holding.busy
                )
                index = None if postponed else lane.peek()
                if index is not None and turn is None:
                    start, end = holding.manifest.chunk_span(index)
                    turn = _Turn(self._cap, self._clock, end - start)
                elif index is None and turn is not None:
                    # It came to the asker from elsewhere meanwhile, or others go before.
                    turn.end()
                    turn = None
                wait_s = self._limits.heartbeat_s if turn is None else turn.wait_s
                if postponed and lane.n_ready:
                    wait_s = _LOOK_S
                if turn is not None and wait_s <= 0:
                    await self._send_chunk(stream, lane, holding, turn, sent)
                    turn.end()
                    turn = None
                    said_s = served_s = self._clock.monotonic()
                    continue
                await set_within(lane.wake, min(wait_s, self._limits.heartbeat_s))
                # Also between frequent wakes: an asker that waits for its turn must not think this peer silent.
                silent_s = self._clock.monotonic() - said_s
                if silent_s >= self._limits.heartbeat_s and (lane.waits or lane.n_ready):
                    await self._reply(stream, Waiting())
                    said_s = self._clock.monotonic()
        finally:
            if turn is not None:
                turn.end()

    async def _send_chunk(
        self, stream: Stream, lane: OutgoingLane, holding: Holding, turn: _Turn, sent: Counter[PeerId]
    ) -> None:
        """Send what is next on ``lane``, if anything is, for this ``turn``."""
        index = lane.next_ready()
        if index is None:
            return
        lane.sending = True
        data = await holding.read(index)
        if data is None:
            await self._reply(stream, Missing((index,)))
        else:
            await self._reply(stream, Chunk(index, lane.n_ready), data, turn)
            sent[stream.remote] += len(data)
        lane.sending = False

    async def _reply(
        self, stream: Stream, message: Any, data: bytes | memoryview = b"", turn: _Turn | None = None
    ) -> None:
        allowed_s = self._limits.write_s + len(data) / self._limits.min_bytes_per_s
        try:
            async with asyncio.timeout(allowed_s):
                await send(stream, message)
                if turn is not None:
                    await turn.write(stream, data)
        except TimeoutError:
            raise DeadlineExceeded(
                f"{stream.remote} did not take {len(data)} bytes in {allowed_s:.0f} s"
            ) from None


class _Turn:
    """A place in the queue for the cap: the time in which ``nbytes`` are to be sent, evenly.

    It is a reservation, and is given back as far as it was not used.
    """

    def __init__(self, cap: TokenBucket, clock: Clock, nbytes: int) -> None:
        self._cap = cap
        self._clock = clock
        self._unused = nbytes
        self._ends_s = cap.reserve(nbytes, clock.monotonic())

    @property
    def wait_s(self) -> float:
        """Seconds until it begins; 0 if it has."""
        return self._until(self._unused)

    async def write(self, stream: Stream, data: bytes | memoryview) -> None:
        """Write ``data`` to ``stream`` as fast as the turn allows."""
        if not self._cap.capped:
            await stream.write(data)
            return
        view = memoryview(data)
        for start in range(0, len(view), _SLICE_BYTES):
            piece = view[start : start + _SLICE_BYTES]
            self._unused -= len(piece)
            # The last byte goes when the turn ends.
            if (wait_s := self._until(self._unused)) > 0:
                await asyncio.sleep(wait_s)
            await stream.write(piece)

    def _until(self, left: int) -> float:
        """Seconds until ``left`` bytes of the turn are to be sent; 0 for a time that is past."""
        wait_s = self._ends_s - min(_MAX_TURN_S, self._cap.seconds(left)) - self._clock.monotonic()
        return wait_s if wait_s > _INSTANT_S else 0.0

    def end(self) -> None:
        self._cap.give_back(self._unused)
        self._unused = 0
