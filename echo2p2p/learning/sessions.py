"""The learner's end of the work sessions: who is there, what they said last, and a bounded way to tell them.

One stream a worker. A worker that is silent for three beat periods, that reads so slowly that its outbox
fills, that sends message after message of which nothing comes, or that says something which is not our
protocol, loses its session and nothing else; it may dial again.
"""

from __future__ import annotations

import asyncio
import logging
import math
from collections import Counter
from typing import Protocol

from echo2p2p.data.work import (
    WORK_PROTOCOL,
    Advertise,
    Alive,
    Beat,
    FromLearner,
    FromWorker,
    Goodbye,
    Join,
    Welcome,
)
from echo2p2p.errors import DeadlineExceeded, Echo2p2pError, ProtocolError, RecordError
from echo2p2p.provisioning.activation import Candidate
from echo2p2p.provisioning.estimators import DurationEstimator, RateEstimator, WorkEstimator
from echo2p2p.swarm.budget import MessageBudget
from echo2p2p.swarm.identity import PeerId
from echo2p2p.swarm.messages import PROTOCOL_VERSION, protocol_id, receive, send
from echo2p2p.swarm.network import Network, Stream
from echo2p2p.swarm.records import WorkerAdvert, check_live

log = logging.getLogger("echo2p2p.learner")

JOIN_TIMEOUT_S = 15.0
MAX_JOIN_BYTES = 16 * 1024
WRITE_TIMEOUT_S = 30.0
VERSIONS_PROVED = 64
DECLINE_PAUSE_S = 1.0
OUTBOX_MESSAGES = 1024
MISSED_BEATS = 3
MESSAGE_BURST = 1024
MESSAGES_PER_S = 20.0
MESSAGES_PER_GROUP = 4
"""For each group that was accepted a worker may send so many messages, besides those that time allows."""
ADVERT_PRICE = 8
"""An advert costs the check of a signature and a look at the whole pool."""
JOIN_BURST = 10
JOINS_PER_S = 0.2
MAX_JOINING_PER_PEER = 2
"""Streams on which one peer has not said yet what it wants."""
JOINERS_REMEMBERED = 4096
BANNED_REMEMBERED = 4096
LEASES_TIMED = 256
"""Leases of one worker whose turnaround is being measured."""


