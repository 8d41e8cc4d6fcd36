"""How good a policy is on prompts that are never trained on: its mean held-out reward and how sure that is."""

from __future__ import annotations

import asyncio
import math
from dataclasses import dataclass
from pathlib import Path
from statistics import mean, stdev
from typing import TYPE_CHECKING

from echo2p2p.errors import SettingsError
from echo2p2p.settings import Settings

if TYPE_CHECKING:
    from echo2p2p.data.trajectory import Group

_Z_95 = 1.96


@dataclass(frozen=True)
class Evaluation:
    """What came out.

    Attributes:
        reward: mean over all samples.
        low, high: 95 % confidence interval of the mean over prompts like these; samples of one prompt are not
            independent, so it is taken over the prompts' means.
        samples_per_prompt: completions of each prompt.
        samples: completions of all prompts together.
        failed: samples whose reward could not be computed, counted as 0.
        tokens_mean: sampled tokens a completion.
    """

    task: str
    reward: float
    low: float
    high: float
    prompts: int
    samples_per_prompt: int
    samples: int
    failed: int
    tokens_mean: float


async def evaluate(policy_dir: Path, settings: Settings, *, prompts: int, samples: int) -> Evaluation:
    """The weights in ``policy_dir`` on held-out prompts 0 … ``prompts`` − 1 of the settings' task.

    Sampled as in training: ``learner.temperature``, ``top_p`` and ``max_new_tokens``.

    Raises:
        SettingsError: the folder is no policy with weights, or the task cannot be used here.
        EngineError, OutOfMemory: as the engine does.
    """
    from echo2p2p.data.chosen import choose
    from echo2p2p.data.policy import build_model
    from echo2p2p.data.task import HELD_OUT
    from echo2p2p.data.trajectory import Sampling
    from echo2p2p.parts import make_scorer, torch_device
    from echo2p2p.rollout.episodes import roll_out
    from echo2p2p.rollout.transformers_engine import TransformersEngine
    from echo2p2p.weights.snapshot import from_state_dict

    device = torch_device(settings.policy.device)
    model = build_model(policy_dir, dtype=None, device="cpu", weights=True)
    snapshot = from_state_dict(model.state_dict())
    engine = TransformersEngine(policy_dir, device=device, threads=settings.learner.threads or None)
    spec, task = choose(settings.task)
    scorer = make_scorer(policy_dir, task, spec)
    options = settings.learner
    try:
        await engine.install(snapshot, 0)
        groups = await roll_out(
            engine,
            scorer,
            range(prompts),
            n_samples=samples,
            sampling=Sampling(options.temperature, options.top_p, options.max_new_tokens),
            seed=settings.seed,
            offload=asyncio.to_thread,
            split=HELD_OUT,
        )
    finally:
        scorer.close()
        await engine.close()
    return _summary(settings.task.name, groups)


def _summary(task: str, groups: list[Group]) -> Evaluation:
    """Raises SettingsError if there is nothing to take a mean of."""
    if not groups:
        raise SettingsError("an evaluation needs at least one prompt")
    means = [mean(float(reward) for reward in group.rewards()) for group in groups]
    centre = mean(means)
    half = _Z_95 * stdev(means) / math.sqrt(len(means)) if len(means) > 1 else math.inf
    samples = [sample for group in groups for sample in group.samples]
    return Evaluation(
        task=task,
        reward=centre,
        low=centre - half,
        high=centre + half,
        prompts=len(groups),
        samples_per_prompt=len(groups[0].samples),
        samples=len(samples),
        failed=sum(sample.failed for sample in samples),
        tokens_mean=mean(sample.n_trained for sample in samples),
    )
