"""``echo2p2p learner``."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import rich_click as click

from echo2p2p.cli.options import print_settings, resolve_layers, settings_options, swarm_options
from echo2p2p.errors import Contradiction
from echo2p2p.layering import with_sources


def _resume(_: click.Context, __: click.Parameter, value: str | None) -> str | None:
    if value is None or value == "latest" or (value.isascii() and value.isdigit()):
        return value
    raise click.BadParameter(f"{value!r} is neither 'latest' nor a step")


@click.command("learner")
@settings_options
@swarm_options
@click.option("--name", help="Name of the run; it becomes NAME@LEARNER_PEER_ID.")
@click.option(
    "--policy",
    type=click.Path(exists=True, file_okay=False, path_type=Path),
    help="Hugging Face folder to start from.",
)
@click.option("--steps", type=int, help="Training steps.")
@click.option(
    "--resume", callback=_resume, metavar="latest|STEP", help="Go on from a checkpoint of the run folder."
)
@click.option(
    "--run-dir", type=click.Path(file_okay=False, path_type=Path), help="Folder of the run.  [runs/NAME]"
)
@click.option("--plain", is_flag=True, help="One line now and then instead of the live view.")
@click.option("-v", "--verbose", count=True, help="Say more; repeatable.")
def command(
    files: tuple[Path, ...],
    overrides: tuple[str, ...],
    dry_run: bool,
    name: str | None,
    policy: Path | None,
    steps: int | None,
    resume: str | None,
    run_dir: Path | None,
    plain: bool,
    verbose: int,
    **swarm: Any,
) -> None:
    """Train a policy with rollouts from the swarm.

    Publishes versions, leases prompts to the cheapest workers that keep it busy, and trains only on what is
    inside the staleness window. Stopped with Ctrl-C, it writes a checkpoint; --resume latest goes on from it.
    """
    settings, layered = resolve_layers(
        files,
        overrides,
        swarm,
        learner={"steps": steps},
        policy={"path": policy},
        **{"": {"name": name, "run_dir": run_dir}},
    )
    try:
        settings.learner.check_period()
    except Contradiction as error:
        raise with_sources(error, layered) from None
    if dry_run:
        print_settings(settings, layered)
        return
    import os
    import sys

    from echo2p2p.cli.run import join_line, run_role, setup_logging
    from echo2p2p.parts import follow_learner
    from echo2p2p.roles import run_learner
    from echo2p2p.rundir import RunDir
    from echo2p2p.telemetry.events import EventLog
    from echo2p2p.telemetry.live import LiveView, wants_plain
    from echo2p2p.telemetry.text import human_usd

    setup_logging(verbose)
    if int(os.environ.get("RANK", "0")) > 0 and int(os.environ.get("WORLD_SIZE", "1")) > 1:
        follow_learner(settings)
        return
    place = RunDir.open(settings.run_dir or Path("runs") / settings.name)
    started = False

    def joined(network: Any) -> None:
        nonlocal started
        started = True
        peers = join_line(network, *settings.swarm.initial_peers)
        click.echo(f"echo2p2p worker --run {settings.name}@{network.peer_id} {peers}")
        click.echo("workers join with this line; stop with Ctrl-C", err=True)

    def watch(events: EventLog) -> LiveView:
        return LiveView(events, plain=plain or wants_plain(sys.stderr, os.environ))

    end = "the run is finished"

    def over(status: Any) -> None:
        nonlocal end
        spent = human_usd(status.spend_usd)
        end = f"the run was finished already: {status.step} steps, {spent} spent; go on with a larger --steps"

    finished = False
    try:
        finished = run_role(
            lambda stop: run_learner(
                settings, place, resume=resume, stop=stop, joined=joined, watch=watch, over=over
            )
        )
    finally:
        if finished:
            click.echo(f"{end}; draw it with: echo2p2p report {place.path}", err=True)
        elif started and (place.path / "checkpoints").is_dir():
            click.echo("stopped; go on with --resume latest", err=True)
        place.close()
