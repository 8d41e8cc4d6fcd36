"""``echo2p2p bootstrap``."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import rich_click as click

from echo2p2p.cli.options import print_settings, resolve_layers, settings_options, swarm_options


@click.command("bootstrap")
@settings_options
@swarm_options
@click.option(
    "--run-dir", type=click.Path(file_okay=False, path_type=Path), help="Folder for identity and log."
)
@click.option("-v", "--verbose", count=True, help="Say more; repeatable.")
def command(
    files: tuple[Path, ...],
    overrides: tuple[str, ...],
    dry_run: bool,
    run_dir: Path | None,
    verbose: int,
    **swarm: Any,
) -> None:
    """Run a bootstrap peer: the well-known door of a swarm.

    Prints the line that others join with, and stays until it is stopped. Give it a fixed port, and keep its
    identity file, so that its address stays the same:

        echo2p2p bootstrap --host-maddrs /ip4/0.0.0.0/tcp/31337
    """
    settings, layered = resolve_layers(files, overrides, swarm, **{"": {"run_dir": run_dir}})
    if dry_run:
        print_settings(settings, layered)
        return
    from echo2p2p.cli.run import join_line, run_role, setup_logging
    from echo2p2p.roles import run_bootstrap
    from echo2p2p.rundir import RunDir

    setup_logging(verbose)
    place = RunDir.open(settings.run_dir) if settings.run_dir else RunDir.first_free(Path("runs/bootstrap"))

    def joined(network: Any) -> None:
        click.echo(join_line(network))
        click.echo("others join with this line; stop with Ctrl-C", err=True)

    run_role(lambda stop: run_bootstrap(settings, place, stop=stop, joined=joined))
