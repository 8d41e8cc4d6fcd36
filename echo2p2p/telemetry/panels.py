"""The panels of the report: each draws one question about a run onto a figure that it is given.

Every panel has an honest empty state, and no text in it is read as mathematics or as markup.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from echo2p2p.telemetry import dissemination_panels
from echo2p2p.telemetry.drawing import (
    AMBER,
    BLUE,
    GREY,
    GRID,
    INK,
    MUTED,
    RED,
    TEAL,
    byte_unit,
    draw_empty,
    draw_legend,
    draw_line,
    draw_stack,
    integer_x,
    label_axes,
    new_axes,
)
from echo2p2p.telemetry.history import RunHistory
from echo2p2p.telemetry.text import PEER_TAIL, ascii_only, human_number, human_usd

MAX_WORKER_BARS = 12


def reward(figure: Any, history: RunHistory) -> None:
    """Is it learning? Mean reward a step with its spread, and the held-out evaluations."""
    axes = new_axes(figure, "step", "reward")
    mean, std = history.columns["reward_mean"], history.columns["reward_std"]
    if len(history.steps):
        axes.fill_between(history.steps, mean - std, mean + std, color=BLUE, alpha=0.13, linewidth=0)
        draw_line(axes, history.steps, mean, BLUE, "training, mean ± std")
    if history.evals:
        steps, values, _ = zip(*history.evals, strict=True)
        axes.plot(steps, values, color=AMBER, linewidth=0.9, linestyle=":", zorder=3)
        axes.plot(steps, values, "D", color=AMBER, markersize=5.5, label="held-out", zorder=4)
    if not len(history.steps) and not history.evals:
        return draw_empty(axes, "no steps yet")
    return draw_legend(axes)


def mismatch(figure: Any, history: RunHistory) -> None:
    """Does off-policy data hurt? How far the samplers' policy was from the learner's."""
    upper, lower = figure.subplots(2, 1, sharex=True)
    label_axes(upper, "", "KL [nats/token]")
    label_axes(lower, "step", "gradient norm")
    if not len(history.steps):
        draw_empty(lower, "")
        return draw_empty(upper, "no steps yet")
    draw_line(upper, history.steps, history.columns["mismatch_kl"], BLUE, "KL(sampler, learner)")
    draw_line(lower, history.steps, history.columns["grad_norm"], MUTED, "before clipping")
    integer_x(lower)
    draw_legend(upper)
    return draw_legend(lower)


def tokens(figure: Any, history: RunHistory) -> None:
    """Is the data used, and does the policy still explore? Shares of tokens without effect, and the entropy."""
    upper, lower = figure.subplots(2, 1, sharex=True)
    label_axes(upper, "", "tokens [%]")
    label_axes(lower, "step", "entropy [nats]")
    if not len(history.steps):
        draw_empty(lower, "")
        return draw_empty(upper, "no steps yet")
    columns = history.columns
    received = np.where(columns["tokens"] > 0, columns["tokens"], np.nan)
    draw_line(upper, history.steps, columns["wasted_tokens"] / received * 100, AMBER, "wasted")
    for name, colour, label in (
        ("masked_fraction", RED, "masked"),
        ("truncated_fraction", TEAL, "cut at C"),
        ("clipped_fraction", BLUE, "clipped"),
    ):
        draw_line(upper, history.steps, columns[name] * 100, colour, label)
    draw_line(lower, history.steps, columns["entropy"], MUTED, "of the policy")
    upper.set_ylim(bottom=0)
    integer_x(lower)
    draw_legend(upper)
    return draw_legend(lower)


def staleness(figure: Any, history: RunHistory) -> None:
    """Does the window hold? Share of trained tokens by staleness, against S."""
    axes = new_axes(figure, "staleness [versions]", "trained tokens [%]")
    total = sum(history.staleness_tokens.values())
    if not total:
        return draw_empty(axes, "no tokens trained yet")
    window = history.window
    ages = np.array(list(history.staleness_tokens))
    share = np.array(list(history.staleness_tokens.values())) / total * 100
    colours = [RED if age > window else BLUE for age in ages]
    axes.bar(ages, share, width=0.72, color=colours)
    right = float(ages.max())
    if not math.isnan(window):
        right = max(right, window)
        axes.axvline(window + 0.5, color=RED, linestyle="--", linewidth=1.4, label=f"window S = {window:.0f}")
    axes.set_xlim(-0.6, right + 0.9)
    if right <= 30:
        for age, value in zip(ages, share, strict=True):
            axes.annotate(
                f"{value:.0f}" if value >= 1 else f"{value:.1g}",
                (age, value),
                xytext=(0, 2),
                textcoords="offset points",
                ha="center",
                fontsize=7.5,
                color=MUTED,
            )
    return draw_legend(axes)


def time(figure: Any, history: RunHistory) -> None:
    """Does the learner wait? Training and waiting per step, and the running bubble ratio."""
    upper, lower = figure.subplots(2, 1, sharex=True)
    label_axes(upper, "", "bubble ratio [%]")
    label_axes(lower, "step", "seconds")
    if not len(history.steps):
        draw_empty(lower, "")
        return draw_empty(upper, "no steps yet")
    bubble = history.columns["bubble_ratio"] * 100
    draw_line(upper, history.steps, bubble, AMBER, "T_idle / (T_idle + T_train)")
    upper.set_ylim(0, max(5.0, float(np.nanmax(np.append(bubble, 0))) * 1.15))
    draw_stack(
        lower,
        history.steps,
        [
            (history.columns["t_train_s"], BLUE, "T_train"),
            (history.columns["t_idle_s"], AMBER, "T_idle"),
        ],
    )
    draw_legend(upper)
    return draw_legend(lower)


def dissemination(figure: Any, history: RunHistory) -> None:
    """How do weights travel? Chunk bytes of each version by who gave them, and T_bcast."""
    upper, lower = figure.subplots(2, 1, sharex=True)
    label_axes(upper, "", "T_bcast [s]")
    if not history.versions:
        label_axes(lower, "policy version", "bytes")
        draw_empty(lower, "")
        return draw_empty(upper, "nothing published yet")
    numbers = np.array([version.version for version in history.versions])
    draw_line(upper, numbers, np.array([version.t_bcast_s for version in history.versions]), BLUE, "T_bcast")
    upper.set_ylim(bottom=0)
    learner = np.array([version.bytes_from_learner for version in history.versions])
    peers = np.array([version.bytes_from_peers for version in history.versions])
    scale, unit = byte_unit(float((learner + peers).max()))
    label_axes(lower, "policy version", f"installed [{unit}]")
    draw_stack(
        lower,
        numbers,
        [(learner / scale, BLUE, "from the learner"), (peers / scale, TEAL, "from other workers")],
    )
    return draw_legend(lower)


def throughput(figure: Any, history: RunHistory) -> None:
    """Are there enough workers? Σμ of the active ones against the target, and how many they are."""
    upper, lower = figure.subplots(2, 1, sharex=True, height_ratios=[2, 1])
    label_axes(upper, "", "rollouts/s")
    label_axes(lower, "step", "active workers")
    if not len(history.steps):
        draw_empty(lower, "")
        return draw_empty(upper, "no steps yet")
    draw_line(upper, history.steps, history.columns["mu_pool"], TEAL, "μ_pool")
    upper.plot(history.steps, history.columns["mu_target"], color=INK, linestyle="--", label="μ_target")
    upper.set_ylim(bottom=0)
    lower.step(history.steps, history.columns["active"], where="mid", color=TEAL)
    lower.set_ylim(bottom=0)
    lower.yaxis.get_major_locator().set_params(integer=True)
    integer_x(lower)
    return draw_legend(upper)


def cost(figure: Any, history: RunHistory) -> None:
    """What did it cost? Cumulative $ at advertised prices, against keeping every worker on."""
    axes = new_axes(figure, "step", "$ since the start")
    known = ~np.isnan(history.spend_usd)
    if not known.any():
        return draw_empty(axes, "nothing spent yet")
    draw_line(axes, history.steps, history.all_on_usd, GREY, "every worker on")
    draw_line(axes, history.steps, history.spend_usd, TEAL, "chosen workers")
    axes.fill_between(
        history.steps, history.spend_usd, history.all_on_usd, color=GREY, alpha=0.2, linewidth=0
    )
    axes.set_ylim(bottom=0)
    return draw_legend(axes)


def workers(figure: Any, history: RunHistory) -> None:
    """Who was chosen? Price per throughput of each known worker, in the order they are activated."""
    axes = new_axes(figure, "ρ [$ per 1,000 rollouts]", "")
    axes.grid(visible=False, axis="y")
    shown = history.workers[:MAX_WORKER_BARS]
    if not shown:
        return draw_empty(axes, "no worker has joined yet")
    rho = np.nan_to_num(np.array([worker.rho for worker in shown]) * 1000)
    reach = float(rho.max()) or 1.0
    colours = {"active": TEAL, "standby": GREY}
    for row, (worker, value) in enumerate(zip(shown, rho, strict=True)):
        axes.barh(row, value, height=0.66, color=colours.get(worker.state, GRID))
        price = (
            "price not known"
            if math.isnan(worker.price_per_hour)
            else f"{human_usd(worker.price_per_hour)}/h"
        )
        note = price + (", μ not known" if math.isnan(worker.mu) else f", μ {human_number(worker.mu)}/s")
        axes.text(value + reach * 0.02, row, note, va="center", fontsize=7.5, color=MUTED)
    names = [f"{ascii_only(w.peer, 128)[-PEER_TAIL:]}  {ascii_only(w.gpu, 14)}" for w in shown]
    axes.set_yticks(range(len(shown)), names)
    axes.set_ylim(max(len(shown), 4) - 0.4, -0.6)
    axes.set_xlim(0, reach * 1.62)
    axes.xaxis.get_major_locator().set_params(nbins=5)
    for state, colour in (("active", TEAL), ("standby", GREY), ("gone", GRID)):
        axes.bar(0, 0, color=colour, label=state)
    if more := len(history.workers) - len(shown):
        axes.bar(0, 0, color="none", label=f"({more} more)")
    return draw_legend(axes)


PANELS: Sequence[tuple[str, Callable[[Any, RunHistory], None]]] = (
    ("Reward", reward),
    ("Staleness of trained tokens", staleness),
    ("Training and waiting", time),
    ("Off-policy distance and gradient", mismatch),
    ("Tokens without effect, and entropy", tokens),
    ("Dissemination of policy versions", dissemination),
    ("Throughput against target", throughput),
    ("Cost", cost),
    ("Workers by unit throughput cost", workers),
    ("Arrivals", dissemination_panels.arrivals),
    ("Senders", dissemination_panels.sources),
)
"""Title and drawing function of each panel, in reading order; the last :data:`WIDE` are of one dissemination."""
WIDE = 2


def panel_title(name: str, history: RunHistory) -> str:
    """``name``, with the version that a panel of one dissemination is about."""
    shown = history.dissemination
    if shown is None or name not in [title for title, _ in PANELS[-WIDE:]]:
        return name
    return f"{name} of version {shown.version}" + (f" ({shown.chosen})" if shown.chosen else "")
