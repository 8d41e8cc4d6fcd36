"""From groups to padded micro-batches: what the trainer feeds its model (pure, but for tensors).

Rows are sorted by length, so that little is padding, and packed up to a budget of token places. Padding is on
the right and attention is causal, so no real token ever sees it and no mask is needed.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from echo2p2p.data.trajectory import Group
from echo2p2p.learning.objective import group_advantages


@dataclass(frozen=True)
class Row:
    """One trajectory, ready for the loss.

    Attributes:
        completion, sampler_logprobs: all that follows the prompt, what an environment said included.
        trained: bool, (completion tokens,): which of them the model sampled.
        group: number of its group in the batch.
        balance_target: what trajectory balance wants log π_θ(completion) to be; unused otherwise.
    """

    prompt: Sequence[int]
    completion: Sequence[int]
    sampler_logprobs: np.ndarray
    trained: np.ndarray
    advantage: float
    reward: float
    group: int
    balance_target: float = 0.0

    @property
    def length(self) -> int:
        """Tokens the model reads: the last one is predicted, never read."""
        return len(self.prompt) + len(self.completion) - 1

    @property
    def n_trained(self) -> int:
        """Tokens that the loss is about."""
        return int(self.trained.sum())


@dataclass(frozen=True)
class MicroBatch:
    """Rows side by side.

    Attributes:
        ids: int64, (rows, width), padded with 0.
        keep: how many of the last places hold every predicted token.
        where: bool, (rows, keep), the places that predict a token that is trained.
        targets, sampler_logprobs, advantages: (tokens,), in the row-major order of ``where``.
        balance_targets: float32, (rows,).
    """

    ids: Tensor
    keep: int
    where: Tensor
    targets: Tensor
    sampler_logprobs: Tensor
    advantages: Tensor
    balance_targets: Tensor


def rows_of(groups: Sequence[Group], *, scale_by_std: bool) -> list[Row]:
    """All trajectories of ``groups`` with their advantages, in order."""
    rows = []
    for number, group in enumerate(groups):
        advantages = group_advantages(torch.from_numpy(group.rewards()), scale_by_std=scale_by_std).tolist()
        for sample, advantage in zip(group.samples, advantages, strict=True):
            logprobs, trained = sample.logprob_array(), sample.trained()
            rows.append(
                Row(group.prompt, sample.completion, logprobs, trained, advantage, sample.reward, number)
            )
    return rows


def pack(rows: Sequence[Row], max_tokens: int) -> Iterator[list[Row]]:
    """Rows of similar length together, each pack at most ``max_tokens`` token places, or one row."""
    packed: list[Row] = []
    for row in sorted(rows, key=lambda row: -row.length):
        if packed and (len(packed) + 1) * packed[0].length > max_tokens:
            yield packed
            packed = []
        packed.append(row)
    if packed:
        yield packed


def collate(rows: Sequence[Row], device: torch.device) -> MicroBatch:
    """One micro-batch of ``rows`` on ``device``."""
    width = max(row.length for row in rows)
    first = min(len(row.prompt) for row in rows) - 1
    ids = np.zeros((len(rows), width), dtype=np.int64)
    where = np.zeros((len(rows), width), dtype=np.bool_)
    for i, row in enumerate(rows):
        ids[i, : row.length] = [*row.prompt, *row.completion[:-1]]
        where[i, len(row.prompt) - 1 : row.length] = row.trained
    lengths = [row.n_trained for row in rows]
    targets = [np.asarray(row.completion, dtype=np.int64)[row.trained] for row in rows]
    sampler_logprobs = [row.sampler_logprobs[row.trained] for row in rows]
    return MicroBatch(
        ids=torch.from_numpy(ids).to(device),
        keep=width - first,
        where=torch.from_numpy(where[:, first:]).to(device),
        targets=torch.from_numpy(np.concatenate(targets)).to(device),
        sampler_logprobs=torch.from_numpy(np.concatenate(sampler_logprobs)).to(device),
        advantages=torch.from_numpy(
            np.repeat(np.array([row.advantage for row in rows], dtype=np.float32), lengths)
        ).to(device),
        balance_targets=torch.tensor([row.balance_target for row in rows], device=device),
    )
