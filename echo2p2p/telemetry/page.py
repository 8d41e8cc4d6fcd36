"""The report as one self-contained HTML page: no script, no request, readable on a phone, light or dark.

Whatever came from peers is cleaned and HTML-escaped; a content security policy forbids scripts and requests
should that ever fail.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from datetime import UTC, datetime
from html import escape

from echo2p2p.telemetry.headline import Figure, headline, status
from echo2p2p.telemetry.history import RunHistory
from echo2p2p.telemetry.state import Worker
from echo2p2p.telemetry.text import clean, human_bytes, human_number, human_seconds, human_usd, short_peer

MAX_WORKER_ROWS = 200
MAX_REASONS = 50
MAX_STORY = 60

_STYLE = """
:root { color-scheme: light dark; --back: #f3f5f7; --paper: #fefefe; --ink: #1f2a36; --muted: #66727f;
  --grid: #e3e7eb; --blue: #2b66c4; --teal: #139483; --amber: #dd8f14; --red: #c93a40; --grey: #a9b3bd; }
@media (prefers-color-scheme: dark) { :root { --back: #12171d; --paper: #1a2129; --ink: #e5eaef;
  --muted: #95a2af; --grid: #2c3641; --blue: #6c9cf0; --teal: #35c0ac; --amber: #f0ad43; --red: #f07178;
  --grey: #5f6b77; } }
* { box-sizing: border-box; }
body { margin: 0 auto; max-width: 78rem; padding: 1.5rem 1rem 3rem; background: var(--back);
  color: var(--ink); font: 15px/1.5 system-ui, -apple-system, "Segoe UI", sans-serif; }
h1 { font-size: 1.35rem; margin: 0; overflow-wrap: anywhere; }
h2 { font-size: .95rem; margin: 0 0 .6rem; }
p { margin: .2rem 0; overflow-wrap: anywhere; }
.muted { color: var(--muted); } small { color: var(--muted); font-size: .8rem; }
.grid { display: grid; gap: .8rem; margin-top: .8rem; }
.cards { grid-template-columns: repeat(auto-fit, minmax(max(10rem, 23%), 1fr)); }
.panels { grid-template-columns: repeat(auto-fit, minmax(min(100%, 26rem), 1fr)); }
.box { background: var(--paper); border: 1px solid var(--grid); border-radius: .6rem; padding: .8rem 1rem;
  min-width: 0; overflow-wrap: anywhere; }
.box b { display: block; font-size: 1.45rem; line-height: 1.35; font-weight: 600; }
.good b { color: var(--teal); } .bad b { color: var(--red); }
.scroll { overflow-x: auto; } svg { display: block; width: 100%; height: auto; }
table { border-collapse: collapse; width: 100%; font-size: .85rem; font-variant-numeric: tabular-nums; }
th, td { text-align: left; padding: .3rem .9rem .3rem 0; border-bottom: 1px solid var(--grid);
  white-space: nowrap; }
th { color: var(--muted); font-weight: 500; } tr:last-child td { border-bottom: 0; }
td.n, th.n { text-align: right; } td.when { width: 1%; color: var(--muted); }
td.wrap { white-space: normal; overflow-wrap: anywhere; min-width: 12rem; }
.active { color: var(--teal); } .gone { color: var(--muted); }
"""
_POLICY = "default-src 'none'; style-src 'unsafe-inline'"


def render_page(history: RunHistory, panels: Sequence[tuple[str, str]]) -> str:
    """The whole page.

    Args:
        panels: title and inline SVG of each panel; trusted, written into the page as they are.
    """
    title = clean(history.run, 130) or "unnamed run"
    cards = "".join(_card(figure) for figure in headline(history))
    drawn = "".join(f'<section class="box"><h2>{escape(name)}</h2>{svg}</section>' for name, svg in panels)
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        f'<meta http-equiv="Content-Security-Policy" content="{_POLICY}">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{escape(title)}</title><style>{_STYLE}</style></head><body>"
        f"<header><h1>{escape(title)}</h1><p class=muted>{escape(_subtitle(history))}</p></header>"
        f'<div class="grid cards">{cards}</div><div class="grid panels">{drawn}</div>'
        f'<div class="grid">{_workers(history)}</div><div class="grid panels">'
        + _reasons("Groups dropped from the replay buffer", history.dropped)
        + _reasons("Groups refused at admission", history.refused)
        + f'</div><div class="grid">{_story(history)}</div></body></html>\n'
    )


def _subtitle(history: RunHistory) -> str:
    started = history.started
    parts = [status(history)]
    for name, label in (
        ("task", "task"),
        ("mode", ""),
        ("staleness", "S ="),
        ("kappa", "κ ="),
        ("prompts_per_step", "prompts a step:"),
        ("samples_per_prompt", "samples a prompt:"),
        ("gamma", "γ ="),
    ):
        if started.get(name) is not None:
            parts.append(f"{label} {clean(started[name])}".strip())
    if not math.isnan(history.last_unix) and 0 <= history.last_unix < 4e9:
        last = datetime.fromtimestamp(history.last_unix, UTC)
        parts.append(f"last event {last:%Y-%m-%d %H:%M:%S} UTC")
    return " · ".join(parts)


def _card(figure: Figure) -> str:
    return (
        f'<div class="box {figure.tone}"><small>{escape(figure.label)}</small>'
        f"<b>{escape(figure.value)}</b><small>{escape(figure.note)}</small></div>"
    )


def _workers(history: RunHistory) -> str:
    if not history.workers:
        return _box("Workers", "<p class=muted>No worker has joined yet.</p>")
    own_logs = any(worker.generated_groups or worker.accepted for worker in history.workers)
    heads = ["worker", "GPU", "state", "$/h", "μ [rollouts/s]", "ρ [$/1,000 rollouts]", "version", "installs"]
    heads += ["from learner", "from workers", "refused"]
    if own_logs:
        heads += ["groups generated", "accepted"]
    heads.append("left because")
    head = "".join(
        f"<th{'' if i < 3 or name == 'left because' else ' class=n'}>{name}" for i, name in enumerate(heads)
    )
    rows = "".join(_worker_row(worker, own_logs) for worker in history.workers[:MAX_WORKER_ROWS])
    more = len(history.workers) - MAX_WORKER_ROWS
    note = f"<p class=muted>{more} more are not shown.</p>" if more > 0 else ""
    return _box(
        "Workers, cheapest throughput first",
        f"<div class=scroll><table><tr>{head}</tr>{rows}</table></div>{note}",
    )


def _worker_row(worker: Worker, own_logs: bool) -> str:
    state = worker.state if worker.state in {"active", "standby", "gone"} else "unknown"
    figures = [
        _or_dash(worker.price_per_hour, human_usd),
        _or_dash(worker.mu, human_number),
        _or_dash(worker.rho * 1000, human_usd),
        str(worker.version) if worker.version >= 0 else "–",
        str(worker.installs),
        human_bytes(worker.bytes_from_learner),
        human_bytes(worker.bytes_from_peers),
        str(worker.refused.total()),
    ]
    if own_logs:
        figures += [f"{worker.generated_groups:.0f}", f"{worker.accepted:.0f}"]
    return (
        f'<tr><td title="{escape(clean(worker.peer))}">{escape(short_peer(worker.peer))}'
        f"<td>{escape(clean(worker.gpu, 40) or '–')}<td class={state}>{state}"
        + "".join(f"<td class=n>{escape(figure)}" for figure in figures)
        + f"<td class=wrap>{escape(clean(worker.left, 200))}</tr>"
    )


def _reasons(title: str, counts: Mapping[str, float]) -> str:
    known = {reason: count for reason, count in counts.items() if count}
    if not known:
        return _box(title, "<p class=muted>None.</p>")
    ordered = sorted(known.items(), key=lambda item: -item[1])
    rows = "".join(
        f"<tr><td class=wrap>{escape(clean(reason, 200))}<td class=n>{count:,.0f}</tr>"
        for reason, count in ordered[:MAX_REASONS]
    )
    more = len(ordered) - MAX_REASONS
    note = f"<p class=muted>{more} more reasons are not shown.</p>" if more > 0 else ""
    return _box(title, f"<table>{rows}</table>{note}")


def _story(history: RunHistory) -> str:
    if not history.notable:
        return _box("What happened", "<p class=muted>Nothing yet.</p>")
    rows = "".join(
        f'<tr><td class="n when">{escape(human_seconds(t))}<td class=wrap>{escape(text)}</tr>'
        for t, text in history.notable[-MAX_STORY:]
    )
    title = (
        "What happened"
        if len(history.notable) <= MAX_STORY
        else f"What happened, the last {MAX_STORY} events"
    )
    return _box(title, f"<table>{rows}</table>")


def _box(title: str, body: str) -> str:
    return f'<section class="box"><h2>{escape(title)}</h2>{body}</section>'


def _or_dash(value: float, show: Callable[[float], str]) -> str:
    return "–" if math.isnan(value) else show(value)
