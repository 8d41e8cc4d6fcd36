"""The GRPO objective as pure functions on tensors.

J = E[ min(π_learner(a; θ_old) / π_sampler(a), C) · min(r·A, clip(r, 1 − ε_low, 1 + ε_high)·A) ]
    − β·KL(π_θ‖π_ref)

with r = π_θ/π_θ_old and A the group-normalised reward: ECHO-2's objective. The first factor is a constant
weight that corrects for what the sampler was: an older version, another kernel, another precision. The KL
term stands outside it, as a property of θ alone.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from echo2p2p.data.policy import scaled_log_softmax

_STD_FLOOR = 1e-6
_SLICE_ELEMENTS = 2**26


@dataclass(frozen=True)
class TokenLoss:
    """The loss of each token and what the step reports about it; every field has the tokens' shape.

    Attributes:
        loss: to be minimised; differentiable.
        weight: the truncated importance weight.
        truncated: whether C cut the weight.
        clipped: whether the clip took the token's gradient away.
        mismatch_kl: estimate of KL(π_sampler‖π_learner) from the sampled token, never negative.
        reference_kl: estimate of KL(π_θ‖π_ref), never negative; zero without a reference.
    """

    loss: Tensor
    weight: Tensor
    truncated: Tensor
    clipped: Tensor
    mismatch_kl: Tensor
    reference_kl: Tensor


def group_advantages(rewards: Tensor, *, scale_by_std: bool = True) -> Tensor:
    """Rewards of one group, less their mean, over their standard deviation.

    A group whose rewards are all equal has no advantage anywhere: it teaches nothing.

    Args:
        rewards: float, (samples,).
        scale_by_std: without it, groups of middling difficulty weigh more.
    """
    centred = rewards - rewards.mean()
    std = rewards.std(correction=0)
    if float(std) < _STD_FLOOR:
        return torch.zeros_like(rewards)
    return centred / std if scale_by_std else centred


def token_loss(
    logprobs: Tensor,
    *,
    old_logprobs: Tensor,
    sampler_logprobs: Tensor,
    advantages: Tensor,
    clip_low: float,
    clip_high: float,
    importance_cap: float,
    reference_logprobs: Tensor | None = None,
    kl_beta: float = 0.0,
) -> TokenLoss:
    """The negated objective, token by token. All tensors have one shape, (tokens,).

    Args:
        logprobs: log π_θ at the sampling temperature; the only one with a gradient.
        old_logprobs: log π_θ_old, the learner's policy as this batch began.
        sampler_logprobs: log π_sampler, as the worker reported it.
        advantages: the advantage of each token's trajectory.
        clip_low, clip_high: ε below and above.
        importance_cap: C.
        reference_logprobs: log π_ref; needed if ``kl_beta`` is not 0.
    """
    gap = old_logprobs - sampler_logprobs
    full_weight = gap.exp()
    weight = full_weight.clamp(max=importance_cap)
    ratio = (logprobs - old_logprobs).exp()
    plain = ratio * advantages
    bounded = ratio.clamp(1.0 - clip_low, 1.0 + clip_high) * advantages
    loss = -weight * torch.minimum(plain, bounded)
    reference_kl = torch.zeros_like(loss)
    if reference_logprobs is not None:
        reference_kl = k3(reference_logprobs - logprobs)
        loss = loss + kl_beta * reference_kl
    return TokenLoss(
        loss=loss,
        weight=weight,
        truncated=full_weight > importance_cap,
        clipped=bounded < plain,
        mismatch_kl=k3(gap).detach(),
        reference_kl=reference_kl.detach(),
    )


def k3(log_ratio: Tensor) -> Tensor:
    """Schulman's estimator of KL(p‖q) from samples of p: e^x − 1 − x ≥ 0 with x = log q − log p."""
    return log_ratio.exp() - 1.0 - log_ratio


def chosen_logprobs(logits: Tensor, targets: Tensor, temperature: float) -> tuple[Tensor, Tensor]:
    """Log-probability of each target at the sampling temperature, and the entropy it was drawn at, in nats.

    With a large vocabulary the float32 distributions of a micro-batch would take more memory than the model,
    so they exist for a slice of tokens at a time, and once more in the backward pass.

    Args:
        logits: (tokens, vocabulary), any float dtype.
        targets: int64, (tokens,).

    Returns:
        float32, (tokens,) each; the entropies carry no gradient.
    """
    step = max(1, _SLICE_ELEMENTS // logits.shape[-1])
    if len(targets) <= step:
        return _chosen(logits, targets, temperature)
    parts = [
        checkpoint(_chosen, logits[i : i + step], targets[i : i + step], temperature, use_reentrant=False)
        for i in range(0, len(targets), step)
    ]
    return torch.cat([logprobs for logprobs, _ in parts]), torch.cat([entropies for _, entropies in parts])


def _chosen(logits: Tensor, targets: Tensor, temperature: float) -> tuple[Tensor, Tensor]:
    log_softmax = scaled_log_softmax(logits, temperature)
    constant = log_softmax.detach()
    entropies = -(constant.exp() * constant).sum(dim=-1)
    return log_softmax.gather(-1, targets[:, None]).squeeze(-1), entropies
