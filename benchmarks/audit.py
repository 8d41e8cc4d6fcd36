"""How much of a lie the learner's audit has to read, and what reading costs.

``python -m benchmarks.audit [--policy FOLDER] [--steps N]``

A learner is N training steps ahead of what workers generate with. Three workers are honest, one of them with an
engine that computes in bfloat16; a fourth lies. The learner reads every group, as it does with a share of them in a
run: there a liar has sent what is counted here, divided by ``learner.audit_share``.

The last line on stdout is one JSON object, ``{"audit": {…}}``:

* ``found_after``: tokens read until the liar was found out, by lie; null if it was not. ``coarse`` is no lie: weights
  of 4 bits, with their own log-probabilities; ``coarse, unsaid`` has those of the policy;
* ``accused``: honest workers that were found out, in all rounds together, of ``judged``;
* ``distance``: KL(workers ‖ learner), nats a token;
* ``share_of_step``: seconds for 5 % of a step's groups, against the whole step's.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import tempfile
import time
from collections.abc import Callable, Coroutine, Sequence
from itertools import count
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import torch

from benchmarks.nodes import say
from echo2p2p.data.policy import build_model
from echo2p2p.data.scoring import TaskScorer
from echo2p2p.data.trajectory import Group, Sampling, Trajectory, pack_logprobs
from echo2p2p.layering import load
from echo2p2p.learning.audit import Auditor, Reading
from echo2p2p.learning.replay import Entry
from echo2p2p.learning.trainer import GRPOTrainer, TrainerSettings
from echo2p2p.parts import SEED_POLICY, load_policy
from echo2p2p.rollout.episodes import roll_out
from echo2p2p.rollout.transformers_engine import TransformersEngine

SHARE = 0.05
GROUPS, SAMPLES, ROUNDS = 32, 8, 24
TOKENS = 128
LEARNING_RATE = 1.2e-4
"""The demo's."""
_seeds = count()


class Workers:
    """What generates, and what the policy says of it."""

    def __init__(self, folder: Path, scorer: TaskScorer) -> None:
        self._folder = folder
        self._scorer = scorer
        self._plain = GRPOTrainer(folder, TrainerSettings(threads=1))

    async def draw(
        self, engine: TransformersEngine, *, temperature: float = 1.0, unsaid: bool = False
    ) -> list[Group]:
        """One batch of ``engine``; ``unsaid``: with the log-probabilities that the right policy has."""
        groups = await roll_out(
            engine,
            self._scorer,
            range(GROUPS),
            n_samples=SAMPLES,
            sampling=Sampling(temperature, max_new_tokens=TOKENS),
            seed=next(_seeds),
            offload=asyncio.to_thread,
        )
        if not unsaid:
            return groups
        return [
            changed(group, lambda sample, own: (sample.completion, own.numpy()), said)
            for group, said in zip(groups, self._plain.logprobs(groups), strict=True)
        ]

    async def engine(self, *, dtype: torch.dtype = torch.float32, bits: int = 0) -> TransformersEngine:
        """An engine of the workers' version, in ``dtype``, or with weights of ``bits``."""
        with tempfile.TemporaryDirectory() as folder:
            model: Any = build_model(self._folder, dtype=torch.float32, device="cpu", weights=True)
            if bits:
                coarsen(model, bits)
            model.to(dtype=dtype).save_pretrained(folder)
            snapshot = GRPOTrainer(Path(folder), TrainerSettings(publish_dtype=str(dtype)[6:])).snapshot()
        engine = TransformersEngine(self._folder, dtype=dtype, threads=1)
        await engine.install(snapshot, 0)
        return engine


@torch.no_grad()
def coarsen(model: torch.nn.Module, bits: int) -> None:
    """Round each row of each matrix to so many bits."""
    for parameter in model.parameters():
        if parameter.ndim == 2:
            step = parameter.abs().amax(dim=1, keepdim=True) / (2 ** (bits - 1) - 1)
            parameter.copy_((parameter / step).round() * step)


Change = Callable[[Trajectory, torch.Tensor], tuple[Sequence[int], np.ndarray]]


