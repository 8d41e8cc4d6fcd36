"""A run in a handful of figures: the cards at the top of the page, and the lines of the summary."""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass

import numpy as np

from echo2p2p.telemetry.history import RunHistory
from echo2p2p.telemetry.text import human_bytes, human_seconds, human_usd
from echo2p2p.telemetry.values import number


@dataclass(frozen=True)
class Figure:
    """One figure: what it is, its value, what to hold it against, and whether it is good or bad news.

    ``tone`` is good, bad or plain. No text in it comes from a peer.
    """

    label: str
    value: str
    note: str
    tone: str = "plain"


def headline(history: RunHistory) -> list[Figure]:
    """The figures that say how a run went, in the order in which people ask for them."""
    return [
        _reward(history),
        _steps(history),
        _staleness(history),
        _bubble(history),
        _workers(history),
        _broadcast(history),
        _bytes(history),
        _spending(history),
    ]


def status(history: RunHistory) -> str:
    """How far it is. A log cannot tell a run that is under way from one that was killed."""
    if history.finished is not None:
        return "stopped" if history.finished.get("finished") is False else "finished"
    return "under way, or ended without a word" if history.started else "not started"


def _reward(history: RunHistory) -> Figure:
    label = "held-out reward"
    before, after = history.reward_before_after
    prompts = f"{history.evals[-1][2]} prompts" if history.evals and history.evals[-1][2] else ""
    if math.isnan(before):
        return Figure(label, "–", "not evaluated yet")
    if math.isnan(after):
        return Figure(label, f"{before:.3f}", ", ".join(filter(None, ("before training", prompts))))
    tone = "good" if after > before else "bad" if after < before else "plain"
    return Figure(
        label,
        f"{before:.3f} → {after:.3f}",
        ", ".join(filter(None, (f"{after - before:+.3f}", prompts))),
        tone,
    )


def _steps(history: RunHistory) -> Figure:
    planned = number(history.started.get("max_steps"))
    value = str(int(history.steps[-1]) if len(history.steps) else 0)
    notes = ["" if math.isnan(planned) else f"of {planned:.0f}", f"in {human_seconds(history.seconds)}"]
    if history.resumes:
        notes.append(f"resumed {history.resumes} ×")
    if history.skipped_steps:
        notes.append(f"{history.skipped_steps} without an update")
    return Figure("steps", value, ", ".join(filter(None, notes)))


def _staleness(history: RunHistory) -> Figure:
    label, window, seen = "oldest trained token", history.window, history.staleness_max
    against = "S is not in the log" if math.isnan(window) else f"window S = {window:.0f}"
    if math.isnan(seen):
        return Figure(label, "–", against)
    value = "1 version" if seen == 1 else f"{seen:.0f} versions"
    if seen > window:
        return Figure(label, value, f"{against} is broken", "bad")
    return Figure(label, value, against, "plain" if math.isnan(window) else "good")


def _bubble(history: RunHistory) -> Figure:
    ratio = history.bubble_ratio
    if math.isnan(ratio):
        return Figure("bubble ratio", "–", "no steps yet")
    idle = float(np.nansum(history.columns["t_idle_s"]))
    return Figure("bubble ratio", f"{ratio:.1%}", f"the learner waited {human_seconds(idle)}")


def _workers(history: RunHistory) -> Figure:
    states = Counter(worker.state for worker in history.workers)
    others = [f"{states[state]} {state}" for state in ("standby", "gone") if states[state]]
    return Figure("active workers", str(states["active"]), ", ".join(others) or "none other known")


def _broadcast(history: RunHistory) -> Figure:
    times = [version.t_bcast_s for version in history.versions if not math.isnan(version.t_bcast_s)]
    published = len(history.versions)
    note = f"median of {len(times)}; {published} published" if published else "nothing published yet"
    reasons = Counter(version.why for version in history.versions)
    told = [f"{reasons[why]} for {why}" for why in ("divergence", "window") if reasons[why]]
    if told:
        note += f", {' and '.join(told)}"
    return Figure("T_bcast", human_seconds(float(np.median(times))) if times else "–", note)


def _bytes(history: RunHistory) -> Figure:
    learner, peers = history.bytes_from_learner, history.bytes_from_peers
    if not learner + peers:
        return Figure("weights from other workers", "–", "nothing installed yet")
    note = f"{human_bytes(learner)} from the learner, {human_bytes(peers)} from other workers"
    return Figure("weights from other workers", f"{peers / (learner + peers):.0%}", note)


def _spending(history: RunHistory) -> Figure:
    spent, everything = history.spend_usd[-1:], history.all_on_usd[-1:]
    if not len(spent) or math.isnan(spent[0]):
        return Figure("spent", "–", "nothing spent yet")
    note = "at advertised prices"
    if everything[0] > 0:
        note += f"; {human_usd(everything[0])} with every worker on ({1 - spent[0] / everything[0]:.0%} less)"
    return Figure("spent", human_usd(float(spent[0])), note)
