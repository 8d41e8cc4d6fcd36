"""From a prompt's index to token ids, and from sampled token ids to a reward.

Worker and learner hold the same scorer, built from the run's pinned tokenizer and task, so the learner can
check what a worker says by computing it again.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Protocol

from echo2p2p.data.task import TRAIN, Task, TurnTask
from echo2p2p.errors import RewardFailed, TaskError

if TYPE_CHECKING:  # it imports transformers, which takes seconds and which a simulation does not need
    from echo2p2p.data.tokens import PolicyTokenizer


class Scorer(Protocol):
    """Pure functions of their arguments; safe to call from any thread. What is not abstract is that of a task of one
    turn.

    Attributes:
        max_turns: turns of the model in an episode.
        turn_tokens: tokens in one of them; of no account if there is only one.
        stop_tokens: ids that end a turn, as the engines know them; without any nobody can say where one ends.
    """

    max_turns: int = 1
    turn_tokens: int = 0
    stop_tokens: frozenset[int] = frozenset()

    @property
    def vocab_size(self) -> int:
        """Token ids are below this."""
        ...

    def prompt_tokens(self, index: int, split: str = TRAIN) -> list[int]:
        """The token ids of prompt ``index``. Raises TaskError if the task fails."""
        ...

    def reward(self, index: int, completion: Sequence[int], split: str = TRAIN) -> float:
        """The reward of sampled token ids as a completion of prompt ``index``.

        Raises:
            RewardFailed: this one completion cannot be scored.
            TaskError: the task fails.
        """
        ...

    def respond(self, index: int, turns: Sequence[Sequence[int]], split: str = TRAIN) -> list[int] | None:  # noqa: ARG002
        """The token ids that the environment puts after the model's ``turns``; None if the episode is over."""
        return None

    def episode_reward(self, index: int, turns: Sequence[Sequence[int]], split: str = TRAIN) -> float:
        """The reward of the model's ``turns``. Raises as :meth:`reward` does."""
        return self.reward(index, turns[0], split)

    def close(self) -> None:
        """End what the task has started."""
        return


class TaskScorer(Scorer):
    """A task seen through a policy's tokenizer.

    Args:
        vocab_size: rows of the policy's embedding; may be more than the tokenizer knows.
        stop_tokens: ids that end a turn.
    """

    def __init__(
        self,
        task: Task,
        tokenizer: PolicyTokenizer,
        vocab_size: int,
        *,
        stop_tokens: frozenset[int] = frozenset(),
    ) -> None:
        self._task = task
        self._turns = task if isinstance(task, TurnTask) else None
        self._tokenizer = tokenizer
        self._vocab_size = vocab_size
        self.stop_tokens = stop_tokens
        if self._turns is not None:
            self.max_turns, self.turn_tokens = self._turns.max_turns, self._turns.turn_tokens

    @property
    def vocab_size(self) -> int:
        return self._vocab_size

    def prompt_tokens(self, index: int, split: str = TRAIN) -> list[int]:
        with _plugged_in(self._task, index):
            # It may be text that the tokenizer makes nothing of.
            return self._tokenizer.encode_prompt(self._task.prompt(index, split))

    def reward(self, index: int, completion: Sequence[int], split: str = TRAIN) -> float:
        return self.episode_reward(index, [completion], split)

    def respond(self, index: int, turns: Sequence[Sequence[int]], split: str = TRAIN) -> list[int] | None:
        if self._turns is None:
            return None
        actions = [self._tokenizer.decode_completion(turn) for turn in turns]
        with _plugged_in(self._task, index):
            text = self._turns.respond(index, actions, split)
            return None if text is None else self._tokenizer.encode_turn(text, after=turns[-1][-1])

    def episode_reward(self, index: int, turns: Sequence[Sequence[int]], split: str = TRAIN) -> float:
        actions = [self._tokenizer.decode_completion(turn) for turn in turns]
        with _plugged_in(self._task, index):
            if self._turns is not None:
                return self._turns.episode_reward(index, actions, split)
            return self._task.reward(index, actions[0], split)

    def close(self) -> None:
        end = getattr(self._task, "close", None)
        if end is not None:
            end()


@contextmanager
def _plugged_in(task: Task, index: int) -> Iterator[None]:
    """A task may be anybody's code: whatever it raises must not end the node that asked it."""
    try:
        yield
    except RewardFailed:
        raise
    except Exception as error:
        raise TaskError(f"task {task.name} failed on prompt {index}: {error!r}") from error
