"""How a run went, on one screen: what a person reads when it has ended."""

from __future__ import annotations

import math
from pathlib import Path

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from echo2p2p.telemetry.headline import headline, status
from echo2p2p.telemetry.history import RunHistory
from echo2p2p.telemetry.state import Decision
from echo2p2p.telemetry.text import clean, human_number, human_usd, short_peer

MAX_WORKER_ROWS = 12
_TONES = {"good": "green", "bad": "bold red", "plain": "bold"}


def format_summary(history: RunHistory, *, report: Path | None = None) -> RenderableType:
    """The summary as a rich renderable; printed to a file it is plain text.

    Says the held-out reward before and after, the steps, the oldest token against S, who was chosen and why,
    who gave the weights, what was spent, and where the report is.

    Args:
        report: the page to point to; None if there is none.
    """
    figures = Table.grid(padding=(0, 2))
    figures.add_column(style="dim", no_wrap=True)
    figures.add_column(no_wrap=True)
    figures.add_column(style="dim")
    for figure in headline(history):
        figures.add_row(figure.label, Text(figure.value, style=_TONES[figure.tone]), Text(figure.note))
    title = Text(f"{clean(history.run, 130) or 'unnamed run'}: {status(history)}", style="bold")
    parts: list[RenderableType] = [title, Text(), figures]
    if history.decision is not None and history.decision.pool:
        parts += [Text(), *_choice(history, history.decision)]
    if report is not None:
        parts += [Text(), Text(f"report: {clean(report, 1000)}", no_wrap=True, overflow="ignore")]
    return Group(*parts)


def _choice(history: RunHistory, decision: Decision) -> list[RenderableType]:
    """The last activation, in the order in which it went through the workers."""
    target = _figure(decision.mu_target)
    why = f"Workers by price per throughput (ρ), the cheapest first, until Σμ reaches {target}/s"
    if not decision.feasible:
        why += "; all of them together do not reach it"
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="dim")
    for heading in ("worker", "gpu", "$/h", "μ/s", "ρ $/1k", "Σμ/s", "state"):
        table.add_column(heading, justify="right" if "/" in heading else "left", no_wrap=True)
    gpus = {worker.peer: worker.gpu for worker in history.workers}
    total = 0.0
    for peer, price, mu, state in decision.pool[:MAX_WORKER_ROWS]:
        chosen = state == "active"
        total += mu if chosen and not math.isnan(mu) else 0.0
        rho = price / 3.6 / mu if mu > 0 else math.nan
        row = [
            short_peer(peer),
            clean(gpus.get(peer), 20),
            "–" if math.isnan(price) else human_usd(price),
            _figure(mu),
            _figure(rho),
            _figure(total) if chosen else "",
            clean(state, 12),
        ]
        table.add_row(*map(Text, row), style="green" if chosen else "dim")
    if (more := len(decision.pool) - MAX_WORKER_ROWS) > 0:
        table.add_row(Text(f"+ {more} more", style="dim"))
    return [Text(why), table]


def _figure(value: float) -> str:
    return "–" if math.isnan(value) else human_number(value)
