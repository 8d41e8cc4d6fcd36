"""A run on the terminal while it happens, fed by the event log's listeners and nothing else.

On a terminal: one panel on stderr, redrawn twice a second by a thread of its own. Elsewhere (a pipe,
NO_COLOR, a dumb terminal, ``--plain``): one ASCII line every few seconds. Either way the thread that emits an
event only updates a few figures, and the terminal is as it was when the view ends, also by an exception.
"""

from __future__ import annotations

import math
import sys
import threading
import time
from collections.abc import Callable, Mapping
from types import TracebackType
from typing import Self, TextIO

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from echo2p2p.telemetry.events import Event, EventLog
from echo2p2p.telemetry.state import RunState, Worker, by_rho
from echo2p2p.telemetry.text import ascii_only, clean, human_bytes, human_seconds, human_usd, short_peer
from echo2p2p.telemetry.values import number, whole

REFRESH_PER_SECOND = 2.0
MAX_WORKER_ROWS = 10
MAX_NEWS = 4
_SPARK = "▁▂▃▄▅▆▇█"
_SPARK_WIDTH = 40
_PLAIN_KINDS = {"run_started", "eval", "run_finished"}
"""Kinds that get a plain line of their own; everything else shows in the periodic one."""
_STYLES = {"active": "green", "standby": "default", "gone": "dim"}
_ORDER = {"active": 0, "standby": 1}


def wants_plain(stream: TextIO, environ: Mapping[str, str]) -> bool:
    """Whether ``stream`` should get lines rather than a panel that redraws itself."""
    encoding = (getattr(stream, "encoding", "") or "").lower().replace("-", "")
    return (
        not stream.isatty()
        or bool(environ.get("NO_COLOR"))
        or environ.get("TERM") == "dumb"
        or encoding != "utf8"
    )


