"""The worker's end of a work session: dials the learner, and dials again when the connection goes.

What was submitted and has no verdict yet is sent again on the next session; the learner takes each group once.
"""

from __future__ import annotations

import asyncio
import logging
import random
from collections import Counter
from typing import Protocol

from echo2p2p.data.work import (
    WORK_PROTOCOL,
    Activate,
    Alive,
    Beat,
    Decline,
    FromLearner,
    FromWorker,
    Goodbye,
    Head,
    Join,
    Lease,
    Standby,
    Submit,
    TaskSpec,
    Verdict,
    Welcome,
)
from echo2p2p.errors import (
    Echo2p2pError,
    IncompatibleVersion,
    NotSpoken,
    ProtocolError,
    SettingsError,
    TurnedAway,
)
from echo2p2p.rollout.refusals import Refusals
from echo2p2p.swarm.messages import PROTOCOL_VERSION, protocol_id, receive, send
from echo2p2p.swarm.network import Network, Stream
from echo2p2p.swarm.records import Keys, ManifestRecord, check_live
from echo2p2p.telemetry.events import EventLog
from echo2p2p.telemetry.text import short_peer

log = logging.getLogger("echo2p2p.worker")

DIAL_TIMEOUT_S = 15.0
FIRST_RETRY_S = 1.0
LONGEST_RETRY_S = 15.0
SILENT_BEATS = 4
"""The learner answers every beat; one that leaves so many unanswered is dialled anew."""
LAST_WORDS_S = 3.0
ACCEPTED = "accepted"
MAX_MESSAGE_BYTES = 2**20
OUTBOX_MESSAGES = 4096


class SessionOwner(Protocol):
    """The worker, as its session sees it."""

    @property
    def version(self) -> int: ...

    @property
    def fingerprint(self) -> str: ...

    @property
    def queued(self) -> int: ...

    def seal_advert(self) -> bytes: ...

    def on_welcome(self, welcome: Welcome) -> None: ...

    def on_active(self, active: bool) -> None: ...

    def on_head(self, record: ManifestRecord, sealed: bytes) -> None: ...

    def on_word(self, period_s: float) -> None:
        """The learner said something; the next thing is due within ``period_s``."""
        ...

    def on_lease(self, lease: Lease) -> None: ...

    async def run_is_finished(self) -> bool: ...

    def leaving(self) -> list[Decline]: ...


