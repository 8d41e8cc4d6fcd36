"""The worker: joins a run, follows its policy versions, rolls out what it is leased, and sends it back.

Three loops share one state. The session loop talks to the learner and dials again when the connection goes;
the fetch loop brings new versions while generation goes on; the roll-out loop swaps a fetched version in
between two batches, proves what the engine then holds, and generates. A worker never generates with a version
older than a lease asks for, and says Ready only for a version that is wholly installed.
"""

from __future__ import annotations

import asyncio
import logging
import random
from collections import deque
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import msgspec

from echo2p2p.config import WorkerSettings
from echo2p2p.data.scoring import Scorer
from echo2p2p.data.trajectory import Group, Trajectory, pack_logprobs
from echo2p2p.data.work import (
    MAX_ARRIVALS,
    Decline,
    Lease,
    Ready,
    Submit,
    TaskSpec,
    Welcome,
    arrivals_reported,
)
from echo2p2p.errors import (
    Echo2p2pError,
    EngineError,
    FingerprintMismatch,
    OutOfDisk,
    OutOfMemory,
    ResourceError,
    SettingsError,
    SwarmError,
    TaskError,
    UnsoundWeights,
    VerificationError,
)
from echo2p2p.rollout.engine import Completion, InferenceEngine
from echo2p2p.rollout.session import LearnerSession
from echo2p2p.swarm.directory import Directory
from echo2p2p.swarm.network import Network
from echo2p2p.swarm.records import MAX_ADDRESSES, ManifestRecord, WorkerAdvert
from echo2p2p.swarm.word import LearnerWord
from echo2p2p.telemetry.events import EventLog
from echo2p2p.weights.gate import check as check_sound
from echo2p2p.weights.subscriber import Fetched, WeightSubscriber

log = logging.getLogger("echo2p2p.worker")

FETCH_RETRY_S = 2.0
MAX_SOURCES_LOGGED = 64
LOOK_TIMEOUT_S = 5.0
FAILURES_TO_LEAVE = 16
"""Prompts given back in a row, none rolled out between them, after which the worker itself is at fault."""

Build = Callable[[TaskSpec, Mapping[str, bytes]], Awaitable[tuple[InferenceEngine, Scorer]]]
"""Makes the engine and the scorer of a run from its task and its pinned policy files."""


