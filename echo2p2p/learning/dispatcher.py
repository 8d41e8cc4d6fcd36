"""Between the sessions and the replay buffer: leases prompts to active workers, admits what comes back.

How much is leased follows from when it will be needed. Let v_next be the version at which the next batch is
drawn: v_t while the learner waits, v_t + 1 while it trains. A group that joins the line behind ``backlog`` others
is drawn at version v_next + ⌊backlog / G⌋ (G groups a step). A worker gets a lease only

* in the window: v_next + ⌊backlog / G⌋ ≤ v + S, where v is the version that it generates with; work that would
  be stale on arrival is never paid for;
* just in time: backlog / G · T_train ≤ its own turnaround + T_train; work that waits only grows old, and one step
  of slack is enough to never let the learner wait for it.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable

from echo2p2p.data.scoring import Scorer
from echo2p2p.data.trajectory import Group, Sampling
from echo2p2p.data.work import Beat, Decline, FromWorker, Lease, Ready, Submit, Verdict
from echo2p2p.learning.admission import Refusal, check_claim, check_contents
from echo2p2p.learning.journal import Contents, Journal
from echo2p2p.learning.ledger import PromptLedger
from echo2p2p.learning.replay import Entry, ReplayBuffer
from echo2p2p.learning.scoring_costs import Check, ScoringCosts
from echo2p2p.learning.sessions import Session
from echo2p2p.settings import LearnerSettings
from echo2p2p.swarm.clock import Clock
from echo2p2p.telemetry.events import EventLog

CHECKED_AT_ONCE = 3
"""Groups whose contents are checked: rewards may take seconds, and the threads they wait in are others' as well. A
sandbox has as many processes."""
MIN_OUTSTANDING_GROUPS = 2
"""A worker always has the next group while it generates one: otherwise each round trip is idle time."""
BYTES_PER_TOKEN = 12
"""On the wire: at most 5 for the id, 4 for its log-probability, and something to spare."""
SAMPLE_OVERHEAD_BYTES = 512
PROMPT_BYTES = 2**20
DECLINERS_TO_SET_ASIDE = 3
DECLINED_FOLLOWED = 4096
REFUSALS_LOGGED = 100
"""Of one session; a worker that sends nothing but rubbish must not fill the disk with our complaints."""
WAIT_REPORT_S = 30.0
LEFT_THE_WINDOW = "left the window"
FOUND_OUT = "of a worker that was found out"


class Dispatcher:
    """Leases, admission and batches of one run.

    Args:
        n_active: how many workers are paid now.
        journal: where accepted groups and batches are written first; what it holds of an earlier life of the
            learner is taken up: batches that were drawn are drawn again, in the same order. None: nowhere, and
            what was accepted and not yet in a checkpoint is lost in a crash and leased again.
        just_in_time: False leases whatever the buffer has room for, to model learners that do, and look at the
            window only when they draw a batch.

    Attributes:
        version: v_t, the learner's version; set by the learner after each step.
        t_train_s: what the learner measured; how far ahead work is leased follows from it.
        dropped: groups that were paid for or offered and not trained, by reason.
        dropped_tokens: completion tokens of those of them that came.
        mean_tokens: moving mean of completion tokens a rollout.
    """

    def __init__(
        self,
        settings: LearnerSettings,
        *,
        ledger: PromptLedger,
        scorer: Scorer,
        clock: Clock,
        events: EventLog,
        t_train_s: float,
        n_active: Callable[[], int],
        journal: Journal | None = None,
        just_in_time: bool = True,
    ) -> None:
        self._settings = settings
        self._just_in_time = just_in_time
        self._ledger = ledger
        self._scorer = scorer
        self._clock = clock
        self._events = events
        self._group_quota = settings.prompts_per_step
        self._replay = ReplayBuffer(
            staleness=settings.staleness,
            capacity_groups=(settings.staleness + 2) * settings.prompts_per_step,
        )
        self._sampling = Sampling(settings.temperature, settings.top_p, settings.max_new_tokens)
        self._sequential = settings.is_sequential
        self._arrived = asyncio.Event()
        self._sessions: dict[str, Session] = {}
        self._training = False
        self._n_active = n_active
        self._journal = journal
        self._recorded: dict[int, list[Entry]] = {}
        self._drawn: list[Entry] = []
        self._decliners: dict[int, set[str]] = {}
        self._checks = asyncio.Semaphore(CHECKED_AT_ONCE)
        self._costs = ScoringCosts()
        self.version = 0
        self._published = self._published_before = -1
        self.t_train_s = t_train_s
        self.mean_tokens = float(settings.max_new_tokens)
        self._lengths = 0
        self.dropped: Counter[str] = Counter()
        self.dropped_tokens = 0
        if journal is not None:
            self._take_up(journal.found)

    @property
    def buffered(self) -> int:
        """Groups that wait to be trained."""
        return len(self._replay) + sum(map(len, self._recorded.values()))

    @property
    def leased(self) -> int:
        """Groups that are out with workers."""
        return self._ledger.n_leased

    # --- sessions -----------------------------------------------------------------------------------

    def add(self, session: Session) -> None:
        """A worker is there, or there again: what it was leased is its own as before."""
        self._sessions[session.peer] = session
        self._ledger.restore(session.peer)

    @property
    def max_message_bytes(self) -> int:
        """What a group of this run can amount to. It holds for workers without a lease too: one that comes back
        to a restarted learner sends what it had been leased by the life before.
        """
        per_sample = self._settings.max_new_tokens * BYTES_PER_TOKEN + SAMPLE_OVERHEAD_BYTES
        return PROMPT_BYTES + self._settings.samples_per_prompt * per_sample

    def remove(self, session: Session) -> None:
        """Its leases stay open for one beat period, in case it was only the connection that went."""
        if self._sessions.get(session.peer) is session:
            del self._sessions[session.peer]
            self._costs.left(session.peer)
            self._ledger.shorten(session.peer, self._clock.monotonic() + self._settings.beat_period_s)
        self._arrived.set()

    async def receive(self, session: Session, message: FromWorker) -> None:
        """Handle one message of the rollout plane."""
        if isinstance(message, Submit):
            await self._admit(session, message)
        elif isinstance(message, Decline):
            self._declined(session, message)
        elif isinstance(message, Ready):
            if self._ledger.outstanding(session.peer):
                session.started_work(self._clock.monotonic())
        elif isinstance(message, Beat):
            return
        # What one worker delivered or gave back makes room for one worker's next lease: its own.
        self._top_up(session)

    # --- leasing ------------------------------------------------------------------------------------

    def top_up(self) -> None:
        """Lease work to every active worker that has too little, as far as the window allows."""
        now = self._clock.monotonic()
        for worker, groups in self._ledger.expire(now):
            self.dropped["lease expired"] += groups
            if worker in self._sessions:
                self._sessions[worker].failed(
                    now, lost_s=self._settings.lease_s, mean_tokens=self.mean_tokens
                )
        active = [s for s in self._sessions.values() if s.active]
        active.sort(key=lambda s: self._ledger.outstanding(s.peer) / max(s.mu(self.mean_tokens), 1e-9))
        for session in active:
            self._top_up(session)

    def _top_up(self, session: Session) -> None:
        here = self._sessions.get(session.peer) is session  # or a lease that it is told of is nobody's
        may = here and session.active and self.published >= 0
        if may and self._clock.monotonic() >= session.not_before and self.keeps_up(session):
            n = min(self._shortfall(session), self._room(session))
            if n > 0:
                self._lease(session, n, self._clock.monotonic())

    def _shortfall(self, session: Session) -> int:
        """Groups that ``session`` should hold beyond what it holds: one step's worth of its own rate."""
        ahead_s = min(self.t_train_s, self._settings.lease_s / 2)
        rate = session.mu(self.mean_tokens) / self._settings.samples_per_prompt
        wanted = max(MIN_OUTSTANDING_GROUPS, round(rate * ahead_s))
        if session.rate is None:
            # Nothing but an announcement: a fair share of one step, until something has come of it.
            share = -(-self._group_quota // max(1, self._n_active()))
            wanted = min(wanted, max(MIN_OUTSTANDING_GROUPS, share))
        return wanted - self._ledger.outstanding(session.peer)

    def _room(self, session: Session) -> int:
        """Groups that may join the line now without being stale when their turn comes."""
        backlog = self.buffered + self.leased
        if self._sequential:
            drawing = not self._training and self.published == self.version
            return self._group_quota - backlog if drawing else 0
        if not self._just_in_time:
            return self._replay.capacity_groups - backlog
        generating = max(session.version, self._min_version())
        next_version = self.version + (1 if self._training else 0)
        steps_in_window = generating + self._settings.staleness - next_version + 1
        steps_in_time = 1 + session.turnaround.seconds / self.t_train_s
        return int(min(steps_in_window, steps_in_time) * self._group_quota) - backlog

    def keeps_up(self, session: Session) -> bool:
        """Whether it may be leased work, even work that has to wait for the newest version.

        One that was left behind, or has just come, has the weights to fetch, which may take minutes. What it were
        leased meanwhile would have its place in the line, and leave it too old.
        """
        return session.version >= min(self._min_version(), self._published_before)

    @property
    def published(self) -> int:
        """The newest version that workers can hold; −1 for none."""
        return self._published

    @published.setter
    def published(self, version: int) -> None:
        self._published_before, self._published = self._published, version

    def _min_version(self) -> int:
        """The oldest version that a lease given now may be rolled out with."""
        if self._sequential:
            return self.published
        # A version that leaves the window at the next step is not worth rolling out with.
        return min(self.published, max(0, self.version - self._settings.staleness + 1))

    def _lease(self, session: Session, n: int, now: float) -> None:
        duration_s = self._settings.lease_s
        min_version = self._min_version()
        number, indices = self._ledger.lease(
            session.peer, n, now=now, duration_s=duration_s, min_version=min_version
        )
        session.leased(number, now)
        if session.version >= min_version:
            session.started_work(now)
        session.tell(
            Lease(number, indices, self._settings.samples_per_prompt, self._sampling, min_version, duration_s)
        )

    # --- admission ----------------------------------------------------------------------------------

    async def _admit(self, session: Session, submit: Submit) -> None:
        group = submit.group

        def claim() -> Refusal | None:
            return check_claim(
                group,
                lease=submit.lease,
                sender=session.peer,
                ledger=self._ledger,
                learner_version=self.version,
                proved=session.proved,
                staleness=self._settings.staleness,
            )

        refusal = claim() or self._too_dear(session)
        if refusal is None:
            async with self._checks:
                verified = await self._checked(session, group)
            # The lease may have run out, and the learner moved on, while the contents were checked.
            refusal = verified if isinstance(verified, Refusal) else claim()
            if refusal is None and isinstance(verified, Group):
                group = verified
                entry = Entry(group, session.peer, submit.lease)
                refusal = None if self._replay.add(entry) else Refusal.FULL
                if refusal is None and self._journal is not None:
                    self._journal.accept(entry)
        held = self._ledger.holder(submit.lease, group.index) == session.peer
        if refusal is None:
            self._ledger.accept(submit.lease, group.index)
            session.accepted += 1
            self._note_length(group.n_tokens / len(group.samples))
            self._arrived.set()
        else:
            if held:
                self._ledger.give_back(submit.lease, group.index)
            session.refused += 1
            self.dropped[refusal.value] += 1
            self.dropped_tokens += group.n_tokens
            if session.refused <= REFUSALS_LOGGED:
                self._events.emit("refused", worker=session.peer, reason=refusal.value, index=group.index)
        session.delivered(
            submit.lease,
            self._clock.monotonic(),
            len(group.samples) if refusal is None else 0,
            still_busy=self._ledger.outstanding(session.peer) > 0,
            mean_tokens=self.mean_tokens,
        )
        session.tell(Verdict(submit.lease, group.index, refusal.value if refusal else ""))

    def _too_dear(self, session: Session) -> Refusal | None:
        """Whether its groups have lately cost too much to look at one now; then it is leased no more for a while."""
        now = self._clock.monotonic()
        wait_s = self._costs.wait_s(session.peer, now)
        if not wait_s:
            return None
        session.pause(now, min(wait_s, self._settings.lease_s))
        return Refusal.COSTLY

    async def _checked(self, session: Session, group: Group) -> Group | Refusal:
        """What comes of checking ``group``; what that costs is its sender's account."""
        samples = len(group.samples)
        limit_s = self._costs.limit_s(session.peer, samples, self._clock.monotonic())
        check = Check(self._clock.monotonic, limit_s)
        verified: Group | Refusal = Refusal.TASK
        try:
            verified = await self._clock.offload(
                lambda: check_contents(
                    group,
                    scorer=self._scorer,
                    n_samples=self._settings.samples_per_prompt,
                    max_new_tokens=self._settings.max_new_tokens,
                    is_over=check.is_over,
                )
            )
        finally:
            check.give_up()  # a session that ends leaves its thread at the next sample
            gone = self._sessions.get(session.peer) is not session
            refused = gone or (isinstance(verified, Refusal) and verified is not Refusal.COSTLY)
            self._costs.charge(session.peer, check.seconds, samples, self._clock.monotonic(), refused=refused)
        return verified

    def _note_length(self, tokens: float) -> None:
        """All count alike at first: the setting that it starts from is a limit, often far off."""
        self._lengths += 1
        self.mean_tokens += max(0.05, 1 / (1 + self._lengths)) * (tokens - self.mean_tokens)

    def _declined(self, session: Session, message: Decline) -> None:
        """Prompts come back. One that several workers could not roll out is set aside for good."""
        held = {i for i in message.indices if self._ledger.holder(message.lease, i) == session.peer}
        for index in held:
            decliners = self._decliners.setdefault(index, set())
            decliners.add(session.peer)
            if len(decliners) >= DECLINERS_TO_SET_ASIDE:
                self._ledger.set_aside(message.lease, index)
                del self._decliners[index]
                self.dropped["set aside: no worker could roll it out"] += 1
            else:
                self._ledger.give_back(message.lease, index)
                self.dropped["declined by the worker"] += 1
        while len(self._decliners) > DECLINED_FOLLOWED:
            del self._decliners[next(iter(self._decliners))]
        if held:
            session.declined(
                self._clock.monotonic(),
                longest_pause_s=self._settings.lease_s,
                mean_tokens=self.mean_tokens,
            )

    # --- batches ------------------------------------------------------------------------------------

    async def next_batch(self) -> list[Entry]:
        """Wait for one step's groups, all inside the window at ``version``; oldest versions first.

        There is no deadline: a learner without workers waits for them, and says so every half minute.
        """
        while True:
            batch = self._recorded_batch()
            for entry in self._replay.drop_stale(self.version):
                self._drop(entry, LEFT_THE_WINDOW)
            if batch is None:
                batch = self._replay.take(self._group_quota, self.version)
                if batch is not None and self._journal is not None:
                    self._journal.draw(self.version, batch)
            if batch is not None:
                self._training = True
                self._drawn = batch
                # Taking a batch makes room, also for workers that had none left and so will not ask.
                self.top_up()
                return batch
            self.top_up()
            self._arrived.clear()
            try:
                async with asyncio.timeout(self._next_check_s()):
                    await self._arrived.wait()
            except TimeoutError:
                pass

    def discard(self, worker: str) -> None:
        """``worker`` has no place here any more: what it delivered and nobody has trained is of no use, and what it
        was leased is leased to others at once.
        """
        if worker in self._sessions:
            self.remove(self._sessions[worker])
        self._ledger.shorten(worker, self._clock.monotonic())
        for entry in self._replay.drop_of(worker):
            self._drop(entry, FOUND_OUT)
        self.top_up()

    def trained(self, batch: list[Entry]) -> None:
        """The batch has become a step."""
        self._training = False
        self._drawn = []
        self._ledger.train([entry.group.index for entry in batch])

    def captured(self, *, durable: int) -> None:
        """The books of ``version`` are being saved; the checkpoint of version ``durable`` is on disk."""
        if self._journal is not None:
            drawn = {self.version: self._drawn} if self._drawn else {}
            self._journal.begin(
                self.version,
                durable=durable,
                waiting=self._replay.waiting(),
                batches=drawn | self._recorded,
            )

    def _take_up(self, found: Contents) -> None:
        """Go on with what an earlier life had accepted and not trained."""
        for version, batch in found.batches.items():
            if any(self._ledger.is_settled(entry.group.index) for entry in batch):
                break  # not of the history that the checkpoint is of
            self._recorded[version] = batch
            for entry in batch:
                self._ledger.hold(entry.group.index)
        for entry in found.waiting:
            if not self._ledger.is_settled(entry.group.index) and self._replay.add(entry):
                self._ledger.hold(entry.group.index)

    def _recorded_batch(self) -> list[Entry] | None:
        """What ``version`` was trained on in an earlier life; None if it was not, or by other rules."""
        batch = self._recorded.pop(self.version, None)
        if (
            batch is not None
            and len(batch) == self._group_quota
            and all(self._replay.admissible(entry.group.version, self.version) for entry in batch)
        ):
            return batch
        # What was recorded for later versions followed from it.
        for entry in (*(batch or ()), *(e for later in self._recorded.values() for e in later)):
            if not self._replay.add(entry):
                self._drop(entry, Refusal.FULL.value)
        self._recorded.clear()
        return None

    def _drop(self, entry: Entry, reason: str) -> None:
        """An accepted group will not be trained: its prompt is leased again, and its worker is told."""
        self._ledger.drop(entry.group.index)
        self.dropped[reason] += 1
        self.dropped_tokens += entry.group.n_tokens
        if entry.worker in self._sessions:
            self._sessions[entry.worker].tell(Verdict(entry.lease, entry.group.index, reason))

    def _next_check_s(self) -> float:
        """Until the next lease runs out: then its prompts go to somebody else."""
        expiry = self._ledger.next_expiry()
        if expiry is None:
            return WAIT_REPORT_S
        return min(WAIT_REPORT_S, max(0.01, expiry - self._clock.monotonic()))
