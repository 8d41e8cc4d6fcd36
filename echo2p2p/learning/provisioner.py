"""Who is paid: measures what the capacity model needs, decides with it, and tells the workers.

The decisions themselves are pure (:mod:`echo2p2p.provisioning`); this is the loop around them.
"""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import Callable, Mapping
from statistics import median

from echo2p2p.data.work import Standby
from echo2p2p.learning.sessions import Session
from echo2p2p.provisioning.accounting import Budget, Spending
from echo2p2p.provisioning.activation import Activator, Candidate, by_cost
from echo2p2p.provisioning.capacity import arriving_kappa, mu_min, mu_min_standing
from echo2p2p.provisioning.estimators import DurationEstimator, Shortfall
from echo2p2p.settings import LearnerSettings, ProvisioningSettings
from echo2p2p.swarm.clock import Clock
from echo2p2p.swarm.identity import PeerId
from echo2p2p.telemetry.events import EventLog

log = logging.getLogger("echo2p2p.learner")

BELIEVABLE_SPEEDUP = 10.0
MAX_OVERSIZE = 4.0
"""The pool is never wanted larger than this many times what the learner consumes."""
FIRST_DECISION_DEADLINE_S = 120.0
"""After this long the run starts with the workers that are there, even if fewer than ``min_workers``."""


BUDGET_RESERVE_S = 1.0
"""The last second that the budget pays for is not bought: the loop may be that late."""


