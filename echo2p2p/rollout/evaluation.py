"""Scores a policy on prompts that are never trained on."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass

from echo2p2p.data.scoring import Scorer
from echo2p2p.data.task import HELD_OUT
from echo2p2p.data.trajectory import Sampling
from echo2p2p.rollout.engine import InferenceEngine
from echo2p2p.rollout.episodes import roll_out
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
        groups = await roll_out(
            self.engine,
            self.scorer,
            range(self.n_prompts),
            n_samples=self.n_samples,
            sampling=self.sampling,
            seed=self.seed,
            offload=asyncio.to_thread,
            split=HELD_OUT,
        )
        rewards = [sample.reward for group in groups for sample in group.samples]
        return sum(rewards) / len(rewards), self.n_prompts
