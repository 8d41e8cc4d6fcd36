"""The sums that the audit is made of: a policy reads groups and compares them with what is said of them."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from echo2p2p.data.trajectory import Group
from echo2p2p.learning.audit import Reading
from echo2p2p.learning.batching import rows_of
from echo2p2p.learning.forward import PolicyForward
from echo2p2p.learning.objective import k3, per_sequence

_MAX_LOG_RATIO = 5.0
"""No token weighs more than a hundred and fifty others."""
_LOW_LOG_RATIO = 2.0
"""In the bounded mean none weighs more than seven."""


@torch.no_grad()
def read_groups(policy: PolicyForward, groups: Sequence[Group]) -> list[Reading]:
    """What ``policy`` makes of each of ``groups``; it must not have been trained on them."""
    readings = [Reading() for _ in groups]
    for rows, batch in policy.micro_batches(rows_of(groups, scale_by_std=False)):
        logprobs, entropies = policy(batch)
        gap = logprobs - batch.sampler_logprobs
        ratio = gap.clamp(max=_MAX_LOG_RATIO).exp()
        surprise = ratio * (-logprobs - entropies)
        bounded = gap.clamp(max=_LOW_LOG_RATIO).exp() * (-logprobs - entropies)
        parts = (
            torch.ones_like(gap),
            ratio - 1.0,
            (ratio - 1.0).square(),
            surprise,
            surprise.square(),
            k3(gap),
            bounded,
            bounded.square(),
        )
        sums = torch.stack([per_sequence(part, batch.where) for part in parts], dim=-1)
        for row, own in zip(rows, sums.tolist(), strict=True):
            readings[row.group] += Reading(*own)
    return readings
