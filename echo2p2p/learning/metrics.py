"""What a training step reports about itself, and how it is added up over micro-batches."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from echo2p2p.data.trajectory import Group
from echo2p2p.learning.batching import Row
from echo2p2p.learning.objective import TokenLoss
from echo2p2p.learning.ranks import Ranks


@dataclass(frozen=True)
class StepMetrics:
    """What one step did. Means and shares are over the tokens that were trained, unless said otherwise.

    Attributes:
        skipped: why the weights did not move: ``non-finite``, ``no signal`` (every group's rewards are
            equal) or nothing.
        non_finite_steps: steps skipped so far for a loss or gradient that was not finite, this one included.
        groups, trained_groups: received, and with any signal: not all rewards equal.
        tokens, trained_tokens: sampled tokens received, and those that went through the loss.
        wasted_tokens: tokens received that moved nothing by their reward: of groups of equal rewards, of masked
            sequences, of updates that were skipped.
        completion_length_mean: sampled tokens a completion.
        reward_mean: over all samples; reward_std: mean over groups of the standard deviation within.
        loss: the objective, negated, over all tokens received.
        grad_norm: before clipping, of the last update.
        weight_mean, weight_max: of the truncated importance weight w.
        mismatch_max: the largest π_learner/π_sampler of a token, before C.
        ratio_max: the largest π_θ/π_proximal.
        truncated_fraction: tokens whose mismatch exceeds C; clipped_fraction: tokens the clip silenced;
            masked_fraction: tokens of sequences left out for their mismatch.
        mismatch_kl: KL(π_sampler‖π_learner), what staleness and numerics amount to: the mean of
            e^x − 1 − x with x = log π_learner(θ_old) − log π_sampler, 3 at most (k3).
        reference_kl: KL(π_θ‖π_ref) alike, without a bound.
        entropy: of the policy, in nats.
    """

    skipped: str
    non_finite_steps: int
    groups: int
    trained_groups: int
    tokens: int
    trained_tokens: int
    wasted_tokens: int
    completion_length_mean: float
    reward_mean: float
    reward_std: float
    loss: float
    grad_norm: float
    learning_rate: float
    weight_mean: float
    weight_max: float
    mismatch_max: float
    ratio_max: float
    truncated_fraction: float
    clipped_fraction: float
    masked_fraction: float
    mismatch_kl: float
    reference_kl: float
    entropy: float


class StepTally:
    """Adds up what a step reports.

    Attributes:
        rows: all trajectories of the step.
        tokens: sampled tokens in them.
        grad_norm: of the last update, before clipping; set by the trainer.
        used_tokens: tokens whose reward moved the policy; counted by the trainer.
    """

    def __init__(self, groups: Sequence[Group], rows: list[Row]) -> None:
        self.rows = rows
        self.tokens = sum(group.n_tokens for group in groups)
        self.grad_norm = 0.0
        self.used_tokens = 0
        self._groups = groups
        self._loss = 0.0
        self._trained_tokens = 0
        self._maxima: dict[str, float] = dict.fromkeys(("weight", "mismatch", "ratio"), 0.0)
        self._sums: dict[str, float] = dict.fromkeys(
            ("weight", "truncated", "clipped", "masked", "mismatch_kl", "reference_kl", "entropy"), 0.0
        )

    def add(self, result: TokenLoss, entropies: Tensor, loss: float) -> None:
        """Count one micro-batch, whose part of the step's loss is ``loss``."""
        self._loss += loss
        self._trained_tokens += len(result.weight)
        for name in self._maxima:
            self._maxima[name] = max(self._maxima[name], float(getattr(result, name).max()))
        for name in self._sums:
            values = entropies if name == "entropy" else getattr(result, name)
            self._sums[name] += float(values.sum())

    def add_up(self, ranks: Ranks) -> None:
        """Make it the tally of all ranks together."""
        sums = [self._loss, self._trained_tokens, self.used_tokens, *self._sums.values()]
        loss, trained, used, *parts = ranks.total(sums)
        self._loss, self._trained_tokens, self.used_tokens = loss, int(trained), int(used)
        self._sums = dict(zip(self._sums, parts, strict=True))
        self._maxima = dict(zip(self._maxima, ranks.largest(list(self._maxima.values())), strict=True))

    def metrics(self, skipped: str, *, learning_rate: float, non_finite_steps: int) -> StepMetrics:
        """The step's report, once all of it is counted."""
        rewards = [group.rewards() for group in self._groups]
        mean: Callable[[str], float] = lambda name: self._sums[name] / max(1, self._trained_tokens)  # noqa: E731
        spreads: list[Any] = [values.std() for values in rewards]
        return StepMetrics(
            skipped=skipped,
            non_finite_steps=non_finite_steps,
            groups=len(self._groups),
            trained_groups=len({row.group for row in self.rows if row.advantage}),
            tokens=self.tokens,
            trained_tokens=self._trained_tokens,
            wasted_tokens=self.tokens - self.used_tokens,
            completion_length_mean=self.tokens / len(self.rows),
            reward_mean=sum(float(values.sum()) for values in rewards) / len(self.rows),
            reward_std=float(sum(spreads)) / len(spreads),
            loss=self._loss,
            grad_norm=self.grad_norm,
            learning_rate=learning_rate,
            weight_mean=mean("weight"),
            weight_max=self._maxima["weight"],
            mismatch_max=self._maxima["mismatch"],
            ratio_max=self._maxima["ratio"],
            truncated_fraction=mean("truncated"),
            clipped_fraction=mean("clipped"),
            masked_fraction=mean("masked"),
            mismatch_kl=mean("mismatch_kl"),
            reference_kl=mean("reference_kl"),
            entropy=mean("entropy"),
        )
