"""From groups to micro-batches: what the trainer feeds its model (pure, but for tensors).

Where the model's attention is :mod:`echo2p2p.learning.packed`, sequences lie one behind the other and nothing is
padding. Otherwise they lie side by side: rows of similar length together, so that little is padding, which is on the
right, where no real token sees it, since attention is causal; so no mask is needed.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from echo2p2p.data.trajectory import Group
from echo2p2p.learning.objective import group_advantages
from echo2p2p.learning.packed import packed_inputs


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
    """Rows that go through the model together.

    Attributes:
        inputs: what the model is called with; ``input_ids`` is (1, all tokens) or (rows, longest).
        at: int64, (tokens,), the places that predict a token that is trained, in the flattened ``input_ids``.
        keep: of side by side rows: how many of the last places hold all of these; 0 for one behind the other.
        where: bool, (rows, most tokens of a row), which of the tokens belong to which row, in row-major order.
        targets, sampler_logprobs, advantages: (tokens,), in the order of ``at``.
        balance_targets: float32, (rows,).
    """

    inputs: dict[str, Any]
    at: Tensor
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


def pack(rows: Sequence[Row], max_tokens: int, *, padded: bool) -> Iterator[list[Row]]:
    """Rows of similar length together, each pack at most ``max_tokens`` token places, or one row.

    Args:
        padded: a row takes as many places as the longest beside it.
    """
    packed: list[Row] = []
    places = 0
    for row in sorted(rows, key=lambda row: -row.length):
        width = packed[0].length if padded and packed else row.length
        if packed and places + width > max_tokens:
            yield packed
            packed, places, width = [], 0, row.length
        packed.append(row)
        places += width
    if packed:
        yield packed


def collate(rows: Sequence[Row], device: torch.device, *, padded: bool) -> MicroBatch:
    """One micro-batch of ``rows`` on ``device``: side by side if ``padded``, else one behind the other."""
    lengths = [row.n_trained for row in rows]
    targets = [np.asarray(row.completion, dtype=np.int64)[row.trained] for row in rows]
    sampler_logprobs = [row.sampler_logprobs[row.trained] for row in rows]
    sequences = [[*row.prompt, *row.completion[:-1]] for row in rows]
    width = max(row.length for row in rows)
    starts = [i * width for i in range(len(rows))]
    keep = 0
    if padded:
        ids = np.zeros((len(rows), width), dtype=np.int64)
        for i, sequence in enumerate(sequences):
            ids[i, : len(sequence)] = sequence
        inputs: dict[str, Any] = {"input_ids": torch.from_numpy(ids).to(device)}
        keep = width + 1 - min(len(row.prompt) for row in rows)
    else:
        inputs = packed_inputs(sequences, device)
        starts = np.cumsum([0, *(row.length for row in rows)]).tolist()[:-1]
    at = [
        np.arange(start + len(row.prompt) - 1, start + row.length)[row.trained]
        for start, row in zip(starts, rows, strict=True)
    ]
    return MicroBatch(
        inputs=inputs,
        at=torch.from_numpy(np.concatenate(at)).to(device),
        keep=keep,
        where=(torch.arange(max(lengths))[None, :] < torch.tensor(lengths)[:, None]).to(device),
        targets=torch.from_numpy(np.concatenate(targets)).to(device),
        sampler_logprobs=torch.from_numpy(np.concatenate(sampler_logprobs)).to(device),
        advantages=torch.from_numpy(
            np.repeat(np.array([row.advantage for row in rows], dtype=np.float32), lengths)
        ).to(device),
        balance_targets=torch.tensor([row.balance_target for row in rows], device=device),
    )
