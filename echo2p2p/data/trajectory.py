"""What a rollout is on its way from a worker to the loss: token ids, log-probabilities, versions, a reward.

Text is never tokenised again after generation: the ids that the engine sampled are the ids that are trained.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from typing import Annotated

import msgspec
import numpy as np
from msgspec import Meta

TokenId = Annotated[int, Meta(ge=0, lt=2**24)]
TurnLength = Annotated[int, Meta(ge=1, le=2**20)]
MAX_TURNS = 1023
"""Of model and environment together."""
MAX_REWARD = 1e6


class Sampling(msgspec.Struct, frozen=True):
    """How completions are drawn. ``temperature`` 0 means greedy; log-probabilities are then those at 1."""

    temperature: Annotated[float, Meta(ge=0, le=10)] = 1.0
    top_p: Annotated[float, Meta(gt=0, le=1)] = 1.0
    max_new_tokens: Annotated[int, Meta(ge=1, le=2**20)] = 256


class Trajectory(msgspec.Struct, frozen=True):
    """One completion of one prompt, or one episode that begins with it.

    An episode's completion is the model's turns with the environment's between them, token by token as the engine
    was fed with them. The environment's tokens are conditions: never trained, never counted.

    Attributes:
        completion: sampled token ids, the end-of-sequence token included where one was sampled.
        logprobs: little-endian float32, one a completion token: the log-probability of each sampled token
            under the policy that sampled it, at the sampling temperature; 0 for the environment's.
        version_min, version_max: oldest and newest policy version that any of its tokens came from.
        reward: as the worker scored it; the learner computes it again.
        finish: ``stop`` (end of sequence) or ``length``; of the last turn.
        turns: how many tokens each turn has, the model's first and last, the environment's between; empty if the
            completion is one turn of the model.
        failed: the reward could not be computed, and counts as 0.
    """

    completion: Annotated[list[TokenId], Meta(min_length=1, max_length=2**20)]
    logprobs: Annotated[bytes, Meta(max_length=2**22)]
    version_min: Annotated[int, Meta(ge=0, le=2**53)]
    version_max: Annotated[int, Meta(ge=0, le=2**53)]
    reward: Annotated[float, Meta(ge=-MAX_REWARD, le=MAX_REWARD)]
    finish: Annotated[str, Meta(pattern=r"^(stop|length)\Z")]
    turns: Annotated[list[TurnLength], Meta(max_length=MAX_TURNS)] = []
    failed: bool = False

    @property
    def n_trained(self) -> int:
        """Tokens that the model sampled."""
        return sum(self.turns[::2]) if self.turns else len(self.completion)

    def spans(self) -> list[tuple[int, int]]:
        """Where each turn begins and ends in ``completion``; the model's are the first, the third, …."""
        ends = list(accumulate(self.turns or [len(self.completion)]))
        return list(zip([0, *ends], ends, strict=False))

    def trained(self) -> np.ndarray:
        """Which completion tokens are trained: bool, shape (completion tokens,)."""
        lengths = self.turns or [len(self.completion)]
        return np.repeat(np.arange(len(lengths)) % 2 == 0, lengths)

    def logprob_array(self) -> np.ndarray:
        """``logprobs`` as float32, shape (completion tokens,)."""
        return np.frombuffer(self.logprobs, dtype="<f4")


class Group(msgspec.Struct, frozen=True):
    """All samples of one prompt. A group is trained whole or not at all.

    Attributes:
        index: the prompt's index in the task.
        prompt: the prompt's token ids, as the worker fed them to its engine.
    """

    index: Annotated[int, Meta(ge=0, le=2**53)]
    prompt: Annotated[list[TokenId], Meta(min_length=1, max_length=2**20)]
    samples: Annotated[list[Trajectory], Meta(min_length=1, max_length=4096)]

    @property
    def version(self) -> int:
        """The version of its oldest token: what the window S is measured from."""
        return min(sample.version_min for sample in self.samples)

    @property
    def n_tokens(self) -> int:
        """Sampled tokens over all samples."""
        return sum(sample.n_trained for sample in self.samples)

    def rewards(self) -> np.ndarray:
        """float32, shape (samples,)."""
        return np.array([sample.reward for sample in self.samples], dtype=np.float32)


def pack_logprobs(values: Sequence[float] | np.ndarray) -> bytes:
    """The wire form of a trajectory's log-probabilities: little-endian float32."""
    return np.asarray(values, dtype="<f4").tobytes()
