"""A trainer that is modelled by the duration of its step; its policy is numbers without meaning."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from echo2p2p.data.trajectory import Group
from echo2p2p.learning.audit import Reading
from echo2p2p.weights.snapshot import Layout, Snapshot, TensorSpec


@dataclass(frozen=True)
class ModelledCheckpoint:
    """What is on the modelled disk: the step, the prompt indices trained until then, the learner's books."""

    step: int
    trained: tuple[int, ...]
    learner_state: bytes


class ModelledTrainer:
    """Takes ``t_train_s`` a step. Its snapshots have ``snapshot_bytes`` bytes.

    Args:
        jitter: a step takes up to this part longer or shorter.
        changed_share: the part of the bf16 weights that a step changes; None for other bytes in every version,
            which no patch can shorten.
        drift_kl: KL divergence of one version from the one before, nats per token; it grows as the square of their
            distance.
        seed: of the jitter.

    Attributes:
        trained: prompt indices, in the order in which they were trained.
        checkpoints: every save, oldest first.
    """

    def __init__(
        self,
        *,
        t_train_s: float,
        snapshot_bytes: int,
        jitter: float = 0.0,
        changed_share: float | None = None,
        drift_kl: float = 0.0,
        seed: int = 0,
    ) -> None:
        self._t_train_s = t_train_s
        self._snapshot_bytes = snapshot_bytes
        self._jitter = jitter
        self._changed_share = changed_share
        self._drift_kl = drift_kl
        self._rng = random.Random(f"{seed} trainer")
        self._weights = (0, _first_weights(snapshot_bytes)) if changed_share is not None else None
        self.step = 0
        self.trained: list[int] = []
        self.checkpoints: list[ModelledCheckpoint] = []

    async def train(self, groups: Sequence[Group]) -> Mapping[str, Any]:
        spread = self._rng.uniform(-self._jitter, self._jitter) if self._jitter else 0.0
        await asyncio.sleep(self._t_train_s * (1 + spread))
        tokens = sum(group.n_tokens for group in groups)
        square_ages = sum((self.step - group.version) ** 2 * group.n_tokens for group in groups)
        self.step += 1
        self.trained.extend(group.index for group in groups)
        rewards = np.concatenate([group.rewards() for group in groups])
        return {
            "reward_mean": float(rewards.mean()),
            "tokens": tokens,
            "mismatch_kl": self._drift_kl * square_ages / max(1, tokens),
            "groups": len(groups),
        }

    async def read(self, groups: Sequence[Group]) -> Sequence[Reading]:
        del groups
        return ()  # there is no policy

    async def snapshot(self) -> Snapshot:
        nbytes = self._snapshot_bytes
        if self._weights is None:
            data = np.random.default_rng(self.step).bytes(nbytes)
            return Snapshot(Layout((TensorSpec("policy", "uint8", (nbytes,), 0, nbytes),), {}), data)
        layout = Layout((TensorSpec("policy", "bfloat16", (nbytes // 2,), 0, nbytes),), {})
        return Snapshot(layout, self._weights_at(self.step).tobytes())

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

    def _weights_at(self, step: int) -> np.ndarray[Any, np.dtype[np.uint16]]:
        """The weights after ``step`` steps, which follow from the number alone."""
        assert self._weights is not None
        assert self._changed_share is not None
        at, words = self._weights
        if at > step:
            at, words = 0, _first_weights(self._snapshot_bytes)
        for number in range(at, step):
            rng = np.random.default_rng(number)
            changed = rng.choice(words.size, size=round(self._changed_share * words.size), replace=False)
            # The next representable value up or down, as small steps at bf16 make.
            words[changed] ^= 1
        self._weights = (step, words)
        return words


def _first_weights(nbytes: int) -> np.ndarray[Any, np.dtype[np.uint16]]:
    """Normal numbers of a usual size, as bf16 bit patterns."""
    values = np.random.default_rng(0).standard_normal(nbytes // 2, dtype=np.float32) * np.float32(0.02)
    return (values.view(np.uint32) >> 16).astype(np.uint16)
