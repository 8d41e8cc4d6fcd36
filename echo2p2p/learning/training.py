"""Puts the blocking GRPO trainer behind the learner's loop: one thread of its own, one call at a time."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from pathlib import Path
from typing import Any, TypeVar

import torch

from echo2p2p.data.trajectory import Group
from echo2p2p.learning.audit import Reading
from echo2p2p.learning.checkpoint import Checkpoint, folder_of, load, save
from echo2p2p.learning.trainer import GRPOTrainer, TrainerState
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
        # Denormals would make a step on the CPU several times slower; the setting is the thread's own.
        self._thread = ThreadPoolExecutor(
            1, thread_name_prefix="trainer", initializer=torch.set_flush_denormal, initargs=(True,)
        )

    async def train(self, groups: Sequence[Group]) -> Mapping[str, Any]:
        return asdict(await self._call(lambda: self._trainer.train(groups)))

    async def read(self, groups: Sequence[Group]) -> list[Reading]:
        return await self._call(lambda: self._trainer.read(groups))

    async def snapshot(self) -> Snapshot:
        return await self._call(self._trainer.snapshot)

    async def capture(self) -> tuple[Snapshot, TrainerState]:
        return await self._call(lambda: (self._trainer.snapshot(), self._trainer.state()))

    async def save(self, step: int, state: TrainerState, learner_state: bytes) -> None:
        # Not on the trainer's thread: the next step goes on while the disk is written.
        checkpoint = Checkpoint(step, state, learner_state)
        await asyncio.to_thread(lambda: save(self._checkpoints, checkpoint, keep=self._keep))

    async def go_back(self, step: int) -> bytes:
        def restore() -> bytes:
            checkpoint = load(folder_of(self._checkpoints, step))
            self._trainer.load_state(checkpoint.trainer)
            return checkpoint.learner_state

        return await self._call(restore)

    def close(self) -> None:
        self._thread.submit(self._trainer.close)
        self._thread.shutdown(wait=True)

    async def _call(self, work: Callable[[], T]) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._thread, work)
