"""From groups to micro-batches: what the trainer feeds its model (pure, but for tensors).

Where the model's attention is :mod:`echo2p2p.learning.packed`, sequences lie one behind the other, those of a group
behind one prompt, and nothing is padding. Otherwise they lie side by side: rows of similar length together, so that
little is padding. That is on the right, where no real token sees it, since attention is causal; so no mask is needed.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any

import numpy as np
import torch
from torch import Tensor

from echo2p2p.data.trajectory import Group
from echo2p2p.learning.objective import group_advantages
from echo2p2p.learning.packed import Bundle, packed_inputs


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
        at: int64, (tokens,), the places that predict a token that is trained, in the flattened ``input_ids``. The
            last place of a prompt that several rows share predicts a token of each.
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
    """Rows in packs of at most ``max_tokens`` token places, or one row.

    Args:
        padded: rows of similar length lie together, and a row takes as many places as the longest beside it.
            Otherwise those of a group do, and their prompt takes its places once, and half of them again for each
            row more: attention keeps a copy of it for every row, most of the memory where prompts are long.
    """
    packed: list[Row] = []
    places = 0
    for row in sorted(rows, key=lambda row: (0 if padded else row.group, -row.length)):
        added = row.length
        if packed and padded:
            added = packed[0].length
        elif packed and packed[-1].group == row.group:
            added -= len(row.prompt) // 2
        if packed and places + added > max_tokens:
            yield packed
            packed, places, added = [], 0, row.length
        packed.append(row)
        places += added
    if packed:
        yield packed


def collate(rows: Sequence[Row], device: torch.device, *, padded: bool) -> MicroBatch:
    """One micro-batch of ``rows`` on ``device``: side by side if ``padded``, else one behind the other."""
    lengths = [row.n_trained for row in rows]
    targets = [np.asarray(row.completion, dtype=np.int64)[row.trained] for row in rows]
    sampler_logprobs = [row.sampler_logprobs[row.trained] for row in rows]
    inputs, places = (_side_by_side if padded else _one_behind_the_other)(rows, device)
    at = [each[row.trained] for each, row in zip(places, rows, strict=True)]
    return MicroBatch(
        inputs=inputs,
        at=torch.from_numpy(np.concatenate(at)).to(device),
        keep=inputs["input_ids"].shape[1] + 1 - min(len(row.prompt) for row in rows) if padded else 0,
        where=(torch.arange(max(lengths))[None, :] < torch.tensor(lengths)[:, None]).to(device),
        targets=torch.from_numpy(np.concatenate(targets)).to(device),
        sampler_logprobs=torch.from_numpy(np.concatenate(sampler_logprobs)).to(device),
        advantages=torch.from_numpy(
            np.repeat(np.array([row.advantage for row in rows], dtype=np.float32), lengths)
        ).to(device),
        balance_targets=torch.tensor([row.balance_target for row in rows], device=device),
    )


def _side_by_side(rows: Sequence[Row], device: torch.device) -> tuple[dict[str, Any], list[np.ndarray]]:
    """The model's inputs, and the places that predict the completion of each row."""
    width = max(row.length for row in rows)
    ids = np.zeros((len(rows), width), dtype=np.int64)
    for own, row in zip(ids, rows, strict=True):
        own[: row.length] = [*row.prompt, *row.completion[:-1]]
    places = [
        np.arange(start + len(row.prompt) - 1, start + row.length)
        for start, row in zip(range(0, ids.size, width), rows, strict=True)
    ]
    return {"input_ids": torch.from_numpy(ids).to(device)}, places


def _one_behind_the_other(
    rows: Sequence[Row], device: torch.device
) -> tuple[dict[str, Any], list[np.ndarray]]:
    """The same without padding; neighbours of one group have their prompt in common."""
    bundles: list[Bundle] = []
    places = []
    end = 0
    for _, group in groupby(rows, key=lambda row: row.group):
        members = list(group)
        prompt, continuations = members[0].prompt, [row.completion[:-1] for row in members]
        bundles.append((prompt, continuations))
        end += len(prompt)
        last = end - 1
        for continuation in continuations:
            places.append(np.array([last, *range(end, end + len(continuation))]))
            end += len(continuation)
    return packed_inputs(bundles, device), places
