"""From events to one typed picture of a run.

:class:`RunState` takes events one by one and is what the live view looks at; :meth:`RunState.history` turns
it into a :class:`RunHistory`, arrays that the report and the summary draw from.

Both take whatever a log holds: a run that is still going, one that crashed and was resumed several times
(a step that was done twice counts as it was done last; money spent on it twice stays spent), fields that
are missing or of the wrong type (NaN, or nothing). No event makes them raise.
"""

from __future__ import annotations

import math
from collections import Counter, deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import numpy as np

from echo2p2p.telemetry.cumulative import Cumulative
from echo2p2p.telemetry.events import Event, read_events

STEP_COLUMNS = (
    "reward_mean",
    "reward_std",
    "loss",
    "grad_norm",
    "entropy",
    "mismatch_kl",
    "ratio_max",
    "clipped_fraction",
    "staleness_mean",
    "staleness_max",
    "tokens",
    "groups",
    "t_train_s",
    "t_idle_s",
    "bubble_ratio",
    "mu_pool",
    "mu_target",
    "active",
    "buffered",
    "leased",
)
NOTABLE = {
    "run_started",
    "worker_joined",
    "worker_left",
    "run_finished",
    "eval",
    "events_lost",
    "refused",
    "checkpoint",
    "broadcast",
    "activation",
}
"""Kinds that a person wants to see in a list of what happened."""
_MAX_NOTABLE = 200


def number(value: object) -> float:
    """``value`` as a float, NaN where it is none; a list counts as its length."""
    if isinstance(value, list):
        return float(len(value))
    if isinstance(value, bool) or not isinstance(value, int | float):
        return math.nan
    result = float(value)
    return result if math.isfinite(result) else math.nan


def amount(value: object) -> float:
    """:func:`number`, with 0 where it is none: for sums."""
    result = number(value)
    return 0.0 if math.isnan(result) else result


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


@dataclass(frozen=True)
class Decision:
    """One activation: who was chosen, out of whom, for which target. Units as in :class:`Worker`."""

    t_s: float
    pool: tuple[tuple[str, float, float, str], ...]  # worker, price_per_hour, mu, state; by ρ ascending
    mu_pool: float
    mu_target: float
    feasible: bool
    reason: str


@dataclass(frozen=True)
class RunHistory:
    """A run, as its logs tell it.

    Attributes:
        started: fields of the last ``run_started``; empty if there is none.
        finished: fields of ``run_finished``; None if the run is still going or ended without it.
        resumes: how often it was started again.
        seconds: wall-clock time of all its processes.
        steps: numbers of the steps that count, ascending; int64, shape (n,).
        columns: one float array of shape (n,) for each of :data:`STEP_COLUMNS`, NaN where unknown.
        spend_usd, all_on_usd: cumulative over resumes; shape (n,).
        staleness_tokens: tokens trained on, by staleness.
        dropped: groups dropped by reason, over the whole run.
        refused: groups refused at admission, by reason.
        evals: step, held-out reward, prompts.
        skipped_steps: how many of the steps applied no update.
    """

    started: Mapping[str, Any]
    finished: Mapping[str, Any] | None
    resumes: int
    seconds: float
    last_unix: float
    steps: np.ndarray
    columns: Mapping[str, np.ndarray]
    spend_usd: np.ndarray
    all_on_usd: np.ndarray
    staleness_tokens: Mapping[int, float]
    dropped: Mapping[str, float]
    refused: Mapping[str, int]
    evals: tuple[tuple[int, float, int], ...]
    versions: tuple[Version, ...]
    workers: tuple[Worker, ...]
    decision: Decision | None
    notable: tuple[Event, ...]
    skipped_steps: int

    @property
    def run(self) -> str:
        return str(self.started.get("run") or "")

    @property
    def window(self) -> float:
        """S, in versions; NaN if the log does not say."""
        return number(self.started.get("staleness"))

    @property
    def staleness_max(self) -> float:
        """The oldest token that was trained, in versions; NaN before the first step."""
        seen = self.columns["staleness_max"]
        reported = [float(v) for v in seen[~np.isnan(seen)]] + [float(s) for s in self.staleness_tokens]
        return max(reported, default=math.nan)

    @property
    def bubble_ratio(self) -> float:
        """T_idle / (T_idle + T_train) over all steps; NaN before the first."""
        idle = float(np.nansum(self.columns["t_idle_s"]))
        total = idle + float(np.nansum(self.columns["t_train_s"]))
        return idle / total if total > 0 else math.nan

    @property
    def bytes_from_learner(self) -> float:
        return sum(version.bytes_from_learner for version in self.versions)

    @property
    def bytes_from_peers(self) -> float:
        return sum(version.bytes_from_peers for version in self.versions)

    @property
    def reward_before_after(self) -> tuple[float, float]:
        """Held-out reward of the first and of the last evaluation; NaN where there is none."""
        if not self.evals:
            done = self.finished or {}
            return number(done.get("reward_before")), number(done.get("reward_after"))
        first, last = self.evals[0], self.evals[-1]
        return (first[1], last[1] if last[0] != first[0] else math.nan)


