"""Scores a policy on prompts that are never trained on."""

from __future__ import annotations

from dataclasses import dataclass

from echo2p2p.data.scoring import Scorer
from echo2p2p.data.task import HELD_OUT
from echo2p2p.data.trajectory import Sampling
from echo2p2p.rollout.engine import InferenceEngine
from echo2p2p.weights.snapshot import Snapshot


@dataclass(frozen=True)
class Evaluator:
    """Mean held-out reward of sampled completions.

    Attributes:
        n_prompts: held-out prompts 0 … n − 1, the same ones every time.
        sampling: as in training, so that the figure is comparable with the training reward.
    """

    engine: InferenceEngine
    scorer: Scorer
    sampling: Sampling
    n_prompts: int
    n_samples: int
    seed: int

    async def __call__(self, snapshot: Snapshot, version: int) -> tuple[float, int]:
        """Returns the mean reward over all samples, and the number of prompts."""
        await self.engine.install(snapshot, version)
        prompts = [self.scorer.prompt_tokens(index, HELD_OUT) for index in range(self.n_prompts)]
        completions = await self.engine.generate(
            prompts, n_samples=self.n_samples, sampling=self.sampling, seed=self.seed
        )
        rewards = [
            self.scorer.reward(index, sample.tokens, HELD_OUT)
            for index, samples in enumerate(completions)
            for sample in samples
        ]
        return sum(rewards) / len(rewards), self.n_prompts
