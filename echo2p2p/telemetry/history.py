"""From the events files of a run to one typed picture of it, which the report and the summary draw from."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from echo2p2p.telemetry.dissemination import Dissemination, choose_version, read_dissemination
from echo2p2p.telemetry.events import read_events
from echo2p2p.telemetry.state import STEP_COLUMNS, Decision, RunState, Version, Worker, by_rho
from echo2p2p.telemetry.values import number


@dataclass(frozen=True)
class RunHistory:
    """A run, as its logs tell it.

    Attributes:
        started: fields of the last ``run_started``; empty if there is none.
        finished: fields of the last ``run_finished``; None if the run goes on or ended without it.
        resumes: how often it was started again.
        seconds: wall-clock time of all its processes.
        steps: numbers of the steps that count, ascending; int64, shape (n,).
        columns: one float array of shape (n,) for each of :data:`STEP_COLUMNS`, NaN where unknown.
        spend_usd, all_on_usd: cumulative over resumes; shape (n,).
        staleness_max: the oldest token ever trained, in versions, also by steps that were taken back; NaN
            before the first step.
        staleness_tokens: tokens trained on, by staleness.
        dropped: groups dropped by reason, over the whole run.
        refused: groups refused at admission, by reason.
        evals: step, held-out reward, prompts.
        versions: the published ones, ascending.
        workers: all that were ever seen, cheapest throughput first.
        decision: the last activation that left anybody active, or the first.
        notable: (seconds since the run began, what happened); the text is fit to be shown.
        skipped_steps: how many of the steps applied no update.
        dissemination: one version in detail; None if no log has one, or none was read.
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
    staleness_max: float
    staleness_tokens: Mapping[int, float]
    dropped: Mapping[str, float]
    refused: Mapping[str, int]
    evals: tuple[tuple[int, float, int], ...]
    versions: tuple[Version, ...]
    workers: tuple[Worker, ...]
    decision: Decision | None
    notable: tuple[tuple[float, str], ...]
    skipped_steps: int
    dissemination: Dissemination | None = None

    @property
    def run(self) -> str:
        return str(self.started.get("run") or "")

    @property
    def window(self) -> float:
        """S, in versions; NaN if the log does not say."""
        return number(self.started.get("staleness"))

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


def freeze(state: RunState) -> RunHistory:
    """What ``state`` knows so far, as arrays."""
    order = sorted(state.rows)
    table = np.array([state.rows[step] for step in order]).reshape(len(order), len(STEP_COLUMNS))
    staleness: defaultdict[int, float] = defaultdict(float)
    for histogram in state.staleness.values():
        for age, tokens in histogram.items():
            staleness[age] += tokens
    return RunHistory(
        started=state.started,
        finished=state.finished,
        resumes=state.resumes,
        seconds=state.seconds,
        last_unix=state.last_unix,
        steps=np.array(order, dtype=np.int64),
        columns={name: table[:, i] for i, name in enumerate(STEP_COLUMNS)},
        spend_usd=state.spend.series(order),
        all_on_usd=state.all_on.series(order),
        staleness_max=state.oldest,
        staleness_tokens=dict(sorted(staleness.items())),
        dropped={reason: counter.total for reason, counter in sorted(state.drops.items())},
        refused=dict(sorted(state.refused.items())),
        evals=tuple((step, reward, n) for step, (reward, n) in sorted(state.evals.items())),
        versions=tuple(state.versions[key] for key in sorted(state.versions)),
        workers=tuple(sorted(state.workers.values(), key=by_rho)),
        decision=state.decision,
        notable=tuple(state.notable),
        skipped_steps=len(state.skipped),
    )


def load_history(learner: Path, workers: Iterable[Path] = (), *, version: int | None = None) -> RunHistory:
    """Read a run's logs: the learner's, and those of workers where they are at hand.

    Args:
        version: the policy version to show in detail; by default that of median T_bcast.

    Raises:
        SettingsError: one of them cannot be read, or there is nothing to show of ``version``.
    """
    state = RunState()
    for path in (learner, *workers):
        for event in read_events(path):
            state.add(event)
    chosen = choose_version(state.versions, version)
    dissemination = None if chosen is None else read_dissemination(learner, *chosen)
    return replace(freeze(state), dissemination=dissemination)
