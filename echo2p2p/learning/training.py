"""Puts the blocking GRPO trainer behind the learner's loop: one thread of its own, one call at a time."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from pathlib import Path
from typing import Any, TypeVar

from echo2p2p.data.trajectory import Group
from echo2p2p.learning.checkpoint import Checkpoint, save
from echo2p2p.learning.trainer import GRPOTrainer
from echo2p2p.weights.snapshot import Snapshot

T = TypeVar("T")


class ThreadTrainer:
    """:class:`echo2p2p.learning.learner.Trainer` on a :class:`GRPOTrainer`.

    Args:
        checkpoints: folder of the run's checkpoints.
        keep: how many stay.
    """

    def __init__(self, trainer: GRPOTrainer, checkpoints: Path, *, keep: int) -> None:
        self._trainer = trainer
        self._checkpoints = checkpoints
        self._keep = keep
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="trainer")

    async def train(self, groups: Sequence[Group]) -> Mapping[str, Any]:
        return asdict(await self._call(lambda: self._trainer.train(groups)))

    async def snapshot(self) -> Snapshot:
        return await self._call(self._trainer.snapshot)

    async def save(self, step: int, learner_state: bytes) -> None:
        def write() -> None:
            checkpoint = Checkpoint(step, self._trainer.state(), learner_state)
            save(self._checkpoints, checkpoint, keep=self._keep)

        await self._call(write)

    def close(self) -> None:
        self._thread.shutdown(wait=True, cancel_futures=True)

    async def _call(self, work: Callable[[], T]) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._thread, work)
