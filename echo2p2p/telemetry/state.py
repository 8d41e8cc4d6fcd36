"""What the events so far say of a run: takes them one by one, in constant time each.

It takes whatever a log holds: a run that is still going, one that crashed and was resumed several times,
fields that are missing or of the wrong type (NaN, or nothing). No event makes it raise.

A resume takes back the steps after its checkpoint, since the policy they made is gone; what was spent and
dropped in them stays counted.
"""

from __future__ import annotations

import math
from collections import Counter, deque
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from echo2p2p.telemetry.cumulative import Cumulative
from echo2p2p.telemetry.events import Event
from echo2p2p.telemetry.kinds import PUBLISHED_FOR
from echo2p2p.telemetry.story import tell
from echo2p2p.telemetry.values import amount, number, whole

STEP_COLUMNS = (
    "reward_mean",
    "reward_std",
    "loss",
    "grad_norm",
    "entropy",
    "mismatch_kl",
    "weight_max",
    "truncated_fraction",
    "clipped_fraction",
    "masked_fraction",
    "mismatch_max",
    "reference_kl",
    "staleness_mean",
    "staleness_max",
    "tokens",
    "wasted_tokens",
    "groups",
    "trained_groups",
    "t_train_s",
    "t_idle_s",
    "bubble_ratio",
    "mu_pool",
    "mu_target",
    "active",
    "buffered",
    "leased",
)
MAX_NOTABLE = 200
"""How many of the latest notable events are kept."""


@dataclass
class Worker:
    """What the logs say of one worker. Text in it is the worker's own and must be cleaned before it is shown.

    ``mu`` in rollouts a second, ``rho`` in $ per rollout (``price_per_hour / 3600 / mu``; NaN until μ is
    known), ``state`` one of active, standby, gone. ``generated_*`` and ``accepted`` are 0 unless the
    worker's own log was read.
    """

    peer: str
    gpu: str = ""
    price_per_hour: float = math.nan
    mu: float = math.nan
    state: str = "standby"
    left: str = ""
    version: int = -1
    installs: int = 0
    bytes_from_learner: float = 0.0
    bytes_from_peers: float = 0.0
    generated_groups: float = 0.0
    generated_tokens: float = 0.0
    accepted: float = 0.0
    refused: Counter[str] = field(default_factory=Counter)

    @property
    def rho(self) -> float:
        return self.price_per_hour / 3600 / self.mu if self.mu > 0 else math.nan


@dataclass
class Version:
    """How one policy version travelled. NaN where the log does not say."""

    version: int
    snapshot_bytes: float = math.nan
    t_bcast_s: float = math.nan
    bytes_from_learner: float = 0.0
    bytes_from_peers: float = 0.0
    installs: int = 0
    why: str = ""
    """Why it was published; of those that the kinds of events name, or empty."""
    reports: int = 0
    """Workers that said when their bytes came."""


@dataclass(frozen=True)
class Decision:
    """One activation: who was chosen, out of whom, for which target. Units as in :class:`Worker`."""

    pool: tuple[tuple[str, float, float, str], ...]  # worker, price_per_hour, mu, state; by ρ ascending
    mu_pool: float
    mu_target: float
    feasible: bool
    reason: str


