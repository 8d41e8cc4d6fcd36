"""What all panels of the report share: colours, style, axes and legends."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

INK = "#1f2a36"
MUTED = "#66727f"
GRID = "#e3e7eb"
PAPER = "#fefefe"
BLUE = "#2b66c4"
TEAL = "#139483"
AMBER = "#dd8f14"
RED = "#c93a40"
GREY = "#a9b3bd"
PALETTE = {
    "ink": INK,
    "muted": MUTED,
    "grid": GRID,
    "paper": PAPER,
    "blue": BLUE,
    "teal": TEAL,
    "amber": AMBER,
    "red": RED,
    "grey": GREY,
}
"""Blue is the learner, teal the workers, amber waiting, red a limit, grey what was not used."""

STYLE: dict[str, Any] = {
    "font.family": "DejaVu Sans",
    "font.size": 9,
    "text.color": INK,
    "text.parse_math": False,
    "axes.edgecolor": MUTED,
    "axes.facecolor": PAPER,
    "axes.grid": True,
    "axes.axisbelow": True,
    "axes.labelcolor": MUTED,
    "axes.labelsize": 8.5,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "figure.facecolor": PAPER,
    "grid.color": GRID,
    "grid.linewidth": 0.8,
    "legend.fontsize": 8,
    "legend.frameon": False,
    "lines.linewidth": 1.6,
    "xtick.color": MUTED,
    "ytick.color": MUTED,
    "xtick.labelsize": 8,
    "ytick.labelsize": 8,
}
"""rcParams under which the panels are drawn."""

_MAX_BARS = 80


def new_axes(figure: Any, xlabel: str, ylabel: str) -> Any:
    axes = figure.subplots()
    label_axes(axes, xlabel, ylabel)
    if xlabel == "step":
        integer_x(axes)
    return axes


def label_axes(axes: Any, xlabel: str, ylabel: str) -> None:
    axes.set_xlabel(xlabel)
    axes.set_ylabel(ylabel)


def integer_x(axes: Any) -> None:
    axes.xaxis.get_major_locator().set_params(integer=True)


def draw_line(axes: Any, x: np.ndarray, y: np.ndarray, colour: str, label: str) -> None:
    """A line, with markers while there are few points, so that a single one shows."""
    axes.plot(x, y, color=colour, label=label, marker="o" if len(x) <= 12 else "", markersize=3.5)


def draw_stack(axes: Any, x: np.ndarray, layers: Sequence[tuple[np.ndarray, str, str]]) -> None:
    """Stacked bars, or stacked areas where there are too many for bars."""
    base = np.zeros(len(x))
    width = 0.8 * float(np.diff(x).min()) if len(x) > 1 else 0.8
    for values, colour, label in layers:
        top = base + np.nan_to_num(values)
        if len(x) <= _MAX_BARS:
            axes.bar(x, top - base, bottom=base, width=width, color=colour, label=label)
        else:
            axes.fill_between(x, base, top, step="mid", color=colour, label=label, linewidth=0)
        base = top
    integer_x(axes)


def draw_legend(axes: Any) -> None:
    """The legend above the axes, where it covers nothing."""
    width_in = axes.figure.bbox.width / axes.figure.dpi
    axes.legend(
        loc="lower left",
        bbox_to_anchor=(-0.01, 0.99),
        ncols=max(3, min(6, int(width_in / 1.3))),
        handlelength=1.3,
        columnspacing=1.2,
        borderpad=0.2,
    )


def draw_empty(axes: Any, text: str) -> None:
    axes.grid(visible=False)
    axes.set_xticks([])
    axes.set_yticks([])
    axes.spines[:].set_color(GRID)
    axes.text(0.5, 0.5, text, ha="center", va="center", color=MUTED, fontsize=10, transform=axes.transAxes)


def byte_unit(largest: float) -> tuple[float, str]:
    for power, unit in ((3, "GiB"), (2, "MiB"), (1, "KiB")):
        if largest >= 1024**power:
            return float(1024**power), unit
    return 1.0, "B"


def fit_text(text: Any, parts: Sequence[str], figure: Any, *, lines: int) -> None:
    """Put ``parts`` into a text artist, separated by dots, in at most ``lines`` lines that end inside the figure.

    Lines break between parts; what does not fit even so is cut off with ``~``.
    """
    renderer = figure.canvas.get_renderer()
    room = figure.bbox.width * 0.984

    def fits(line: str) -> bool:
        text.set_text(line)
        return bool(text.get_window_extent(renderer).width <= room)

    shown: list[str] = []
    for part in parts:
        joined = f"{shown[-1]}   ·   {part}" if shown else part
        if shown and (fits(joined) or len(shown) == lines):
            shown[-1] = joined
        else:
            shown.append(part)
    for row, line in enumerate(shown):
        cut = len(line)
        while cut > 1 and not fits(line[:cut] + "~" * (cut < len(line))):
            cut -= 1
        shown[row] = line[:cut] + "~" * (cut < len(line))
    text.set_text("\n".join(shown))
