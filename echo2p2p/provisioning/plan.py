"""The capacity model asked before a run: is it feasible, who is needed, what does it cost, how stale does it get?

Pure. The same functions decide during a run (:mod:`echo2p2p.provisioning.activation`).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from echo2p2p.provisioning.activation import Candidate, cheapest
from echo2p2p.provisioning.capacity import (
    best_kappa,
    conservative_staleness,
    default_kappa,
    min_kappa,
    min_staleness,
    mu_min,
    step_s,
)


@dataclass(frozen=True)
class Inputs:
    """What a plan follows from; symbols as in :mod:`echo2p2p.provisioning.capacity`.

    Attributes:
        kappa: None for the best one.
        at_once: rollouts that a worker generates at once, which with its speed says T_work.
    """

    rollouts: int
    t_train_s: float
    t_bcast_s: float
    staleness: int
    gamma: float
    kappa: int | None = None
    price_cap_per_hour: float = math.inf
    at_once: int = 0


@dataclass(frozen=True)
class Plan:
    """The answer.

    Attributes:
        feasible: the chosen workers reach μ_target, and no rollout gets older than S.
        why: what stands in the way, or empty.
        mu_min: the least Σμ with which the learner does not wait, all rollouts being within S.
        workers: in the order in which they would be activated.
        price_per_step: of the workers alone, the learner not included; where they cannot keep it busy, a step
            takes as long as its rollouts do.
        delta_cons: Δ_cons with these workers; None where nothing generates.
    """

    inputs: Inputs
    kappa: int
    feasible: bool
    why: str
    mu_min: float
    mu_target: float
    mu_pool: float
    workers: tuple[Candidate, ...]
    price_per_hour: float
    price_per_step: float
    delta_cons: int | None


def plan(inputs: Inputs, candidates: Sequence[Candidate]) -> Plan:
    """The cheapest workers that keep the learner busy under ``inputs``; where there are none, what would help."""
    found = _cheapest_plan(inputs, candidates)
    if found.feasible:
        return found
    advice = _what_helps(found, candidates)
    return replace(found, why=f"{found.why}: {' or '.join(advice)}") if advice else found


def _cheapest_plan(inputs: Inputs, candidates: Sequence[Candidate]) -> Plan:
    instant = _plan(inputs, candidates, t_work_s=0.0)
    if not inputs.at_once or not instant.workers:
        return instant
    # How long the work in hand takes depends on who is chosen, which depends on it a little.
    return _plan(inputs, candidates, t_work_s=inputs.at_once * len(instant.workers) / instant.mu_pool)


def _plan(inputs: Inputs, candidates: Sequence[Candidate], *, t_work_s: float) -> Plan:
    times = {"t_train_s": inputs.t_train_s, "t_bcast_s": inputs.t_bcast_s, "t_work_s": t_work_s}
    kappa = inputs.kappa or best_kappa(staleness=inputs.staleness, **times)
    impossible = kappa is None
    kappa = kappa or default_kappa(inputs.staleness)
    needed = mu_min(kappa=kappa, staleness=inputs.staleness, rollouts=inputs.rollouts, **times)
    target = inputs.gamma * needed
    chosen = cheapest(candidates, target, price_cap_per_hour=inputs.price_cap_per_hour)
    mu_pool = sum(c.mu for c in chosen)
    delta = conservative_staleness(kappa=kappa, rollouts=inputs.rollouts, mu_pool=mu_pool, **times)
    if impossible or kappa * inputs.t_train_s <= inputs.t_bcast_s:
        least = min_kappa(t_train_s=inputs.t_train_s, t_bcast_s=inputs.t_bcast_s)
        least_s = min_staleness(**times)
        why = (
            f"a broadcast of {inputs.t_bcast_s:g} s takes too long for κ = {kappa} and S = {inputs.staleness}; "
            f"κ must be at least {least}, and S at least {least_s}"
        )
    elif math.isinf(needed):
        why = f"with κ = {kappa} rollouts get older than S, however many workers there are"
    elif mu_pool < target * (1 - 1e-9):
        cap = inputs.price_cap_per_hour
        why = (
            f"all workers together make {mu_pool:.4g} of {target:.4g} rollouts/s (γ · μ_min)"
            f"{'' if math.isinf(cap) else f' for ${cap:g}/h'}; {target - mu_pool:.4g} rollouts/s are missing"
        )
    else:
        why = ""
    price = sum(c.price_per_hour for c in chosen)
    a_step_s = step_s(
        kappa=kappa, staleness=inputs.staleness, rollouts=inputs.rollouts, mu_pool=mu_pool, **times
    )
    return Plan(
        inputs=inputs,
        kappa=kappa,
        feasible=not why,
        why=why,
        mu_min=needed,
        mu_target=target,
        mu_pool=mu_pool,
        workers=tuple(chosen),
        price_per_hour=price,
        price_per_step=price * a_step_s / 3600 if chosen else 0.0,
        delta_cons=delta,
    )


def _what_helps(found: Plan, candidates: Sequence[Candidate]) -> list[str]:
    """What would make ``found`` feasible, each by itself. Nothing is advised that a plan does not confirm."""
    inputs = found.inputs

    def feasible(**changed: Any) -> Plan | None:
        other = _cheapest_plan(replace(inputs, **changed), candidates)
        return other if other.feasible else None

    advice = []
    if uncapped := feasible(price_cap_per_hour=math.inf):
        advice.append(
            f"raise the price cap to ${math.ceil(uncapped.price_per_hour * 100 - 1e-6) / 100:.2f}/h"
        )
    elif not math.isinf(found.mu_min):
        advice.append("add workers")
    if inputs.kappa and (other := feasible(kappa=None)):
        advice.append(f"set κ to {other.kappa}")
    work_s = inputs.at_once * len(found.workers) / found.mu_pool if found.mu_pool else 0.0
    times = {"t_train_s": inputs.t_train_s, "t_bcast_s": inputs.t_bcast_s}
    kappa = inputs.kappa or min_kappa(**times)
    # The first S that any pool can keep. One more asks for the fewest workers; who they are changes T_work a little.
    least = kappa + min_staleness(**times, t_work_s=work_s) - min_kappa(**times)
    for staleness in range(max(inputs.staleness + 1, least), least + 3):
        if feasible(staleness=staleness):
            advice.append(f"raise S to {staleness}")
            break
    if inputs.t_bcast_s and feasible(t_bcast_s=0.0):
        advice.append("broadcast faster")
    if not math.isinf(found.mu_min):
        rollouts = int(inputs.rollouts * found.mu_pool / found.mu_target)
        if rollouts and feasible(rollouts=rollouts):
            advice.append(f"train on no more than {rollouts} rollouts a step")
    return advice
