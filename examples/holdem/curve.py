"""The reward curve of a run that kept its journal, with a band over the groups.

    python examples/holdem/curve.py runs/holdem runs/before.json runs/after.json docs/images/holdem.png

The two JSON files are what ``echo2p2p eval --json`` says of the policy before and after training. A group is the
samples of one prompt; they are not independent, so a group counts as one value, its mean.
"""

from __future__ import annotations

import argparse
import json
import math
from pathlib import Path

import matplotlib as mpl
import numpy as np
from matplotlib.figure import Figure

from echo2p2p.learning.journal import read
from echo2p2p.telemetry.drawing import AMBER, BLUE, MUTED, STYLE, TEAL, label_axes
from echo2p2p.telemetry.events import read_events

WINDOW = 10
"""Steps whose groups make one point of the curve."""
Z_95 = 1.96


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    for name in ("run", "before", "after", "picture"):
        parser.add_argument(name, type=Path)
    arguments = parser.parse_args()
    batches = read(arguments.run / "journal").batches
    groups = [[entry.group.rewards().mean() for entry in batch] for _, batch in sorted(batches.items())]
    windows = [np.concatenate(groups[at : at + WINDOW]) for at in range(0, len(groups), WINDOW)]
    ends = [min(len(groups), (number + 1) * WINDOW) for number in range(len(windows))]
    steps = np.array([end - WINDOW / 2 for end in ends])
    mean = np.array([window.mean() for window in windows])
    half = np.array([Z_95 * window.std(ddof=1) / math.sqrt(len(window)) for window in windows])
    low, high = (np.array([np.quantile(window, q) for window in windows]) for q in (0.25, 0.75))
    evals = [event for event in read_events(arguments.run / "events.jsonl") if event["event"] == "eval"]

    with mpl.rc_context(STYLE):
        figure = Figure(figsize=(7.2, 3.8), layout="constrained")
        axes = figure.subplots()
        axes.fill_between(
            steps, low, high, color=BLUE, alpha=0.08, linewidth=0, label="middle half of the groups"
        )
        axes.fill_between(steps, mean - half, mean + half, color=BLUE, alpha=0.3, linewidth=0)
        axes.plot(steps, mean, color=BLUE, label=f"training, mean of {WINDOW} steps and its 95 % band")
        axes.plot(
            [event["step"] for event in evals],
            [event["reward"] for event in evals],
            "D",
            color=AMBER,
            markersize=3.5,
            label=f"held out, {evals[0]['n']} deals",
        )
        for step, path in ((0, arguments.before), (len(groups), arguments.after)):
            found = json.loads(path.read_text())
            error = [[found["reward"] - found["low"]], [found["high"] - found["reward"]]]
            label = f"held out, {found['prompts']} deals, 95 %" if step else None
            axes.errorbar(
                step, found["reward"], error, color=TEAL, marker="o", capsize=3, label=label, zorder=4
            )
            beside = (6, -3) if step == 0 else (-6, -16)
            axes.annotate(
                f"{found['reward']:.3f}",
                (step, found["reward"]),
                beside,
                textcoords="offset points",
                ha="left" if step == 0 else "right",
                color=MUTED,
            )
        axes.axhline(0, color=MUTED, linewidth=0.8)
        label_axes(axes, "step", "big blinds won a hand")
        axes.legend(loc="lower right", ncols=2)
        arguments.picture.parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(arguments.picture, dpi=150)


if __name__ == "__main__":
    main()
