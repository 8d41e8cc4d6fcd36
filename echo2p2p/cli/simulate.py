"""``echo2p2p simulate``."""

from __future__ import annotations

import logging
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING

import rich_click as click
from click.exceptions import Exit

from echo2p2p.cli.options import json_option
from echo2p2p.cli.run import setup_logging
from echo2p2p.cli.table import print_json, print_table

if TYPE_CHECKING:
    from echo2p2p.simulation.outcome import Outcome
    from echo2p2p.simulation.play import Progress


@click.command("simulate")
@click.argument("scenario", required=False)
@click.option(
    "--run-dir",
    type=click.Path(file_okay=False, path_type=Path),
    help="Folder of the run.  [runs/sim-NAME-TIME]",
)
@click.option("--seed", type=click.IntRange(0, 2**31 - 1), help="Another one than the scenario's.")
@click.option("--list", "list_", is_flag=True, help="List the scenarios that come with echo2p2p, and stop.")
@click.option("-v", "--verbose", count=True, help="What the roles say, on stderr; -vv for everything.")
@json_option
def command(
    scenario: str | None, run_dir: Path | None, seed: int | None, list_: bool, verbose: int, as_json: bool
) -> None:
    """Play a swarm that is not there: hours in seconds, on this machine alone.

    SCENARIO is a TOML file, or the name of a scenario that comes with echo2p2p. The learner, the workers, the
    relay, the window and the activation are the real code; engines, training and links are modelled. The same
    scenario gives the same events. `echo2p2p report` draws the run folder.

    Leaves with 1 if the run broke one of the promises: the window, exactly once, the price cap.
    """
    from echo2p2p.errors import SettingsError
    from echo2p2p.rundir import RunDir
    from echo2p2p.simulation.outcome import figures
    from echo2p2p.simulation.play import play
    from echo2p2p.simulation.scenario import load_scenario, shipped_scenarios

    if list_:
        shipped = {name: load_scenario(file).description for name, file in shipped_scenarios().items()}
        if as_json:
            print_json(shipped)
        else:
            print_table(["scenario", "what it shows"], list(shipped.items()), empty="there are none")
        return
    if scenario is None:
        raise click.UsageError("name a scenario; --list shows those that come with echo2p2p")
    setup_logging(verbose)
    if not verbose:
        # Peers that are lost are what a scenario is about, not news.
        logging.getLogger("echo2p2p").setLevel(logging.CRITICAL)
    if scenario not in shipped_scenarios() and not Path(scenario).is_file():
        raise click.UsageError(
            f"there is no scenario or file {scenario!r}; shipped ones: {', '.join(shipped_scenarios())}"
        )
    chosen = load_scenario(scenario)
    if seed is not None:
        chosen = chosen.model_copy(update={"seed": seed})
    stem = Path("runs") / f"sim-{chosen.name}-{time.strftime('%Y%m%d-%H%M%S')}"
    folder = RunDir.open(run_dir) if run_dir else RunDir.first_free(stem)
    try:
        if folder.events.exists():
            raise SettingsError(
                f"{folder.path} holds the events of an earlier run", hint="name another folder with --run-dir"
            )
        folder.write_settings(chosen.settings)
        outcome = play(chosen, events=folder.events, progress=_progress(chosen.duration_s))
    finally:
        folder.close()
    if as_json:
        print_json({**figures(outcome), "run_dir": str(folder.path)})
    else:
        print_table(["", ""], _rows(outcome), empty="")
        click.echo(f"\necho2p2p report {folder.path}")
    for broken in outcome.broken:
        click.echo(f"echo2p2p: a promise did not hold: {broken}", err=True)
    if outcome.broken:
        raise Exit(1)


def _progress(duration_s: float) -> Progress:
    """On a terminal one line that is written again and again, elsewhere a line for every tenth."""
    on_terminal = sys.stderr.isatty()
    shown = 0

    def show(virtual_s: float, steps: int, active: int) -> None:
        nonlocal shown
        tenth = int(10 * virtual_s / duration_s)
        line = f"{virtual_s / duration_s:4.0%}  {virtual_s / 3600:.1f} h  {steps} steps  {active} active"
        if on_terminal:
            click.echo(f"\r{line:60}", err=True, nl=virtual_s >= duration_s)
        elif tenth > shown:
            shown = tenth
            click.echo(line, err=True)

    return show


def _rows(outcome: Outcome) -> list[list[str]]:
    def text(value: float | None, form: str) -> str:
        return "–" if value is None else form.format(value)

    whole = "–" if outcome.bytes_per_version is None else f"{outcome.bytes_per_version / 1e6:,.1f} MB"
    return [
        ["scenario", outcome.scenario],
        ["virtual time", f"{outcome.virtual_s / 3600:.2f} h"],
        ["steps", f"{outcome.steps}"],
        ["a step takes", text(outcome.step_s, "{:.1f} s")],
        ["of that waiting", text(outcome.wait_s, "{:.1f} s")],
        ["bubble ratio", text(outcome.bubble_ratio, "{:.1%}")],
        ["tokens trained", text(outcome.tokens_per_s, "{:,.0f}/s")],
        ["T_bcast", text(outcome.t_bcast_s, "{:.1f} s")],
        ["a version travels as", whole],
        ["sent by the learner", text(outcome.by_learner, "{:.0%}")],
        ["active workers", text(outcome.active, "{:.1f}") + f", at most {outcome.most_active}"],
        ["cost of a step", text(outcome.usd_per_step, "${:.4f}")],
        ["of that workers", text(outcome.worker_usd_per_step, "${:.4f}")],
        ["oldest token trained", f"{outcome.staleness_max} versions"],
        ["groups dropped", ", ".join(f"{n} {why}" for why, n in outcome.dropped.items()) or "none"],
        ["what happened", ", ".join(f"{n} {what}" for what, n in outcome.happened.items() if n) or "nothing"],
        ["promises", "; ".join(outcome.broken) or "all held"],
    ]
