"""``echo2p2p worker``."""

from __future__ import annotations

from contextlib import closing
from pathlib import Path
from typing import Any

import rich_click as click

from echo2p2p.cli.options import checked_run, print_settings, resolve_layers, settings_options, swarm_options

_LEARNER_S = ("name", "learner", "provisioning")
"""What a worker never looks up in its own settings: the run's is in force."""


@click.command("worker")
@settings_options
@swarm_options
@click.option(
    "--run",
    "run",
    required=True,
    callback=checked_run,
    metavar="NAME@LEARNER",
    help="The run to work for, as its learner prints it.",
)
@click.option("--price", type=float, metavar="USD", help="Price per hour while active, in $.")
@click.option("--gpu", help="GPU type to announce.  [as found]")
@click.option("--upload-mbit", type=float, help="Upload bandwidth to announce, Mbit/s.")
@click.option("--download-mbit", type=float, help="Download bandwidth to announce, Mbit/s.")
@click.option("--tokens-per-s", type=float, help="Speed to announce; the learner measures the real one.")
@click.option("--limit-tokens-per-s", type=float, help="Never generate faster than this.")
@click.option("--device", help="torch device.  [auto]")
@click.option("--run-dir", type=click.Path(file_okay=False, path_type=Path), help="Folder of this worker.")
@click.option("-v", "--verbose", count=True, help="Say more; repeatable.")
def command(
    files: tuple[Path, ...],
    overrides: tuple[str, ...],
    dry_run: bool,
    run: str,
    price: float | None,
    gpu: str | None,
    upload_mbit: float | None,
    download_mbit: float | None,
    tokens_per_s: float | None,
    limit_tokens_per_s: float | None,
    device: str | None,
    run_dir: Path | None,
    verbose: int,
    **swarm: Any,
) -> None:
    """Roll out for a learner, for a price.

    Needs nothing but the line that the learner printed: policy, tokenizer and weights come over the swarm.
    A worker waits on standby, unpaid, until it is among the cheapest that the learner needs.
    """
    settings, layered = resolve_layers(
        files,
        overrides,
        swarm,
        worker={
            "price_per_hour": price,
            "gpu": gpu,
            "upload_mbit": upload_mbit,
            "download_mbit": download_mbit,
            "tokens_per_s": tokens_per_s,
            "limit_tokens_per_s": limit_tokens_per_s,
            "device": device,
        },
        **{"": {"run_dir": run_dir}},
    )
    if dry_run:
        click.echo(f"# The run is {run}. Its learner says what is trained and who is paid;")
        click.echo("# [task] only says which code and files of a task this worker allows.\n")
        print_settings(settings, layered, without=_LEARNER_S)
        return
    given = {key for source, tree in layered if source == "--set" for key in tree}
    if ignored := [key for key in _LEARNER_S if key in given]:
        said, theirs = ", ".join(ignored), ", ".join(_LEARNER_S)
        click.echo(f"--set of {said} has no effect: a worker takes {theirs} from its run's learner", err=True)
    from echo2p2p.cli.run import run_role, setup_logging
    from echo2p2p.roles import run_worker
    from echo2p2p.rundir import RunDir
    from echo2p2p.telemetry.worker_view import WorkerView

    if not settings.swarm.initial_peers:
        raise click.UsageError("--initial-peers is needed: the line that the learner printed has it")
    setup_logging(verbose)
    stem = Path("runs") / f"{run.partition('@')[0]}-worker"
    place = RunDir.open(settings.run_dir) if settings.run_dir else RunDir.first_free(stem)

    def joined(network: Any) -> None:
        click.echo(f"worker {network.peer_id} has joined the swarm, folder {place.path}", err=True)

    with closing(place):
        run_role(lambda stop: run_worker(settings, run, place, stop=stop, joined=joined, watch=WorkerView))
    click.echo("the worker has left the run", err=True)
