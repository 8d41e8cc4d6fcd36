"""Each kind of task trains on a whole swarm: real learner, workers, engines and trainer on the memory network."""

from __future__ import annotations

import asyncio
import random
from pathlib import Path

import torch
from policies import EOS, make_text_policy

from echo2p2p.data.chosen import build, choose
from echo2p2p.data.policy import build_model, load_config
from echo2p2p.data.scoring import TaskScorer
from echo2p2p.data.tokens import PolicyTokenizer
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

STEPS = 4
PROMPTS = 2
LEARNER = Identity.from_seed(b"learner".ljust(32))


def settings(task, **learner) -> Settings:
    return Settings(
        name="tasks",
        task=task,
        learner={
            "steps": STEPS,
            "staleness": 4,
            "prompts_per_step": PROMPTS,
            "samples_per_prompt": 8,
            "threads": 1,
            "beat_period_s": 1,
            "journal": False,
            "eval_every": 0,
            **learner,
        },
        worker={"threads": 1, "batch_groups": 4},
    )


def imitate(folder: Path, task, texts, *, enough: float, steps: int) -> None:
    """Show the policy ``texts(index)`` as completions of the first prompts, until it is fairly sure of them."""
    tokenizer = PolicyTokenizer(folder)
    model = build_model(folder, dtype=torch.float32, device="cpu", weights=True).requires_grad_(True)
    rows = [
        (tokenizer.encode_prompt(task.prompt(index)), [*tokenizer.encode_prompt(text), EOS])
        for index in range(PROMPTS * STEPS + 4)
        for text in texts(index)
    ]
    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-3)
    width = max(len(prompt) + len(completion) for prompt, completion in rows)
    ids, targets = torch.zeros(len(rows), width, dtype=torch.long), torch.full((len(rows), width), -100)
    for row, (prompt, completion) in enumerate(rows):
        whole = torch.tensor([*prompt, *completion])
        ids[row, : len(whole)] = whole
        targets[row, len(prompt) - 1 : len(whole) - 1] = whole[len(prompt) :]
    for _ in range(steps):
        loss = torch.nn.functional.cross_entropy(model(ids).logits.flatten(0, 1), targets.flatten())
        if float(loss.detach()) < enough:
            break
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    model.save_pretrained(folder)


async def train(folder: Path, chosen: Settings, events_path: Path) -> list[dict]:
    """One learner and two workers until the run is finished; the learner's events."""
    tokenizer, vocabulary = PolicyTokenizer(folder), int(load_config(folder).vocab_size)
    spec, task = choose(chosen.task)
    scorer = TaskScorer(task, tokenizer, vocabulary)
    trainer = ThreadTrainer(
        GRPOTrainer(folder, TrainerSettings(learning_rate=1e-3, threads=1)),
        events_path.parent / "ckpt",
        keep=2,
    )
    run = f"{chosen.name}@{LEARNER.peer_id}"

    async def build_engine(told, _assets):
        return TransformersEngine(folder, threads=1), TaskScorer(
            build(told, chosen.task), tokenizer, vocabulary
        )

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
        workers = []
        for number in range(2):
            peer = swarm.add_peer(Identity.from_seed(f"worker {number}".encode().ljust(32)))
            subscriber = WeightSubscriber(peer, run, MemoryStore(), keep_versions=2)
            await subscriber.start()
            workers.append(
                Worker(
                    peer,
                    run,
                    chosen.worker,
                    describe=WorkerModel(1.0, 1000.0).advert(),
                    subscriber=subscriber,
                    directory=Directory(peer, run, ttl_s=90),
                    build=build_engine,
                    events=EventLog(None, role="worker", peer=peer.peer_id, clock=peer.clock),
                    rng=random.Random(number),
                )
            )
        async with asyncio.timeout(100), asyncio.TaskGroup() as tasks:
            running = [tasks.create_task(worker.run()) for worker in workers]
            assert await learner.run()
            for worker in workers:
                worker.stop()
            await asyncio.wait(running)
        trainer.close()
        scorer.close()
        events.close()
        assert not swarm.errors
    return list(read_events(events_path))


async def check_run(folder, chosen, tmp_path) -> list[dict]:
    events = await train(folder, chosen, tmp_path / "events.jsonl")
    steps = [event for event in events if event["event"] == "step"]
    assert len(steps) == STEPS
    assert any(event["grad_norm"] > 0 for event in steps)
    for event in steps:
        assert event["mismatch_kl"] < 0.5
    [finished] = [event for event in events if event["event"] == "run_finished"]
    assert finished
    return steps


async def test_knights_and_knaves_with_a_reward_of_one_s_own(tmp_path):
    """The library pays for whole answers, which a policy of no sense never gives: here letters count as well."""
    rewards = tmp_path / "rewards.py"
    rewards.write_text(
        "def score(prompt, completion, answer):\n"
        "    return len(set(completion) & set(answer)) / len(set(answer)) + (answer in completion)\n"
    )
    folder = make_text_policy(tmp_path / "policy")
    options = {"dataset": "knights_knaves", "n_people": 2, "extract": "whole"}
    task = {"name": "reasoning-gym", "options": options, "reward": f"{rewards}:score"}
    steps = await check_run(folder, settings(task, max_new_tokens=24), tmp_path)
    assert all(0 < event["reward_mean"] < 1 for event in steps)


async def test_sokoban(tmp_path):
    folder = make_text_policy(tmp_path / "policy")
    options = {"width": 3, "height": 3, "scramble": 3, "turns": 3, "turn_tokens": 8}
    await check_run(folder, settings({"name": "sokoban", "options": options}, max_new_tokens=200), tmp_path)


async def test_no_limit_holdem(tmp_path):
    folder = make_text_policy(tmp_path / "policy")
    options = {"opponent": "tight", "turns": 4, "turn_tokens": 8}
    chosen = settings({"name": "holdem", "options": options}, max_new_tokens=400)
    _, shown = choose(chosen.task)
    moves = ["call", "raise 6", "all-in", "fold"]
    imitate(folder, shown, lambda index: [moves[index % 4], moves[index % 4 - 1]], enough=0.4, steps=80)
    await check_run(folder, chosen, tmp_path)
