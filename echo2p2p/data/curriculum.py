"""A task that changes as the run goes on: from which prompt's index on which options hold."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Mapping, Sequence
from itertools import pairwise

from echo2p2p.data.task import TRAIN, Task, TurnTask
from echo2p2p.errors import SettingsError


class Staged:
    """One task at several difficulties. Held-out prompts are always those of the last one, which is the goal.

    A stage begins with a prompt's index, not with a step: worker and learner agree on it however late a lease comes.
    With R/n prompts a step, step v begins at about index v·R/n.

    Args:
        starts: index of each stage's first prompt, ascending, the first 0.
        tasks: one a stage.
    """

    def __init__(self, starts: Sequence[int], tasks: Sequence[Task]) -> None:
        if starts[0] != 0 or any(a >= b for a, b in pairwise(starts)):
            raise SettingsError(f"stages start at {list(starts)}, which does not ascend")
        self._starts = list(starts)
        self._tasks = list(tasks)

    @property
    def name(self) -> str:
        return self._tasks[0].name

    @property
    def pins(self) -> Mapping[str, str]:
        return {
            f"{name} of stage {number}" if number else name: pin
            for number, task in enumerate(self._tasks)
            for name, pin in getattr(task, "pins", {}).items()
        }

    def prompt(self, index: int, split: str = TRAIN) -> str:
        return self.at(index, split).prompt(index, split)

    def answer(self, index: int, split: str = TRAIN) -> str:
        return self.at(index, split).answer(index, split)

    def reward(self, index: int, completion: str, split: str = TRAIN) -> float:
        return self.at(index, split).reward(index, completion, split)

    def close(self) -> None:
        for task in self._tasks:
            end = getattr(task, "close", None)
            if end is not None:
                end()

    def at(self, index: int, split: str = TRAIN) -> Task:
        """The task that prompt ``index`` belongs to."""
        return self._tasks[bisect_right(self._starts, index) - 1 if split == TRAIN else -1]


class StagedTurns(Staged):
    """The same for tasks of several turns. An episode has as much room as the roomiest stage allows."""

    def __init__(self, starts: Sequence[int], tasks: Sequence[Task]) -> None:
        super().__init__(starts, tasks)
        self._turns = [task for task in tasks if isinstance(task, TurnTask)]
        self.max_turns = max(task.max_turns for task in self._turns)
        self.turn_tokens = max(task.turn_tokens for task in self._turns)

    def respond(self, index: int, actions: Sequence[str], split: str = TRAIN) -> str | None:
        task = self._at_turns(index, split)
        return task.respond(index, actions, split) if len(actions) < task.max_turns else None

    def episode_reward(self, index: int, actions: Sequence[str], split: str = TRAIN) -> float:
        return self._at_turns(index, split).episode_reward(index, actions, split)

    def _at_turns(self, index: int, split: str) -> TurnTask:
        task = self.at(index, split)
        assert isinstance(task, TurnTask)
        return task


def staged(starts: Sequence[int], tasks: Sequence[Task]) -> Task:
    """``tasks`` one after the other. Raises SettingsError if the stages are out of order."""
    return (StagedTurns if isinstance(tasks[0], TurnTask) else Staged)(starts, tasks)
