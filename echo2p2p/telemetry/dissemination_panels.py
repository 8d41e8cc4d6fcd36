"""The panels of one dissemination: when each worker's bytes came, and who sent them."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np

from echo2p2p.telemetry.dissemination import Dissemination, Receipt
from echo2p2p.telemetry.drawing import (
    AMBER,
    BLUE,
    GREY,
    GRID,
    INK,
    MUTED,
    PAPER,
    RED,
    TEAL,
    byte_unit,
    draw_empty,
    draw_legend,
    label_axes,
    new_axes,
)
from echo2p2p.telemetry.history import RunHistory
from echo2p2p.telemetry.text import PEER_TAIL, ascii_only, human_bytes, human_seconds

MAX_ROWS = 12
"""Workers that are shown one by one."""
_FEWEST_ROWS = 3
_ROW_HEIGHT = 0.78
_ON_PAPER = {"facecolor": PAPER, "edgecolor": "none", "pad": 0.6}


def arrivals(figure: Any, history: RunHistory) -> None:
    """When did each worker's bytes come, and from whom? One row a worker, filled as its bytes arrive."""
    axes = new_axes(figure, "seconds since the publication began", "")
    shown = history.dissemination
    if shown is None:
        return draw_empty(axes, "no version with arrivals in this log")
    rows = _spread(shown.receipts)
    end_s = _end_s(shown)
    for row, receipt in enumerate(rows):
        _draw_receipt(axes, row, receipt, end_s)
    axes.set_yticks(
        [row - _ROW_HEIGHT / 2 for row in range(len(rows))],
        [ascii_only(receipt.worker, 128)[-PEER_TAIL:] for receipt in rows],
    )
    axes.tick_params(axis="y", length=0)
    axes.grid(visible=False, axis="y")
    axes.set_ylim(max(len(rows), _FEWEST_ROWS) - 0.85, -1.0)
    axes.set_xlim(0, end_s * 1.02)
    if shown.announced_s > 0:
        axes.axvspan(0, shown.announced_s, color=GRID, linewidth=0, label="checkpoint and manifest")
    if not math.isnan(shown.t_bcast_s):
        axes.axvline(
            shown.t_bcast_s,
            color=RED,
            linestyle="--",
            linewidth=1.4,
            label=f"T_bcast = {human_seconds(shown.t_bcast_s)}",
        )
    axes.fill_between([], [], color=BLUE, label="from the learner")
    axes.fill_between([], [], color=TEAL, alpha=0.55, linewidth=0, label="from workers")
    axes.plot([], [], "D", color=AMBER, markeredgecolor=INK, markeredgewidth=0.6, markersize=5, label="ready")
    if len(shown.receipts) > len(rows):
        axes.set_ylabel(f"{len(rows)} of {len(shown.receipts)} workers, first to last")
    return draw_legend(axes)


def sources(figure: Any, history: RunHistory) -> None:
    """Who sent it? Chunk bytes by sender: the learner, and each worker."""
    shown = history.dissemination
    axes = new_axes(figure, "", "")
    if shown is None:
        return draw_empty(axes, "no version with arrivals in this log")
    bars = _bars(shown)
    longest = max(*(bar.nbytes for bar in bars), float(np.nan_to_num(shown.copy_bytes)))
    scale, unit = byte_unit(longest)
    total = sum(bar.nbytes * bar.senders for bar in bars) or 1.0
    reach = longest / scale or 1.0
    for row, bar in enumerate(bars):
        axes.barh(row, bar.nbytes / scale, height=0.66, color=bar.colour)
        share = bar.nbytes * bar.senders / total
        percent = "< 1%" if 0 < share < 0.01 else f"{share:.0%}"
        note = f"{human_bytes(bar.nbytes)}{' each' if bar.senders > 1 else ''}, {percent}"
        axes.text(
            bar.nbytes / scale + reach * 0.02,
            row,
            note,
            va="center",
            fontsize=7.5,
            color=MUTED,
            bbox=_ON_PAPER,
        )
    axes.set_yticks(range(len(bars)), [bar.name for bar in bars])
    axes.tick_params(axis="y", length=0)
    axes.grid(visible=False, axis="y")
    axes.set_ylim(max(len(bars), _FEWEST_ROWS + 1) - 0.4, -0.6)
    axes.set_xlim(0, reach * 1.4)
    axes.xaxis.get_major_locator().set_params(nbins=5)
    label_axes(axes, f"chunk bytes sent [{unit}]", "")
    if not math.isnan(shown.copy_bytes):
        what = "the patch" if shown.patched else "the snapshot"
        axes.axvline(
            shown.copy_bytes / scale,
            color=INK,
            linestyle=":",
            linewidth=1.4,
            label=f"{what} once: {human_bytes(shown.copy_bytes)}",
        )
    return draw_legend(axes)


