"""What came of a simulated run: its figures, its bill, and whether the promises held.

The bill is kept here, from who was active when and what each one really costs, and not taken from the learner.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Any

from echo2p2p.simulation.scenario import Scenario
from echo2p2p.telemetry.events import Event

_CENT = 1e-6


@dataclass(frozen=True)
class Outcome:
    """How a scenario went. Figures leave the warm-up out; None where there is nothing to take them from.

    Attributes:
        steps: training steps in all.
        step_s, wait_s: of one step, on average; the wait is part of the step.
        t_bcast_s: mean over the versions after the first one.
        active: active workers, on average over time.
        usd_per_step: learner and active workers together; ``worker_usd_per_step`` is the workers' part.
        bytes_per_version: that travel for one version to one worker: the patch, or the whole.
        by_learner: part of all chunk bytes that the learner sent.
        happened: joins, leaves, kills.
        broken: promises that did not hold, in words; empty if all is well.
    """

    scenario: str
    virtual_s: float
    steps: int
    step_s: float | None
    wait_s: float | None
    bubble_ratio: float | None
    t_bcast_s: float | None
    active: float | None
    most_active: int
    usd_per_step: float | None
    worker_usd_per_step: float | None
    staleness_max: int
    tokens_per_s: float | None
    bytes_per_version: float | None
    by_learner: float | None
    dropped: Mapping[str, int]
    happened: Mapping[str, int]
    broken: tuple[str, ...]


@dataclass(frozen=True)
class _Step:
    t: float
    t_train_s: float
    t_idle_s: float
    staleness_max: int
    tokens: int
    worker_usd: float
    active_seconds: float


class Books:
    """Takes the learner's events one by one.

    Attributes:
        prices: what each worker really costs, $/h.
        flat_price: what every worker announces where the learner must not see prices.
    """

    def __init__(self, scenario: Scenario) -> None:
        count = sum(workers.count for workers in scenario.workers)
        total = sum(workers.count * workers.price_per_hour for workers in scenario.workers)
        self.flat_price = total / count if count else scenario.workers[0].price_per_hour
        self.prices: dict[str, float] = {}
        self.taken: list[_Step] = []
        self.broadcasts: list[tuple[float, float]] = []
        self.travelled: list[tuple[float, int]] = []
        self.bytes: Counter[str] = Counter()
        self.dropped: dict[str, int] = {}
        self.most_active = 0
        self.dearest = 0.0
        self._paid: dict[str, float] = {}
        self._t = 0.0
        self._usd = 0.0
        self._active_seconds = 0.0

    @property
    def steps(self) -> int:
        return len(self.taken)

    @property
    def active(self) -> int:
        return len(self._paid)

    def price(self, worker: str, per_hour: float) -> None:
        """``worker`` costs so much from now on; one that is active, from its next activation on if that is more."""
        self.prices[worker] = per_hour
        if worker in self._paid and per_hour < self._paid[worker]:
            self._paid[worker] = per_hour

    def learner_is_gone(self) -> None:
        """Nobody is paid any more."""
        self._paid.clear()

    def take(self, event: Event) -> None:
        """One event of the learner's log."""
        self._advance(event["t"])
        kind = event["event"]
        if kind == "activation":
            self._paid = {peer: self._paid.get(peer, self.prices[peer]) for peer in event["active"]}
            self.most_active = max(self.most_active, len(self._paid))
            self.dearest = max(self.dearest, sum(self._paid.values()))
        elif kind == "worker_left":
            self._paid.pop(event["worker"], None)
        elif kind == "broadcast":
            self.broadcasts.append((event["t"], event["t_bcast_s"]))
        elif kind == "published":
            self.travelled.append((event["t"], event["patch_bytes"] or event["snapshot_bytes"]))
        elif kind == "ready":
            self.bytes["learner"] += event["bytes_from_learner"]
            self.bytes["peers"] += event["bytes_from_peers"]
        elif kind == "step":
            self.dropped = event["dropped"]
            self.taken.append(
                _Step(
                    event["t"],
                    event["t_train_s"],
                    event["t_idle_s"],
                    event["staleness_max"],
                    event["tokens"],
                    self._usd,
                    self._active_seconds,
                )
            )

    def _advance(self, now: float) -> None:
        seconds = max(0.0, now - self._t)
        self._t = now
        self._usd += sum(self._paid.values()) / 3600 * seconds
        self._active_seconds += len(self._paid) * seconds


def judge(scenario: Scenario, books: Books, trained: Sequence[int], happened: Mapping[str, int]) -> Outcome:
    """The outcome of a run that has ended.

    Args:
        trained: prompt indices, as the trainer took them.
    """
    steps = books.taken[scenario.warmup_steps :]
    # The first step after the warm-up only says when the others begin.
    counted = steps[1:]
    n = len(counted)
    span_s = steps[-1].t - steps[0].t if n else 0.0
    worker_usd = steps[-1].worker_usd - steps[0].worker_usd if n else 0.0
    usd = worker_usd + scenario.learner.price_per_hour / 3600 * span_s
    idle = sum(step.t_idle_s for step in counted)
    busy = sum(step.t_train_s for step in counted)
    begun = steps[0].t if n else 0.0
    broadcasts = [t_bcast_s for t, t_bcast_s in books.broadcasts if t > begun]
    travelled = [nbytes for t, nbytes in books.travelled if t > begun]
    moved = sum(books.bytes.values())
    return Outcome(
        scenario=scenario.name,
        virtual_s=scenario.duration_s,
        steps=books.steps,
        step_s=span_s / n if n else None,
        wait_s=idle / n if n else None,
        bubble_ratio=idle / (idle + busy) if n else None,
        t_bcast_s=fmean(broadcasts) if broadcasts else None,
        active=(steps[-1].active_seconds - steps[0].active_seconds) / span_s if n else None,
        most_active=books.most_active,
        usd_per_step=usd / n if n else None,
        worker_usd_per_step=worker_usd / n if n else None,
        staleness_max=max((step.staleness_max for step in books.taken), default=0),
        tokens_per_s=sum(step.tokens for step in counted) / span_s if n else None,
        bytes_per_version=fmean(travelled) if travelled else None,
        by_learner=books.bytes["learner"] / moved if moved else None,
        dropped=books.dropped,
        happened=happened,
        broken=tuple(_broken(scenario, books, trained)),
    )


def _broken(scenario: Scenario, books: Books, trained: Sequence[int]) -> list[str]:
    settings = scenario.settings
    found = []
    oldest = max((step.staleness_max for step in books.taken), default=0)
    if oldest > settings.learner.staleness:
        found.append(f"window: a token of {oldest} versions was trained, S is {settings.learner.staleness}")
    twice = len(trained) - len(set(trained))
    if twice:
        found.append(f"exactly once: {twice} prompts were trained again")
    cap = settings.provisioning.price_cap_per_hour or math.inf
    if scenario.rules.cost_aware and books.dearest > cap + _CENT:
        found.append(f"price cap: ${books.dearest:.4g}/h were paid at once, ${cap:g}/h is the cap")
    return found


def figures(outcome: Outcome) -> dict[str, Any]:
    """The outcome as JSON can hold it."""
    return {key: _plain(getattr(outcome, key)) for key in Outcome.__dataclass_fields__}


def _plain(value: Any) -> Any:
    if isinstance(value, Mapping):
        return dict(value)
    return list(value) if isinstance(value, tuple) else value
