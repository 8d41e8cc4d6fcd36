"""Serves what this peer holds: manifests and chunks, also of a version that is still arriving here.

Guarantees:

* Only verified bytes leave, and a chunk that a peer waits for leaves as soon as it is here.
* Every stream is bounded: requests by size and number, waits and writes by deadlines, streams by peer.
* Chunks and manifests leave no faster than the cap, members before strangers and otherwise first come, first served;
  who waits for its turn is told so.
* A version that a member is still getting from here outlives its time: one, the oldest, while that goes on.
"""

from __future__ import annotations

import asyncio
import math
from collections import Counter
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any

from echo2p2p.errors import DeadlineExceeded, Echo2p2pError, ProtocolError
from echo2p2p.swarm.budget import MessageBudget
from echo2p2p.swarm.identity import PeerId
from echo2p2p.swarm.messages import framed, protocol_id, receive
from echo2p2p.swarm.network import Network, Stream
from echo2p2p.weights.coding import Coder
from echo2p2p.weights.gatekeeper import Gatekeeper
from echo2p2p.weights.holding import Holding, OutgoingLane, set_within
from echo2p2p.weights.rate import TokenBucket
from echo2p2p.weights.turn import Turn
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

    max_streams: int = 768
    """Well below what the node accepts of all protocols together, so that others find room."""
    max_streams_per_peer: int = 32
    """Several times what one fetch opens, for those of the fetch before may still be closing."""
    max_stranger_streams: int = 64
    """For all together who are members of no version that is served and were told of none: few, for what lies in
    their streams when members come is ahead of those."""
    max_streams_per_stranger: int = 8
    first_request_s: float = 5.0
    unknown_version_s: float = 10.0
    """How long a request may wait for a version that this peer has not heard of yet."""
    chunk_wait_s: float = 30.0
    """How long a request may wait for chunks while none arrive here."""
    heartbeat_s: float = 1.0
    idle_s: float = 120.0
    write_s: float = 30.0
    """An asker that takes nothing for so long while something is being sent to it loses its lane."""
    linger_s: float = 600.0
    """How long a version whose time is over is kept for a member that is still getting it from here."""
    barred_s: float = 60.0
    """How long a peer that floods a lane with messages is served nothing."""
    suspect_wait_s: float = 10.0
    """A suspect gets something after this, however much the others want: it may be an honest one."""
    min_bytes_per_s: float = 16 * 1024
    """An asker that takes a chunk more slowly than this, beyond ``write_s``, loses its lane."""
    upload_mbit: float = math.inf
    """Chunks and manifests leave no faster than this, to all askers together."""


_BURST_S = 0.05
"""What leaves at once under a cap waits in front of the line, and other messages behind it."""
_POLL_S = 0.25
"""How often who may not send now looks whether it may."""
_ASK_BURST = 512
_ASKS_PER_S = 20.0
_ASKS_PER_CHUNK = 3
"""Messages of an asker for each chunk that it gets; the most that one reply brings about."""
_MAX_BARRED = 1024
_LOOK_S = 0.05
"""How often is looked whether somebody whom the learner suspects can have its turn."""
DEFAULT_SERVER_LIMITS = ServerLimits()


