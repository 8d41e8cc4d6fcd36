"""The overlap capacity model: how many rollouts a second keep the learner busy, and how stale they get.

Pure functions. Symbols as in the ECHO-2 paper: R rollouts a step, T_train seconds a step, κ steps between
publications, T_bcast seconds from publication until a fraction 1/γ of the active workers can generate,
T_work seconds that a worker takes for what it generates at once (its batch of groups), μ rollouts a second, S the
staleness budget.

The paper lets workers stand still while a version travels (:func:`mu_min_standing`). Ours generate with the version
that they have, so a broadcast costs no rollouts: it only makes them older, and what it asks of the pool follows from
the window. The first batch for which the version before is too old is drawn D = S + 1 − κ steps after a publication,
and its rollouts begin when the broadcast ends. When it is drawn, workers are on average halfway through what they
generate, which is not in it:

    μ ≥ R / T_train    and    D·T_train ≥ T_bcast + T_work / 2 + R / μ

``python -m benchmarks.overlap`` measures both.
"""

from __future__ import annotations

import math


def mu_min(
    *, kappa: int, staleness: int, rollouts: int, t_train_s: float, t_bcast_s: float, t_work_s: float = 0.0
) -> float:
    """Rollouts a second below which the learner must wait, of workers that generate while a version travels.

    Infinite where no pool is fast enough: κ·T_train ≤ T_bcast, and versions would be published faster than they
    arrive; or D·T_train ≤ T_bcast + T_work / 2, and rollouts are too old when they could begin.
    """
    if kappa * t_train_s <= t_bcast_s:
        return math.inf
    times = {"t_train_s": t_train_s, "t_bcast_s": t_bcast_s, "t_work_s": t_work_s}
    return max(rollouts / t_train_s, mu_fresh(kappa=kappa, staleness=staleness, rollouts=rollouts, **times))


def mu_min_standing(*, kappa: int, rollouts: int, t_train_s: float, t_bcast_s: float) -> float:
    """The paper's μ_min(κ) = κ·R / (κ·T_train − T_bcast), of workers that stand still while a version travels.

    Infinite where κ·T_train ≤ T_bcast.
    """
    slack_s = kappa * t_train_s - t_bcast_s
    return kappa * rollouts / slack_s if slack_s > 0 else math.inf


def mu_fresh(
    *, kappa: int, staleness: int, rollouts: int, t_train_s: float, t_bcast_s: float, t_work_s: float = 0.0
) -> float:
    """Rollouts a second from which on Δ_cons ≤ S; infinite where no pool is fast enough.

    Δ_cons ≤ S ⇔ (T_bcast + T_work/2 + R/μ) / T_train ≤ S + 1 − κ.
    """
    slack_s = (staleness + 1 - kappa) * t_train_s - t_bcast_s - t_work_s / 2
    return rollouts / slack_s if slack_s > 0 else math.inf


def step_s(
    *,
    kappa: int,
    staleness: int,
    rollouts: int,
    t_train_s: float,
    t_bcast_s: float,
    mu_pool: float,
    t_work_s: float = 0.0,
) -> float:
    """Seconds from step to step with this pool, waits included; infinite where nothing generates.

    A learner that waits for the first batch of a version (once in κ steps) gives the next versions as much more
    time: ⌊D / κ⌋ of such waits lie between a publication and the batch that needs it.
    """
    if mu_pool <= 0:
        return math.inf
    generation_s = rollouts / mu_pool
    steps_until_needed = staleness + 1 - kappa
    late_s = t_bcast_s + t_work_s / 2 + generation_s - steps_until_needed * t_train_s
    waits = 1 + max(0, steps_until_needed) // kappa
    return max(generation_s, t_train_s + max(0.0, late_s) / waits / kappa)


def min_kappa(*, t_train_s: float, t_bcast_s: float) -> int:
    """The smallest publication period for which overlap is possible at all."""
    return int(t_bcast_s // t_train_s) + 1


def arriving_kappa(kappa: int, *, staleness: int, t_train_s: float, t_bcast_s: float) -> int:
    """``kappa``, or the smallest period in which a broadcast ends, if that is longer and S has room for it.

    Versions that are published faster than they arrive arrive no sooner: they hold each other up.
    """
    times = {"t_train_s": t_train_s, "t_bcast_s": t_bcast_s}
    return max(kappa, min_kappa(**times)) if staleness >= min_staleness(**times) else kappa


def conservative_staleness(
    *,
    kappa: int,
    rollouts: int,
    t_train_s: float,
    t_bcast_s: float,
    mu_pool: float,
    t_work_s: float = 0.0,
) -> int | None:
    """Δ_cons = κ + ⌈(T_bcast + T_work/2 + R/μ_pool) / T_train⌉ − 1: no rollout is older when it is trained.

    None where nothing generates (μ_pool = 0).
    """
    if mu_pool <= 0:
        return None
    lag_steps = (t_bcast_s + t_work_s / 2 + rollouts / mu_pool) / t_train_s
    # A lag of a whole number of steps must not become one more through rounding.
    return kappa + math.ceil(lag_steps - 1e-9) - 1


def default_kappa(staleness: int) -> int:
    """The publication period that follows from the staleness budget S where T_bcast < T_train: max(1, S − 1).

    It is then the best one (:func:`best_kappa`), and the paper's for S ≥ 3. With S = 0 every step waits for
    rollouts of its own version, and each version has to be published.
    """
    return max(1, staleness - 1)


def best_kappa(*, staleness: int, t_train_s: float, t_bcast_s: float, t_work_s: float = 0.0) -> int | None:
    """The publication period with which the smallest pool keeps the learner busy; None where none can.

    With b = T_bcast / T_train and l = (T_bcast + T_work/2) / T_train it takes κ > b and
    μ ≥ R / (T_train · min(1, S + 1 − κ − l)). Of equals the largest, at most S − 1, publishes least: S − 1 for
    l < 1, ⌊S − l⌋ as far as that is above b, and ⌊b⌋ + 1 for smaller S, down to :func:`min_staleness`.
    """
    b, lag = t_bcast_s / t_train_s, (t_bcast_s + t_work_s / 2) / t_train_s

    def slack(kappa: int) -> float:
        return min(1.0, staleness + 1 - kappa - lag)

    possible = range(default_kappa(staleness), int(b), -1)
    best = max(possible, key=slack, default=0)  # of equals the first
    return best if best and slack(best) > 0 else None


def min_staleness(*, t_train_s: float, t_bcast_s: float, t_work_s: float = 0.0) -> int:
    """The smallest S ≥ 1 that any pool can keep under overlap: ⌊b⌋ + ⌊l⌋ + 1 (:func:`best_kappa`)."""
    return int(t_bcast_s // t_train_s) + int((t_bcast_s + t_work_s / 2) // t_train_s) + 1