class LiveView:
    """A context manager that shows what ``log`` says until it is left.

    Args:
        log: the learner's event log.
        plain: lines instead of the panel; see :func:`wants_plain`.
        stream: where to; stderr if None.
        plain_every_s: at least so long between two periodic lines.
        clock: seconds, monotonic.
    """

    def __init__(
        self,
        log: EventLog,
        *,
        plain: bool,
        stream: TextIO | None = None,
        plain_every_s: float = 10.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._log = log
        self._stream = sys.stderr if stream is None else stream
        self._plain_every_s = plain_every_s
        self._clock = clock
        self._lock = threading.Lock()
        self._state = RunState()
        self._last_event = self._last_line = clock()
        self._unsubscribe: Callable[[], None] | None = None
        self._live: Live | None = None
        if not plain:
            self._live = Live(
                get_renderable=self.render,
                console=Console(file=self._stream),
                refresh_per_second=REFRESH_PER_SECOND,
                redirect_stdout=False,
            )

    def __enter__(self) -> Self:
        if self._live is not None:
            self._live.start(refresh=True)
        self._unsubscribe = self._log.subscribe(self._on_event)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._unsubscribe is not None:
            self._unsubscribe()
        if self._live is not None:
            self._live.stop()

    def render(self) -> RenderableType:
        """The panel as it stands now."""
        with self._lock:
            state = self._state
            running = 0.0 if state.finished is not None else self._clock() - self._last_event
            body: list[RenderableType] = [_figures(state)]
            if state.workers:
                body.append(_workers(state))
            body += [
                Text(f"{human_seconds(t):>11}  {text}", style="dim", no_wrap=True, overflow="ellipsis")
                for t, text in list(state.notable)[-MAX_NEWS:]
            ]
            title = Text(_header(state, state.seconds + running), style="bold")
        return Panel(Group(*body), title=title, title_align="left", border_style="dim")

    def _on_event(self, event: Event) -> None:
        with self._lock:
            self._state.add(event)
            now = self._last_event = self._clock()
            if self._live is not None:
                return
            due = now - self._last_line >= self._plain_every_s
            if not due and event["event"] not in _PLAIN_KINDS:
                return
            self._last_line = now
            line = plain_line(self._state)
        try:
            self._stream.write(line + "\n")
            self._stream.flush()
        except OSError:  # whoever read the lines has gone: the run goes on without them
            if self._unsubscribe is not None:
                self._unsubscribe()


def plain_line(state: RunState) -> str:
    """The state of a run in one line of ASCII."""
    parts = [f"step {_progress(state)}", f"{human_seconds(state.seconds)}"]
    parts += [f"reward {value:.3f}" for value in state.column("reward_mean", 1) if not math.isnan(value)]
    if state.evals:
        parts.append(f"held-out {state.evals[max(state.evals)][0]:.3f}")
    parts.append(f"staleness {_or_dash(state.oldest, '.0f')} (S {_window(state)})")
    parts += [f"bubble {value:.1%}" for value in _known(state, "bubble_ratio")]
    active = sum(worker.state == "active" for worker in state.workers.values())
    parts.append(f"workers {active}/{len(state.workers)}")
    parts.append(f"spent {human_usd(state.spend.total)}")
    if state.finished is not None:
        parts.append("stopped" if state.finished.get("finished") is False else "finished")
    return ascii_only("  ".join(parts), 240)


def sparkline(values: list[float], width: int = _SPARK_WIDTH) -> str:
    """The last ``width`` finite values as a row of blocks, lowest to highest."""
    shown = [value for value in values if math.isfinite(value)][-width:]
    if not shown:
        return ""
    low, span = min(shown), max(shown) - min(shown)
    top = len(_SPARK) - 1
    return "".join(_SPARK[round((value - low) / span * top) if span else top // 2] for value in shown)


def _header(state: RunState, elapsed_s: float) -> str:
    version = max(state.versions, default=0)
    name = clean(state.started.get("run"), 130).split("@")[0] or "waiting for the run to start"
    return f" {clean(name, 40)} · step {_progress(state)} · version {version} · {human_seconds(elapsed_s)} "


def _progress(state: RunState) -> str:
    planned = number(state.started.get("max_steps"))
    step = max(state.last_step, whole(state.started.get("resumed_from")))
    return str(step) if math.isnan(planned) else f"{step}/{planned:.0f}"


def _window(state: RunState) -> str:
    window = number(state.started.get("staleness"))
    return "?" if math.isnan(window) else f"{window:.0f}"


def _known(state: RunState, name: str) -> list[float]:
    """The newest value of a column, if there is one."""
    return [value for value in state.column(name, 1) if not math.isnan(value)]


def _figures(state: RunState) -> Table:
    rewards = state.column("reward_mean", _SPARK_WIDTH)
    latest = next(iter(_known(state, "reward_mean")), math.nan)
    evals = [f"{reward:.3f} @ {step}" for step, (reward, _) in sorted(state.evals.items())[-3:]]
    oldest = state.oldest
    mean = next(iter(_known(state, "staleness_mean")), math.nan)
    bubble = next(iter(_known(state, "bubble_ratio")), math.nan)
    over = oldest > number(state.started.get("staleness"))
    learner = sum(version.bytes_from_learner for version in state.versions.values())
    peers = sum(version.bytes_from_peers for version in state.versions.values())
    grid = Table.grid(padding=(0, 2))
    grid.add_column(style="dim", no_wrap=True)
    grid.add_column(no_wrap=True, overflow="ellipsis")
    grid.add_row("reward", Text(f"{sparkline(rewards)} {_or_dash(latest, '.3f')}", style="cyan"))
    grid.add_row("held-out", Text("   ".join(evals) or "not evaluated yet"))
    grid.add_row(
        "staleness",
        Text(
            f"mean {_or_dash(mean, '.1f')}, oldest {_or_dash(oldest, '.0f')}, window S = {_window(state)}",
            style="bold red" if over else "default",
        ),
    )
    grid.add_row("off-policy", Text(_off_policy(state)))
    grid.add_row("policy", Text(_policy(state)))
    grid.add_row("bubble ratio", Text(_or_dash(bubble, ".1%")))
    grid.add_row(
        "weights", Text(f"{human_bytes(learner)} from the learner, {human_bytes(peers)} from workers")
    )
    grid.add_row(
        "spent",
        Text(f"{human_usd(state.spend.total)} of {human_usd(state.all_on.total)} with every worker on"),
    )
    return grid


def _off_policy(state: RunState) -> str:
    """How far the newest step's data was from the policy, and what that cost; only what the log knows."""
    tokens = next(iter(_known(state, "tokens")), math.nan)
    parts = [f"KL {value:.1e}" for value in _known(state, "mismatch_kl")]
    for name, label in (("clipped_fraction", "clipped"), ("masked_fraction", "masked")):
        parts += [f"{label} {value:.1%}" for value in _known(state, name)]
    parts += [f"wasted {value / tokens:.0%}" for value in _known(state, "wasted_tokens") if tokens > 0]
    return ", ".join(parts) or "-"


def _policy(state: RunState) -> str:
    parts = [f"entropy {value:.2f}" for value in _known(state, "entropy")]
    parts += [f"gradient {value:.2g}" for value in _known(state, "grad_norm")]
    return ", ".join(parts) or "-"


def _workers(state: RunState) -> Table:
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="dim", show_edge=False)
    table.add_column("worker", no_wrap=True)
    table.add_column("gpu", no_wrap=True, overflow="ellipsis", max_width=20)
    for heading in ("$/h", "μ/s", "ρ $/1k", "version"):
        table.add_column(heading, justify="right", no_wrap=True)
    table.add_column("state", no_wrap=True)
    ranked = sorted(state.workers.values(), key=lambda worker: (_ORDER.get(worker.state, 2), *by_rho(worker)))
    for worker in ranked[:MAX_WORKER_ROWS]:
        table.add_row(*_worker_row(worker), style=_STYLES.get(worker.state, "dim"))
    if (more := len(ranked) - MAX_WORKER_ROWS) > 0:
        table.add_row(Text(f"+ {more} more", style="dim"))
    return table


def _worker_row(worker: Worker) -> list[Text]:
    return [
        Text(short_peer(worker.peer)),
        Text(clean(worker.gpu, 24)),
        Text(_or_dash(worker.price_per_hour, ".3g")),
        Text(_or_dash(worker.mu, ".3g")),
        Text(_or_dash(worker.rho * 1000, ".3g")),
        Text(str(worker.version) if worker.version >= 0 else "-"),
        Text(clean(worker.state, 12)),
    ]


def _or_dash(value: float, form: str) -> str:
    return "-" if math.isnan(value) else format(value, form)