class RunState:
    """Takes events in order; see the module's docstring. Not thread-safe.

    Its attributes are for reading: the live view looks at them, and
    :func:`echo2p2p.telemetry.history.freeze` makes arrays of them.
    """

    def __init__(self) -> None:
        self.started: Event = {}
        self.finished: Event | None = None
        self.resumes = 0
        self.last_unix = math.nan
        self.last_step = 0
        self.rows: dict[int, np.ndarray] = {}
        self.evals: dict[int, tuple[float, int]] = {}
        self.versions: dict[int, Version] = {}
        self.workers: dict[str, Worker] = {}
        self.decision: Decision | None = None
        self.refused: Counter[str] = Counter()
        self.spend = Cumulative()
        self.all_on = Cumulative()
        self.drops: dict[str, Cumulative] = {}
        self.notable: deque[tuple[float, str]] = deque(maxlen=MAX_NOTABLE)
        """(seconds since the run began, what happened), the text fit to be shown anywhere."""
        self.staleness: dict[int, dict[int, float]] = {}
        """{step: {staleness: tokens}}."""
        self.skipped: set[int] = set()
        self.oldest = math.nan
        """The oldest token ever trained, in versions; also of steps that a resume took back."""
        self._active: set[str] = set()
        self._last_skip = ""
        self._verdicts: dict[str, float] = {}
        self._past_s = 0.0
        self._t = 0.0

    @property
    def seconds(self) -> float:
        """Wall-clock time of the learner's processes so far."""
        return self._past_s + self._t

    def add(self, event: Event) -> None:
        """Take one event; a kind that matters to nobody here is passed over."""
        kind = str(event.get("event"))
        if event.get("role") == "learner":
            if kind == "run_started":
                self._past_s, self._t = self.seconds, 0.0
            self._t = max(self._t, amount(event.get("t")))
            if not math.isnan(unix := number(event.get("unix"))):
                self.last_unix = unix
        if kind in _HANDLED:
            getattr(self, f"_on_{kind}")(event)
        if kind not in _TOLD_ELSEWHERE:
            self._note(event)

    def column(self, name: str, n: int) -> list[float]:
        """One of :data:`STEP_COLUMNS` over the last ``n`` steps, in order."""
        index = STEP_COLUMNS.index(name)
        return [float(self.rows[step][index]) for step in sorted(self.rows)[-n:]]

    def worker(self, peer: object) -> Worker:
        key = str(peer)
        return self.workers.setdefault(key, Worker(key))

    # --- learner ---------------------------------------------------------------------------------

    def _on_run_started(self, event: Event) -> None:
        if self.started:
            self.resumes += 1
            self._take_back(whole(event.get("resumed_from")))
            for worker in self.workers.values():
                worker.state = "gone"
        else:  # what is known of the steps before, where their own events are not
            step = whole(event.get("resumed_from"))
            self.spend.at(step, number(event.get("spend_usd")))
            self.all_on.at(step, number(event.get("all_on_usd")))
        self.started, self.finished = event, None

    def _on_run_finished(self, event: Event) -> None:
        self.finished = event

    def _on_worker_joined(self, event: Event) -> None:
        worker = self.worker(event.get("worker"))
        worker.gpu = str(event.get("gpu") or "")
        worker.price_per_hour = number(event.get("price_per_hour"))
        worker.state, worker.left = "standby", ""

    def _on_worker_left(self, event: Event) -> None:
        if self.finished is not None:
            return  # the run had its workers to the end; that they leave then is no news
        worker = self.worker(event.get("worker"))
        worker.state, worker.left = "gone", str(event.get("reason") or "")
        self._note(event)

    def _on_activation(self, event: Event) -> None:
        changed = self._active != (active := {str(peer) for peer in _list(event.get("active"))})
        self._active = active
        pool = []
        for entry in _list(event.get("pool")):
            if not isinstance(entry, dict):
                continue
            worker = self.worker(entry.get("worker"))
            worker.price_per_hour = number(entry.get("price_per_hour"))
            worker.mu = number(entry.get("mu"))
            worker.state = str(entry.get("state") or "standby")
            pool.append((by_rho(worker), (worker.peer, worker.price_per_hour, worker.mu, worker.state)))
        decision = Decision(
            pool=tuple(entry for _, entry in sorted(pool)),
            mu_pool=number(event.get("mu_pool")),
            mu_target=number(event.get("mu_target")),
            feasible=event.get("feasible") is not False,
            reason=str(event.get("reason") or ""),
        )
        if active or self.decision is None:
            self.decision = decision
        if changed or not decision.feasible:
            self._note(event)

    def _on_published(self, event: Event) -> None:
        version = self._version(event)
        version.snapshot_bytes = number(event.get("snapshot_bytes"))
        version.why = why if (why := str(event.get("why"))) in PUBLISHED_FOR else ""

    def _on_broadcast(self, event: Event) -> None:
        self._version(event).t_bcast_s = number(event.get("t_bcast_s"))

    def _on_ready(self, event: Event) -> None:
        worker, version = self.worker(event.get("worker")), self._version(event)
        worker.version = version.version
        for total in (worker, version):
            total.installs += 1
            total.bytes_from_learner += amount(event.get("bytes_from_learner"))
            total.bytes_from_peers += amount(event.get("bytes_from_peers"))
        version.reports += bool(_list(event.get("arrivals")))

    def _on_step(self, event: Event) -> None:
        step = whole(event.get("step"))
        self.last_step = step
        self.rows[step] = np.array([number(event.get(name)) for name in STEP_COLUMNS])
        histogram = event.get("staleness_hist")
        items = histogram.items() if isinstance(histogram, dict) else ()
        self.staleness[step] = {int(key): amount(n) for key, n in items if key.isdecimal() and len(key) < 10}
        ages = [number(event.get("staleness_max")), *map(float, self.staleness[step]), self.oldest]
        self.oldest = max((age for age in ages if not math.isnan(age)), default=math.nan)
        skipped = str(event.get("skipped") or "")
        if skipped:
            self.skipped.add(step)
        else:
            self.skipped.discard(step)
        if skipped and skipped != self._last_skip:
            self._note(event)
        self._last_skip = skipped
        self.spend.at(step, number(event.get("spend_usd")))
        self.all_on.at(step, number(event.get("all_on_usd")))
        dropped = event.get("dropped")
        for reason, count in dropped.items() if isinstance(dropped, dict) else ():
            self.drops.setdefault(str(reason), Cumulative()).at(step, number(count))

    def _on_eval(self, event: Event) -> None:
        if not math.isnan(reward := number(event.get("reward"))):
            self.evals[whole(event.get("step"))] = (reward, whole(event.get("n")))

    def _on_refused(self, event: Event) -> None:
        reason, worker = str(event.get("reason")), self.worker(event.get("worker"))
        self.refused[reason] += 1
        worker.refused[reason] += 1
        if worker.refused[reason] == 1:
            self._note(event)

    # --- worker ----------------------------------------------------------------------------------

    def _on_generated(self, event: Event) -> None:
        worker = self.worker(event.get("peer"))
        worker.generated_groups += amount(event.get("groups"))
        worker.generated_tokens += amount(event.get("tokens"))

    def _on_verdicts(self, event: Event) -> None:
        worker, reading = self.worker(event.get("peer")), amount(event.get("accepted"))
        before = self._verdicts.get(worker.peer, 0.0)
        worker.accepted += reading - before if reading >= before else reading
        self._verdicts[worker.peer] = reading

    def _take_back(self, resumed_from: int) -> None:
        for by_step in (self.rows, self.evals, self.staleness):
            for step in [step for step in by_step if step > resumed_from]:
                del by_step[step]
        self.skipped = {step for step in self.skipped if step <= resumed_from}
        self.last_step = resumed_from
        for counter in (self.spend, self.all_on, *self.drops.values()):
            counter.restart(resumed_from)

    def _note(self, event: Event) -> None:
        if text := tell(event):
            self.notable.append((self.seconds, text))

    def _version(self, event: Event) -> Version:
        key = whole(event.get("version"))
        return self.versions.setdefault(key, Version(key))


_HANDLED = {name.removeprefix("_on_") for name in vars(RunState) if name.startswith("_on_")}
_TOLD_ELSEWHERE = {"activation", "installed", "refused", "session", "state", "step", "worker_left"}
"""Too frequent to be notable each time: their handlers decide."""


def _list(value: object) -> list[Any]:
    return value if isinstance(value, list) else []


def by_rho(worker: Worker) -> tuple[float, str]:
    """Sort key: the cheapest throughput first, workers without a known ρ last."""
    return (math.inf if math.isnan(worker.rho) else worker.rho, worker.peer)