class RunState:
    """Takes events in order; see the module's docstring. Not thread-safe."""

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
        self.notable: deque[Event] = deque(maxlen=_MAX_NOTABLE)
        self._staleness: dict[int, dict[int, float]] = {}
        self._skipped: set[int] = set()
        self._past_s = 0.0
        self._t = 0.0

    @property
    def seconds(self) -> float:
        """Wall-clock time of the learner's processes so far."""
        return self._past_s + self._t

    def add(self, event: Event) -> None:
        """Take one event; a kind that matters to nobody here is passed over."""
        if event.get("role") == "learner":
            if event.get("event") == "run_started":
                self._past_s, self._t = self.seconds, 0.0
            self._t = max(self._t, amount(event.get("t")))
            if not math.isnan(number(event.get("unix"))):
                self.last_unix = number(event.get("unix"))
        kind = str(event.get("event"))
        if kind in NOTABLE:
            self.notable.append(event)
        handle = getattr(self, f"_on_{kind}", None) if kind in _HANDLED else None
        if handle is not None:
            handle(event)

    def column(self, name: str) -> list[float]:
        """One of :data:`STEP_COLUMNS` over the steps so far, in order."""
        index = STEP_COLUMNS.index(name)
        return [float(self.rows[step][index]) for step in sorted(self.rows)]

    def worker(self, peer: object) -> Worker:
        key = str(peer)
        return self.workers.setdefault(key, Worker(key))

    def history(self) -> RunHistory:
        """What is known so far, as arrays."""
        order = sorted(self.rows)
        table = np.array([self.rows[step] for step in order]).reshape(len(order), len(STEP_COLUMNS))
        staleness: Counter[int] = Counter()
        for histogram in self._staleness.values():
            staleness.update(histogram)
        return RunHistory(
            started=self.started,
            finished=self.finished,
            resumes=self.resumes,
            seconds=self.seconds,
            last_unix=self.last_unix,
            steps=np.array(order, dtype=np.int64),
            columns={name: table[:, i] for i, name in enumerate(STEP_COLUMNS)},
            spend_usd=self.spend.series(order),
            all_on_usd=self.all_on.series(order),
            staleness_tokens=dict(sorted(staleness.items())),
            dropped={reason: counter.total for reason, counter in sorted(self.drops.items())},
            refused=dict(self.refused),
            evals=tuple((step, reward, n) for step, (reward, n) in sorted(self.evals.items())),
            versions=tuple(self.versions[key] for key in sorted(self.versions)),
            workers=tuple(sorted(self.workers.values(), key=_by_rho)),
            decision=self.decision,
            notable=tuple(self.notable),
            skipped_steps=len(self._skipped),
        )

    # --- learner ---------------------------------------------------------------------------------

    def _on_run_started(self, event: Event) -> None:
        if self.started:
            self.resumes += 1
            resumed_from = int(amount(event.get("resumed_from")))
            for counter in (self.spend, self.all_on, *self.drops.values()):
                counter.restart(resumed_from)
            for worker in self.workers.values():
                worker.state = "gone"
        self.started, self.finished = event, None

    def _on_run_finished(self, event: Event) -> None:
        self.finished = event

    def _on_worker_joined(self, event: Event) -> None:
        worker = self.worker(event.get("worker"))
        worker.gpu = str(event.get("gpu") or "")
        worker.price_per_hour = number(event.get("price_per_hour"))
        worker.state, worker.left = "standby", ""

    def _on_worker_left(self, event: Event) -> None:
        worker = self.worker(event.get("worker"))
        worker.state, worker.left = "gone", str(event.get("reason") or "")

    def _on_activation(self, event: Event) -> None:
        pool = []
        for entry in _dicts(event.get("pool")):
            worker = self.worker(entry.get("worker"))
            worker.price_per_hour = number(entry.get("price_per_hour"))
            worker.mu = number(entry.get("mu"))
            worker.state = str(entry.get("state") or "standby")
            pool.append((_by_rho(worker), (worker.peer, worker.price_per_hour, worker.mu, worker.state)))
        self.decision = Decision(
            t_s=amount(event.get("t")),
            pool=tuple(entry for _, entry in sorted(pool)),
            mu_pool=number(event.get("mu_pool")),
            mu_target=number(event.get("mu_target")),
            feasible=event.get("feasible") is not False,
            reason=str(event.get("reason") or ""),
        )

    def _on_published(self, event: Event) -> None:
        self._version(event).snapshot_bytes = number(event.get("snapshot_bytes"))

    def _on_broadcast(self, event: Event) -> None:
        self._version(event).t_bcast_s = number(event.get("t_bcast_s"))

    def _on_ready(self, event: Event) -> None:
        worker, version = self.worker(event.get("worker")), self._version(event)
        worker.version = version.version
        for total in (worker, version):
            total.installs += 1
            total.bytes_from_learner += amount(event.get("bytes_from_learner"))
            total.bytes_from_peers += amount(event.get("bytes_from_peers"))

    def _on_step(self, event: Event) -> None:
        step = int(amount(event.get("step")))
        self.last_step = step
        self.rows[step] = np.array([number(event.get(name)) for name in STEP_COLUMNS])
        histogram = event.get("staleness_hist")
        items = histogram.items() if isinstance(histogram, dict) else ()
        self._staleness[step] = {int(key): amount(n) for key, n in items if str(key).isdecimal()}
        (self._skipped.add if event.get("skipped") is True else self._skipped.discard)(step)
        self.spend.at(step, number(event.get("spend_usd")))
        self.all_on.at(step, number(event.get("all_on_usd")))
        dropped = event.get("dropped")
        for reason, count in dropped.items() if isinstance(dropped, dict) else ():
            self.drops.setdefault(str(reason), Cumulative()).at(step, number(count))

    def _on_eval(self, event: Event) -> None:
        if not math.isnan(reward := number(event.get("reward"))):
            self.evals[int(amount(event.get("step")))] = (reward, int(amount(event.get("n"))))

    def _on_refused(self, event: Event) -> None:
        reason = str(event.get("reason"))
        self.refused[reason] += 1
        self.worker(event.get("worker")).refused[reason] += 1

    # --- worker ----------------------------------------------------------------------------------

    def _on_generated(self, event: Event) -> None:
        worker = self.worker(event.get("peer"))
        worker.generated_groups += amount(event.get("groups"))
        worker.generated_tokens += amount(event.get("tokens"))

    def _on_verdicts(self, event: Event) -> None:
        self.worker(event.get("peer")).accepted += amount(event.get("accepted"))

    def _version(self, event: Event) -> Version:
        key = int(amount(event.get("version")))
        return self.versions.setdefault(key, Version(key))


_HANDLED = {name.removeprefix("_on_") for name in vars(RunState) if name.startswith("_on_")}


def load_history(learner: Path, workers: Iterable[Path] = ()) -> RunHistory:
    """Read a run's logs: the learner's, and those of workers where they are at hand.

    Raises:
        SettingsError: one of them cannot be read.
    """
    state = RunState()
    for path in (learner, *workers):
        for event in read_events(path):
            state.add(event)
    return state.history()


def _dicts(value: object) -> list[dict[str, Any]]:
    return [item for item in value if isinstance(item, dict)] if isinstance(value, list) else []


def _by_rho(worker: Worker) -> tuple[float, str]:
    return (math.inf if math.isnan(worker.rho) else worker.rho, worker.peer)
