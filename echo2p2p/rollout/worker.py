"""The worker: joins a run, follows its policy versions, rolls out what it is leased, and sends it back.

Three loops share one state. The session loop talks to the learner and dials again when the connection goes;
the fetch loop brings new versions and stages them while generation goes on; the roll-out loop swaps a staged
version in between two batches, and generates with it while it is read back from the engine.

Guarantees:

* A worker never generates with a version older than a lease asks for.
* It says Ready only for a version that the engine has been proven to hold, whole.
* What is generated before that proof is kept back until then, and thrown away if the proof fails: then the
  version is written whole, and a worker whose engine holds something else even so leaves.
"""

from __future__ import annotations

import asyncio
import logging
import random
from collections import deque
from collections.abc import Awaitable, Callable, Mapping
from functools import partial

import msgspec

from echo2p2p.data.scoring import Scorer
from echo2p2p.data.work import Advertise, Decline, Lease, Submit, TaskSpec, Welcome
from echo2p2p.errors import (
    Echo2p2pError,
    EngineError,
    Interrupted,
    OutOfDisk,
    OutOfMemory,
    ResourceError,
    SettingsError,
    SwarmError,
    TaskError,
    UnsoundWeights,
    VerificationError,
)
from echo2p2p.rollout.engine import InferenceEngine
from echo2p2p.rollout.episodes import roll_out
from echo2p2p.rollout.following import LOOK_TIMEOUT_S, VersionFetcher, check_same_files
from echo2p2p.rollout.session import LearnerSession
from echo2p2p.rollout.trial import Arrived, Prompt, Trial
from echo2p2p.settings import WorkerSettings
from echo2p2p.swarm.directory import Directory
from echo2p2p.swarm.network import Network
from echo2p2p.swarm.records import MAX_ADDRESSES, ManifestRecord, WorkerAdvert
from echo2p2p.swarm.word import LearnerWord
from echo2p2p.telemetry.events import EventLog
from echo2p2p.weights.gate import check as check_sound
from echo2p2p.weights.subscriber import WeightSubscriber

log = logging.getLogger("echo2p2p.worker")

FETCH_RETRY_S = 2.0
BATCHES_AT_ONCE = 2
"""With an engine that takes new prompts while it generates: one batch ends while the next keeps it full."""
FAILURES_TO_LEAVE = 16
"""Prompts given back in a row, none rolled out between them, after which the worker itself is at fault."""

Build = Callable[[TaskSpec, Mapping[str, bytes]], Awaitable[tuple[InferenceEngine, Scorer]]]
"""Makes the engine and the scorer of a run from its task and its pinned policy files."""


