"""``echo2p2p demo``."""

from __future__ import annotations

import time
from pathlib import Path

import rich_click as click

from echo2p2p.cli.options import json_option
from echo2p2p.cli.table import print_json


@click.command("demo")
@click.option(
    "--run-dir", type=click.Path(file_okay=False, path_type=Path), help="Folder of the run.  [runs/demo-TIME]"
)
@click.option(
    "--set", "overrides", multiple=True, metavar="KEY=VALUE", help="Change one of the demo's settings."
)
@click.option("--deadline", "deadline_s", default=600.0, show_default=True, help="Seconds until it gives up.")
@json_option
def command(run_dir: Path | None, overrides: tuple[str, ...], deadline_s: float, as_json: bool) -> None:
    """A whole swarm on this machine, trained until the reward has risen.

    One bootstrap peer, one learner and four workers, as six processes on a real hivemind network: they
    reverse digits, worse than one in three at first. It ends by itself within minutes, with a summary and a
    report; Ctrl-C at any moment stops everything.
    """
    from rich.console import Console

    from echo2p2p.demo import run_demo
    from echo2p2p.telemetry.headline import headline
    from echo2p2p.telemetry.history import load_history
    from echo2p2p.telemetry.report import write_report
    from echo2p2p.telemetry.summary import format_summary

    folder = run_dir or Path("runs") / time.strftime("demo-%Y%m%d-%H%M%S")
    click.echo(f"starting a bootstrap peer, a learner and four workers; their logs: {folder}", err=True)
    run_demo(folder, overrides=overrides, deadline_s=deadline_s)
    click.echo("drawing the report …", err=True)
    report = write_report(folder)
    history = load_history(folder / "events.jsonl", sorted(folder.glob("worker-*/events.jsonl")))
    if as_json:
        figures = {figure.label: figure.value for figure in headline(history)}
        print_json({"figures": figures, "report": str(report.html), "png": str(report.png)})
        return
    Console().print(format_summary(history, report=report.html))
