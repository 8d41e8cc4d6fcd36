"""The pictures of ``benchmarks/parity.py``: learning curves with their bands, and reward against staleness."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from echo2p2p.telemetry.drawing import AMBER, BLUE, GREY, MUTED, RED, STYLE, TEAL, draw_legend, label_axes

CURVE_COLOURS = (BLUE, TEAL, GREY, AMBER, RED)


def draw(found: dict[str, Any], folder: Path) -> None:
    """Write ``parity.png`` and ``staleness.png`` into ``folder`` from the benchmark's JSON object."""
    import matplotlib as mpl
    from matplotlib.figure import Figure

    folder.mkdir(parents=True, exist_ok=True)
    setup = found["setup"]
    with mpl.rc_context(STYLE):
        figure = Figure(figsize=(7.2, 3.6), layout="constrained")
        axes = figure.subplots()
        _draw_curve(axes, found["colocated"], BLUE, "one process")
        _draw_curve(axes, found["decoupled"], TEAL, f"swarm, S = {setup['compared']}")
        label_axes(axes, f"step; mean and 95 % band of {setup['seeds']} seeds", "held-out reward")
        draw_legend(axes)
        figure.savefig(folder / "parity.png", dpi=150)

        figure = Figure(figsize=(9.6, 3.6), layout="constrained")
        left, right = figure.subplots(1, 2)
        staleness = found["staleness"]
        _draw_finals(left, staleness["swarm"], TEAL, "swarm, by S", 0.0)
        _draw_finals(left, staleness["lag"], BLUE, "one process, by age", -0.15)
        _draw_finals(left, staleness["lag_fast"], RED, f"… at {setup['fast']} × the learning rate", 0.15)
        left.set_xticks(sorted({int(key) for kind in staleness.values() for key in kind}))
        label_axes(left, "S, or the age of every batch, versions", "final held-out reward")
        for (lag, runs), colour in zip(staleness["lag_fast"].items(), CURVE_COLOURS, strict=False):
            _draw_curve(right, runs, colour, f"{lag} old")
        label_axes(right, f"step, {setup['fast']} × the learning rate", "held-out reward")
        for axes in (left, right):
            draw_legend(axes)
        figure.savefig(folder / "staleness.png", dpi=150)


def _draw_curve(axes: Any, runs: dict[str, Any], colour: str, label: str) -> None:
    curve = runs["curve"]
    axes.plot(curve["steps"], curve["mean"], color=colour, label=label)
    axes.fill_between(curve["steps"], curve["low"], curve["high"], color=colour, alpha=0.15, linewidth=0)
    axes.set_ylim(0, 1)


def _draw_finals(axes: Any, by_knob: dict[str, Any], colour: str, label: str, shift: float) -> None:
    """Mean and band at each knob, and each seed's own as a dot."""
    x = [int(knob) + shift for knob in by_knob]
    mean = [runs["mean"] for runs in by_knob.values()]
    below = [runs["mean"] - runs["low"] for runs in by_knob.values()]
    above = [runs["high"] - runs["mean"] for runs in by_knob.values()]
    axes.errorbar(
        x, mean, yerr=[below, above], color=colour, label=label, marker="o", markersize=4, capsize=2
    )
    for at, runs in zip(x, by_knob.values(), strict=True):
        axes.scatter([at] * len(runs["finals"]), runs["finals"].values(), color=MUTED, s=5, zorder=3)
    axes.set_ylim(0, 1)
