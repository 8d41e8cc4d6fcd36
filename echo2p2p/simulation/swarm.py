"""A whole swarm in one process: the real learner and workers on the memory network, engines modelled."""

from __future__ import annotations

import asyncio
import math
import random
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import msgspec

from echo2p2p._version import __version__
from echo2p2p.learning.journal import Journal
from echo2p2p.learning.learner import Learner
from echo2p2p.learning.state import LearnerState, roll_forward
from echo2p2p.rollout.worker import Worker
from echo2p2p.settings import Settings
from echo2p2p.simulation.engine import Lengths, ModelledEngine, ModelledScorer
from echo2p2p.simulation.trainer import ModelledTrainer
from echo2p2p.swarm.directory import Directory
from echo2p2p.swarm.identity import Identity, PeerId
from echo2p2p.swarm.memory import MemorySwarm
from echo2p2p.swarm.memory_peer import MemoryNetwork
from echo2p2p.swarm.records import ManifestRecord, WorkerAdvert
from echo2p2p.telemetry.events import EventLog
from echo2p2p.weights.exchange import DEFAULT_SERVER_LIMITS, ServerLimits
from echo2p2p.weights.lane import DEFAULT_FETCH_LIMITS, FetchLimits
from echo2p2p.weights.manifest import Member
from echo2p2p.weights.publisher import Published, WeightPublisher
from echo2p2p.weights.snapshot import Snapshot
from echo2p2p.weights.store import MemoryStore
from echo2p2p.weights.subscriber import Fetched, WeightSubscriber


@dataclass(frozen=True)
class WorkerModel:
    """A modelled worker: what it costs, and what it really does (which it also announces).

    Attributes:
        sequence_tokens_per_s: of one completion, whatever the batch; not announced.
        delay_s: one way, half of it counting for this end; None for the swarm's.
    """

    price_per_hour: float
    tokens_per_s: float
    upload_mbit: float = 100.0
    download_mbit: float = 100.0
    gpu: str = "modelled"
    sequence_tokens_per_s: float = math.inf
    delay_s: float | None = None

    def advert(self) -> WorkerAdvert:
        """What such a worker announces."""
        return WorkerAdvert(
            gpu=self.gpu,
            gpu_count=1,
            gpu_memory_gib=32,
            upload_mbit=self.upload_mbit,
            download_mbit=self.download_mbit,
            price_per_hour=self.price_per_hour,
            tokens_per_s=self.tokens_per_s,
            version=-1,
            engine="modelled",
            state="standby",
            software=__version__,
        )


@dataclass(frozen=True)
class Manners:
    """Where a simulated swarm does other than echo2p2p does, and how patient its transfers are.

    Attributes:
        relay: workers pass chunks on; without it the learner sends everything to everybody.
        generate_while_fetching: without it a worker stands still from the announcement of a version until it has it,
            as the capacity formula of the ECHO-2 paper has it.
        just_in_time: without it the learner leases whatever its buffer has room for.
    """

    relay: bool = True
    generate_while_fetching: bool = True
    just_in_time: bool = True
    fetch_limits: FetchLimits = DEFAULT_FETCH_LIMITS
    server_limits: ServerLimits = DEFAULT_SERVER_LIMITS