def changed(group: Group, change: Change, said: Sequence[torch.Tensor] | None = None) -> Group:
    """``group`` with other tokens and log-probabilities."""
    own = said or [torch.from_numpy(sample.logprob_array().copy()) for sample in group.samples]
    samples = []
    for sample, logprobs in zip(group.samples, own, strict=True):
        tokens, values = change(sample, logprobs)
        samples.append(
            msgspec.structs.replace(sample, completion=list(tokens), logprobs=pack_logprobs(values))
        )
    return msgspec.structs.replace(group, samples=samples)


def made_up(sample: Trajectory, logprobs: torch.Tensor) -> tuple[Sequence[int], np.ndarray]:
    return sample.completion, np.full(len(logprobs), -0.5, np.float32)


def cut(sample: Trajectory, logprobs: torch.Tensor) -> tuple[Sequence[int], np.ndarray]:
    """The last token is the one of a completion that had ended, and said to be likely."""
    kept = max(1, len(logprobs) // 2)
    tokens = [*sample.completion[: kept - 1], sample.completion[-1]]
    return tokens, np.append(logprobs[: kept - 1].numpy(), np.float32(-0.1))


async def measure(folder: Path, steps: int) -> dict[str, object]:
    settings = load(
        overrides=[
            f"policy.path={folder}",
            "learner.threads=1",
            f"learner.max_new_tokens={TOKENS}",
            f"learner.optimizer.learning_rate={LEARNING_RATE}",
        ]
    )
    _, scorer, learner, spare = load_policy(settings, None)
    await spare.close()
    workers = Workers(folder, scorer)
    right = await workers.engine()
    step_s = 0.0
    for _ in range(steps):
        batch = await workers.draw(right)
        started = time.perf_counter()
        learner.train(batch)
        step_s += (time.perf_counter() - started) / steps
    share = batch[: max(1, round(SHARE * len(batch)))]
    started = time.perf_counter()
    learner.read(share)
    read_s = time.perf_counter() - started
    rounded = await workers.engine(dtype=torch.bfloat16)
    coarse = await workers.engine(bits=4)

    async def with_change(change: Change) -> list[Group]:
        return [changed(group, change) for group in await workers.draw(right)]

    lies: dict[str, Callable[[], Coroutine[None, None, list[Group]]]] = {
        "made up": lambda: with_change(made_up),
        "cut short": lambda: with_change(cut),
        "greedy": lambda: workers.draw(right, temperature=0),
        "temperature 0.7": lambda: workers.draw(right, temperature=0.7, unsaid=True),
        "temperature 0.9": lambda: workers.draw(right, temperature=0.9, unsaid=True),
        "coarse, unsaid": lambda: workers.draw(coarse, unsaid=True),
        "coarse": lambda: workers.draw(coarse),
    }
    found_after: dict[str, float | None] = {}
    accused = judged = 0
    honest = Reading()
    for name, lie in lies.items():
        auditor, lied, found_after[name] = Auditor(share=1, dice=random.Random(0)), Reading(), None
        for _ in range(ROUNDS):
            sent = {"one": right, "two": right, "rounded": rounded}
            batches = {worker: await workers.draw(engine) for worker, engine in sent.items()}
            batches["liar"] = await lie()
            entries = [Entry(group, worker) for worker, groups in batches.items() for group in groups]
            readings = learner.read([entry.group for entry in entries])
            honest = sum(readings[:GROUPS], honest)
            lied = sum(readings[-GROUPS:], lied)
            found = auditor.judge(entries, readings)
            accused += len(found.keys() - {"liar"})
            judged += len(sent)
            if "liar" in found:
                found_after[name] = lied.tokens
                break
        say(f"{name}: {'found' if found_after[name] else 'not found'} in {lied.tokens:.0f} tokens")
    for engine in (right, rounded, coarse):
        await engine.close()
    return {
        "found_after": found_after,
        "accused": accused,
        "judged": judged,
        "distance": honest.distance / honest.tokens,
        "share_of_step": read_s / step_s,
    }


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.audit", description=__doc__.split("\n")[0])
    parser.add_argument(
        "--policy", type=Path, default=SEED_POLICY, help="a policy folder for the demo's task"
    )
    parser.add_argument("--steps", type=int, default=3, help="training steps that the learner is ahead")
    arguments = parser.parse_args()
    print(json.dumps({"audit": asyncio.run(measure(arguments.policy, arguments.steps))}))


if __name__ == "__main__":
    main()