class Session:
    """One connected worker, as the learner knows it.

    Attributes:
        version: the newest version it proved to have installed; −1 for none.
        proved: all versions it proved to have installed, the newest few.
        active: whether it is paid now, at ``price_per_hour``.
        arriving: it is paid, and nothing has come of that yet, good or bad.
        assumed_mu: what it is taken to deliver while it has announced nothing and delivered nothing.
        usually_kept: the part of an announced speed that workers deliver, as far as is known.
        not_before: no lease before this (monotonic seconds): it handed some back, or cost too much to score.
        accepted, refused: groups so far.
        turnaround: from lease to delivery of a group, in seconds.
        work: what it generates at once.
    """

    def __init__(self, stream: Stream, advert: WorkerAdvert, rate: RateEstimator | None = None) -> None:
        self.peer: PeerId = stream.remote
        self.advert = advert
        self.proved: list[int] = []
        self.active = False
        self.arriving = False
        self.price_per_hour = advert.price_per_hour
        self.not_before = 0.0
        self.accepted = 0
        self.refused = 0
        self.stream = stream
        self._outbox: asyncio.Queue[FromLearner] = asyncio.Queue(OUTBOX_MESSAGES)
        self._ended = asyncio.Event()
        self._over = ""
        self.rate = rate
        self.assumed_mu = 1.0
        self.usually_kept = 1.0
        self._declined = 0
        self._busy_since: float | None = None
        self._without_since = 0.0
        self._leased_at: dict[int, float] = {}
        self.turnaround = DurationEstimator(0.0)
        self.work = WorkEstimator()

    @property
    def version(self) -> int:
        return self.proved[-1] if self.proved else -1

    def prove(self, version: int) -> None:
        """The worker has shown that it holds the published weights of ``version``."""
        self.proved = [*self.proved, version][-VERSIONS_PROVED:]

    def activate(self, now: float) -> None:
        """Paid from now on, at the price that it announces now; a later raise does not count."""
        self._without_since = now
        self.active = self.arriving = True
        self.price_per_hour = self.advert.price_per_hour

    def release(self) -> None:
        self.active = self.arriving = False

    def advertised(self, advert: WorkerAdvert) -> None:
        """A new advert: a lower price counts at once, a higher one at the next activation."""
        self.advert = advert
        if not self.active or advert.price_per_hour < self.price_per_hour:
            self.price_per_hour = advert.price_per_hour

    @property
    def raised_its_price(self) -> bool:
        return self.active and self.advert.price_per_hour > self.price_per_hour

    def tell(self, message: FromLearner) -> None:
        """Queue ``message``. A full outbox means that the worker stopped reading: its session ends."""
        try:
            self._outbox.put_nowait(message)
        except asyncio.QueueFull:
            self.end(f"worker {self.peer} does not read its messages")

    async def write_outbox(self) -> None:
        """Send what is queued, in order, until cancelled."""
        while True:
            message = await self._outbox.get()
            try:
                async with asyncio.timeout(WRITE_TIMEOUT_S):
                    await send(self.stream, message)
            except TimeoutError:
                raise DeadlineExceeded(f"worker {self.peer} does not read its messages") from None
            self._outbox.task_done()

    async def flush(self) -> None:
        """Until everything that was queued has been sent."""
        await self._outbox.join()

    def end(self, reason: str) -> None:
        """Whatever the worker does, its session is over."""
        self._over = self._over or reason
        self._ended.set()

    async def watch(self) -> None:
        """Raises ProtocolError once the session has to end."""
        await self._ended.wait()
        raise ProtocolError(self._over)

    def leased(self, lease: int, now: float) -> None:
        """The worker was told of a lease."""
        self._leased_at[lease] = now
        while len(self._leased_at) > LEASES_TIMED:
            del self._leased_at[next(iter(self._leased_at))]

    def started_work(self, now: float) -> None:
        """The worker holds leased prompts and the weights to roll them out: its time counts from here."""
        if self._busy_since is None:
            self._busy_since = now

    def delivered(
        self, lease: int, now: float, accepted_rollouts: int, *, still_busy: bool, mean_tokens: float
    ) -> None:
        """A group came; ``accepted_rollouts`` is 0 if it was refused."""
        if lease in self._leased_at:
            self.turnaround.observe(now - self._leased_at[lease])
        busy_s = now - self._busy_since if self._busy_since is not None else 0.0
        self._observe(accepted_rollouts, busy_s, mean_tokens)
        self.work.observe(busy_s)
        self._busy_since = now if still_busy else None
        if accepted_rollouts:
            self._declined = 0

    def failed(self, now: float, *, lost_s: float, mean_tokens: float) -> None:
        """A lease ran out or came back empty: at least ``lost_s`` that brought nothing."""
        busy_s = now - self._busy_since if self._busy_since is not None else 0.0
        self._observe(0, max(lost_s, busy_s), mean_tokens)
        self._busy_since = None

    def without_version(self, now: float, *, longest_s: float, mean_tokens: float) -> None:
        """It is paid, and cannot be leased work: ``longest_s`` of that count like a lease that ran out."""
        if now - self._without_since >= longest_s:
            self._without_since = now
            self.failed(now, lost_s=longest_s, mean_tokens=mean_tokens)

    def declined(self, now: float, *, longest_pause_s: float, mean_tokens: float) -> None:
        """It handed prompts back. The next lease waits, twice as long each time in a row."""
        self._declined += 1
        pause_s = min(longest_pause_s, DECLINE_PAUSE_S * 2 ** min(self._declined - 1, 16))
        self.not_before = now + pause_s
        self.failed(now, lost_s=pause_s, mean_tokens=mean_tokens)

    def pause(self, now: float, seconds: float) -> None:
        """No lease for ``seconds`` from ``now`` on."""
        self.not_before = max(self.not_before, now + seconds)

    def mu(self, mean_tokens: float) -> float:
        """Rollouts a second: as measured, or as announced until something has been."""
        return self.rate.per_s if self.rate is not None else self._announced(mean_tokens)

    @property
    def mu_source(self) -> str:
        """Where :meth:`mu` comes from: measured, announced (the worker's word) or assumed (nobody's)."""
        if self.rate is not None:
            return "measured"
        return "announced" if self.advert.tokens_per_s else "assumed"

    def candidate(self, mean_tokens: float, *, keeps_up: bool, believable: float = math.inf) -> Candidate:
        """The worker as the activation sees it; of an announcement no more than ``believable`` counts."""
        mu = self.mu(mean_tokens)
        if self.rate is None:
            mu = min(mu, believable)
        return Candidate(self.peer, self.price_per_hour, mu, self.active, self.arriving and not keeps_up)

    def kept(self, mean_tokens: float) -> float | None:
        """The part of the speed it announces that it has delivered; None if it announced or delivered nothing."""
        if self.rate is None or not self.advert.tokens_per_s:
            return None
        return self.rate.per_s * mean_tokens / self.advert.tokens_per_s

    def _observe(self, rollouts: int, seconds: float, mean_tokens: float) -> None:
        if self.rate is None:
            self.rate = RateEstimator(self._announced(mean_tokens))
        self.arriving = False
        self.rate.observe(rollouts, seconds)

    def _announced(self, mean_tokens: float) -> float:
        if not self.advert.tokens_per_s:
            return self.assumed_mu
        return self.usually_kept * self.advert.tokens_per_s / mean_tokens


