"""A whole swarm in one process: the real learner and workers on the memory network, engines modelled."""

from __future__ import annotations

import asyncio
import random
from dataclasses import dataclass, field
from pathlib import Path

import msgspec

from echo2p2p._version import __version__
from echo2p2p.config import Settings
from echo2p2p.learning.journal import Journal
from echo2p2p.learning.learner import Learner
from echo2p2p.learning.state import LearnerState, roll_forward
from echo2p2p.rollout.worker import Worker
from echo2p2p.simulation.engine import ModelledEngine, ModelledScorer
from echo2p2p.simulation.trainer import ModelledTrainer
from echo2p2p.swarm.directory import Directory
from echo2p2p.swarm.identity import Identity
from echo2p2p.swarm.memory import MemorySwarm
from echo2p2p.swarm.memory_peer import MemoryNetwork
from echo2p2p.swarm.records import WorkerAdvert
from echo2p2p.telemetry.events import EventLog
from echo2p2p.weights.publisher import WeightPublisher
from echo2p2p.weights.store import MemoryStore
from echo2p2p.weights.subscriber import WeightSubscriber


@dataclass(frozen=True)
class WorkerModel:
    """A modelled worker: what it costs, and what it really does (which it also announces)."""

    price_per_hour: float
    tokens_per_s: float
    upload_mbit: float = 100.0
    download_mbit: float = 100.0
    gpu: str = "modelled"


@dataclass
class SimulatedRun:
    """One run in the making: start workers, start the learner, kill either, look at what came out.

    Attributes:
        mean_tokens: completion tokens a rollout.
        install_s: what a swap takes in every engine.
        journal: folder of the learner's journal; None: it has none.
    """

    swarm: MemorySwarm
    settings: Settings
    t_train_s: float
    snapshot_bytes: int = 256 * 1024
    mean_tokens: float = 100.0
    install_s: float = 1.0
    learner_upload_mbit: float = 300.0
    seed: int = 0
    events: Path | None = None
    journal: Path | None = None
    identity: Identity = field(default_factory=lambda: Identity.from_seed(b"learner".ljust(32)))
    workers: dict[str, Worker] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.run = f"{self.settings.name}@{self.identity.peer_id}"
        self.store = MemoryStore()
        self.trainer = ModelledTrainer(t_train_s=self.t_train_s, snapshot_bytes=self.snapshot_bytes)

    async def start_learner(self) -> tuple[Learner, MemoryNetwork]:
        """A learner that is ready to run, on a peer of its own; it goes on from the newest checkpoint, if any."""
        network = self.swarm.add_peer(self.identity, upload_mbit=self.learner_upload_mbit)
        events = EventLog(self.events, role="learner", peer=network.peer_id, clock=network.clock)
        publisher = WeightPublisher(
            network,
            self.run,
            self.store,
            chunk_bytes=self.settings.weights.chunk_kib * 1024,
            keep_versions=3,
            upload_mbit=self.learner_upload_mbit,
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
        )
        return learner, network

    async def start_worker(self, model: WorkerModel, number: int) -> tuple[Worker, MemoryNetwork]:
        """A worker that is ready to run; ``number`` decides its identity and its randomness."""
        identity = Identity.from_seed(f"worker {self.seed} {number}".encode().ljust(32)[:32])
        network = self.swarm.add_peer(
            identity, upload_mbit=model.upload_mbit, download_mbit=model.download_mbit
        )
        subscriber = WeightSubscriber(network, self.run, MemoryStore(), keep_versions=2)
        await subscriber.start()
        engine = ModelledEngine(
            tokens_per_s=model.tokens_per_s, mean_tokens=self.mean_tokens, install_s=self.install_s
        )

        async def build(*_: object) -> tuple[ModelledEngine, ModelledScorer]:
            return engine, ModelledScorer()

        worker = Worker(
            network,
            self.run,
            self.settings.worker,
            describe=_advert(model),
            subscriber=subscriber,
            directory=Directory(network, self.run, ttl_s=self.settings.swarm.record_ttl_s),
            build=build,
            events=EventLog(None, role="worker", peer=network.peer_id, clock=network.clock),
            rng=random.Random(f"{self.seed} {number}"),
        )
        self.workers[network.peer_id] = worker
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


def _advert(model: WorkerModel) -> WorkerAdvert:
    return WorkerAdvert(
        gpu=model.gpu,
        gpu_count=1,
        gpu_memory_gib=32,
        upload_mbit=model.upload_mbit,
        download_mbit=model.download_mbit,
        price_per_hour=model.price_per_hour,
        tokens_per_s=model.tokens_per_s,
        version=-1,
        engine="modelled",
        state="standby",
        software=__version__,
    )
