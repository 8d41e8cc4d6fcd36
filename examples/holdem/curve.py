"""The reward curve of a run that kept its journal, with a band over the groups.

    python examples/holdem/curve.py runs/holdem runs/before.json runs/after.json docs/images/holdem.png

The two JSON files are what ``echo2p2p eval --json`` says of the policy before and after training. A group is the
samples of one prompt; they are not independent, so a group counts as one value, its mean. The dashed line is what a
player without eyes makes of the same held-out deals, who makes the best move that needs none.
"""

from __future__ import annotations

import argparse
import json
import math
from pathlib import Path

import matplotlib as mpl
import numpy as np
from matplotlib.figure import Figure

from echo2p2p.data.holdem import HoldemTask
from echo2p2p.data.task import HELD_OUT, make_task
from echo2p2p.layering import load
from echo2p2p.learning.journal import read
from echo2p2p.telemetry.drawing import AMBER, BLUE, MUTED, STYLE, TEAL, label_axes
from echo2p2p.telemetry.events import read_events

BLIND_MOVES = ("call", "raise", "all-in")
WINDOW = 25
"""Steps whose groups make one point of the curve."""
Z_95 = 1.96


def without_eyes(task: HoldemTask, deals: int) -> tuple[str, float]:
    """The move that makes the most when it is made always, and how much: big blinds, mean of held-out deals."""

    def worth(move: str, index: int) -> float:
        moves = [move]
        while task.respond(index, moves, HELD_OUT) is not None and len(moves) < task.max_turns:
            moves.append(move)
        return task.episode_reward(index, moves, HELD_OUT)

    means = {move: float(np.mean([worth(move, index) for index in range(deals)])) for move in BLIND_MOVES}
    best = max(means, key=lambda move: means[move])
    return best, means[best]


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
    settings = load([arguments.run / "config.resolved.toml"])
    task = make_task("holdem", seed=settings.task.seed, options=settings.task.options)
    assert isinstance(task, HoldemTask)
    move, blind = without_eyes(task, json.loads(arguments.before.read_text())["prompts"])
    evals = [event for event in read_events(arguments.run / "events.jsonl") if event["event"] == "eval"]

    with mpl.rc_context(STYLE):
        figure = Figure(figsize=(7.2, 3.8), layout="constrained")
        axes = figure.subplots()
        axes.fill_between(steps, mean - half, mean + half, color=BLUE, alpha=0.15, linewidth=0)
        axes.plot(
            steps, mean, color=BLUE, linewidth=1, label=f"training, {WINDOW} steps' deals and their 95 % band"
        )
        axes.plot(
            [event["step"] for event in evals],
            [event["reward"] for event in evals],
            "-D",
            color=AMBER,
            markersize=3.5,
            label=f"held out, the same {evals[0]['n']} deals each time",
        )
        for step, path in ((0, arguments.before), (len(groups), arguments.after)):
            found = json.loads(path.read_text())
            error = [[found["reward"] - found["low"]], [found["high"] - found["reward"]]]
            label = f"held out, {found['prompts']} deals, 95 %" if step else None
            axes.errorbar(
                step, found["reward"], error, color=TEAL, marker="o", capsize=3, label=label, zorder=4
            )
            beside = (8, -14) if step == 0 else (-8, 12)
            axes.annotate(
                f"{found['reward']:.3f}".replace("-", "−"),
                (step, found["reward"]),
                beside,
                textcoords="offset points",
                ha="left" if step == 0 else "right",
                color=MUTED,
            )
        axes.axhline(0, color=MUTED, linewidth=0.8)
        axes.axhline(
            blind,
            color=MUTED,
            linewidth=1,
            linestyle="--",
            label=f"always {move}, the same deals: {blind:.3f}",
        )
        label_axes(axes, "step", "big blinds won a hand")
        axes.legend(loc="lower right", ncols=2)
        arguments.picture.parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(arguments.picture, dpi=150)


if __name__ == "__main__":
    main()
