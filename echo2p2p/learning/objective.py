"""The training objective as pure functions on tensors: the GRPO family, and trajectory balance.

J = E[ w · min(r·A, clip(r, 1 − ε_low, 1 + ε_high)·A) ] − β·KL(π_θ‖π_ref)

with A the group's advantages, r = π_θ/π_proximal, and w = min(π_learner(a; θ_old)/π_sampler(a), C) a constant that
corrects for what the sampler was: an older version, another kernel, another precision. ECHO-2's objective is
the default; ``docs/objective.md`` has the formula and the source of every option. The KL term stands outside
w, as a property of θ alone.

Tokens lie in one row-major line; ``where``, bool of shape (sequences, width), says which sequence each belongs
to. Sums over a sequence go through it, since they then have one order on every device.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from echo2p2p.data.policy import scaled_log_softmax

_STD_FLOOR = 1e-6
_SLICE_ELEMENTS = 2**26
_MAX_LOG_RATIO = 20.0
"""e^20 is already no ratio that anybody trains on, and its square is still a float32."""
_MAX_MISMATCH = 3.0
"""What a step reports as its mismatch is a mean: one token with a made-up log-probability must not be all of it."""


@dataclass(frozen=True)
class Objective:
    """What is minimised.

    Attributes:
        kind: ``grpo``, or ``trajectory-balance``, which heeds ``balance_beta`` and nothing else of this.
        normalisation: how tokens are averaged over the batch: ``token`` (every token the same), ``sequence``
            (every sequence the same), ``constant`` (sequences times the completion budget).
        ratio_level: what is clipped: each ``token``'s ratio, or the ``sequence``'s geometric mean (GSPO).
        proximal: the policy that the clip holds θ near: the ``learner``'s as the step began (decoupled PPO: w
            corrects for the sampler), or the ``sampler``'s (coupled: w is 1, and C bounds r itself).
        clip_low, clip_high: ε below and above 1.
        importance_cap: C.
        mask_measure: of a sequence's π_learner(θ_old)/π_sampler: the ``geometric`` mean over its tokens, or their
            ``product``.
        mask_low, mask_high: a sequence whose measure is outside has w = 0; None for no bound.
        kl_beta: β; 0 keeps no reference policy.
        scale_by_std: divide advantages by the group's standard deviation.
        balance_beta: β of trajectory balance, the temperature of the target π_ref·exp(reward/β).
    """

    kind: Literal["grpo", "trajectory-balance"] = "grpo"
    normalisation: Literal["token", "sequence", "constant"] = "token"
    ratio_level: Literal["token", "sequence"] = "token"
    proximal: Literal["learner", "sampler"] = "learner"
    clip_low: float = 0.2
    clip_high: float = 0.28
    importance_cap: float = 2.0
    mask_measure: Literal["geometric", "product"] = "geometric"
    mask_low: float | None = None
    mask_high: float | None = None
    kl_beta: float = 0.0
    scale_by_std: bool = True
    balance_beta: float = 0.05

    @property
    def is_balance(self) -> bool:
        """Whether it is trajectory balance."""
        return self.kind == "trajectory-balance"

    @property
    def needs_reference(self) -> bool:
        """Whether π_ref takes part; then groups of equal rewards are trained as well."""
        return self.is_balance or self.kl_beta > 0


@dataclass(frozen=True)
class TokenLoss:
    """The loss of each token and what the step reports about it; every field has the tokens' shape.

    Attributes:
        loss: to be minimised; differentiable.
        weight: w.
        ratio: π_θ/π_proximal, at the level that is clipped.
        mismatch: π_learner(θ_old)/π_sampler, as it is.
        truncated: whether C cut the mismatch.
        clipped: whether the clip took the token's gradient away.
        masked: whether its sequence was left out for its mismatch.
        mismatch_kl: estimate (k3) of KL(π_sampler‖π_learner) from the sampled token, never negative; no ratio counts
            as more than e³.
        reference_kl: estimate (k3) of KL(π_θ‖π_ref), never negative; zero without a reference.
    """

    loss: Tensor
    weight: Tensor
    ratio: Tensor
    mismatch: Tensor
    truncated: Tensor
    clipped: Tensor
    masked: Tensor
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
    where: Tensor,
    objective: Objective,
    reference_logprobs: Tensor | None = None,
) -> TokenLoss:
    """The negated GRPO objective, token by token. All tensors but ``where`` have one shape, (tokens,).

    Args:
        logprobs: log π_θ at the sampling temperature; the only one with a gradient.
        old_logprobs: log π_θ_old, the learner's policy as this batch began.
        sampler_logprobs: log π_sampler, as the worker reported it.
        advantages: the advantage of each token's trajectory.
        reference_logprobs: log π_ref; needed if ``kl_beta`` is not 0.
    """
    gap = old_logprobs - sampler_logprobs
    mismatch = gap.exp()
    masked = _masked(gap, where, objective)
    coupled = objective.proximal == "sampler"
    weight = torch.ones_like(gap) if coupled else mismatch.clamp(max=objective.importance_cap)
    weight = torch.where(masked, 0.0, weight)
    log_ratio = logprobs - (sampler_logprobs if coupled else old_logprobs)
    if objective.ratio_level == "sequence":
        log_ratio = per_token(per_sequence(log_ratio, where) / where.sum(dim=-1), where)
    # Bounded before the exponential: behind it, an infinite ratio would have the gradient 0 · ∞. Coupled, C does
    # for r what it otherwise does for w: min(r·A, …) has no bound of its own where A < 0.
    bound = math.log(objective.importance_cap) if coupled else _MAX_LOG_RATIO
    ratio = log_ratio.clamp(max=bound).exp()
    plain = ratio * advantages
    bounded = ratio.clamp(1.0 - objective.clip_low, 1.0 + objective.clip_high) * advantages
    loss = -weight * torch.minimum(plain, bounded)
    reference_kl = torch.zeros_like(loss)
    if reference_logprobs is not None:
        reference_kl = k3(reference_logprobs - logprobs)
        loss = loss + objective.kl_beta * reference_kl
    return TokenLoss(
        loss=loss,
        weight=weight,
        ratio=ratio.detach(),
        mismatch=mismatch,
        truncated=mismatch > objective.importance_cap,
        clipped=bounded < plain,
        masked=masked,
        mismatch_kl=k3(gap.clamp(max=_MAX_MISMATCH)).detach(),
        reference_kl=reference_kl.detach(),
    )


def _masked(gap: Tensor, where: Tensor, objective: Objective) -> Tensor:
    """Which tokens belong to a sequence whose mismatch is out of bounds."""
    if objective.mask_low is None and objective.mask_high is None:
        return torch.zeros_like(gap, dtype=torch.bool)
    measure = per_sequence(gap, where)
    if objective.mask_measure == "geometric":
        measure = measure / where.sum(dim=-1)
    outside = torch.zeros_like(measure, dtype=torch.bool)
    if objective.mask_low is not None:
        outside |= measure < math.log(objective.mask_low)
    if objective.mask_high is not None:
        outside |= measure > math.log(objective.mask_high)
    return per_token(outside, where)


def balance_targets(logprobs: Tensor, reference_logprobs: Tensor, rewards: Tensor, beta: float) -> Tensor:
    """What log π_θ(y) of each sample of one group should be: log π_ref(y) + reward/β − log Ẑ.

    Ẑ is VarGrad's estimate of the partition function from the group itself,
    log Ẑ = mean(log π_ref + reward/β − log π_θ), and a constant.

    Args:
        logprobs, reference_logprobs: of whole completions, (samples,).
        rewards: (samples,).
    """
    wanted = reference_logprobs + rewards / beta
    return wanted - (wanted - logprobs).mean()


def balance_loss(
    logprobs: Tensor,
    *,
    old_logprobs: Tensor,
    sampler_logprobs: Tensor,
    reference_logprobs: Tensor,
    targets: Tensor,
    where: Tensor,
) -> TokenLoss:
    """Trajectory balance: (log π_θ(y) − target)², in equal parts on the tokens of y.

    It holds for samples of any policy, so nothing is weighted, clipped or masked.

    Args:
        targets: of :func:`balance_targets`, (sequences,).
    """
    gap = old_logprobs - sampler_logprobs
    residual = per_sequence(logprobs, where) - targets
    nothing = torch.zeros_like(gap, dtype=torch.bool)
    return TokenLoss(
        loss=per_token(residual.square() / where.sum(dim=-1), where),
        weight=torch.ones_like(gap),
        ratio=(logprobs - old_logprobs).exp().detach(),
        mismatch=gap.exp(),
        truncated=nothing,
        clipped=nothing,
        masked=nothing,
        mismatch_kl=k3(gap.clamp(max=_MAX_MISMATCH)),
        reference_kl=k3(reference_logprobs - logprobs).detach(),
    )


def batch_sum(loss: Tensor, where: Tensor, objective: Objective) -> Tensor:
    """The part of a micro-batch in the numerator of the batch's loss; parts add up, however they are cut."""
    if objective.normalisation == "sequence" and not objective.is_balance:
        loss = loss / per_token(where.sum(dim=-1), where)
    return loss.sum()


def batch_divisor(objective: Objective, *, tokens: int, sequences: int, budget: int) -> float:
    """What the sums of all micro-batches are divided by.

    Args:
        tokens, sequences: of the whole batch, groups without signal included.
        budget: tokens that a completion may have at most.
    """
    if objective.is_balance or objective.normalisation == "sequence":
        return sequences
    return tokens if objective.normalisation == "token" else sequences * budget


def per_sequence(values: Tensor, where: Tensor) -> Tensor:
    """Sums of ``values``, (tokens,), over each sequence: (sequences,)."""
    return values.new_zeros(where.shape).masked_scatter(where, values).sum(dim=-1)


def per_token(values: Tensor, where: Tensor) -> Tensor:
    """Each sequence's value, (sequences,), at each of its tokens: (tokens,)."""
    return torch.masked_select(values[:, None].expand(where.shape), where)


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
