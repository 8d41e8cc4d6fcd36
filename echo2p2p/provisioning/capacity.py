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


def mu_fresh(*, kappa: int, staleness: int, rollouts: int, t_train_s: float, t_bcast_s: float) -> float:
    """Rollouts a second from which on Δ_cons ≤ S; infinite where no pool is fast enough.

    Δ_cons ≤ S ⇔ (T_bcast + R/μ) / T_train ≤ S + 1 − κ.
    """
    slack_s = (staleness + 1 - kappa) * t_train_s - t_bcast_s
    return rollouts / slack_s if slack_s > 0 else math.inf


def default_kappa(staleness: int) -> int:
    """The publication period that follows from the staleness budget S where T_bcast < T_train: max(1, S − 1).

    It is then the best one (:func:`best_kappa`), and the paper's for S ≥ 3. With S = 0 every step waits for
    rollouts of its own version, and each version has to be published.
    """
    return max(1, staleness - 1)


def best_kappa(*, staleness: int, t_train_s: float, t_bcast_s: float) -> int | None:
    """The publication period with which the smallest pool overlaps and keeps Δ_cons ≤ S; None where none can.

    With b = T_bcast / T_train, a pool does both if R/(μ·T_train) ≤ min(1 − b/κ, S + 1 − κ − b). The first rises with
    κ, the second falls. One is above 0 if κ = ⌊b⌋ + 1 < S + 1 − b, that is from S = 2⌊b⌋ + 1 on
    (:func:`min_staleness`).
    """
    b = t_bcast_s / t_train_s

    def slack(kappa: int) -> float:
        return min(1 - b / kappa, staleness + 1 - kappa - b)

    best = max(
        range(1, staleness + 1), key=slack, default=0
    )  # of equals the first, which publishes most often
    return best if best and slack(best) > 0 else None


def min_staleness(*, t_train_s: float, t_bcast_s: float) -> int:
    """The smallest S ≥ 1 that any pool can keep under overlap: 2⌊T_bcast/T_train⌋ + 1."""
    return 2 * int(t_bcast_s // t_train_s) + 1
