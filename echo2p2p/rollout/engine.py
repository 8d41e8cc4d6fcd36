"""The engine boundary: tokens in, tokens out.

Real engines stand beside this module; the modelled one is in :mod:`echo2p2p.simulation`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from echo2p2p.data.trajectory import Sampling
from echo2p2p.weights.snapshot import Snapshot


@dataclass(frozen=True)
class Completion:
    """One sampled completion.

    Attributes:
        tokens: token ids, the end-of-sequence token included where one was sampled.
        logprobs: float32, shape (tokens,): of each sampled token at the sampling temperature, under the
            policy that sampled it.
        version_min, version_max: oldest and newest version any of its tokens came from.
        finish: ``stop`` or ``length``.
    """

    tokens: list[int]
    logprobs: np.ndarray
    version_min: int
    version_max: int
    finish: str


class InferenceEngine(Protocol):
    """Generates under one installed policy version. Not thread-safe: one call at a time."""

    @property
    def version(self) -> int:
        """The installed policy version; −1 before the first install."""
        ...

    async def generate(
        self, prompts: Sequence[Sequence[int]], *, n_samples: int, sampling: Sampling, seed: int
    ) -> list[list[Completion]]:
        """Sample ``n_samples`` completions of every prompt.

        Args:
            prompts: token ids, one sequence a prompt.
            seed: the same seed, prompts and policy give the same completions on the same machine.

        Returns:
            One list of ``n_samples`` completions a prompt, in order.

        Raises:
            OutOfMemory: the batch does not fit; the engine stays usable.
            EngineError: no version is installed, or the engine failed.
        """
        ...

    async def install(self, snapshot: Snapshot, version: int) -> str:
        """Swap in the weights of ``version`` and drop every cache of the old policy.

        Returns:
            The fingerprint of what the engine really holds afterwards, read back from it.

        Raises:
            EngineError: the snapshot does not fit the model; the old version stays installed.
        """
        ...

    async def close(self) -> None:
        """Free the engine's memory and end its processes."""
        ...
