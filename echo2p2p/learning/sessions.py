"""The learner's end of the work sessions: who is there, what they said last, and a bounded way to tell them.

One stream a worker. A worker that is silent for three beat periods, that reads so slowly that its outbox
fills, or that says something which is not our protocol, loses its session and nothing else; it may dial again.
"""

from __future__ import annotations

import asyncio
import logging
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
    TaskSpec,
    Welcome,
)
from echo2p2p.errors import Echo2p2pError, ProtocolError, RecordError
from echo2p2p.provisioning.activation import Candidate
from echo2p2p.provisioning.estimators import DurationEstimator, RateEstimator
from echo2p2p.swarm.identity import PeerId
from echo2p2p.swarm.messages import PROTOCOL_VERSION, protocol_id, receive, send
from echo2p2p.swarm.network import Network, Stream
from echo2p2p.swarm.records import WorkerAdvert, check

log = logging.getLogger("echo2p2p.learner")

JOIN_TIMEOUT_S = 15.0
MAX_JOIN_BYTES = 16 * 1024
MAX_MESSAGE_BYTES = 32 * 1024 * 1024
"""One group: at most this much. 16 samples of 8,192 tokens are about 1 MiB."""
OUTBOX_MESSAGES = 1024
MISSED_BEATS = 3
LEASES_TIMED = 256
"""Leases of one worker whose turnaround is being measured."""


class Session:
    """One connected worker, as the learner knows it.

    Attributes:
        version: the newest version it proved to have installed; −1 for none.
        active: whether it is paid now.
        accepted, refused: groups so far.
        turnaround: from lease to delivery of a group, in seconds.
    """

    def __init__(self, stream: Stream, advert: WorkerAdvert, version: int) -> None:
        self.peer: PeerId = stream.remote
        self.advert = advert
        self.version = version
        self.active = False
        self.accepted = 0
        self.refused = 0
        self.stream = stream
        self._outbox: asyncio.Queue[FromLearner] = asyncio.Queue(OUTBOX_MESSAGES)
        self._overflow = asyncio.Event()
        self._rate: RateEstimator | None = None
        self._busy_since: float | None = None
        self._leased_at: dict[int, float] = {}
        self.turnaround = DurationEstimator(0.0)

    def tell(self, message: FromLearner) -> None:
        """Queue ``message``. A full outbox means that the worker stopped reading: its session ends."""
        try:
            self._outbox.put_nowait(message)
        except asyncio.QueueFull:
            self._overflow.set()

    async def write_outbox(self) -> None:
        """Send what is queued, in order, until cancelled."""
        while True:
            await send(self.stream, await self._outbox.get())
            self._outbox.task_done()

    async def flush(self) -> None:
        """Until everything that was queued has been sent."""
        await self._outbox.join()

    async def watch_outbox(self) -> None:
        """Raises ProtocolError once the outbox has overflowed."""
        await self._overflow.wait()
        raise ProtocolError(f"worker {self.peer} does not read its messages")

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
        if self._rate is None:
            self._rate = RateEstimator(self._announced(mean_tokens))
        self._rate.observe(accepted_rollouts, now - self._busy_since if self._busy_since is not None else 0.0)
        self._busy_since = now if still_busy else None

    def stopped_work(self) -> None:
        self._busy_since = None

    def mu(self, mean_tokens: float) -> float:
        """Rollouts a second: as measured, or as announced until something has been."""
        return self._rate.per_s if self._rate is not None else self._announced(mean_tokens)

    def candidate(self, mean_tokens: float) -> Candidate:
        return Candidate(self.peer, self.advert.price_per_hour, self.mu(mean_tokens), self.active)

    def _announced(self, mean_tokens: float) -> float:
        return self.advert.tokens_per_s / mean_tokens


class SessionHandler(Protocol):
    """Who is told what happens in the sessions. Called on the loop; ``joined`` may refuse by raising."""

    def joined(self, session: Session) -> None: ...

    async def received(self, session: Session, message: FromWorker) -> None: ...

    def left(self, session: Session, reason: str) -> None: ...


class WorkSessions:
    """Accepts work sessions on the network and keeps the open ones.

    Args:
        beat_period_s: how often workers are told to show a sign of life.
        max_sessions: one more is turned away.
    """

    def __init__(
        self,
        network: Network,
        run: str,
        task: TaskSpec,
        handler: SessionHandler,
        *,
        beat_period_s: float,
        max_sessions: int,
    ) -> None:
        self._network = network
        self._run = run
        self._task = task
        self._handler = handler
        self._beat_period_s = beat_period_s
        self._max_sessions = max_sessions
        self.open: dict[PeerId, Session] = {}

    async def listen(self) -> None:
        """Serve the work protocol from now on."""
        await self._network.handle(protocol_id(WORK_PROTOCOL), self._serve)

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
            await send(stream, Welcome(self._task, self._beat_period_s))
            async with asyncio.TaskGroup() as tasks:
                tasks.create_task(session.write_outbox())
                tasks.create_task(session.watch_outbox())
                tasks.create_task(self._read(session))  # ends only by raising, which ends the others
        except* Echo2p2pError as group:
            reason = str(group.exceptions[0])
        finally:
            self._handler.left(session, reason)
            if self.open.get(session.peer) is session:
                del self.open[session.peer]

    async def _admit(self, stream: Stream) -> Session | None:
        join: Join = await receive(stream, Join, max_bytes=MAX_JOIN_BYTES, timeout_s=JOIN_TIMEOUT_S)
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
        session = Session(stream, advert, join.version)
        earlier = self.open.get(session.peer)
        self.open[session.peer] = session
        self._handler.joined(session)
        if earlier is not None:
            await earlier.stream.close()
        return session

    async def _read(self, session: Session) -> None:
        while True:
            message: FromWorker = await receive(
                session.stream,
                FromWorker,
                max_bytes=MAX_MESSAGE_BYTES,
                timeout_s=self._beat_period_s * MISSED_BEATS,
            )
            if isinstance(message, Advertise):
                session.advert = self._advert(session.peer, message.advert)
            elif isinstance(message, Beat):
                session.tell(Alive())
            await self._handler.received(session, message)

    def _advert(self, peer: PeerId, sealed: bytes) -> WorkerAdvert:
        body = check(sealed, owner=peer, now_unix=self._network.clock.unix()).body
        if not isinstance(body, WorkerAdvert):
            raise RecordError(f"{peer} joined with a record that is not an advert")
        return body


async def _turn_away(stream: Stream, reason: str, *, retry: bool) -> None:
    log.info("turned %s away: %s", stream.remote, reason)
    await send(stream, Goodbye(reason, retry))