class LearnerSession:
    """Keeps one work session with the learner of ``run`` open."""

    def __init__(
        self, network: Network, run: str, owner: SessionOwner, *, events: EventLog, rng: random.Random
    ) -> None:
        self._network = network
        self._keys = Keys(run)
        self._owner = owner
        self._events = events
        self._rng = rng
        self._outbox: asyncio.Queue[FromWorker] = asyncio.Queue(OUTBOX_MESSAGES)
        self._unanswered: dict[tuple[int, int], Submit] = {}
        self._stop = asyncio.Event()
        self._retry_s = FIRST_RETRY_S
        self._task: TaskSpec | None = None
        self._verdicts: Counter[str] = Counter()
        self._refusals = Refusals()
        self._held_back: list[Submit] | None = None

    @property
    def task(self) -> TaskSpec:
        """The run's task, as the learner said in its welcome."""
        if self._task is None:
            raise ProtocolError("the learner has not said which task it runs")
        return self._task

    def tell(self, message: FromWorker) -> None:
        """Queue ``message`` for the learner. What does not fit is lost: the learner's leases run out."""
        try:
            self._outbox.put_nowait(message)
        except asyncio.QueueFull:
            log.warning("a message to the learner was dropped: it does not read")

    def submit(self, submit: Submit) -> None:
        """Queue a finished group; it is kept until its verdict comes."""
        self._unanswered[submit.lease, submit.group.index] = submit
        if self._held_back is None:
            self.tell(submit)
        else:
            self._held_back.append(submit)

    def hold_back(self) -> None:
        """Send no finished groups until :meth:`let_go`: nobody knows what they are worth by now."""
        self._held_back = self._held_back or []

    def let_go(self) -> None:
        """Undo :meth:`hold_back`."""
        held, self._held_back = self._held_back, None
        for submit in held or ():
            if (submit.lease, submit.group.index) in self._unanswered:
                self.tell(submit)

    def stop(self) -> None:
        """End the session, handing back what is still leased."""
        self._stop.set()

    async def run(self) -> None:
        """Hold a session until the run is finished or :meth:`stop` is called.

        Raises:
            TurnedAway, IncompatibleVersion: the learner refuses this worker for good.
        """
        while not self._stop.is_set():
            try:
                if await self._hold():
                    return
            except (TurnedAway, IncompatibleVersion, SettingsError):
                raise
            except Echo2p2pError as error:
                self._events.emit("session", state="lost", reason=error.message)
                log.info("no session with the learner, dialling again in %.0f s: %s", self._retry_s, error)
            self._owner.on_active(False)
            if await self._owner.run_is_finished():
                self._events.emit(
                    "session", state="ended", reason="the learner's record says that the run is finished"
                )
                return
            try:
                async with asyncio.timeout(self._retry_s * self._rng.uniform(0.75, 1.25)):
                    await self._stop.wait()
            except TimeoutError:
                self._retry_s = min(LONGEST_RETRY_S, 2 * self._retry_s)

    async def _hold(self) -> bool:
        """One session, from dialling to its end; True if there is no point in another."""
        learner = self._keys.learner_id
        try:
            stream = await self._network.open_stream(
                learner, protocol_id(WORK_PROTOCOL), timeout_s=DIAL_TIMEOUT_S
            )
        except NotSpoken:  # a learner that starts up says so too, for a moment
            raise NotSpoken(
                f"the peer after the @ of --run, {short_peer(learner)}, is there, but no learner of protocol "
                f"{PROTOCOL_VERSION}: compare --run with the line that the learner printed"
            ) from None
        failure: BaseException | None = None
        finished = False
        try:
            welcome = await self._join(stream)
            if welcome is None:
                return False
            self._owner.on_word(welcome.beat_period_s)
            self._events.emit("session", state="open", reason="")
            # What is still queued belonged to the last session; the groups in it are among the unanswered.
            self._outbox = asyncio.Queue(OUTBOX_MESSAGES)
            for submit in list(self._unanswered.values()):
                await send(stream, submit)
            async with asyncio.TaskGroup() as tasks:
                helpers = [
                    tasks.create_task(self._write(stream)),
                    tasks.create_task(self._beat(welcome.beat_period_s)),
                    tasks.create_task(self._end_on_stop(stream)),
                ]
                finished = await self._read(stream, welcome.beat_period_s)
                for helper in helpers:
                    helper.cancel()
        except* Echo2p2pError as group:
            failure = group.exceptions[0]
        finally:
            await stream.close()
        if failure is not None and not self._stop.is_set():
            raise failure
        return finished or self._stop.is_set()

    async def _join(self, stream: Stream) -> Welcome | None:
        advert = self._owner.seal_advert()
        owner = self._owner
        join = Join(self._keys.run, PROTOCOL_VERSION, advert, owner.version, owner.fingerprint)
        await send(stream, join)
        answer: Welcome | Goodbye = await receive(
            stream, Welcome | Goodbye, max_bytes=MAX_MESSAGE_BYTES, timeout_s=DIAL_TIMEOUT_S
        )
        if isinstance(answer, Welcome):
            self._owner.on_welcome(answer)
            self._task = answer.task
            self._retry_s = FIRST_RETRY_S
            return answer
        if answer.protocol != PROTOCOL_VERSION:
            raise IncompatibleVersion(
                f"the learner speaks protocol {answer.protocol}, this worker {PROTOCOL_VERSION}",
                hint="install the release that the learner runs",
            )
        if not answer.retry:
            raise TurnedAway(f"the learner turned this worker away: {answer.reason}")
        self._events.emit("session", state="turned away", reason=answer.reason)
        return None

    async def _read(self, stream: Stream, beat_period_s: float) -> bool:
        """Handle what the learner says until it says goodbye; True if the run is finished."""
        while True:
            message: FromLearner = await receive(
                stream, FromLearner, max_bytes=MAX_MESSAGE_BYTES, timeout_s=SILENT_BEATS * beat_period_s
            )
            self._owner.on_word(beat_period_s)
            if isinstance(message, Lease):
                self._owner.on_lease(message)
            elif isinstance(message, Verdict):
                self._settle(message)
            elif isinstance(message, Head):
                self._head(message)
            elif isinstance(message, Activate | Standby):
                self._owner.on_active(isinstance(message, Activate))
            elif isinstance(message, Alive):
                continue
            elif isinstance(message, Goodbye):
                self._events.emit("session", state="ended", reason=message.reason)
                # The learner's leases end with it; their work would only be refused by its next life.
                self._unanswered.clear()
                self._owner.leaving()
                return not message.retry
            else:
                raise ProtocolError("the learner greeted twice")

    def _head(self, message: Head) -> None:
        learner = self._keys.learner_id
        record = check_live(message.record, owner=learner)
        if not isinstance(record.body, ManifestRecord) or record.key != self._keys.manifest:
            raise ProtocolError("the learner announced a version with a record that is not a manifest's")
        self._owner.on_head(record.body, message.record)

    def _settle(self, verdict: Verdict) -> None:
        self._unanswered.pop((verdict.lease, verdict.index), None)
        self._verdicts[verdict.reason or ACCEPTED] += 1
        if verdict.reason and (line := self._refusals.add(verdict.reason, self._network.clock.monotonic())):
            log.warning("%s", line)

    async def _write(self, stream: Stream) -> None:
        while True:
            await send(stream, await self._outbox.get())
            self._outbox.task_done()

    async def _beat(self, period_s: float) -> None:
        while True:
            self.tell(Beat(self._owner.version, self._owner.queued))
            if line := self._refusals.due(self._network.clock.monotonic()):
                log.warning("%s", line)
            refused = {reason: n for reason, n in self._verdicts.items() if reason != ACCEPTED}
            self._events.emit("verdicts", accepted=self._verdicts[ACCEPTED], refused=refused)
            await asyncio.sleep(period_s)

    async def _end_on_stop(self, stream: Stream) -> None:
        await self._stop.wait()
        for decline in self._owner.leaving():
            self.tell(decline)
        try:
            async with asyncio.timeout(LAST_WORDS_S):
                await self._outbox.join()
        except TimeoutError:
            log.info("left without having told the learner everything")
        await stream.close()
