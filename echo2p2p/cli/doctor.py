"""``echo2p2p doctor``."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import msgspec
import rich_click as click
from click.exceptions import Exit

from echo2p2p.cli.options import json_option, print_settings, resolve_layers, settings_options, swarm_options
from echo2p2p.cli.table import print_json
from echo2p2p.telemetry.text import clean

MARKS = {"ok": ("ok     ", "green"), "warning": ("warning", "yellow"), "failure": ("failure", "red")}
MAX_CHARS = 600


@click.command("doctor")
@settings_options
@swarm_options
@click.option(
    "--policy",
    type=click.Path(exists=True, file_okay=False, path_type=Path),
    help="Policy folder that the engine shall load.  [the seed policy]",
)
@click.option("--device", help="torch device.  [auto]")
@click.option(
    "--run-dir", type=click.Path(file_okay=False, path_type=Path), help="Where the run folder will be."
)
@click.option(
    "--deadline",
    "deadline_s",
    type=click.FloatRange(1, 3600),
    help="Seconds for the engine, and for the network.  [120; for vLLM, which compiles, 600]",
)
@json_option
def command(
    files: tuple[Path, ...],
    overrides: tuple[str, ...],
    dry_run: bool,
    policy: Path | None,
    device: str | None,
    run_dir: Path | None,
    deadline_s: float | None,
    as_json: bool,
    **swarm: Any,
) -> None:
    """Can this machine take part? Checks what a run needs, and changes nothing.

    Versions, memory, disk, open files, clock, ports, GPU; that the engine loads a policy and generates, that p2pd
    starts, what it carries on this machine, and how soon each of --initial-peers answers. Each line is ok, warning or
    failure, with what to do.

    Leaves with 0 if nothing failed, and otherwise with the exit code of the first failure.
    """
    settings, layered = resolve_layers(
        files,
        overrides,
        swarm,
        policy={"path": policy},
        worker={"device": device},
        **{"": {"run_dir": run_dir}},
    )
    if dry_run:
        print_settings(settings, layered)
        return
    from echo2p2p.doctor.examine import examine, exit_code
    from echo2p2p.doctor.finding import Finding

    def show(finding: Finding) -> None:
        mark, colour = MARKS[finding.state]
        hint = f"\n         → {clean(finding.hint, MAX_CHARS)}" if finding.hint else ""
        says = f"{clean(finding.check)}: {clean(finding.says, MAX_CHARS)}"
        click.echo(f"{click.style(mark, fg=colour)}  {says}{hint}")

    found = asyncio.run(examine(settings, deadline_s=deadline_s, tell=(lambda _: None) if as_json else show))
    if as_json:
        print_json([msgspec.structs.asdict(finding) for finding in found])
    if code := exit_code(found):
        raise Exit(code)
