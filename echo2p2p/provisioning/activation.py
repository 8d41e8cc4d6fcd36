"""Which workers to pay: the cheapest set that keeps the learner busy, without thrashing.

Pure: time is an argument. :func:`cheapest` is the one-shot choice, :class:`Activator` the closed loop.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from operator import attrgetter

import numpy as np

from echo2p2p.provisioning.covering import ROUNDING, Floats, Mask, cover

LEAST_MU = 1e-9
"""Rollouts a second; a worker that delivers fewer delivers none."""


@dataclass(frozen=True)
class Candidate:
    """One worker as the activation sees it.

    Attributes:
        mu: rollouts a second it delivers, accepted ones only.
        active: whether it is paid now.
        arriving: it is paid, and has yet to fetch the weights.
    """

    peer: str
    price_per_hour: float
    mu: float
    active: bool = False
    arriving: bool = False

    @property
    def rho(self) -> float:
        """Unit throughput cost ρ = c/μ, in $ per 1,000 rollouts; infinite for one that delivers nothing."""
        return self.price_per_hour / 3.6 / self.mu if self.mu > LEAST_MU else math.inf


def by_cost(candidates: Iterable[Candidate]) -> list[Candidate]:
    """Cheapest rollouts first. Ties go to the lower price, then to the faster one (among those that cost nothing),
    then to the lower peer id, so that every run agrees.
    """
    return _in_order(candidates)[0]


def cheapest(
    candidates: Iterable[Candidate], target: float, *, price_cap_per_hour: float = math.inf
) -> list[Candidate]:
    """The workers that reach ``target`` for the least money, in the order of :func:`by_cost`.

    Greedy by ρ, then improved around the last worker taken (:mod:`echo2p2p.provisioning.covering`): within 1 %
    of the optimum on the price lists of ``benchmarks/activation``. If no set under the price cap reaches
    ``target``, the set under the cap that delivers most is returned: a slow learner beats a stopped one.
    """
    pool, price, mu = _in_order(
        c for c in candidates if c.mu > LEAST_MU and c.price_per_hour <= price_cap_per_hour
    )
    chosen = cover(price, mu, target)
    if float(price[chosen].sum()) > price_cap_per_hour * (1 + ROUNDING):
        chosen = _most_under(price, mu, price_cap_per_hour)
    return [pool[i] for i in np.flatnonzero(chosen)]


def _in_order(candidates: Iterable[Candidate]) -> tuple[list[Candidate], Floats, Floats]:
    """As :func:`by_cost`, with prices and μ."""
    listed = sorted(candidates, key=attrgetter("peer"))
    price = np.array([c.price_per_hour for c in listed])
    mu = np.array([c.mu for c in listed])
    rho = np.divide(price, mu, out=np.full(len(mu), np.inf), where=mu > LEAST_MU)
    order = np.lexsort((-mu, price, rho))
    return [listed[i] for i in order.tolist()], price[order], mu[order]


def _most_under(price: Floats, mu: Floats, cap: float) -> Mask:
    """The most Σμ for at most ``cap``: what is left out has to cover the price that is too much, at the least μ."""
    order = np.lexsort((mu, -price / mu))
    free = price[order] <= 0
    paid = order[~free]
    left_out = cover(mu[paid], price[paid], float(price.sum()) - cap)
    chosen = np.ones(len(price), dtype=np.bool_)
    chosen[paid[left_out]] = False
    return chosen


WORTHWHILE_SAVING = 0.1
"""A change of workers must save at least this part of the price of the active ones."""


@dataclass(frozen=True)
class Decision:
    """What the loop wants now: who starts, who stops, and why, in words."""

    activate: tuple[str, ...] = ()
    release: tuple[str, ...] = ()
    reason: str = ""


class Activator:
    """The closed loop: adds when the pool stays below the target, releases when it stays above by a margin.

    A shortfall is made good at once where it comes from losing workers, from having none, or is felt by a learner
    that waits. A shortfall or an excess that comes from drifting estimates must last ``persistence_s`` first. An
    excess counts only above ``margin`` × target, and a release never takes the pool below the target, so estimates
    that wobble by less than the margin move nobody. In between, a set that has been cheaper by a tenth for
    ``persistence_s`` replaces the active one: a cheaper worker that comes late gets its turn.

    Workers that are still arriving count when more are added, for they have been bought; they do not count when
    others are let go, for the learner lives on what those deliver until then. So in a change for cheaper the new ones
    come first and the old ones go once the new ones have the weights, unless the price cap has no room for both.

    Args:
        persistence_s: how long a drift must last before anybody is added or released.
        margin: the excess over the target, as a fraction of it, that is tolerated.
        price_cap_per_hour: the price of the active set never exceeds it ($/h).
    """

    def __init__(self, *, persistence_s: float, margin: float, price_cap_per_hour: float = math.inf) -> None:
        self._persistence_s = persistence_s
        self._margin = margin
        self._cap = price_cap_per_hour
        self._below_since: float | None = None
        self._above_since: float | None = None
        self._dear_since: float | None = None
        self._changing: frozenset[str] = frozenset()
        self._active_before: frozenset[str] = frozenset()

    def decide(
        self, now: float, candidates: Sequence[Candidate], target: float, *, waiting: bool = False
    ) -> Decision:
        """One turn of the loop.

        Args:
            now: seconds, monotonic.
            candidates: everyone who could work now, active or not.
            target: μ_target, rollouts a second; infinite where the model is infeasible.
            waiting: the learner waits for rollouts, so a shortfall is a fact and no drift of estimates.
        """
        active = [c for c in candidates if c.active]
        standby = [c for c in candidates if not c.active]
        mu_pool = sum(c.mu for c in active)
        price = sum(c.price_per_hour for c in active)
        lost = self._active_before - {c.peer for c in active}
        decision = Decision()

        if price > self._cap * (1 + ROUNDING):
            decision = self._fit_under_cap(active)
        elif mu_pool < target:
            self._above_since = None
            self._below_since = now if self._below_since is None else self._below_since
            waited = now - self._below_since >= self._persistence_s
            if not active or lost or waited or waiting:
                added = cheapest(standby, target - mu_pool, price_cap_per_hour=self._cap - price)
                if added:
                    why = _why_add(bool(active), bool(lost), waiting)
                    decision = Decision(
                        activate=tuple(c.peer for c in added),
                        reason=f"{why}: {mu_pool:.3g} of {target:.3g} rollouts/s",
                    )
                    self._below_since = None
        elif self._changing:
            decision = self._end_change(active, target)
        elif mu_pool > target * (1 + self._margin):
            self._below_since = None
            self._above_since = now if self._above_since is None else self._above_since
            if now - self._above_since >= self._persistence_s:
                decision = self._release_dearest(active, target)
                self._above_since = None
        else:
            self._below_since = self._above_since = None
            decision = self._change_for_cheaper(now, candidates, active, target)

        kept = {c.peer for c in active} - set(decision.release)
        self._active_before = frozenset(kept | set(decision.activate))
        return decision

    def _change_for_cheaper(
        self, now: float, candidates: Sequence[Candidate], active: list[Candidate], target: float
    ) -> Decision:
        """Change workers where another set has cost less than this one, by a worthwhile part, for long enough."""
        ideal = cheapest(candidates, target, price_cap_per_hour=self._cap)
        price = sum(c.price_per_hour for c in active)
        saving = price - sum(c.price_per_hour for c in ideal)
        wanted, there = {c.peer for c in ideal}, {c.peer for c in active}
        # Only to let some go is not a change: that excess is inside the margin, and the next wobble wants them back.
        if sum(c.mu for c in ideal) < target or saving < WORTHWHILE_SAVING * price or wanted <= there:
            self._dear_since = None
            return Decision()
        self._dear_since = now if self._dear_since is None else self._dear_since
        if now - self._dear_since < self._persistence_s:
            return Decision()
        self._dear_since = None
        added = [c for c in ideal if c.peer not in there]
        why = f"a cheaper set: ${price - saving:.3g}/h instead of ${price:.3g}/h"
        if price + sum(c.price_per_hour for c in added) > self._cap:
            released = tuple(c.peer for c in active if c.peer not in wanted)
            return Decision(tuple(c.peer for c in added), released, why)
        self._changing = frozenset(c.peer for c in added)
        return Decision(activate=tuple(c.peer for c in added), reason=why)

    def _end_change(self, active: list[Candidate], target: float) -> Decision:
        """Once all that came for a change have the weights, or have gone, let the dearest go."""
        if any(c.arriving for c in active if c.peer in self._changing):
            return Decision()
        self._changing = frozenset()
        return self._release_dearest(active, target, why="the cheaper ones are ready")

    def _release_dearest(
        self, active: list[Candidate], target: float, *, why: str = "pool above target"
    ) -> Decision:
        """Let go, dearest rollouts first, of all that the target can do without."""
        released: list[str] = []
        mu_pool = mu_left = sum(c.mu for c in active if not c.arriving)
        for candidate in reversed(by_cost(active)):
            spare = mu_left - candidate.mu >= target and not candidate.arriving
            if spare and len(released) + 1 < len(active):
                released.append(candidate.peer)
                mu_left -= candidate.mu
        if not released:
            return Decision()
        return Decision(
            release=tuple(released),
            reason=f"{why}: {mu_pool:.3g} of {target:.3g} rollouts/s",
        )

    def _fit_under_cap(self, active: list[Candidate]) -> Decision:
        price = sum(c.price_per_hour for c in active)
        released: list[str] = []
        for candidate in reversed(by_cost(active)):
            if price <= self._cap * (1 + ROUNDING):
                break
            released.append(candidate.peer)
            price -= candidate.price_per_hour
        return Decision(release=tuple(released), reason=f"price cap of ${self._cap:g}/h")


def _why_add(active: bool, lost: bool, waiting: bool) -> str:
    if not active:
        return "none active"
    if lost:
        return "workers lost"
    return "the learner waits" if waiting else "pool below target"