class SessionHandler(Protocol):
    """Who is told what happens in the sessions. Called on the loop."""

    def welcome(self, session: Session, join: Join) -> Welcome:
        """What the worker is greeted with; it has its place already."""
        ...

    def advertised(self, session: Session, advert: WorkerAdvert) -> None: ...

    async def received(self, session: Session, message: FromWorker) -> None: ...

    def left(self, session: Session, reason: str) -> None: ...


class WorkSessions:
    """Accepts work sessions on the network and keeps the open ones.

    Args:
        max_message_bytes: a worker that sends a longer one loses its session.
        beat_period_s: how often workers are told to show a sign of life.
        max_sessions: one more is turned away.
    """

    def __init__(
        self,
        network: Network,
        run: str,
        handler: SessionHandler,
        *,
        max_message_bytes: int,
        beat_period_s: float,
        max_sessions: int,
    ) -> None:
        self._network = network
        self._run = run
        self._handler = handler
        self._max_message_bytes = max_message_bytes
        self._beat_period_s = beat_period_s
        self._max_sessions = max_sessions
        self.open: dict[PeerId, Session] = {}
        self._joining: Counter[PeerId] = Counter()
        self._joins: dict[PeerId, MessageBudget] = {}
        self._banned: dict[PeerId, str] = {}

    async def listen(self) -> None:
        """Serve the work protocol from now on."""
        await self._network.handle(protocol_id(WORK_PROTOCOL), self._serve)

    def ban(self, peer: PeerId, reason: str) -> None:
        """``peer`` has no place here any more, in this life of the learner; it is told when it dials again."""
        self._banned[peer] = reason
        while len(self._banned) > BANNED_REMEMBERED:
            del self._banned[next(iter(self._banned))]
        if peer in self.open:
            self.open[peer].end(reason)

    async def say_goodbye(self, reason: str, *, retry: bool, timeout_s: float = 2.0) -> None:
        """Tell every worker that the learner leaves, and whether it will be back."""
        leaving = list(self.open.values())
        for session in leaving:
            session.tell(Goodbye(reason, retry))
        try:
            async with asyncio.timeout(timeout_s):
                await asyncio.gather(*(session.flush() for session in leaving))
        except TimeoutError:
            log.info("not every worker could be told goodbye")

    async def _serve(self, stream: Stream) -> None:
        session = await self._admit(stream)
        if session is None:
            return
        reason = "stream ended"
        try:
            async with asyncio.TaskGroup() as tasks:
                tasks.create_task(session.write_outbox())
                tasks.create_task(session.watch())
                tasks.create_task(self._read(session))  # ends only by raising, which ends the others
        except* Echo2p2pError as group:
            reason = str(group.exceptions[0])
        finally:
            self._handler.left(session, reason)
            if self.open.get(session.peer) is session:
                del self.open[session.peer]

    async def _admit(self, stream: Stream) -> Session | None:
        peer = stream.remote
        if self._joining[peer] >= MAX_JOINING_PER_PEER:
            raise ProtocolError(f"{peer} opens streams and does not join on them")
        self._joining[peer] += 1
        try:
            join: Join = await receive(stream, Join, max_bytes=MAX_JOIN_BYTES, timeout_s=JOIN_TIMEOUT_S)
        finally:
            self._joining[peer] -= 1
            if not self._joining[peer]:
                del self._joining[peer]
        if not self._may_join(peer):
            await _turn_away(stream, "you have joined too often lately", retry=True)
            return None
        if peer in self._banned:
            await _turn_away(stream, self._banned[peer], retry=False)
            return None
        try:
            advert = self._advert(stream.remote, join.advert)
        except RecordError as error:
            await _turn_away(stream, error.message, retry=False)
            return None
        if join.protocol != PROTOCOL_VERSION:
            await _turn_away(stream, f"this run speaks protocol {PROTOCOL_VERSION}", retry=False)
            return None
        if join.run != self._run:
            await _turn_away(stream, f"this learner runs {self._run}", retry=False)
            return None
        if len(self.open) >= self._max_sessions and stream.remote not in self.open:
            await _turn_away(stream, f"all {self._max_sessions} places are taken", retry=True)
            return None
        # The place is taken before anything is awaited, so that two sessions of one peer cannot both have it.
        earlier = self.open.get(stream.remote)
        session = Session(stream, advert, earlier.rate if earlier else None)
        self.open[session.peer] = session
        session.tell(self._handler.welcome(session, join))
        if earlier is not None:
            await earlier.stream.close()
        return session

    def _may_join(self, peer: PeerId) -> bool:
        now = self._network.clock.monotonic()
        budget = self._joins.setdefault(
            peer, MessageBudget(peer, burst=JOIN_BURST, per_s=JOINS_PER_S, now=now)
        )
        while len(self._joins) > JOINERS_REMEMBERED:
            del self._joins[next(iter(self._joins))]
        try:
            budget.spend(now)
        except ProtocolError:
            return False
        return True

    async def _read(self, session: Session) -> None:
        clock = self._network.clock
        budget = MessageBudget(session.peer, burst=MESSAGE_BURST, per_s=MESSAGES_PER_S, now=clock.monotonic())
        accepted = session.accepted
        while True:
            message: FromWorker = await receive(
                session.stream,
                FromWorker,
                max_bytes=self._max_message_bytes,
                timeout_s=self._beat_period_s * MISSED_BEATS,
            )
            budget.earn(MESSAGES_PER_GROUP * (session.accepted - accepted))
            accepted = session.accepted
            budget.spend(clock.monotonic(), ADVERT_PRICE if isinstance(message, Advertise) else 1)
            if isinstance(message, Advertise):
                self._handler.advertised(session, self._advert(session.peer, message.advert))
            elif isinstance(message, Beat):
                session.tell(Alive())
            await self._handler.received(session, message)

    def _advert(self, peer: PeerId, sealed: bytes) -> WorkerAdvert:
        body = check_live(sealed, owner=peer).body
        if not isinstance(body, WorkerAdvert):
            raise RecordError(f"{peer} joined with a record that is not an advert")
        return body


async def _turn_away(stream: Stream, reason: str, *, retry: bool) -> None:
    log.info("turned %s away: %s", stream.remote, reason)
    await send(stream, Goodbye(reason, retry))