class Worker:
    """One worker in one run.

    Args:
        describe: what this worker announces; version and state are filled in here.
        rng: jitter of redialling, and the seeds of sampling.
    """

    def __init__(
        self,
        network: Network,
        run: str,
        settings: WorkerSettings,
        *,
        describe: WorkerAdvert,
        subscriber: WeightSubscriber,
        directory: Directory,
        build: Build,
        events: EventLog,
        rng: random.Random,
    ) -> None:
        self._network = network
        self._clock = network.clock
        self._settings = settings
        self._describe = describe
        self._fetcher = VersionFetcher(network, subscriber, directory, rng)
        self._directory = directory
        self._build = build
        self._events = events
        self._rng = rng
        self._session = LearnerSession(network, run, self, events=events, rng=rng)
        self._word = LearnerWord(network, run, rng=rng, changed=self._on_stale)
        self._engine: InferenceEngine | None = None
        self._scorer: Scorer | None = None
        self._active = False
        self._head: ManifestRecord | None = None
        self._arrived: Arrived | None = None
        self._trial: Trial | None = None
        self._prompts: deque[Prompt] = deque()
        self._batch_groups = settings.batch_groups
        self._new_head = asyncio.Event()
        self._announced = 0.0
        self._advert_changed = asyncio.Event()
        self._wake = asyncio.Event()
        self._proven = -1
        self._fingerprint = ""
        self._disowned = False
        self._life = 0
        self._no_room_since: float | None = None
        self._built_for: TaskSpec | None = None
        self._assets: Mapping[str, bytes] = {}
        self._failures = 0
        self._retry_alone = 0
        self._batches = 0
        self._busy_until = 0.0
        self._repairs = 0

    @property
    def version(self) -> int:
        """The newest version proven to be installed; −1 for none, and for one that the learner does not know."""
        return self._proven if not self._disowned else -1

    @property
    def queued(self) -> int:
        """Leased groups that have not been submitted."""
        return len(self._prompts) + (len(self._trial.kept_back) if self._trial is not None else 0)

    @property
    def state(self) -> str:
        """standby, active, or stale: without a fresh word of the learner for three of its periods."""
        if self._word.stale:
            return "stale"
        return "active" if self._active else "standby"

    @property
    def head_age_s(self) -> float:
        """How long ago the learner last gave a fresh word of its own."""
        return self._word.age_s

    def advert(self) -> WorkerAdvert:
        """What this worker announces now."""
        addresses = tuple(self._network.addresses()[:MAX_ADDRESSES])
        return msgspec.structs.replace(
            self._describe, version=self.version, state=self.state, addresses=addresses
        )

    def announce(self, price_per_hour: float) -> None:
        """Ask for another price from now on. The learner counts a higher one from the next activation on."""
        self._describe = msgspec.structs.replace(self._describe, price_per_hour=price_per_hour)
        self._session.tell(Advertise(self.seal_advert()))
        self._advert_changed.set()

    async def run(self) -> None:
        """Work until the run is finished or :meth:`stop` is called.

        Raises:
            TurnedAway: the learner refuses this worker for good.
            SettingsError: the run's task or policy cannot be used here.
            FingerprintMismatch, EngineError: the engine does not do what it should.
        """
        try:
            await self._word.serve()
            async with asyncio.TaskGroup() as tasks:
                background = [
                    tasks.create_task(self._word.watch()),
                    tasks.create_task(self._directory.keep(self.advert, changed=self._advert_changed)),
                    tasks.create_task(self._follow_versions()),
                    tasks.create_task(self._roll_out()),
                ]
                await self._session.run()
                for task in background:
                    task.cancel()
            await self._directory.retire(self.advert())
        finally:
            if self._scorer is not None:
                self._scorer.close()
            if self._engine is not None:
                await self._engine.close()

    def stop(self) -> None:
        """Leave the run: leased prompts are handed back, nothing else is started."""
        self._session.stop()

    @property
    def fingerprint(self) -> str:
        """Of :attr:`version`; empty for none."""
        return self._fingerprint if self.version >= 0 else ""

    # --- what the session hears -----------------------------------------------------------------------

    def seal_advert(self) -> bytes:
        return self._directory.seal(self.advert())

    def on_welcome(self, welcome: Welcome) -> None:
        """Raises SettingsError if the run has another task than the one this worker was built for."""
        if self._built_for is not None and welcome.task != self._built_for:
            raise SettingsError(
                f"the run's task has changed from {self._built_for} to {welcome.task}",
                hint="start the worker again",
            )
        if self._engine is None or welcome.version != self._proven:
            # Weights that the learner does not know, from another life of it perhaps, must not be rolled out,
            # nor those that are on their way.
            self._disowned = self._engine is not None
            self._head = self._arrived = None
            self._life += 1

    def on_active(self, active: bool) -> None:
        self._active = active
        self._tell_state()

    def on_word(self, period_s: float) -> None:
        self._word.heard(period_s)

    def _on_stale(self, stale: bool) -> None:
        """Work for a learner that has perhaps moved on may only be refused: none is begun or sent."""
        if stale:
            log.warning("no word of the learner for %.0f s; asking around", self.head_age_s)
            self._session.hold_back()
        else:
            self._session.let_go()
            self._wake.set()
        self._tell_state()

    def _tell_state(self) -> None:
        self._events.emit("state", state=self.state, head_age_s=self.head_age_s)
        self._advert_changed.set()

    def on_head(self, record: ManifestRecord, sealed: bytes) -> None:
        self._word.take(sealed, live=True)
        if self._head is None or record.version > self._head.version or self._disowned:
            self._head = record
            self._announced = self._clock.monotonic()
            self._new_head.set()
            self._fetcher.newer()

    def on_lease(self, lease: Lease) -> None:
        expires_at = self._clock.monotonic() + lease.duration_s
        self._prompts.extend(Prompt(lease, index, expires_at) for index in lease.indices)
        self._wake.set()

    async def run_is_finished(self) -> bool:
        """Look for the learner in the table: where it is now, and whether it has left word that the run is over."""
        try:
            record = await self._directory.learner(LOOK_TIMEOUT_S)
        except SwarmError:
            return False
        return record is not None and record.state == "finished"

    def leaving(self) -> list[Decline]:
        """Hand back everything that was not rolled out, or not with a proven version."""
        if self._trial is not None:
            self._take_back(self._trial)
        declines = [Decline(p.lease.lease, [p.index], "worker is leaving") for p in self._prompts]
        self._prompts.clear()
        return declines

    # --- versions -----------------------------------------------------------------------------------

    async def _follow_versions(self) -> None:
        """Fetch and stage the newest version that has been announced, again and again."""
        failed: int | None = None
        while True:
            await self._new_head.wait()
            self._new_head.clear()
            record, life = self._head, self._life
            if record is None or record.version <= self._generating:
                continue
            try:
                fetched = await self._fetcher.fetch(record, self._announced)
                if fetched is None:
                    self._events.emit("superseded", version=record.version)
                    continue
                self._found_room(record.version)
                # What the learner signed is checked all the same: an engine that holds NaN rolls out nothing.
                await self._clock.offload(partial(check_sound, fetched.snapshot))
                if self._engine is not None:
                    check_same_files(self._assets, fetched.assets)
                else:
                    self._built_for, self._assets = self._session.task, fetched.assets
                    self._engine, self._scorer = await self._build(self._built_for, fetched.assets)
            except UnsoundWeights as error:
                log.error("version %d is not installed: %s", record.version, error)
                self._events.emit("version_refused", version=record.version, reason=error.message)
                continue
            except OutOfDisk as error:
                self._wait_for_room(record.version, error)
                await asyncio.sleep(FETCH_RETRY_S)
                self._new_head.set()
                continue
            except (SwarmError, VerificationError, ResourceError) as error:
                level = logging.DEBUG if record.version == failed else logging.WARNING
                log.log(level, "version %d could not be fetched, trying again: %s", record.version, error)
                failed = record.version
                await asyncio.sleep(FETCH_RETRY_S)
                self._new_head.set()
                continue
            swap = await self._engine.stage(fetched.snapshot, record.version)
            if life == self._life:
                self._arrived = Arrived(fetched, swap, life)
                self._wake.set()

    def _wait_for_room(self, version: int, error: OutOfDisk) -> None:
        if self._no_room_since is None:
            self._no_room_since = self._clock.monotonic()
            self._events.emit("disk_full", version=version, reason=error.message)
            log.error("version %d waits for room on the disk: %s", version, error)

    def _found_room(self, version: int) -> None:
        if self._no_room_since is not None:
            waited_s = self._clock.monotonic() - self._no_room_since
            self._no_room_since = None
            self._events.emit("disk_has_room", version=version, waited_s=waited_s)

    @property
    def _generating(self) -> int:
        """The version to generate with now, proven or not; −1 for none that the learner knows."""
        if self._trial is None:
            return self.version
        return self._trial.arrived.version if self._trial.arrived.life == self._life else -1

    async def _swap(self) -> Trial | None:
        """Swap in what has arrived; None if it is no newer than what is there."""
        arrived, self._arrived = self._arrived, None
        if arrived is None or arrived.version <= self.version:
            return None
        started = self._clock.monotonic()
        await arrived.swap()
        self._trial = Trial(arrived, self._clock.monotonic() - started)
        return self._trial

    async def _prove(self, engine: InferenceEngine, trial: Trial) -> None:
        """Read back what was swapped in, while it generates."""
        if await engine.fingerprint() == trial.published:
            self._settle(trial)
            return
        log.error("version %d was not swapped in as published: it is written whole", trial.arrived.version)
        trial.refuted = True
        self._wake.set()

    async def _repair(self, engine: InferenceEngine, trial: Trial) -> None:
        """Raises FingerprintMismatch: the engine cannot be made to hold the version on trial."""
        self._take_back(trial)
        self._repairs += 1
        await trial.repair(engine, self._clock)
        self._settle(trial)

    def _take_back(self, trial: Trial) -> None:
        """Forget what was generated on trial; its prompts are rolled out again."""
        self._prompts.extendleft(reversed([prompt for prompt, _ in trial.kept_back]))
        trial.kept_back.clear()

    def _settle(self, trial: Trial) -> None:
        """The engine holds the version on trial: say so, and send what it has generated."""
        self._trial = None
        self._wake.set()
        if trial.arrived.life != self._life:
            # The learner of that version is gone, and its leases with it.
            return
        self._proven, self._fingerprint, self._disowned = trial.arrived.version, trial.published, False
        self._events.emit("installed", **trial.costs())
        self._session.tell(trial.ready())
        for prompt, group in trial.kept_back:
            self._session.submit(Submit(prompt.lease.lease, group))

    # --- generation ---------------------------------------------------------------------------------

    async def _roll_out(self) -> None:
        """Swap in what was staged, generate what is leased, and wait for either."""
        async with asyncio.TaskGroup() as tasks:
            while True:
                self._wake.clear()
                engine, scorer = self._engine, self._scorer
                if engine is not None and self._trial is not None and self._trial.refuted:
                    await self._repair(engine, self._trial)
                    continue
                if engine is not None and self._trial is None and self._arrived is not None:
                    trial = await self._swap()
                    if trial is not None:
                        tasks.create_task(self._prove(engine, trial))
                    continue
                batch = self._next_batch() if self._batches < BATCHES_AT_ONCE else []
                if batch and engine is not None and scorer is not None:
                    if engine.overlaps:
                        self._batches += 1
                        tasks.create_task(self._generate_beside(engine, scorer, batch))
                    else:
                        await self._generate(engine, scorer, batch)
                    continue
                await self._wake.wait()

    def _next_batch(self) -> list[Prompt]:
        """Prompts of equal settings that the engine's version may roll out, oldest lease first."""
        now = self._clock.monotonic()
        while self._prompts and self._prompts[0].expires_at <= now:
            self._prompts.popleft()
        batch: list[Prompt] = []
        if self._word.stale:
            return batch
        limit = 1 if self._retry_alone > 0 else self._batch_groups
        self._retry_alone = max(0, self._retry_alone - 1)
        while self._prompts and len(batch) < limit:
            first, head = batch[0] if batch else self._prompts[0], self._prompts[0]
            alike = (first.lease.n_samples, first.lease.sampling) == (
                head.lease.n_samples,
                head.lease.sampling,
            )
            if head.lease.min_version > self._generating or not alike:
                break
            batch.append(self._prompts.popleft())
        return batch

    async def _generate_beside(self, engine: InferenceEngine, scorer: Scorer, batch: list[Prompt]) -> None:
        try:
            await self._generate(engine, scorer, batch)
        finally:
            self._batches -= 1
            self._wake.set()

    async def _generate(self, engine: InferenceEngine, scorer: Scorer, batch: list[Prompt]) -> None:
        lease = batch[0].lease
        started, repairs = self._clock.monotonic(), self._repairs
        try:
            groups = await roll_out(
                engine,
                scorer,
                [prompt.index for prompt in batch],
                n_samples=lease.n_samples,
                sampling=lease.sampling,
                seed=self._rng.getrandbits(63),
                offload=self._clock.offload,
            )
        except Interrupted:
            self._prompts.extendleft(reversed(batch))
            return
        except (OutOfMemory, EngineError, TaskError) as error:
            self._failed(batch, error)
            return
        self._failures = 0
        tokens = sum(group.n_tokens for group in groups)
        if self._settings.limit_tokens_per_s is not None:
            # Before the delivery: the learner takes the time until then for what the work takes.
            ends = max(started, self._busy_until) + tokens / self._settings.limit_tokens_per_s
            self._busy_until = ends
            await asyncio.sleep(max(0.0, ends - self._clock.monotonic()))
        if repairs != self._repairs:
            # Some of it may be of weights that were refuted since.
            self._prompts.extendleft(reversed(batch))
            return
        for prompt, group in zip(batch, groups, strict=True):
            if self._trial is not None:
                self._trial.kept_back.append((prompt, group))
            else:
                self._session.submit(Submit(prompt.lease.lease, group))
        failed = sum(sample.failed for group in groups for sample in group.samples)
        if failed:
            log.warning(
                "%d of %d rewards could not be computed and count as 0", failed, len(groups) * lease.n_samples
            )
        self._events.emit(
            "generated",
            groups=len(groups),
            samples=len(groups) * lease.n_samples,
            tokens=tokens,
            seconds=self._clock.monotonic() - started,
            version=engine.version,
            failed_rewards=failed,
        )

    def _failed(self, batch: list[Prompt], error: Echo2p2pError) -> None:
        """Try again with half of a batch that failed, and give a prompt back that fails alone.

        Raises:
            Echo2p2pError: ``error``, if nothing has worked for a long time: it is this worker, not the prompts.
        """
        log.warning("a batch of %d groups failed: %s", len(batch), error)
        if len(batch) > 1:
            if isinstance(error, OutOfMemory):
                self._batch_groups = len(batch) // 2
            self._retry_alone = len(batch)
            self._prompts.extendleft(reversed(batch))
            return
        self._session.tell(Decline(batch[0].lease.lease, [batch[0].index], error.message[:512]))
        self._failures += 1
        if self._failures >= FAILURES_TO_LEAVE:
            raise error