@dataclass(frozen=True)
class Prompt:
    """One leased prompt, and until when (monotonic seconds) it is this worker's."""

    lease: Lease
    index: int
    expires_at: float


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
        self._subscriber = subscriber
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
        self._fetched: Fetched | None = None
        self._prompts: deque[Prompt] = deque()
        self._batch_groups = settings.batch_groups
        self._new_head = asyncio.Event()
        self._announced = 0.0
        self._advert_changed = asyncio.Event()
        self._wake = asyncio.Event()
        self._not_before = 0.0
        self._fingerprint = ""
        self._disowned = False
        self._life = 0
        self._no_room_since: float | None = None
        self._built_for: TaskSpec | None = None
        self._failures = 0
        self._retry_alone = 0

    @property
    def version(self) -> int:
        """The installed policy version; −1 for none, and for one that the learner does not know."""
        return self._engine.version if self._engine is not None and not self._disowned else -1

    @property
    def queued(self) -> int:
        """Leased groups that have not been submitted."""
        return len(self._prompts)

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
            if self._engine is not None:
                await self._engine.close()

    def stop(self) -> None:
        """Leave the run: leased prompts are handed back, nothing else is started."""
        self._session.stop()

    @property
    def fingerprint(self) -> str:
        """Of the installed weights; empty for none."""
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
        if self._engine is None or welcome.version != self._engine.version:
            # Weights that the learner does not know, from another life of it perhaps, must not be rolled out,
            # nor those that are on their way.
            self._disowned = self._engine is not None
            self._head = self._fetched = None
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
        """Hand back everything that was not rolled out."""
        declines = [Decline(p.lease.lease, [p.index], "worker is leaving") for p in self._prompts]
        self._prompts.clear()
        return declines

    # --- versions -----------------------------------------------------------------------------------

    async def _follow_versions(self) -> None:
        """Fetch the newest version that has been announced, again and again."""
        while True:
            await self._new_head.wait()
            self._new_head.clear()
            record, life = self._head, self._life
            if record is None or record.version <= self.version:
                continue
            try:
                fetched = await self._subscriber.fetch(record, announced=self._announced)
                self._found_room(record.version)
                # What the learner signed is checked all the same: an engine that holds NaN rolls out nothing.
                await self._clock.offload(partial(check_sound, fetched.snapshot))
                if self._engine is None:
                    self._built_for = self._session.task
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
                log.warning("version %d could not be fetched, trying again: %s", record.version, error)
                await asyncio.sleep(FETCH_RETRY_S)
                self._new_head.set()
                continue
            if life == self._life:
                self._fetched = fetched
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

    async def _install(self, engine: InferenceEngine, fetched: Fetched) -> None:
        version = fetched.manifest.version
        started = self._clock.monotonic()
        fingerprint = await engine.install(fetched.snapshot, version)
        pause_s = self._clock.monotonic() - started
        if fingerprint != fetched.manifest.fingerprint:
            raise FingerprintMismatch(
                f"after installing version {version} the engine holds {fingerprint}, "
                f"the learner published {fetched.manifest.fingerprint}",
                hint="the engine changes weights on the way in; report it as a bug",
            )
        self._fingerprint, self._disowned = fingerprint, False
        self._events.emit(
            "installed",
            version=version,
            fetch_s=fetched.fetch_s,
            pause_s=pause_s,
            bytes_from_learner=fetched.bytes_from_learner,
            bytes_from_peers=fetched.bytes_from_peers,
            patches=fetched.patches,
            arrivals=fetched.timeline.points(MAX_ARRIVALS),
            sources=dict(fetched.timeline.by_source.most_common(MAX_SOURCES_LOGGED)),
        )
        members = [member.peer for member in fetched.manifest.members]
        self._session.tell(
            Ready(
                version,
                fingerprint,
                fetched.bytes_from_learner,
                fetched.bytes_from_peers,
                fetched.fetch_s,
                pause_s,
                fetched.timeline.points(arrivals_reported(len(members))),
                fetched.timeline.sent_by(members),
            )
        )

    # --- generation ---------------------------------------------------------------------------------

    async def _roll_out(self) -> None:
        """Swap in what was fetched, generate what is leased, and wait for either."""
        while True:
            self._wake.clear()
            fetched, self._fetched = self._fetched, None
            if fetched is not None and self._engine is not None and fetched.manifest.version > self.version:
                await self._install(self._engine, fetched)
                continue
            wait_s = self._not_before - self._clock.monotonic()
            batch = self._next_batch() if wait_s <= 0 else []
            if batch and self._engine is not None and self._scorer is not None:
                await self._generate(self._engine, self._scorer, batch)
                continue
            try:
                async with asyncio.timeout(wait_s if wait_s > 0 else None):
                    await self._wake.wait()
            except TimeoutError:
                pass

    def _next_batch(self) -> list[Prompt]:
        """Prompts of equal settings that the installed version may roll out, oldest lease first."""
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
            if head.lease.min_version > self.version or not alike:
                break
            batch.append(self._prompts.popleft())
        return batch

    async def _generate(self, engine: InferenceEngine, scorer: Scorer, batch: list[Prompt]) -> None:
        lease = batch[0].lease
        started = self._clock.monotonic()
        try:
            prompts = await self._clock.offload(lambda: [scorer.prompt_tokens(p.index) for p in batch])
            completions = await engine.generate(
                prompts, n_samples=lease.n_samples, sampling=lease.sampling, seed=self._rng.getrandbits(63)
            )
            groups = await self._clock.offload(
                lambda: [
                    _group(scorer, p.index, prompt, done)
                    for p, prompt, done in zip(batch, prompts, completions, strict=True)
                ]
            )
        except (OutOfMemory, EngineError, TaskError) as error:
            self._failed(batch, error)
            return
        self._failures = 0
        for prompt, group in zip(batch, groups, strict=True):
            self._session.submit(Submit(prompt.lease.lease, group))
        tokens = sum(group.n_tokens for group in groups)
        if self._settings.limit_tokens_per_s is not None:
            self._not_before = started + tokens / self._settings.limit_tokens_per_s
        self._events.emit(
            "generated",
            groups=len(groups),
            samples=len(groups) * lease.n_samples,
            tokens=tokens,
            seconds=self._clock.monotonic() - started,
            version=engine.version,
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


def _group(scorer: Scorer, index: int, prompt: Sequence[int], completions: Sequence[Completion]) -> Group:
    return Group(
        index,
        list(prompt),
        [
            Trajectory(
                completion=done.tokens,
                logprobs=pack_logprobs(done.logprobs),
                version_min=done.version_min,
                version_max=done.version_max,
                reward=scorer.reward(index, done.tokens),
                finish=done.finish,
            )
            for done in completions
        ],
    )
