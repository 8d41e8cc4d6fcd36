"""What a run consists of between two steps: the policy, the trainer behind it, and the learner's books."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import msgspec

from echo2p2p.data.trajectory import Group
from echo2p2p.data.work import TaskSpec
from echo2p2p.errors import SettingsError
from echo2p2p.learning.audit import Reading
from echo2p2p.weights.snapshot import Snapshot

log = logging.getLogger("echo2p2p.learner")


class Trainer(Protocol):
    """Turns groups into the next policy. Off the loop, one call at a time."""

    async def train(self, groups: Sequence[Group]) -> Mapping[str, Any]:
        """Take one step; returns the fields of the ``step`` event that the trainer knows."""
        ...

    async def read(self, groups: Sequence[Group]) -> Sequence[Reading]:
        """What the policy, as it is now, says of each of ``groups``; nothing if it cannot. Raises OutOfMemory."""
        ...

    async def snapshot(self) -> Snapshot:
        """The policy as it is now, without the rest of what :meth:`capture` copies."""
        ...

    async def capture(self) -> tuple[Snapshot, Any]:
        """The policy as it is now, and all that the trainer needs to go on from here; both are copies."""
        ...

    async def save(self, step: int, state: Any, learner_state: bytes) -> None:
        """Write a checkpoint of a captured state, with the learner's own beside it; durable on return."""
        ...

    async def go_back(self, step: int) -> bytes:
        """Become what was saved as ``step``; returns the learner's own that was saved with it.

        Raises:
            VerificationError: that checkpoint is not there, or not whole.
        """
        ...


class LearnerState(msgspec.Struct, frozen=True):
    """What of the learner is in a checkpoint. Cumulative figures go on where they were."""

    step: int
    frontier: int
    beyond: tuple[int, ...]
    reward_before: float | None = None
    staleness_max: int = 0
    t_train_s: float = 0.0
    t_idle_s: float = 0.0
    spend_usd: float = 0.0
    all_on_usd: float = 0.0
    dropped: dict[str, int] = {}
    task: TaskSpec | None = None
    run: str = ""

    def check(self, run: str, task: TaskSpec) -> None:
        """Raises SettingsError if this is not a state of ``run`` with ``task``."""
        if self.run not in ("", run):
            raise SettingsError(
                f"the checkpoint belongs to the run {self.run}, not to {run}",
                hint="give the learner the name and the identity that the run was started with",
            )
        if self.task not in (None, task):
            raise SettingsError(
                f"the checkpoint belongs to another task: {self.task}, the settings say {task}",
                hint="resume with the task that the run was started with, or start a new run",
            )


def roll_forward(state: LearnerState, newest_published: int) -> LearnerState:
    """``state`` as a life of the learner may go on from it.

    A checkpoint can be older than what was published: it was chosen by its step, or the newer ones are damaged.
    Workers hold the later versions, so the policy goes on under a number that nobody has seen.
    """
    if state.step >= newest_published:
        return state
    log.warning(
        "the checkpoint is of step %d, but version %d was published: the run goes on from it as version %d",
        state.step,
        newest_published,
        newest_published + 1,
    )
    return msgspec.structs.replace(state, step=newest_published + 1)


@dataclass(frozen=True)
class Capture:
    """Everything of one version, taken between two steps: what is published, and what a resume starts from."""

    version: int
    snapshot: Snapshot
    trainer: Any
    learner: bytes
