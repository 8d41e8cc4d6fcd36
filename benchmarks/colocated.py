"""Training without a swarm: one process that generates, trains and generates again, with the swarm's own parts.

Trainer, objective, engine, sampling, scoring and evaluation are those of the learner and the worker, and settings
mean what they mean there; nothing travels, and nothing runs beside anything else. Given settings and lag it computes
the same bits on the same machine.
"""

from __future__ import annotations

import asyncio
import random
from collections import deque
from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryDirectory

from benchmarks.bands import Run
from echo2p2p.data.trajectory import Sampling
from echo2p2p.learning.replay import Entry, staleness_histogram
from echo2p2p.learning.training import ThreadTrainer
from echo2p2p.parts import load_policy
from echo2p2p.rollout.episodes import roll_out
from echo2p2p.rollout.evaluation import Evaluator
from echo2p2p.settings import Settings
from echo2p2p.weights.snapshot import Snapshot


async def train(settings: Settings, *, lag: int = 0, say: Callable[[str], None] = lambda _: None) -> Run:
    """``learner.steps`` steps on prompts 0, 1, 2, … in order, evaluated every ``learner.eval_every``.

    Args:
        lag: every batch comes from the policy so many versions back; from the first one, while there are fewer.
        say: told each evaluation.
    """
    options = settings.learner
    _, scorer, trainer, engine = load_policy(settings, None)
    sampling = Sampling(options.temperature, options.top_p, options.max_new_tokens)
    evaluate = Evaluator(engine, scorer, sampling, options.eval_prompts, options.eval_samples, settings.seed)
    rng = random.Random(f"{settings.seed} colocated")
    held: deque[tuple[int, Snapshot]] = deque(maxlen=lag + 1)
    curve: dict[int, float] = {}
    tokens = aged = 0
    with TemporaryDirectory() as folder:
        threads = ThreadTrainer(trainer, Path(folder), keep=1)
        try:
            for step in range(options.steps + 1):
                held.append((step, await threads.snapshot()))
                if step == options.steps or step % (options.eval_every or options.steps) == 0:
                    curve[step], _ = await evaluate(held[-1][1], step)
                    say(f"step {step}: reward {curve[step]:.3f}")
                if step == options.steps:
                    break
                version, snapshot = held[0]
                await engine.install(snapshot, version)
                first = step * options.prompts_per_step
                indices = range(first, first + options.prompts_per_step)
                groups = await roll_out(
                    engine,
                    scorer,
                    indices,
                    n_samples=options.samples_per_prompt,
                    sampling=sampling,
                    seed=rng.getrandbits(63),
                    offload=asyncio.to_thread,
                )
                await threads.train(groups)
                ages = staleness_histogram([Entry(group, "") for group in groups], step)
                tokens += sum(ages.values())
                aged += sum(age * n for age, n in ages.items())
        finally:
            threads.close()
            await engine.close()
    return Run(settings.seed, curve, staleness_mean=aged / tokens, staleness_max=min(lag, options.steps - 1))


def train_in_process(settings: Settings, lag: int, label: str) -> Run:
    """:func:`train` for a process pool: a loop of its own, progress on stderr."""
    from benchmarks.nodes import say

    return asyncio.run(train(settings, lag=lag, say=lambda text: say(f"{label}, {text}")))
