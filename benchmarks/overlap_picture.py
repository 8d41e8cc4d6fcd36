"""The picture of ``benchmarks.overlap``: bubble ratio against workers, and against κ for long broadcasts."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

import numpy as np

from echo2p2p.provisioning.capacity import step_s
from echo2p2p.telemetry.drawing import AMBER, BLUE, GREY, INK, MUTED, RED, STYLE

Point = dict[str, Any]


def draw(points: Sequence[Point], rollouts: int, path: Path) -> None:
    """One panel a window with the points that differ in workers, and one with those that differ in κ."""
    import matplotlib as mpl

    mpl.use("Agg")
    import matplotlib.pyplot as plt

    fast = [p for p in points if not p["broadcast_steps"]]
    slow = [p for p in points if p["broadcast_steps"] > 1]
    windows = sorted({p["staleness"] for p in fast})
    n_panels = len(windows) + bool(slow)
    with mpl.rc_context(STYLE):
        figure, axes = plt.subplots(
            1, n_panels, figsize=(2.5 * n_panels, 3.1), squeeze=False, layout="constrained"
        )
        for axis, staleness in zip(axes[0], windows, strict=False):
            _window(axis, [p for p in fast if p["staleness"] == staleness], rollouts)
        axes[0][0].set_ylabel("bubble ratio of the learner, %")
        handles = {h.get_label(): h for axis in axes[0] for h in axis.get_legend_handles_labels()[0]}
        figure.legend(handles=list(handles.values()), loc="outside lower center", ncols=len(handles))
        if slow:
            _periods(axes[0][-1], slow)
        path.parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(path, dpi=150)
        plt.close(figure)


def _window(axis: Any, points: Sequence[Point], rollouts: int) -> None:
    first = points[0]
    mean = {key: fmean(p[key] for p in points) for key in ("t_train_s", "t_bcast_s")}
    rate = fmean(p["rate"] for p in points)
    minimum = fmean(p["predicted_workers"] for p in points)
    counts = np.linspace(1, max(p["workers"] for p in points) + 1, 200)
    predicted = [
        1
        - mean["t_train_s"]
        / step_s(
            kappa=first["kappa"], staleness=first["staleness"], rollouts=rollouts, mu_pool=n * rate, **mean
        )
        for n in counts
    ]
    axis.axvline(minimum, color=RED, linestyle="--", linewidth=1, label="predicted minimum")
    axis.plot(counts, 100 * np.array(predicted), color=GREY, label="predicted")
    _dots(axis, [p["workers"] for p in points], points)
    axis.set_title(f"S = {first['staleness']}, κ = {first['kappa']}", color=INK, loc="left")
    axis.set_xlabel("active workers")
    axis.set_ylim(-3, 75)
    axis.xaxis.get_major_locator().set_params(integer=True)


def _periods(axis: Any, points: Sequence[Point]) -> None:
    places = list(range(len(points)))
    axis.plot(
        places,
        [100 * p["predicted_bubble"] for p in points],
        "_",
        color=GREY,
        markersize=22,
        markeredgewidth=2,
    )
    _dots(axis, places, points)
    b = fmean(p["t_bcast_s"] / p["t_train_s"] for p in points)
    axis.set_xticks(places, [f"S = {p['staleness']}\nκ = {p['kappa']}" for p in points])
    axis.set_xlabel(f"{points[0]['workers']} active workers")
    axis.set_xlim(-0.5, len(points) - 0.5)
    axis.set_title(f"T_bcast = {b:.1f} steps", color=INK, loc="left")
    axis.set_ylim(-3, 75)


def _dots(axis: Any, places: Sequence[float], points: Sequence[Point]) -> None:
    for which, colour, label in ((False, AMBER, "measured"), (True, BLUE, "measured, chosen by the learner")):
        own = [(x, 100 * p["bubble"]) for x, p in zip(places, points, strict=True) if p["chosen"] is which]
        if own:
            axis.plot(*zip(*own, strict=True), "o", color=colour, label=label, zorder=3)
    for x, p in zip(places, points, strict=True):
        text = f"{100 * p['bubble']:.1f}" + (" (disturbed)" if p["disturbed"] else "")
        axis.annotate(
            text, (x, 100 * p["bubble"]), (5, 5), textcoords="offset points", color=MUTED, fontsize=7.5
        ).set_bbox({"facecolor": "white", "edgecolor": "none", "pad": 1})
