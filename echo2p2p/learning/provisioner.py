"""Who is paid: measures what the capacity model needs, decides with it, and tells the workers.

The decisions themselves are pure (:mod:`echo2p2p.provisioning`); this is the loop around them.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Mapping
from statistics import median

from echo2p2p.config import LearnerSettings, ProvisioningSettings
from echo2p2p.data.work import Standby
from echo2p2p.learning.sessions import Session
from echo2p2p.provisioning.accounting import Spending
from echo2p2p.provisioning.activation import Activator, Candidate, by_cost
from echo2p2p.provisioning.capacity import mu_min
from echo2p2p.provisioning.estimators import DurationEstimator
from echo2p2p.swarm.clock import Clock
from echo2p2p.telemetry.events import EventLog

BELIEVABLE_SPEEDUP = 10.0
MAX_OVERSIZE = 4.0
"""The pool is never wanted larger than this many times what the learner consumes."""
FIRST_DECISION_DEADLINE_S = 120.0
"""After this long the run starts with the workers that are there, even if fewer than ``min_workers``."""


class Provisioner:
    """Keeps the cheapest set of workers active that keeps the learner busy.

    Args:
        sessions: the open sessions, by peer; read at every decision.
        mean_tokens: completion tokens a rollout, as far as is known; turns announced tokens/s into μ.
        activated: called with a session that has just become active; tells the worker.
    """

    def __init__(
        self,
        settings: ProvisioningSettings,
        learner: LearnerSettings,
        *,
        sessions: Mapping[str, Session],
        mean_tokens: Callable[[], float],
        activated: Callable[[Session], None],
        clock: Clock,
        events: EventLog,
    ) -> None:
        self._settings = settings
        self._learner = learner
        self._sessions = sessions
        self._mean_tokens = mean_tokens
        self._activated = activated
        self._clock = clock
        self._events = events
        self._activator = Activator(
            persistence_s=settings.persistence_s,
            margin=settings.margin,
            price_cap_per_hour=settings.price_cap_per_hour or math.inf,
        )
        self._started_at: float | None = None
        self._changed = asyncio.Event()
        self._any_active = asyncio.Event()
        self.t_train = DurationEstimator(settings.t_train_prior_s, weight=0.05)
        self.t_bcast = DurationEstimator(settings.t_bcast_prior_s, weight=0.1)
        self.spending = Spending()

    @property
    def active(self) -> list[Session]:
        return [session for session in self._sessions.values() if session.active]

    @property
    def mu_min(self) -> float:
        """μ_min(κ) from what has been measured so far.

        Where nothing can overlap (sequential training) or the model is infeasible (κ·T_train ≤ T_bcast), more
        workers would not hide the broadcast; the pool is then sized for generation to take as long as training.
        """
        rollouts, t_train_s = self._learner.rollouts_per_step, self.t_train.seconds
        overlapped = mu_min(
            kappa=self._learner.publication_period,
            rollouts=rollouts,
            t_train_s=t_train_s,
            t_bcast_s=self.t_bcast.seconds,
        )
        if self._learner.is_sequential or math.isinf(overlapped):
            return rollouts / t_train_s
        # Close to infeasible, the model asks for the whole market; beyond this it would buy nothing.
        return min(overlapped, MAX_OVERSIZE * rollouts / t_train_s)

    @property
    def mu_target(self) -> float:
        return self._settings.gamma * self.mu_min

    @property
    def mu_pool(self) -> float:
        return sum(session.mu(self._mean_tokens()) for session in self.active)

    @property
    def spend_per_hour(self) -> float:
        return sum(session.price_per_hour for session in self.active)

    async def wait_active(self) -> bool:
        """True once a worker has been activated; there is no deadline, a run waits for its workers."""
        return await self._any_active.wait()

    def pool_changed(self) -> None:
        """A worker came or went: decide soon instead of at the next period."""
        self._changed.set()

    def account(self) -> None:
        """Bring the spending up to date; called before anybody's state or presence changes."""
        per_hour = {True: 0.0, False: 0.0}
        for session in self._sessions.values():
            per_hour[session.active] += session.price_per_hour
        self.spending.advance(self._clock.monotonic(), per_hour[True], per_hour[False])

    async def run(self) -> None:
        """Decide every period, and at once when the pool changes, until cancelled."""
        self._started_at = self._clock.monotonic()
        while True:
            self._changed.clear()
            if self._may_start():
                self.decide()
            try:
                async with asyncio.timeout(self._settings.period_s):
                    await self._changed.wait()
            except TimeoutError:
                pass

    def decide(self) -> None:
        """One turn: compare the pool with the target, activate and release."""
        self.account()
        for session in self.active:
            if session.raised_its_price:
                # It was chosen at another price; at this one it is a candidate like any other.
                session.release()
                session.advertised(session.advert)
                session.tell(Standby())
        candidates = self._candidates()
        decision = self._activator.decide(self._clock.monotonic(), candidates, self.mu_target)
        for peer in decision.release:
            self._sessions[peer].release()
            self._sessions[peer].tell(Standby())
        for peer in decision.activate:
            self._sessions[peer].activate()
            self._activated(self._sessions[peer])
            self._any_active.set()
        if decision.activate or decision.release:
            self.report(decision.reason, candidates)

    def report(self, reason: str, candidates: list[Candidate] | None = None) -> None:
        """Write down who is active, and the whole pool in the order in which it would be activated."""
        if candidates is None:
            candidates = self._candidates()
        reachable = sum(candidate.mu for candidate in candidates)
        self._events.emit(
            "activation",
            active=[session.peer for session in self.active],
            pool=[
                {
                    "worker": c.peer,
                    "price_per_hour": c.price_per_hour,
                    "mu": c.mu,
                    "rho": c.rho,
                    "state": "active" if self._sessions[c.peer].active else "standby",
                }
                for c in by_cost(candidates)
            ],
            mu_pool=self.mu_pool,
            mu_target=self.mu_target,
            mu_min=self.mu_min,
            feasible=reachable >= self.mu_target,
            reason=reason,
        )

    def _candidates(self) -> list[Candidate]:
        """Everybody. A speed that is only announced counts up to a few times the median of those measured; a worker
        that announces none is taken to be like the median, or to carry its share.
        """
        mean_tokens = self._mean_tokens()
        measured = [s.mu(mean_tokens) for s in self._sessions.values() if s.rate is not None]
        believable = BELIEVABLE_SPEEDUP * median(measured) if measured else math.inf
        share = self._learner.rollouts_per_step / self.t_train.seconds / max(1, len(self._sessions))
        for session in self._sessions.values():
            session.assumed_mu = median(measured) if measured else share
        return [s.candidate(mean_tokens, believable=believable) for s in self._sessions.values()]

    def _may_start(self) -> bool:
        """The first choice waits for ``min_workers``, so that it is one between offers, not a race."""
        if self.active or len(self._sessions) >= self._learner.min_workers:
            return bool(self._sessions)
        waited = self._clock.monotonic() - (self._started_at or 0.0)
        return bool(self._sessions) and waited >= FIRST_DECISION_DEADLINE_S
