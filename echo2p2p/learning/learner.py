"""The learner: batches in, policy versions out, and the books that make a crash harmless.

One training step makes one policy version. Every κ steps the version is published; it travels while the next
steps train.
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Awaitable, Callable, Coroutine, Mapping
from typing import Any, TypeVar

import msgspec

from echo2p2p.data.scoring import Scorer
from echo2p2p.data.work import Activate, FromWorker, Join, Ready, TaskSpec, Welcome
from echo2p2p.errors import BudgetSpent, OutOfDisk, SwarmError
from echo2p2p.learning.cadence import Cadence
from echo2p2p.learning.dispatcher import Dispatcher
from echo2p2p.learning.journal import Journal
from echo2p2p.learning.ledger import LedgerState, PromptLedger
from echo2p2p.learning.provisioner import Provisioner
from echo2p2p.learning.publication import Publication
from echo2p2p.learning.recovery import Recovery
from echo2p2p.learning.replay import Entry, staleness_histogram
from echo2p2p.learning.sessions import Session, WorkSessions
from echo2p2p.learning.state import Capture, LearnerState, Trainer
from echo2p2p.learning.status import (
    MAX_WORKERS_LISTED,
    Departed,
    RunStatus,
    learner_record,
    serve_status,
    worker_status,
)
from echo2p2p.learning.watch import Watch
from echo2p2p.settings import Settings
from echo2p2p.swarm.directory import Directory
from echo2p2p.swarm.network import Network
from echo2p2p.swarm.records import MAX_RECORD_LIFETIME_S, LearnerRecord, RunRecord, WorkerAdvert
from echo2p2p.telemetry.events import EventLog
from echo2p2p.weights.gate import GateLimits
from echo2p2p.weights.publisher import WeightPublisher
from echo2p2p.weights.snapshot import Snapshot

log = logging.getLogger("echo2p2p.learner")
T = TypeVar("T")


Evaluate = Callable[[Snapshot, int], Awaitable[tuple[float, int]]]
"""Scores a policy (snapshot, version) on the held-out set: mean reward and the number of prompts."""


class Learner:
    """One run of one policy.

    Args:
        assets: the policy's small files (config, tokenizer) by name; every worker builds its engine from them.
        evaluate: scores snapshots on the held-out set. task: what workers are told of it. Both may be left out.
        state, journal: from one checkpoint, whose step the trainer must hold; None for a new run.
        just_in_time: as of the :class:`~echo2p2p.learning.dispatcher.Dispatcher`.
        workers_stand: as of the :class:`~echo2p2p.learning.provisioner.Provisioner`.
    """

    def __init__(
        self,
        network: Network,
        run: str,
        settings: Settings,
        *,
        trainer: Trainer,
        scorer: Scorer,
        publisher: WeightPublisher,
        directory: Directory,
        assets: Mapping[str, bytes],
        events: EventLog,
        evaluate: Evaluate | None = None,
        task: TaskSpec | None = None,
        state: LearnerState | None = None,
        journal: Journal | None = None,
        just_in_time: bool = True,
        workers_stand: bool = False,
    ) -> None:
        self._network = network
        self._clock = network.clock
        self._run = run
        self._settings = settings
        self._trainer = trainer
        self._directory = directory
        self._events = events
        self._evaluate = evaluate
        self.done = state is not None and state.step >= settings.learner.steps
        """Whether the checkpoint has all the steps that the settings ask for already."""
        self._resumed = state is not None
        self._state = state or LearnerState(step=0, frontier=0, beyond=())
        self._ledger = PromptLedger(
            LedgerState(self._state.frontier, self._state.beyond),
            first_lease=int(self._clock.unix() * 1000) * 1024,
        )
        options = settings.learner
        self._dispatcher = Dispatcher(
            options,
            ledger=self._ledger,
            scorer=scorer,
            clock=self._clock,
            events=events,
            t_train_s=settings.provisioning.t_train_prior_s,
            n_active=lambda: self._provisioner.n_active,
            journal=journal,
            just_in_time=just_in_time,
        )
        self._dispatcher.version = self._state.step
        self._dispatcher.dropped = Counter(self._state.dropped)
        self._task = task or TaskSpec(settings.task.name, settings.task.seed, settings.task.options)
        self._state.check(run, self._task)
        self._departed = Departed()
        self._cadence = Cadence(options, self._state.step)
        self._sessions = WorkSessions(
            network,
            run,
            self,
            max_message_bytes=self._dispatcher.max_message_bytes,
            beat_period_s=options.beat_period_s,
            max_sessions=options.max_workers,
        )
        self._watch = Watch(
            options,
            trainer=trainer,
            sessions=self._sessions,
            dispatcher=self._dispatcher,
            events=events,
        )
        self._provisioner = Provisioner(
            settings.provisioning,
            options,
            sessions=self._sessions.open,
            mean_tokens=lambda: self._dispatcher.mean_tokens,
            activated=self._on_activated,
            outstanding=self._ledger.outstanding,
            keeps_up=self._dispatcher.keeps_up,
            clock=self._clock,
            events=events,
            workers_stand=workers_stand,
        )
        self._provisioner.spending.usd = self._state.spend_usd
        self._provisioner.spending.all_on_usd = self._state.all_on_usd
        self._stop = asyncio.Event()
        self._publication = Publication(
            trainer=trainer,
            publisher=publisher,
            directory=directory,
            assets=assets,
            dispatcher=self._dispatcher,
            provisioner=self._provisioner,
            gamma=settings.provisioning.gamma,
            gate=GateLimits(settings.weights.max_change, settings.weights.change_floor),
            wait_for_disk=options.wait_for_disk,
            stop=self._stop,
            clock=self._clock,
            events=events,
        )
        self._recovery = Recovery(
            trainer=trainer,
            ledger=self._ledger,
            dispatcher=self._dispatcher,
            publication=self._publication,
            capture=self._capture,
            stop=self._stop,
            events=events,
            limit=options.max_roll_forwards,
        )
        self._life = "finished" if self.done else "running"
        if self.done and publisher.newest is not None:
            self._dispatcher.published = publisher.newest.manifest.version
        self._t_train_s = self._state.t_train_s
        self._t_idle_s = self._state.t_idle_s
        self._reward_before = self._state.reward_before
        self._reward_after: float | None = None
        self._scored_at = -1
        self._steps_here = 0
        self._staleness_max = self._state.staleness_max

    @property
    def step(self) -> int:
        """Finished training steps, which is the learner's version v_t."""
        return self._dispatcher.version

    def stop(self) -> None:
        """End after the step in progress, with a checkpoint; workers are told to come back."""
        self._stop.set()

    async def run(self) -> bool:
        """Train until done, or until :meth:`stop`. Where it is :attr:`done`, that is said in the table, and no more.

        Returns:
            Whether the run is finished (as opposed to stopped).

        Raises:
            UnsoundWeights: the first weights are, or those of several publications in a row.
            OutOfDisk: there was no room for a checkpoint or a version, and no waiting for it.
            BudgetSpent: nobody can be paid any more; there is a checkpoint.
        """
        if self.done:
            await self._last_word()
            return True
        started, options = self._clock.monotonic(), self._settings.learner
        self._events.emit(
            "run_started",
            run=self._run,
            task=self._settings.task.name,
            mode=options.mode,
            staleness=options.staleness,
            publish=options.publish,
            kappa=options.publication_period,
            prompts_per_step=options.prompts_per_step,
            samples_per_prompt=options.samples_per_prompt,
            gamma=self._settings.provisioning.gamma,
            max_steps=options.steps,
            resumed_from=self._state.step if self._resumed else None,
            spend_usd=self._state.spend_usd,
            all_on_usd=self._state.all_on_usd,
        )
        finished = False
        no_room: OutOfDisk | None = None
        async with asyncio.TaskGroup() as tasks:
            await self._sessions.listen()
            await serve_status(self._network, self.status)
            background = [
                tasks.create_task(self._provisioner.run()),
                tasks.create_task(self._directory.keep(self._run_record)),
                tasks.create_task(self._directory.keep(self._learner_record)),
                tasks.create_task(self._publication.keep_record()),
            ]
            finished = await self._train()
            no_room = await self._recovery.checkpoint(await self._capture())
            self._provisioner.account()
            self._publication.log_relayed()
            self._events.emit(
                "run_finished",
                finished=finished,
                steps=self.step,
                reward_before=self._reward_before,
                reward_after=self._reward_after,
                staleness_max=self._staleness_max,
                bubble_ratio=self._bubble_ratio,
                learner_chunk_bytes=self._publication.chunk_bytes["learner"],
                peer_chunk_bytes=self._publication.chunk_bytes["peers"],
                spend_usd=self._provisioner.spending.usd,
                all_on_usd=self._provisioner.spending.all_on_usd,
                seconds=self._clock.monotonic() - started,
            )
            reason = "the run is finished" if finished else "the learner stops and may come back"
            for task in background:
                task.cancel()  # nobody is activated in place of those that leave now
            await self._sessions.say_goodbye(reason, retry=not finished)
        self._life = "finished" if finished else "stopped"
        await self._last_word()
        if no_room is not None:
            raise no_room
        if self._provisioner.spent.is_set() and not finished and not self._stop.is_set():
            raise BudgetSpent(
                f"the budget is spent after {self.step} of {options.steps} steps: "
                f"${self._provisioner.spending.usd:.4g} of ${self._settings.provisioning.budget_usd:g}",
                hint="raise provisioning.budget_usd and go on with --resume latest",
            )
        return finished

    # --- training -----------------------------------------------------------------------------------

    async def _train(self) -> bool:
        options = self._settings.learner
        if await self._unless_stopped(self._provisioner.wait_active()) is None:
            return False
        await self._publication.publish(await self._capture(), why="start")
        if self._reward_before is None and self.step == 0:
            self._reward_before = await self._score()
        publication: asyncio.Task[None] | None = None
        async with asyncio.TaskGroup() as tasks:
            while self.step < options.steps and not self._reached_goal():
                waited_from = self._clock.monotonic()
                if self._steps_here:
                    self._provisioner.learner_waits()
                batch = await self._unless_stopped(self._dispatcher.next_batch())
                if batch is not None:
                    self._provisioner.learner_trains()
                    await self._one_step(batch, self._clock.monotonic() - waited_from)
                elif self._stop.is_set() or self._provisioner.spent.is_set():
                    return False
                why = self._why_publish()
                if publication is not None and (why or self._recovery.needed.is_set()):
                    # The next step trains while a version travels; two versions never travel at once.
                    await publication
                if self._recovery.needed.is_set():
                    await self._recovery.roll_forward()
                    self._cadence.published(self.step)
                elif why:
                    self._cadence.published(self.step)
                    capture = await self._capture()
                    publication = tasks.create_task(self._recovery.publish(capture, why=why))
                if options.eval_every and self.step % options.eval_every == 0:
                    await self._score()
        if self._dispatcher.published < self.step and not self._recovery.needed.is_set():
            await self._recovery.publish(await self._capture(), why="end")
        if self._recovery.needed.is_set():
            await self._recovery.roll_forward()
        await self._score()
        return True

    async def _one_step(self, batch: list[Entry], t_idle_s: float) -> None:
        """Train ``batch``. Never interrupted by :meth:`stop`: the trainer and the books move together."""
        started = self._clock.monotonic()
        await self._watch.before(batch)
        metrics = await self._trainer.train([entry.group for entry in batch])
        t_train_s = self._clock.monotonic() - started
        self._t_idle_s += t_idle_s
        self._t_train_s += t_train_s
        self._provisioner.t_train.observe(t_train_s)
        self._dispatcher.t_train_s = self._provisioner.t_train.seconds
        self._dispatcher.trained(batch)
        histogram = staleness_histogram(batch, self.step)
        self._staleness_max = max(self._staleness_max, *histogram)
        self._dispatcher.version += 1
        self._steps_here += 1
        self._watch.after(self.step, metrics)
        self._provisioner.account()
        n_tokens = sum(histogram.values())
        if metrics.get("trained_tokens", n_tokens):
            square_age = sum(age**2 * n for age, n in histogram.items()) / n_tokens
            self._cadence.stepped(mismatch_kl=metrics.get("mismatch_kl"), square_age=square_age)
        self._events.emit(
            "step",
            **metrics,
            step=self.step,
            staleness_mean=sum(age * n for age, n in histogram.items()) / n_tokens,
            divergence=self._cadence.divergence(self.step),
            staleness_max=max(histogram),
            staleness_hist={str(age): n for age, n in sorted(histogram.items())},
            t_train_s=t_train_s,
            t_idle_s=t_idle_s,
            bubble_ratio=self._bubble_ratio,
            mu_pool=self._provisioner.mu_pool,
            mu_target=self._provisioner.mu_target,
            active=self._provisioner.n_active,
            buffered=self._dispatcher.buffered,
            leased=self._dispatcher.leased,
            dropped=dict(self._dispatcher.dropped),
            dropped_tokens=self._dispatcher.dropped_tokens,
            spend_usd=self._provisioner.spending.usd,
            all_on_usd=self._provisioner.spending.all_on_usd,
        )

    async def _score(self) -> float | None:
        if self._evaluate is None or self._scored_at == self.step:
            return self._reward_after
        self._scored_at = self.step
        snapshot = await self._trainer.snapshot()
        if not await self._recovery.is_sound(snapshot, self.step):
            return self._reward_after
        reward, n = await self._evaluate(snapshot, self.step)
        self._reward_after = reward
        self._events.emit("eval", step=self.step, reward=reward, n=n)
        return reward

    def _why_publish(self) -> str:
        return self._cadence.due(
            self.step,
            t_train_s=self._provisioner.t_train.seconds,
            t_bcast_s=self._provisioner.t_bcast.seconds,
            t_work_s=self._provisioner.t_work_s,
            mu_pool=self._provisioner.mu_pool,
        )

    def _reached_goal(self) -> bool:
        goal = self._settings.learner.stop_at_reward
        return goal is not None and self._reward_after is not None and self._reward_after >= goal

    async def _unless_stopped(self, wait: Coroutine[Any, Any, T]) -> T | None:
        """What ``wait`` returns; None after :meth:`stop`, or once weights prove unsound or the budget is spent."""
        waiting = asyncio.ensure_future(wait)
        stop = asyncio.ensure_future(self._stop.wait())
        unsound = asyncio.ensure_future(self._recovery.needed.wait())
        spent = asyncio.ensure_future(self._provisioner.spent.wait())
        try:
            await asyncio.wait({waiting, stop, unsound, spent}, return_when=asyncio.FIRST_COMPLETED)
            return waiting.result() if waiting.done() and not stop.done() else None
        finally:
            for future in (waiting, stop, unsound, spent):
                future.cancel()
            await asyncio.gather(waiting, stop, unsound, spent, return_exceptions=True)

    @property
    def _bubble_ratio(self) -> float:
        return self._t_idle_s / max(1e-9, self._t_idle_s + self._t_train_s)

    # --- versions -----------------------------------------------------------------------------------

    async def _capture(self) -> Capture:
        """Between two steps only: policy, trainer and books all belong to the same version."""
        snapshot, trainer = await self._trainer.capture()
        ledger = self._ledger.state()
        self._dispatcher.captured(durable=self._publication.saved)
        state = LearnerState(
            step=self.step,
            frontier=ledger.frontier,
            beyond=ledger.beyond,
            reward_before=self._reward_before,
            staleness_max=self._staleness_max,
            t_train_s=self._t_train_s,
            t_idle_s=self._t_idle_s,
            spend_usd=self._provisioner.spending.usd,
            all_on_usd=self._provisioner.spending.all_on_usd,
            dropped=dict(self._dispatcher.dropped),
            task=self._task,
            run=self._run,
        )
        return Capture(self.step, snapshot, trainer, msgspec.msgpack.encode(state))

    def _run_record(self) -> RunRecord:
        return RunRecord(self._run, self._settings.task.name)

    async def _last_word(self) -> None:
        """Leave in the table how the run ended, for workers that missed the goodbye."""
        try:
            await self._directory.publish(self._learner_record(), ttl_s=MAX_RECORD_LIFETIME_S)
        except SwarmError as error:
            log.info("nobody keeps the record of the run's end: %s", error)

    def _learner_record(self) -> LearnerRecord:
        return learner_record(
            self._settings, self._dispatcher, self._provisioner, self._life, self._network.addresses()
        )

    def status(self) -> RunStatus:
        """How the run goes, for people who look."""
        mean_tokens = self._dispatcher.mean_tokens
        here = [worker_status(s, mean_tokens) for s in self._sessions.open.values()]
        gone = self._departed.statuses(self._clock.monotonic(), self._sessions.open)
        return RunStatus(
            run=self._run,
            step=self.step,
            published_version=self._dispatcher.published,
            active_workers=self._provisioner.n_active,
            mu_pool=self._provisioner.mu_pool,
            mu_target=self._provisioner.mu_target,
            spend_per_hour=self._provisioner.spend_per_hour,
            buffered=self._dispatcher.buffered,
            leased=self._dispatcher.leased,
            bubble_ratio=self._bubble_ratio,
            spend_usd=self._provisioner.spending.usd,
            dropped=dict(self._dispatcher.dropped),
            workers=(here + gone)[:MAX_WORKERS_LISTED],
            divergence=self._cadence.divergence(self.step),
            published_for=dict(self._publication.reasons),
        )

    # --- sessions -----------------------------------------------------------------------------------

    def welcome(self, session: Session, join: Join) -> Welcome:
        self._provisioner.account()
        session.rate = session.rate or self._departed.rate(session.peer)
        if self._publication.knows(join.version, join.fingerprint):
            session.prove(join.version)
        self._dispatcher.add(session)
        advert = session.advert
        self._events.emit(
            "worker_joined",
            worker=session.peer,
            gpu=advert.gpu,
            price_per_hour=advert.price_per_hour,
            tokens_per_s=advert.tokens_per_s,
            upload_mbit=advert.upload_mbit,
        )
        self._provisioner.came(session)
        return Welcome(self._task, session.version, self._settings.learner.beat_period_s)

    def advertised(self, session: Session, advert: WorkerAdvert) -> None:
        self._provisioner.account()
        session.advertised(advert)
        self._provisioner.pool_changed()

    async def received(self, session: Session, message: FromWorker) -> None:
        if isinstance(message, Ready) and not self._publication.on_ready(session, message):
            return
        await self._dispatcher.receive(session, message)

    def left(self, session: Session, reason: str) -> None:
        self._provisioner.account()
        self._dispatcher.remove(session)
        self._provisioner.left(session)
        if self._sessions.open.get(session.peer) is not session:
            return  # the same worker has dialled again
        self._departed.left(session, self._clock.monotonic(), self._dispatcher.mean_tokens)
        self._events.emit("worker_left", worker=session.peer, reason=reason)

    def _on_activated(self, session: Session) -> None:
        session.tell(Activate())
        self._publication.announce(session)
        self._dispatcher.top_up()
