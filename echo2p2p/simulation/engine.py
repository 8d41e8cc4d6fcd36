"""An engine that is modelled by durations: for simulations and tests, never what a user gets by default.

It generates token ids of the right number and takes the virtual time that they would take. Everything around
it (sessions, leases, relay, window) is the real code.
"""

from __future__ import annotations

import asyncio
import math
import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

from echo2p2p.data.scoring import Scorer
from echo2p2p.data.trajectory import Sampling
from echo2p2p.errors import EngineError
from echo2p2p.rollout.engine import Completion, Swap
from echo2p2p.weights.snapshot import Snapshot

VOCAB_SIZE = 1000

Tail = Literal["fixed", "exponential", "lognormal"]


@dataclass(frozen=True)
class Lengths:
    """How long completions get, in tokens.

    Attributes:
        mean: before the cut at ``max_new_tokens``.
        tail: all alike, exponential, or lognormal with ``sigma`` (1 is heavy: one in a hundred is six means long).
    """

    mean: float
    tail: Tail = "exponential"
    sigma: float = 1.0

    def draw(self, rng: random.Random, longest: int) -> int:
        if self.tail == "fixed":
            length = self.mean
        elif self.tail == "exponential":
            length = 1 + rng.expovariate(1 / self.mean)
        else:
            length = rng.lognormvariate(math.log(self.mean) - self.sigma**2 / 2, self.sigma)
        return max(1, min(longest, int(length)))


class ModelledEngine:
    """Generates at a given rate.

    Args:
        tokens_per_s: over a whole batch; may be changed at any time, for the next batch.
        lengths: of completions, at most ``max_new_tokens``.
        install_s: what a swap takes.
        sequence_tokens_per_s: of one completion; a batch takes as long as its longest one at this speed.
    """

    def __init__(
        self,
        *,
        tokens_per_s: float,
        lengths: Lengths,
        install_s: float = 0.0,
        sequence_tokens_per_s: float = math.inf,
    ) -> None:
        self.tokens_per_s = tokens_per_s
        self._lengths = lengths
        self._install_s = install_s
        self._sequence_tokens_per_s = sequence_tokens_per_s
        self._version = -1
        self._held: Snapshot | None = None
        self._paused = asyncio.Event()
        self._running = asyncio.Event()
        self._running.set()

    @property
    def overlaps(self) -> bool:
        return False

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
        lengths = [len(completion.tokens) for group in done for completion in group]
        await self._take(max(sum(lengths) / self.tokens_per_s, max(lengths) / self._sequence_tokens_per_s))
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

    def pause(self) -> None:
        """Let generation stand still where it is."""
        self._running.clear()
        self._paused.set()

    def resume(self) -> None:
        """Undo :meth:`pause`."""
        self._paused.clear()
        self._running.set()

    async def _take(self, seconds: float) -> None:
        """Generate for so long, pauses not counted."""
        loop = asyncio.get_running_loop()
        while True:
            await self._running.wait()
            started = loop.time()
            try:
                async with asyncio.timeout(seconds):
                    await self._paused.wait()
            except TimeoutError:
                return
            seconds -= loop.time() - started

    def _completion(self, rng: random.Random, sampling: Sampling) -> Completion:
        length = self._lengths.draw(rng, sampling.max_new_tokens)
        tokens = [rng.randrange(VOCAB_SIZE)] * length
        logprobs = np.full(length, -1.0, dtype=np.float32)
        return Completion(tokens, logprobs, self._version, self._version, "stop")


class ModelledScorer(Scorer):
    """A task without text: the reward of a completion is a hash of its first token and the prompt's index."""

    @property
    def vocab_size(self) -> int:
        return VOCAB_SIZE

    def prompt_tokens(self, index: int, split: str = "train") -> list[int]:
        return [index % VOCAB_SIZE, len(split)]

    def reward(self, index: int, completion: Sequence[int], split: str = "train") -> float:
        return float((completion[0] + index + len(split)) % 2)