class Provisioner:
    """Keeps the cheapest set of workers active that keeps the learner busy.

    Args:
        sessions: the open sessions, by peer; read at every decision.
        mean_tokens: completion tokens a rollout, as far as is known; turns announced tokens/s into μ.
        activated: called with a session that has just become active; tells the worker.
        outstanding: groups that are out with a worker.
        keeps_up: whether a worker has weights that it can be leased work for.
        workers_stand: workers generate nothing while a version travels, to model systems whose workers do so.

    Attributes:
        winding_down: the budget pays for what is leased, and for no more.
        spent: set once the budget is spent and nobody is active any more.
    """

    def __init__(
        self,
        settings: ProvisioningSettings,
        learner: LearnerSettings,
        *,
        sessions: Mapping[str, Session],
        mean_tokens: Callable[[], float],
        activated: Callable[[Session], None],
        outstanding: Callable[[str], int],
        keeps_up: Callable[[Session], bool],
        clock: Clock,
        events: EventLog,
        workers_stand: bool = False,
    ) -> None:
        self._settings = settings
        self._workers_stand = workers_stand
        self._learner = learner
        self._sessions = sessions
        self._mean_tokens = mean_tokens
        self._activated = activated
        self._outstanding = outstanding
        self._keeps_up = keeps_up
        self._clock = clock
        self._events = events
        self._activator = Activator(
            persistence_s=settings.persistence_s,
            margin=settings.margin,
            price_cap_per_hour=settings.price_cap_per_hour or math.inf,
        )
        self._active: dict[PeerId, Session] = {}
        self._started_at: float | None = None
        self._changed = asyncio.Event()
        self._any_active = asyncio.Event()
        self.t_train = DurationEstimator(settings.t_train_prior_s, weight=0.05)
        self.t_bcast = DurationEstimator(settings.t_bcast_prior_s, weight=0.1)
        self.spending = Spending()
        budget = settings.budget_usd
        self._budget = Budget(math.inf if budget is None else budget, reserve_s=BUDGET_RESERVE_S)
        self.winding_down = False
        self.spent = asyncio.Event()
        self._shortfall = Shortfall()
        self._shortfall_is_news = False
        self._waiting_since: float | None = None

    @property
    def active(self) -> list[Session]:
        return list(self._active.values())

    @property
    def n_active(self) -> int:
        return len(self._active)

    @property
    def mu_min(self) -> float:
        """μ_min(κ) from what has been measured so far.

        Where nothing can overlap (sequential training) or the model is infeasible (a broadcast outlasts κ steps or
        the window), more workers would not hide the broadcast; the pool is then sized for generation to take as
        long as training.
        """
        at_least = self._learner.rollouts_per_step / self.t_train.seconds
        if not self._overlaps:
            return at_least
        # Close to infeasible, the model asks for the whole market; beyond this it would buy nothing.
        return min(self._overlapped, MAX_OVERSIZE * at_least)

    @property
    def _overlapped(self) -> float:
        staleness, rollouts = self._learner.staleness, self._learner.rollouts_per_step
        times = {"t_train_s": self.t_train.seconds, "t_bcast_s": self.t_bcast.seconds}
        kappa = arriving_kappa(self._learner.publication_period, staleness=staleness, **times)
        if self._workers_stand:
            return mu_min_standing(kappa=kappa, rollouts=rollouts, **times)
        return mu_min(kappa=kappa, staleness=staleness, rollouts=rollouts, t_work_s=self.t_work_s, **times)

    @property
    def t_work_s(self) -> float:
        """T_work of the active workers: each counts as far as it delivers; 0 until something has been measured."""
        mean_tokens = self._mean_tokens()
        work = [(session.mu(mean_tokens), session.work.seconds) for session in self.active]
        mu = sum(mu for mu, seconds in work if seconds > 0)
        return sum(mu * seconds for mu, seconds in work) / mu if mu > 0 else 0.0

    @property
    def mu_target(self) -> float:
        """γ·μ_min, and more where the learner has waited all the same."""
        return self._settings.gamma * self.mu_min * self._shortfall.factor

    @property
    def mu_pool(self) -> float:
        return sum(session.mu(self._mean_tokens()) for session in self.active)

    @property
    def spend_per_hour(self) -> float:
        return sum(session.price_per_hour for session in self.active)

    def learner_waits(self) -> None:
        """The learner looks for a batch, with workers that have had the time to begin."""
        self._waiting_since = self._clock.monotonic()

    def learner_trains(self) -> None:
        """The learner has its batch."""
        if self._waited_s is not None and self._shortfall.stepped(self._waited_s, self.t_train.seconds):
            self._shortfall_is_news = True
            self._changed.set()
        self._waiting_since = None

    @property
    def _waited_s(self) -> float | None:
        """For how long the learner has waited, if that says anything about the pool."""
        if self._waiting_since is None or not self._overlaps:
            return None
        return self._clock.monotonic() - self._waiting_since

    @property
    def _overlaps(self) -> bool:
        """Whether a wait says anything about the pool: otherwise the learner waits by design."""
        return not self._learner.is_sequential and math.isfinite(self._overlapped)

    async def wait_active(self) -> bool:
        """True once a worker has been activated; there is no deadline, a run waits for its workers."""
        return await self._any_active.wait()

    def pool_changed(self) -> None:
        """Something about the workers is new: decide soon instead of at the next period."""
        self._changed.set()

    def came(self, session: Session) -> None:
        """A session stands. One that its worker had before is paid no longer."""
        self._active.pop(session.peer, None)
        self._changed.set()

    def left(self, session: Session) -> None:
        """A session has ended."""
        if self._active.get(session.peer) is session:
            del self._active[session.peer]
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
            if self._may_start() or self.winding_down or self._seconds_until_broke() <= 0:
                self.decide()
            pause_s = self._settings.period_s
            if not self.spent.is_set():
                pause_s = min(pause_s, max(0.01, self._seconds_until_broke()))
            try:
                async with asyncio.timeout(pause_s):
                    await self._changed.wait()
            except TimeoutError:
                pass

    def decide(self) -> None:
        """One turn: compare the pool with the target, activate and release."""
        self.account()
        now = self._clock.monotonic()
        for session in self.active:
            if not self._keeps_up(session):
                session.without_version(now, longest_s=self._learner.lease_s, mean_tokens=self._mean_tokens())
            if session.raised_its_price:
                # It was chosen at another price; at this one it is a candidate like any other.
                self._release(session)
                session.advertised(session.advert)
        if self._over_budget():
            return
        if self._waited_s is not None and self._shortfall.waits(self._waited_s, self.t_train.seconds):
            self._shortfall_is_news = True
        waiting, self._shortfall_is_news = self._shortfall_is_news, False
        candidates = self._candidates()
        decision = self._activator.decide(now, candidates, self.mu_target, waiting=waiting)
        for peer in decision.release:
            self._release(self._sessions[peer])
        price = self.spend_per_hour + sum(self._sessions[p].price_per_hour for p in decision.activate)
        if decision.activate and self._seconds_until_broke(price) <= 0:
            self._wind_down()
            self._over_budget()
            return
        for peer in decision.activate:
            self._active[peer] = self._sessions[peer]
            self._sessions[peer].activate(now)
            self._activated(self._sessions[peer])
            self._any_active.set()
        if decision.activate or decision.release:
            self.report(decision.reason, candidates)

    def _release(self, session: Session) -> None:
        self._active.pop(session.peer, None)
        session.release()
        session.tell(Standby())

    # --- budget -------------------------------------------------------------------------------------

    def _committed_usd(self) -> float:
        """The price of what is leased to active workers, at the speed that each has shown."""
        mean_tokens, per_group = self._mean_tokens(), self._learner.samples_per_prompt
        total = 0.0
        for session in self.active:
            rollouts = self._outstanding(session.peer) * per_group
            busy_s = min(self._learner.lease_s, rollouts / max(session.mu(mean_tokens), 1e-9))
            total += session.price_per_hour * busy_s / 3600
        return total

    def _seconds_until_broke(self, per_hour: float | None = None) -> float:
        """Until the active workers, or a set at ``per_hour``, must be released at the latest."""
        per_hour = self.spend_per_hour if per_hour is None else per_hour
        return self._budget.seconds_left(self.spending.usd, 0.0, per_hour)

    def _wind_down(self) -> None:
        if not self.winding_down:
            self.winding_down = True
            log.warning("the budget of $%g pays for what is leased and no more", self._budget.usd)

    def _over_budget(self) -> bool:
        """Stop leasing while what is left pays for what is out; release whoever is done, and all when it is gone."""
        active, per_hour = self.active, self.spend_per_hour
        left_s = self._budget.seconds_left(self.spending.usd, self._committed_usd(), per_hour)
        if not self.winding_down and left_s > (self._settings.period_s if active else 0.0):
            return False
        broke = self._seconds_until_broke() <= 0
        self._wind_down()
        for session in active:
            session.not_before = math.inf
            if session.price_per_hour > 0 and (broke or not self._outstanding(session.peer)):
                self._release(session)
        if len(self.active) < len(active):
            self.report(f"budget of ${self._budget.usd:g}")
        if not any(session.price_per_hour > 0 for session in self.active):
            for session in self.active:
                self._release(session)
            self.spent.set()
        return True

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
        """Everybody. A speed that is only announced counts as far as others have kept theirs, and up to a few times
        the median of those measured; who announces none is taken to be like the median, or to carry its share.
        """
        mean_tokens = self._mean_tokens()
        measured = [s.mu(mean_tokens) for s in self._sessions.values() if s.rate is not None]
        believable = BELIEVABLE_SPEEDUP * median(measured) if measured else math.inf
        share = self._learner.rollouts_per_step / self.t_train.seconds / max(1, len(self._sessions))
        usual = median(measured) if measured else share
        # Batches that wait for their longest completion, say, make every announcement too good in the same way.
        parts = [part for s in self._sessions.values() if (part := s.kept(mean_tokens)) is not None]
        kept = min(1.0, median(parts)) if parts else 1.0
        for session in self._sessions.values():
            session.assumed_mu = usual
            session.usually_kept = kept
        return [
            s.candidate(mean_tokens, keeps_up=self._keeps_up(s), believable=believable)
            for s in self._sessions.values()
        ]

    def _may_start(self) -> bool:
        """The first choice waits for ``min_workers``, so that it is one between offers, not a race."""
        if self.active or len(self._sessions) >= self._learner.min_workers:
            return bool(self._sessions)
        waited = self._clock.monotonic() - (self._started_at or 0.0)
        return bool(self._sessions) and waited >= FIRST_DECISION_DEADLINE_S