@dataclass
class SimulatedRun:
    """One run in the making: start workers, start the learner, kill either, look at what came out.

    Attributes:
        mean_tokens: completion tokens a rollout, exponential, unless ``lengths`` says otherwise.
        install_s: what a swap takes in every engine.
        journal: folder of the learner's journal; None: it has none.
        events: the learner's log, or where to write it.
        jitter, changed_share, drift_kl: as of :class:`~echo2p2p.simulation.trainer.ModelledTrainer`.
    """

    swarm: MemorySwarm
    settings: Settings
    t_train_s: float
    snapshot_bytes: int = 256 * 1024
    mean_tokens: float = 100.0
    install_s: float = 1.0
    learner_upload_mbit: float = 300.0
    seed: int = 0
    journal: Path | None = None
    events: Path | EventLog | None = None
    identity: Identity = field(default_factory=lambda: Identity.from_seed(b"learner".ljust(32)))
    workers: dict[str, Worker] = field(default_factory=dict)
    engines: dict[str, ModelledEngine] = field(default_factory=dict)
    lengths: Lengths | None = None
    jitter: float = 0.0
    changed_share: float | None = None
    drift_kl: float = 0.0
    manners: Manners = Manners()

    def __post_init__(self) -> None:
        self.run = f"{self.settings.name}@{self.identity.peer_id}"
        self.store = MemoryStore()
        self.trainer = ModelledTrainer(
            t_train_s=self.t_train_s,
            snapshot_bytes=self.snapshot_bytes,
            jitter=self.jitter,
            changed_share=self.changed_share,
            drift_kl=self.drift_kl,
            seed=self.seed,
        )

    async def start_learner(self) -> tuple[Learner, MemoryNetwork]:
        """A learner that is ready to run, on a peer of its own; it goes on from the newest checkpoint, if any."""
        network = self.swarm.add_peer(self.identity, upload_mbit=self.learner_upload_mbit)
        events = self.events
        if not isinstance(events, EventLog):
            events = EventLog(events, role="learner", peer=network.peer_id, clock=network.clock)
        publisher = (WeightPublisher if self.manners.relay else _StarPublisher)(
            network,
            self.run,
            self.store,
            chunk_bytes=self.settings.weights.chunk_kib * 1024,
            keep_versions=3,
            max_patch_share=self.settings.weights.max_patch_share,
            patch_chain=self.settings.weights.patch_chain,
            upload_mbit=self.learner_upload_mbit,
            server_limits=self.manners.server_limits,
        )
        await publisher.start()
        state = resume_from = None
        if self.trainer.checkpoints:
            self.trainer.restore(self.trainer.checkpoints[-1])
            state = msgspec.msgpack.decode(self.trainer.checkpoints[-1].learner_state, type=LearnerState)
            newest = publisher.newest.manifest.version if publisher.newest else -1
            state = roll_forward(state, newest)
            resume_from = state.step if state.step == self.trainer.step else None
            self.trainer.step = state.step
        learner = Learner(
            network,
            self.run,
            self.settings,
            trainer=self.trainer,
            scorer=ModelledScorer(),
            publisher=publisher,
            directory=Directory(network, self.run, ttl_s=self.settings.swarm.record_ttl_s),
            assets={"config.json": b"{}"},
            events=events,
            state=state,
            journal=Journal(self.journal, resume_from=resume_from) if self.journal is not None else None,
            just_in_time=self.manners.just_in_time,
            workers_stand=not self.manners.generate_while_fetching,
        )
        return learner, network

    async def start_worker(self, model: WorkerModel, number: int) -> tuple[Worker, MemoryNetwork]:
        """A worker that is ready to run; ``number`` decides its identity and its randomness."""
        identity = Identity.from_seed(f"worker {self.seed} {number}".encode().ljust(32)[:32])
        network = self.swarm.add_peer(
            identity,
            upload_mbit=model.upload_mbit,
            download_mbit=model.download_mbit,
            delay_s=model.delay_s,
        )
        engine = ModelledEngine(
            tokens_per_s=model.tokens_per_s,
            lengths=self.lengths or Lengths(self.mean_tokens),
            install_s=self.install_s,
            sequence_tokens_per_s=model.sequence_tokens_per_s,
        )
        subscriber = _Subscriber(
            network,
            self.run,
            MemoryStore(),
            keep_versions=2,
            fetch_limits=self.manners.fetch_limits,
            server_limits=self.manners.server_limits,
        )
        subscriber.paused = None if self.manners.generate_while_fetching else engine
        await subscriber.start()

        async def build(*_: object) -> tuple[ModelledEngine, ModelledScorer]:
            return engine, ModelledScorer()

        worker = Worker(
            network,
            self.run,
            self.settings.worker,
            describe=model.advert(),
            subscriber=subscriber,
            directory=Directory(network, self.run, ttl_s=self.settings.swarm.record_ttl_s),
            build=build,
            events=EventLog(None, role="worker", peer=network.peer_id, clock=network.clock),
            rng=random.Random(f"{self.seed} {number}"),
        )
        self.workers[network.peer_id] = worker
        self.engines[network.peer_id] = engine
        return worker, network


async def simulate(run: SimulatedRun, models: list[WorkerModel], *, duration_s: float) -> Learner:
    """Run ``models`` and a learner for ``duration_s`` of virtual time, then stop all of them."""
    learner, _ = await run.start_learner()
    async with asyncio.TaskGroup() as tasks:
        running = tasks.create_task(learner.run())
        for number, model in enumerate(models):
            worker, _ = await run.start_worker(model, number)
            tasks.create_task(worker.run())
        await asyncio.wait({running}, timeout=duration_s)
        learner.stop()
        await running
        for worker in run.workers.values():
            worker.stop()
    return learner


class _StarPublisher(WeightPublisher):
    """Names no members: whoever wants a version has it from the learner."""

    async def publish(
        self,
        snapshot: Snapshot,
        version: int,
        members: Sequence[Member],  # noqa: ARG002 - nobody relays
        assets: Mapping[str, bytes],
    ) -> Published:
        return await super().publish(snapshot, version, (), assets)


class _Subscriber(WeightSubscriber):
    """Lets ``paused``, if there is one, stand still while a version arrives."""

    paused: ModelledEngine | None = None

    async def fetch(
        self, record: ManifestRecord, *, peers: Iterable[PeerId] = (), announced: float | None = None
    ) -> Fetched:
        if self.paused is None:
            return await super().fetch(record, peers=peers, announced=announced)
        self.paused.pause()
        try:
            return await super().fetch(record, peers=peers, announced=announced)
        finally:
            self.paused.resume()
