"""A whole swarm on the memory network that really trains: real learner, workers, engines and trainer."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable
from pathlib import Path

from echo2p2p.data.chosen import build, choose
from echo2p2p.data.policy import load_config
from echo2p2p.data.scoring import TaskScorer
from echo2p2p.data.tokens import PolicyTokenizer
from echo2p2p.errors import TurnedAway
from echo2p2p.learning.learner import Learner
from echo2p2p.learning.trainer import GRPOTrainer, TrainerSettings
from echo2p2p.learning.training import ThreadTrainer
from echo2p2p.rollout.transformers_engine import TransformersEngine
from echo2p2p.rollout.worker import Worker
from echo2p2p.settings import Settings
from echo2p2p.simulation.swarm import WorkerModel
from echo2p2p.swarm.directory import Directory
from echo2p2p.swarm.identity import Identity
from echo2p2p.swarm.memory import MemorySwarm
from echo2p2p.telemetry.events import EventLog, read_events
from echo2p2p.weights.publisher import WeightPublisher
from echo2p2p.weights.store import MemoryStore
from echo2p2p.weights.subscriber import WeightSubscriber

LEARNER = Identity.from_seed(b"learner".ljust(32))


def settings(task, *, provisioning=None, **learner) -> Settings:
    return Settings(
        name="tasks",
        task=task,
        learner={
            "steps": 4,
            "staleness": 4,
            "prompts_per_step": 2,
            "samples_per_prompt": 8,
            "threads": 1,
            "beat_period_s": 1,
            "journal": False,
            "eval_every": 0,
            **learner,
        },
        worker={"threads": 1, "batch_groups": 4},
        provisioning=provisioning or {},
    )


async def until_turned_away(worker: Worker) -> None:
    try:
        await worker.run()
    except* TurnedAway:
        pass


async def train(
    folder: Path,
    chosen: Settings,
    events_path: Path,
    *,
    workers: int = 2,
    engine_of: Callable[[int], type[TransformersEngine]] = lambda _: TransformersEngine,
) -> list[dict]:
    """One learner and some workers until the run is finished; the learner's events.

    Args:
        engine_of: of the worker of a number, from 0.
    """
    tokenizer, vocabulary = PolicyTokenizer(folder), int(load_config(folder).vocab_size)
    spec, task = choose(chosen.task)
    scorer = TaskScorer(task, tokenizer, vocabulary)
    trainer = ThreadTrainer(
        GRPOTrainer(folder, TrainerSettings(learning_rate=1e-3, threads=1)),
        events_path.parent / "ckpt",
        keep=2,
    )
    run = f"{chosen.name}@{LEARNER.peer_id}"

    def builder(number):
        async def build_engine(told, _assets):
            return engine_of(number)(folder, threads=1), TaskScorer(
                build(told, chosen.task), tokenizer, vocabulary
            )

        return build_engine

    async with MemorySwarm() as swarm:
        network = swarm.add_peer(LEARNER)
        publisher = WeightPublisher(network, run, MemoryStore(), chunk_bytes=2**16, keep_versions=3)
        await publisher.start()
        events = EventLog(events_path, role="learner", peer=network.peer_id, clock=network.clock)
        learner = Learner(
            network,
            run,
            chosen,
            trainer=trainer,
            scorer=scorer,
            publisher=publisher,
            directory=Directory(network, run, ttl_s=90),
            assets={"config.json": (folder / "config.json").read_bytes()},
            events=events,
            task=spec,
        )
        made = []
        for number in range(workers):
            peer = swarm.add_peer(Identity.from_seed(f"worker {number}".encode().ljust(32)))
            subscriber = WeightSubscriber(peer, run, MemoryStore(), keep_versions=2)
            await subscriber.start()
            made.append(
                Worker(
                    peer,
                    run,
                    chosen.worker,
                    describe=WorkerModel(1.0, 1000.0).advert(),
                    subscriber=subscriber,
                    directory=Directory(peer, run, ttl_s=90),
                    build=builder(number),
                    events=EventLog(None, role="worker", peer=peer.peer_id, clock=peer.clock),
                    rng=random.Random(number),
                )
            )
        async with asyncio.timeout(100), asyncio.TaskGroup() as tasks:
            running = [tasks.create_task(until_turned_away(worker)) for worker in made]
            assert await learner.run()
            for worker in made:
                worker.stop()
            await asyncio.wait(running)
        trainer.close()
        scorer.close()
        events.close()
        assert not swarm.errors
    return list(read_events(events_path))
