"""A trainer that is modelled by the duration of its step; its policy is a counter in a small tensor."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from echo2p2p.data.trajectory import Group
from echo2p2p.weights.snapshot import Layout, Snapshot, TensorSpec


@dataclass(frozen=True)
class ModelledCheckpoint:
    """What is on the modelled disk: the step, the prompt indices trained until then, the learner's books."""

    step: int
    trained: tuple[int, ...]
    learner_state: bytes


class ModelledTrainer:
    """Takes ``t_train_s`` a step. Its snapshots have ``snapshot_bytes`` bytes, all different in every version.

    Attributes:
        trained: prompt indices, in the order in which they were trained.
        checkpoints: every save, oldest first.
    """

    def __init__(self, *, t_train_s: float, snapshot_bytes: int) -> None:
        self._t_train_s = t_train_s
        self._snapshot_bytes = snapshot_bytes
        self.step = 0
        self.trained: list[int] = []
        self.checkpoints: list[ModelledCheckpoint] = []

    async def train(self, groups: Sequence[Group]) -> Mapping[str, Any]:
        await asyncio.sleep(self._t_train_s)
        self.step += 1
        self.trained.extend(group.index for group in groups)
        rewards = np.concatenate([group.rewards() for group in groups])
        return {
            "reward_mean": float(rewards.mean()),
            "tokens": sum(group.n_tokens for group in groups),
            "groups": len(groups),
        }

    async def snapshot(self) -> Snapshot:
        layout = Layout(
            (TensorSpec("policy", "uint8", (self._snapshot_bytes,), 0, self._snapshot_bytes),), {}
        )
        return Snapshot(layout, np.random.default_rng(self.step).bytes(self._snapshot_bytes))

    async def capture(self) -> tuple[Snapshot, tuple[int, ...]]:
        return await self.snapshot(), tuple(self.trained)

    async def save(self, step: int, state: tuple[int, ...], learner_state: bytes) -> None:
        self.checkpoints.append(ModelledCheckpoint(step, state, learner_state))

    async def go_back(self, step: int) -> bytes:
        checkpoint = next(each for each in reversed(self.checkpoints) if each.step == step)
        self.restore(checkpoint)
        return checkpoint.learner_state

    def restore(self, checkpoint: ModelledCheckpoint) -> None:
        """Become what the trainer was when ``checkpoint`` was taken."""
        self.step = checkpoint.step
        self.trained = list(checkpoint.trained)
