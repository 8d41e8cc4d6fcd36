"""The report of a run: one figure (PNG) and one page (HTML) in its folder, from its event logs alone."""

from __future__ import annotations

import io
import os
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from echo2p2p.errors import OutOfDisk, SettingsError
from echo2p2p.telemetry.events import read_events
from echo2p2p.telemetry.headline import headline, status
from echo2p2p.telemetry.history import RunHistory, load_history
from echo2p2p.telemetry.page import render_page
from echo2p2p.telemetry.text import ascii_only

EVENTS_FILE = "events.jsonl"
"""Where a role keeps its event log within its run folder."""
MAX_WORKER_LOGS = 1000


@dataclass(frozen=True)
class Report:
    """Where a report was written."""

    png: Path
    html: Path


def write_report(run_dir: Path, *, version: int | None = None) -> Report:
    """Draw ``report.png`` and write ``report.html`` into ``run_dir``, also while the run is going on.

    Reads the learner's log, ``run_dir/events.jsonl``, and the logs of workers whose run folders lie within
    ``run_dir``, at most two levels deep. Takes a few seconds of one core; imports matplotlib.

    Args:
        version: the policy version whose dissemination is shown; by default that of median T_bcast.

    Raises:
        SettingsError: there is no readable event log in ``run_dir``, it is a bootstrap peer's, or it says nothing of
            how ``version`` came.
        OutOfDisk: the files cannot be written.
    """
    if next(read_events(run_dir / EVENTS_FILE), {}).get("role") == "bootstrap":
        raise SettingsError(
            f"{run_dir} is a bootstrap peer's folder: no learner or worker ran here",
            hint="name the folder of a run",
        )
    below = sorted({*run_dir.glob(f"*/{EVENTS_FILE}"), *run_dir.glob(f"*/*/{EVENTS_FILE}")})
    history = load_history(run_dir / EVENTS_FILE, below[:MAX_WORKER_LOGS], version=version)
    report = Report(png=run_dir / "report.png", html=run_dir / "report.html")
    try:
        _replace(report.png, draw_figure(history))
        _replace(report.html, render_page(history, draw_panels(history)).encode())
    except OSError as error:
        raise OutOfDisk(f"the report cannot be written to {run_dir}: {error.strerror}") from error
    return report


def draw_figure(history: RunHistory) -> bytes:
    """All panels in one figure, as PNG."""
    import matplotlib as mpl
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    from echo2p2p.telemetry.drawing import INK, MUTED, STYLE, fit_text
    from echo2p2p.telemetry.panels import PANELS, WIDE, panel_title

    columns = 3
    rows = -(-(len(PANELS) - WIDE) // columns)
    with mpl.rc_context(STYLE):
        figure: Any = Figure(figsize=(5.2 * columns, 4.0 * (rows + 1) + 1.0), dpi=110, layout="constrained")
        FigureCanvasAgg(figure)
        top, body, last = figure.subfigures(3, 1, height_ratios=[1.0, 4.0 * rows, 4.0])
        cells = [
            *body.subfigures(rows, columns, wspace=0.04, hspace=0.05).flat[: len(PANELS) - WIDE],
            *last.subfigures(1, WIDE, wspace=0.02, width_ratios=[3, 2]),
        ]
        title = ascii_only(history.run, 130) or "unnamed run"
        head = top.text(0.008, 0.72, title, fontsize=15, fontweight="bold", va="center")
        figures = (f"{each.label}: {each.value}" for each in headline(history) if each.value != "–")
        line = top.text(0.008, 0.24, "", fontsize=10, color=MUTED, va="center")
        fit_text(head, [title], figure, lines=1)
        fit_text(line, [status(history), *figures], figure, lines=2)
        for (name, draw), cell in zip(PANELS, cells, strict=True):
            cell.suptitle(
                panel_title(name, history), x=0.03, ha="left", fontsize=11, fontweight="bold", color=INK
            )
            draw(cell, history)
        buffer = io.BytesIO()
        figure.savefig(buffer, format="png")
    return buffer.getvalue()


def draw_panels(history: RunHistory) -> list[tuple[str, str]]:
    """Title and inline SVG of each panel; colours are CSS variables, so that they follow the page's theme."""
    import matplotlib as mpl
    from matplotlib.backends.backend_svg import FigureCanvasSVG
    from matplotlib.figure import Figure

    from echo2p2p.telemetry.drawing import STYLE
    from echo2p2p.telemetry.panels import PANELS, panel_title

    drawn = []
    with mpl.rc_context({**STYLE, "svg.fonttype": "path", "svg.hashsalt": "echo2p2p"}):
        for index, (name, draw) in enumerate(PANELS):
            figure = Figure(figsize=(5.2, 3.7), layout="constrained")
            FigureCanvasSVG(figure)
            draw(figure, history)
            buffer = io.StringIO()
            figure.savefig(buffer, format="svg", metadata={"Date": None, "Creator": None})
            title = panel_title(name, history)
            drawn.append((title, _inline(buffer.getvalue(), title, f"p{index}-")))
    return drawn


def _inline(svg: str, name: str, prefix: str) -> str:
    """An SVG file as part of a page: no prologue, ids of its own, colours of the page, scaled to its box."""
    from echo2p2p.telemetry.drawing import PALETTE

    svg = svg[svg.index("<svg") :]
    svg = re.sub(r"<metadata>.*?</metadata>", "", svg, flags=re.DOTALL)
    svg = re.sub(r'(<svg[^>]*?) width="[^"]*"', r"\1", svg, count=1)
    svg = re.sub(r'(<svg[^>]*?) height="[^"]*"', r"\1", svg, count=1)
    svg = svg.replace("<svg ", f'<svg role="img" aria-label="{name}" ', 1)
    svg = re.sub(r'\bid="', f'id="{prefix}', svg)
    svg = re.sub(r'href="#', f'href="#{prefix}', svg)
    svg = re.sub(r"url\(#", f"url(#{prefix}", svg)
    for colour, value in PALETTE.items():
        svg = svg.replace(value, f"var(--{colour})")
    return svg


def _replace(path: Path, data: bytes) -> None:
    """Write under another name first, so that nobody ever opens half a report."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        temporary.write_bytes(data)
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)
