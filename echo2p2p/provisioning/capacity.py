"""The overlap capacity model: how many rollouts a second keep the learner busy, and how stale they get.

Pure functions. Symbols as in the ECHO-2 paper: R rollouts a step, T_train seconds a step, κ steps between
publications, T_bcast seconds from publication until a fraction 1/γ of the active workers can generate,
μ rollouts a second, S the staleness budget.

Overlap asks that one publication period of training covers its broadcast and the rollouts it consumes:

    κ·T_train ≥ T_bcast + κ·R / μ      ⇔      μ ≥ μ_min(κ) = κ·R / (κ·T_train − T_bcast)
"""

from __future__ import annotations

import math


def mu_min(*, kappa: int, rollouts: int, t_train_s: float, t_bcast_s: float) -> float:
    """Rollouts a second below which the learner must wait; infinite where κ·T_train ≤ T_bcast."""
    slack_s = kappa * t_train_s - t_bcast_s
    return kappa * rollouts / slack_s if slack_s > 0 else math.inf


def min_kappa(*, t_train_s: float, t_bcast_s: float) -> int:
    """The smallest publication period for which overlap is possible at all."""
    return int(t_bcast_s // t_train_s) + 1


def conservative_staleness(
    *, kappa: int, rollouts: int, t_train_s: float, t_bcast_s: float, mu_pool: float
) -> int | None:
    """Δ_cons = κ + ⌈(T_bcast + R/μ_pool) / T_train⌉ − 1: no rollout is older than this when it is trained.

    None where nothing generates (μ_pool = 0).
    """
    if mu_pool <= 0:
        return None
    lag_steps = (t_bcast_s + rollouts / mu_pool) / t_train_s
    # A lag of a whole number of steps must not become one more through rounding.
    return kappa + math.ceil(lag_steps - 1e-9) - 1


def default_kappa(staleness: int) -> int:
    """The publication period that follows from the staleness budget S.

    κ = S − 1 gives Δ_cons ≤ S where T_bcast < T_train (the paper's case, S ≥ 3). κ = 1 is the smallest
    period there is, and under overlap its Δ_cons is at most 1, so it serves S = 1 and S = 2; with S = 0 every
    step waits for rollouts of its own version, and each version has to be published.
    """
    return max(1, staleness - 1)
