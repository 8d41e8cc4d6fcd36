"""From a prompt's index to token ids, and from sampled token ids to a reward.

Worker and learner hold the same scorer, built from the run's pinned tokenizer and task, so the learner can
check what a worker says by computing it again.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Protocol

from echo2p2p.data.task import TRAIN, Task

if TYPE_CHECKING:  # it imports transformers, which takes seconds and which a simulation does not need
    from echo2p2p.data.tokens import PolicyTokenizer


class Scorer(Protocol):
    """Pure functions of their arguments; safe to call from any thread."""

    @property
    def vocab_size(self) -> int:
        """Token ids are below this."""
        ...

    def prompt_tokens(self, index: int, split: str = TRAIN) -> list[int]:
        """The token ids of prompt ``index``."""
        ...

    def reward(self, index: int, completion: Sequence[int], split: str = TRAIN) -> float:
        """The reward of sampled token ids as a completion of prompt ``index``."""
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
        return self._tokenizer.encode_prompt(self._task.prompt(index, split))

    def reward(self, index: int, completion: Sequence[int], split: str = TRAIN) -> float:
        return self._task.reward(index, self._tokenizer.decode_completion(completion), split)