def _draw_receipt(axes: Any, row: int, receipt: Receipt, end_s: float) -> None:
    """The share of the worker's bytes that was here, from the floor of its row to the ceiling."""
    times = np.concatenate([[0.0], receipt.times_s, [end_s]])
    share = _ROW_HEIGHT / receipt.nbytes
    learner = np.concatenate([[0.0], receipt.from_learner, receipt.from_learner[-1:]]) * share
    both = learner + np.concatenate([[0.0], receipt.from_peers, receipt.from_peers[-1:]]) * share
    done = times <= receipt.times_s[-1]
    axes.fill_between(times[done], row, row - learner[done], step="post", color=BLUE, linewidth=0)
    axes.fill_between(
        times[done], row - learner[done], row - both[done], step="post", color=TEAL, alpha=0.55, linewidth=0
    )
    axes.step(times[done], row - both[done], where="post", color=INK, linewidth=0.9)
    axes.plot([0, end_s], [row, row], color=GRID, linewidth=0.8, zorder=0.6)
    axes.text(
        receipt.times_s[-1] + end_s * 0.012,
        row - 0.06,
        human_bytes(receipt.nbytes),
        fontsize=7.5,
        color=MUTED,
        va="bottom",
        bbox=_ON_PAPER,
    )
    if not math.isnan(receipt.ready_s):
        axes.plot(
            [receipt.ready_s],
            [row - _ROW_HEIGHT],
            "D",
            color=AMBER,
            markeredgecolor=INK,
            markeredgewidth=0.6,
            markersize=5,
            zorder=4,
        )


def _spread(receipts: tuple[Receipt, ...]) -> list[Receipt]:
    """All of few; of many, the first, the last, and those at even distances between."""
    if len(receipts) <= MAX_ROWS:
        return list(receipts)
    places = np.linspace(0, len(receipts) - 1, MAX_ROWS).round().astype(int)
    return [receipts[at] for at in places]


def _end_s(shown: Dissemination) -> float:
    moments = [shown.announced_s, *(receipt.times_s[-1] for receipt in shown.receipts)]
    moments += [receipt.ready_s for receipt in shown.receipts if not math.isnan(receipt.ready_s)]
    if not math.isnan(shown.t_bcast_s):
        moments.append(shown.t_bcast_s)
    return float(max(moments)) * 1.08 or 1.0


@dataclass(frozen=True)
class _Bar:
    """``nbytes`` that each of so many ``senders`` sent, on average."""

    name: str
    nbytes: float
    colour: str
    senders: int = 1


def _bars(shown: Dissemination) -> list[_Bar]:
    """The learner, then the workers by what they sent; of many, those who sent least together."""
    bars = [_Bar("learner", shown.from_learner, BLUE)]
    if shown.sent is None:
        return [*bars, _Bar("workers", shown.from_peers, TEAL)]
    senders = sorted(shown.sent.items(), key=lambda item: (-item[1], item[0]))
    few = senders if len(senders) <= MAX_ROWS else senders[: MAX_ROWS - 1]
    bars += [_Bar(ascii_only(peer, 128)[-PEER_TAIL:], nbytes, TEAL) for peer, nbytes in few]
    if rest := senders[len(few) :]:
        mean = sum(nbytes for _, nbytes in rest) / len(rest)
        bars.append(_Bar(f"{len(rest)} more", mean, GREY, len(rest)))
    return bars
