"""An engine that is modelled by durations: for simulations and tests, never what a user gets by default.

It generates token ids of the right number and takes the virtual time that they would take. Everything around
it (sessions, leases, relay, window) is the real code.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Sequence

import numpy as np

from echo2p2p.data.trajectory import Sampling
from echo2p2p.errors import EngineError
from echo2p2p.rollout.engine import Completion, Swap
from echo2p2p.weights.snapshot import Snapshot

VOCAB_SIZE = 1000


class ModelledEngine:
    """Generates at a given rate.

    Args:
        tokens_per_s: over a whole batch.
        mean_tokens: of a completion; lengths are exponential around it, at most ``max_new_tokens``.
        install_s: what a swap takes.
    """

    def __init__(self, *, tokens_per_s: float, mean_tokens: float, install_s: float = 0.0) -> None:
        self.tokens_per_s = tokens_per_s
        self._mean_tokens = mean_tokens
        self._install_s = install_s
        self._version = -1
        self._held: Snapshot | None = None

    @property
    def version(self) -> int:
        return self._version

    async def generate(
        self, prompts: Sequence[Sequence[int]], *, n_samples: int, sampling: Sampling, seed: int
    ) -> list[list[Completion]]:
        if self._version < 0:
            raise EngineError("no policy version is installed")
        rng = random.Random(seed)
        done = [[self._completion(rng, sampling) for _ in range(n_samples)] for _ in prompts]
        await asyncio.sleep(sum(len(c.tokens) for group in done for c in group) / self.tokens_per_s)
        return done

    async def stage(self, snapshot: Snapshot, version: int) -> Swap:
        async def swap() -> None:
            await asyncio.sleep(self._install_s)
            self._held, self._version = snapshot, version

        return swap

    async def fingerprint(self) -> str:
        return self._held.fingerprint() if self._held is not None else ""

    async def install(self, snapshot: Snapshot, version: int) -> str:
        swap = await self.stage(snapshot, version)
        await swap()
        return await self.fingerprint()

    async def close(self) -> None:
        self._version, self._held = -1, None

    def _completion(self, rng: random.Random, sampling: Sampling) -> Completion:
        length = min(sampling.max_new_tokens, 1 + int(rng.expovariate(1 / self._mean_tokens)))
        tokens = [rng.randrange(VOCAB_SIZE)] * length
        logprobs = np.full(length, -1.0, dtype=np.float32)
        return Completion(tokens, logprobs, self._version, self._version, "stop")


class ModelledScorer:
    """A task without text: the reward of a completion is a hash of its first token and the prompt's index."""

    vocab_size = VOCAB_SIZE

    def prompt_tokens(self, index: int, split: str = "train") -> list[int]:
        return [index % VOCAB_SIZE, len(split)]

    def reward(self, index: int, completion: Sequence[int], split: str = "train") -> float:
        return float((completion[0] + index + len(split)) % 2)
