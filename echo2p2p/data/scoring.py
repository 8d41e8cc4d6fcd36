"""From a prompt's index to token ids, and from sampled token ids to a reward.

Worker and learner hold the same scorer, built from the run's pinned tokenizer and task, so the learner can
check what a worker says by computing it again.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Protocol

from echo2p2p.data.task import TRAIN, Task
from echo2p2p.errors import TaskError

if TYPE_CHECKING:  # it imports transformers, which takes seconds and which a simulation does not need
    from echo2p2p.data.tokens import PolicyTokenizer


class Scorer(Protocol):
    """Pure functions of their arguments; safe to call from any thread."""

    @property
    def vocab_size(self) -> int:
        """Token ids are below this."""
        ...

    def prompt_tokens(self, index: int, split: str = TRAIN) -> list[int]:
        """The token ids of prompt ``index``. Raises TaskError if the task fails."""
        ...

    def reward(self, index: int, completion: Sequence[int], split: str = TRAIN) -> float:
        """The reward of sampled token ids as a completion of prompt ``index``. Raises TaskError if the task fails."""
        ...


class TaskScorer:
    """A task seen through a policy's tokenizer.

    Args:
        vocab_size: rows of the policy's embedding; may be more than the tokenizer knows.
    """

    def __init__(self, task: Task, tokenizer: PolicyTokenizer, vocab_size: int) -> None:
        self._task = task
        self._tokenizer = tokenizer
        self._vocab_size = vocab_size

    @property
    def vocab_size(self) -> int:
        return self._vocab_size

    def prompt_tokens(self, index: int, split: str = TRAIN) -> list[int]:
        with _plugged_in(self._task, index):
            text = self._task.prompt(index, split)
        return self._tokenizer.encode_prompt(text)

    def reward(self, index: int, completion: Sequence[int], split: str = TRAIN) -> float:
        text = self._tokenizer.decode_completion(completion)
        with _plugged_in(self._task, index):
            return self._task.reward(index, text, split)


@contextmanager
def _plugged_in(task: Task, index: int) -> Iterator[None]:
    """A task may be anybody's code: whatever it raises must not end the node that asked it."""
    try:
        yield
    except Exception as error:
        raise TaskError(f"task {task.name} failed on prompt {index}: {error!r}") from error
