"""Data on stdout: a table for people, JSON for programs. Everything that came from peers is cleaned first."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from typing import Any

import rich_click as click

from echo2p2p.telemetry.text import clean, human_number

MAX_CELL_CHARS = 400
MAX_CELL_LINES = 24


def print_json(value: Any) -> None:
    click.echo(json.dumps(value, indent=2, ensure_ascii=False))


def print_table(headings: Sequence[str], rows: Sequence[Sequence[Any]], *, empty: str) -> None:
    """A table as wide as the terminal needs; piped, as wide as its content, so that nothing is cut."""
    if not rows:
        click.echo(empty, err=True)
        return
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    table = Table(box=None, header_style="bold", padding=(0, 2, 0, 0))
    cells = [[_cell(value) for value in row] for row in rows]
    for column, heading in enumerate(headings):
        numeric = all(isinstance(row[column], int | float | None) for row in rows)
        table.add_column(heading, justify="right" if numeric else "left", overflow="fold")
    for row in cells:
        table.add_row(*map(Text, row))
    table.show_header = any(headings)
    width = None if sys.stdout.isatty() else 2000
    Console(width=width, soft_wrap=False).print(table)


def _cell(value: Any) -> str:
    if value is None:
        return "–"
    if isinstance(value, float):
        return human_number(value)
    if isinstance(value, bool):
        return "yes" if value else "no"
    lines = [f"{k}: {v}" for k, v in value.items()] if isinstance(value, dict) else value
    if isinstance(lines, list | tuple):
        shown = [clean(line, MAX_CELL_CHARS) for line in lines[:MAX_CELL_LINES]]
        more = [f"and {len(lines) - MAX_CELL_LINES} more"] if len(lines) > MAX_CELL_LINES else []
        return "\n".join(shown + more) or "none"
    return clean(value, MAX_CELL_CHARS)