class ChunkServer:
    """Answers requests on the chunk protocol out of its holdings.

    Args:
        learner: whose word on suspects is taken.
        on_report: called with every report and its sender; who takes none refuses them.

    Attributes:
        bytes_sent: bytes sent for chunks, as they went over the wire, by version and then by peer.
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
        self._told: set[PeerId] = set()
        self._strangers = 0
        self._gatekeeper = Gatekeeper()
        self._barred: dict[PeerId, float] = {}
        self._member_got_s: dict[str, float] = {}
        self._lingering: tuple[str, float] | None = None
        self._changed = asyncio.Event()
        self._streams: Counter[PeerId] = Counter()
        self._cap = TokenBucket(limits.upload_mbit, network.clock.monotonic(), burst_s=_BURST_S)
        self._coder = Coder(network.clock)
        self.bytes_sent: dict[int, Counter[PeerId]] = {}

    async def start(self) -> None:
        await self._network.handle(protocol_id(CHUNK_PROTOCOL), self._serve)

    def serve(self, digest: str, holding: Holding) -> None:
        """Answer for a version, by the digest of its signed manifest. Replaces what was served under it."""
        self._holdings[digest] = holding
        self._members = self._relaying()
        self._told.clear()
        self._pass_on_suspects()
        self.bytes_sent.setdefault(holding.manifest.version, Counter())
        self._changed.set()
        self._changed = asyncio.Event()

    def told(self, peer: PeerId) -> None:
        """``peer`` was told of the newest version: until there is a newer one it is served as members are."""
        self._told.add(peer)

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
        self._member_got_s.pop(digest, None)
        if holding is not None:
            holding.expect(range(0))
            self._members = self._relaying()

    def keep_newest(self, count: int) -> frozenset[int]:
        """Drop all but the newest ``count`` versions and one that lingers; those that are left."""
        newest = sorted(self._holdings.items(), key=lambda item: item[1].manifest.version)
        for digest, holding in newest[:-count]:
            if not self._lingers(digest):
                self.drop(digest)
                self.bytes_sent.pop(holding.manifest.version, None)
        return frozenset(holding.manifest.version for holding in self._holdings.values())

    def _lingers(self, digest: str) -> bool:
        """Whether a version is kept for a member that would otherwise lose, over and over, what it fetches.

        Not for one that has had it twice: that would keep others from lingering.
        """
        now = self._clock.monotonic()
        if self._lingering is not None and self._lingering[0] not in self._holdings:
            self._lingering = None
        moved_s = now - self._member_got_s.get(digest, -math.inf)
        if not self._holdings[digest].is_asked or moved_s > self._limits.chunk_wait_s:
            return False
        if self._lingering is None:
            self._lingering = (digest, now)
        return self._lingering[0] == digest and now - self._lingering[1] <= self._limits.linger_s

    def _relaying(self) -> frozenset[PeerId]:
        return frozenset(
            member.peer for holding in self._holdings.values() for member in holding.manifest.members
        )

    async def _serve(self, stream: Stream) -> None:
        peer = stream.remote
        if self._clock.monotonic() < self._barred.get(peer, -math.inf):
            await self._reply(stream, Refused("too many messages"))
            return
        # Identities cost nothing: however many strangers there are, most streams are left to the members.
        stranger = not self._is_member(peer)
        limits = self._limits
        allowed = limits.max_streams_per_stranger if stranger else limits.max_streams_per_peer
        full = self._streams.total() >= limits.max_streams or (
            stranger and self._strangers >= limits.max_stranger_streams
        )
        if full or self._streams[peer] >= allowed:
            await self._reply(stream, Refused("too many streams"))
            return
        self._streams[peer] += 1
        self._strangers += stranger
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
            self._strangers -= stranger
            self._streams[peer] -= 1
            if not self._streams[peer]:
                del self._streams[peer]

    def _is_member(self, peer: PeerId) -> bool:
        return peer in self._members or peer in self._told

    def _bar(self, peer: PeerId) -> None:
        self._barred.pop(peer, None)
        self._barred[peer] = self._clock.monotonic() + self._limits.barred_s
        while len(self._barred) > _MAX_BARRED:
            del self._barred[next(iter(self._barred))]

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
        while (turn := self._turn(stream.remote, len(holding.body))) is None:
            await asyncio.sleep(self._limits.heartbeat_s)
            await self._reply(stream, Waiting())
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
        budget = MessageBudget(
            stream.remote, burst=_ASK_BURST, per_s=_ASKS_PER_S, now=self._clock.monotonic()
        )
        failure: Echo2p2pError | None = None
        try:
            async with asyncio.TaskGroup() as tasks:
                tasks.create_task(self._take_requests(stream, lane, budget))
                await self._send_chunks(stream, lane, holding, request.version, budget)
        except* Echo2p2pError as group:
            # Of what both directions say about the end of one lane, the first is the cause.
            failure = next(each for each in group.exceptions if isinstance(each, Echo2p2pError))
        finally:
            holding.detach(lane)
        if failure is not None:
            raise failure

    def _turn(self, peer: PeerId, nbytes: int) -> Turn | None:
        """A turn to send ``nbytes`` to ``peer``; None while it may not have one."""
        member = self._is_member(peer)
        if not self._gatekeeper.opens(member=member, nbytes=nbytes, now=self._clock.monotonic()):
            return None
        return Turn(self._cap, self._gatekeeper, self._clock, nbytes, member=member)

    async def _take_requests(self, stream: Stream, lane: OutgoingLane, budget: MessageBudget) -> None:
        """Until the asker ends the stream, which ends the lane."""
        while True:
            request: LaneRequest = await receive(
                stream, LaneRequest, max_bytes=MAX_MESSAGE_BYTES, timeout_s=self._limits.idle_s
            )
            try:
                budget.spend(self._clock.monotonic())
            except ProtocolError:
                self._bar(stream.remote)
                raise
            if isinstance(request, Want):
                lane.want(request)
            else:
                lane.cancel(request.chunks)

    async def _send_chunks(
        self, stream: Stream, lane: OutgoingLane, holding: Holding, version: str, budget: MessageBudget
    ) -> None:
        sent = self.bytes_sent.setdefault(holding.manifest.version, Counter())
        turn: Turn | None = None
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
                    turn = self._turn(stream.remote, end - start)
                elif index is None and turn is not None:
                    # It came to the asker from elsewhere meanwhile, or others go before.
                    turn.end()
                    turn = None
                shut = index is not None and turn is None
                wait_s = turn.wait_s if turn is not None else _POLL_S if shut else self._limits.heartbeat_s
                if postponed and lane.n_ready:
                    wait_s = _LOOK_S
                if turn is not None and wait_s <= 0:
                    await self._send_chunk(stream, lane, holding, turn, sent)
                    turn.end()
                    turn = None
                    budget.earn(_ASKS_PER_CHUNK)
                    # Who has had a version twice keeps none from going.
                    if (
                        self._is_member(stream.remote)
                        and sent[stream.remote] < 2 * holding.manifest.whole_bytes
                    ):
                        self._member_got_s[version] = self._clock.monotonic()
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
        self, stream: Stream, lane: OutgoingLane, holding: Holding, turn: Turn, sent: Counter[PeerId]
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
            coded = None
            if index in holding.manifest.whole:
                coded = await self._coder.coded(data, holding.word_bytes)
            if coded is not None:
                turn.shrink(len(data) - len(coded))
                data = coded
            chunk = Chunk(index, lane.n_ready, len(coded) if coded is not None else 0)
            await self._reply(stream, chunk, data, turn)
            self._coder.wrote(len(data))
            sent[stream.remote] += len(data)
        lane.sending = False

    async def _reply(
        self, stream: Stream, message: Any, data: bytes | memoryview = b"", turn: Turn | None = None
    ) -> None:
        time, left = asyncio.get_running_loop().time, len(data)
        until_s = time() + self._limits.write_s + left / self._limits.min_bytes_per_s
        try:
            async with asyncio.timeout(self._limits.write_s) as deadline:

                def taken(still_left: int) -> None:
                    nonlocal left
                    left = still_left
                    deadline.reschedule(min(until_s, time() + self._limits.write_s))

                if turn is not None:
                    await turn.write(stream, framed(message), data, taken)
                else:
                    await stream.write(framed(message))
        except TimeoutError:
            raise DeadlineExceeded(
                f"{stream.remote} does not read: {left} of {len(data)} bytes were not taken in time"
            ) from None
