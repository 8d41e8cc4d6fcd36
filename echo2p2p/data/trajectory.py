"""What a rollout is on its way from a worker to the loss: token ids, log-probabilities, versions, a reward.

Text is never tokenised again after generation: the ids that the engine sampled are the ids that are trained.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated

import msgspec
import numpy as np
from msgspec import Meta

TokenId = Annotated[int, Meta(ge=0, lt=2**24)]


class Sampling(msgspec.Struct, frozen=True):
    """How completions are drawn. ``temperature`` 0 means greedy; log-probabilities are then those at 1."""

    temperature: Annotated[float, Meta(ge=0, le=10)] = 1.0
    top_p: Annotated[float, Meta(gt=0, le=1)] = 1.0
    max_new_tokens: Annotated[int, Meta(ge=1, le=2**20)] = 256


class Trajectory(msgspec.Struct, frozen=True):
    """One completion of one prompt.

    Attributes:
        completion: sampled token ids, the end-of-sequence token included where one was sampled.
        logprobs: little-endian float32, one a completion token: the log-probability of each sampled token
            under the policy that sampled it, at the sampling temperature.
        version_min, version_max: oldest and newest policy version that any of its tokens came from.
        reward: as the worker scored it; the learner computes it again.
        finish: ``stop`` (end of sequence) or ``length``.
    """

    completion: Annotated[list[TokenId], Meta(min_length=1, max_length=2**20)]
    logprobs: Annotated[bytes, Meta(max_length=2**22)]
    version_min: Annotated[int, Meta(ge=0, le=2**53)]
    version_max: Annotated[int, Meta(ge=0, le=2**53)]
    reward: Annotated[float, Meta(ge=-1e6, le=1e6)]
    finish: Annotated[str, Meta(pattern="^(stop|length)$")]

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
        """Completion tokens over all samples."""
        return sum(len(sample.completion) for sample in self.samples)

    def rewards(self) -> np.ndarray:
        """float32, shape (samples,)."""
        return np.array([sample.reward for sample in self.samples], dtype=np.float32)


def pack_logprobs(values: Sequence[float] | np.ndarray) -> bytes:
    """The wire form of a trajectory's log-probabilities: little-endian float32."""
    return np.asarray(values, dtype="<f4").tobytes()
