"""``echo2p2p report``."""

from __future__ import annotations

from pathlib import Path

import rich_click as click

from echo2p2p.cli.options import json_option
from echo2p2p.cli.table import print_json


@click.command("report")
@click.argument("run_dir", type=click.Path(exists=True, file_okay=False, path_type=Path))
@click.option(
    "--policy-version",
    type=click.IntRange(min=0),
    help="Show the dissemination of this version; by default of the one with the median T_bcast.",
)
@json_option
def command(run_dir: Path, policy_version: int | None, as_json: bool) -> None:
    """Draw the run in RUN_DIR: report.png and report.html, beside its events.

    Works while the run goes on. Logs of workers below the folder are used where there are any.
    """
    from echo2p2p.telemetry.report import write_report

    report = write_report(run_dir, version=policy_version)
    if as_json:
        print_json({"png": str(report.png), "html": str(report.html)})
        return
    click.echo(report.png)
    click.echo(report.html)
