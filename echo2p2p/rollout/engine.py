"""The engine boundary: tokens in, tokens out.

Real engines stand beside this module; the modelled one is in :mod:`echo2p2p.simulation`.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from echo2p2p.data.trajectory import Sampling
from echo2p2p.errors import EngineError
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


Swap = Callable[[], Awaitable[None]]
"""Puts a staged version in the place of the one before. Called once, while nothing is generated.

Raises EngineError or OutOfMemory if that fails; then the version before is whole.
"""


def check_prompts(
    prompts: Sequence[Sequence[int]],
    sampling: Sampling,
    *,
    version: int,
    vocabulary: int,
    max_tokens: int,
    limit: str,
) -> None:
    """What every engine asks of prompts before it generates.

    Args:
        version: what is installed; −1 for nothing.
        vocabulary: token ids lie below it.
        max_tokens: a prompt and what is sampled after it, together.
        limit: names ``max_tokens``, which stands for its ``{}``.

    Raises:
        EngineError: nothing is installed, or a prompt is empty, too long, or has ids outside the vocabulary.
    """
    if version < 0:
        raise EngineError("no policy version is installed", hint="install a snapshot first")
    for prompt in prompts:
        if not prompt or not all(0 <= token < vocabulary for token in prompt):
            raise EngineError(f"a prompt is empty or has ids outside the vocabulary of {vocabulary}")
        if len(prompt) + sampling.max_new_tokens > max_tokens:
            raise EngineError(
                f"a prompt of {len(prompt)} tokens and {sampling.max_new_tokens} new ones exceed the "
                f"{limit.format(max_tokens)}",
                hint="lower max_new_tokens",
            )


class InferenceEngine(Protocol):
    """Generates under one policy version at a time.

    A version comes in three steps, so that generation pauses only for the second: :meth:`stage` while the version
    before generates, the swap between two batches, :meth:`fingerprint` while the new one generates already.
    :meth:`generate`, a swap and :meth:`install` are called one at a time, unless :attr:`overlaps`; the two others may
    run beside :meth:`generate`, one at a time as well.
    """

    @property
    def overlaps(self) -> bool:
        """Whether :meth:`generate` may be called, and a swap made, while it runs; new prompts join the others."""
        ...

    @property
    def version(self) -> int:
        """The policy version that was swapped in last; −1 before the first."""
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
            Interrupted: a swap, or the death of the engine's processes, ended the call; the next one may succeed.
            EngineError: no version is installed, or the engine failed.
            EngineLost: its processes could not be brought back; so all methods but :meth:`close`.
        """
        ...

    async def stage(self, snapshot: Snapshot, version: int) -> Swap:
        """Do everything that can be done for ``version`` without touching what generates.

        Returns:
            The swap, which also drops every cache of the old policy. Right whatever was swapped in since; what it
            writes is small if ``version`` differs little from what the engine held when it was staged.

        Raises:
            EngineError: the snapshot does not fit the model.
            OutOfMemory: there is no room to stage it.
        """
        ...

    async def fingerprint(self) -> str:
        """The fingerprint of what the engine really holds, read back from it. A swap waits for its end."""
        ...

    async def install(self, snapshot: Snapshot, version: int) -> str:
        """Swap in ``version`` by writing everything, whatever the engine is believed to hold.

        Returns:
            The fingerprint of what the engine really holds afterwards, read back from it.

        Raises:
            EngineError: the snapshot does not fit the model; the old version stays installed.
        """
        ...

    async def close(self) -> None:
        """Free the engine's memory and end its processes."""
        ...
