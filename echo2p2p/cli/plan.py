"""``echo2p2p plan``."""

from __future__ import annotations

import csv
import math
from pathlib import Path
from typing import Any

import rich_click as click

from echo2p2p.cli.options import checked_run, json_option, swarm_options
from echo2p2p.cli.table import print_json, print_table
from echo2p2p.errors import DeadlineExceeded, PeerUnreachable, SettingsError
from echo2p2p.provisioning.activation import Candidate
from echo2p2p.provisioning.plan import Inputs, Plan, plan

MAX_CSV_BYTES = 16 * 2**20


@click.command("plan")
@click.argument("prices", required=False, type=click.Path(exists=True, dir_okay=False, path_type=Path))
@click.option(
    "--rollouts", "-R", type=click.IntRange(1), required=True, help="Rollouts per training step (R)."
)
@click.option(
    "--t-train", type=click.FloatRange(0, min_open=True), required=True, help="Seconds per training step."
)
@click.option("--t-bcast", type=click.FloatRange(0), help="Seconds until the workers have a new version.")
@click.option(
    "--model-gb",
    type=click.FloatRange(0, min_open=True),
    help="Instead of --t-bcast: size of the weights, 10⁹ bytes,",
)
@click.option(
    "--bandwidth-mbit", type=click.FloatRange(0, min_open=True), help="and the slowest link, Mbit/s."
)
@click.option(
    "--staleness", "-S", type=click.IntRange(1), default=3, show_default=True, help="Staleness budget (S)."
)
@click.option(
    "--kappa", type=click.IntRange(1), help="Publication period.  [the one that needs the fewest rollouts/s]"
)
@click.option(
    "--at-once",
    type=click.IntRange(1),
    help="Rollouts that a worker generates at once: samples per prompt times batch_groups.  [too few to count]",
)
@click.option("--gamma", type=click.FloatRange(1), default=1.1, show_default=True, help="Safety factor.")
@click.option("--price-cap", type=click.FloatRange(0, min_open=True), help="$/h that is never exceeded.")
@click.option(
    "--run",
    callback=checked_run,
    metavar="NAME@LEARNER",
    help="Instead of PRICES: the workers of a run, as its learner sees them.",
)
@click.option(
    "--timeout", "timeout_s", default=15.0, show_default=True, help="Seconds for each answer of the swarm."
)
@json_option
@swarm_options
def command(
    prices: Path | None,
    rollouts: int,
    t_train: float,
    t_bcast: float | None,
    model_gb: float | None,
    bandwidth_mbit: float | None,
    staleness: int,
    kappa: int | None,
    at_once: int | None,
    gamma: float,
    price_cap: float | None,
    run: str | None,
    timeout_s: float,
    as_json: bool,
    **swarm: Any,
) -> None:
    """Which workers keep a learner busy, and at what price?

    PRICES is a CSV file with the columns worker, price_per_hour, rollouts_per_s, and optionally count. Without it,
    and with --initial-peers, the workers of a running swarm are taken, at the speeds that its learner has measured.
    """
    for value in (t_train, t_bcast, model_gb, bandwidth_mbit, gamma, price_cap):
        if value is not None and not math.isfinite(value):
            raise click.UsageError(f"{value} is not a number to plan with")
    if t_bcast is not None and (model_gb is not None or bandwidth_mbit is not None):
        raise click.UsageError("give either --t-bcast, or --model-gb and --bandwidth-mbit")
    if t_bcast is None:
        if model_gb is None or bandwidth_mbit is None:
            raise click.UsageError("give --t-bcast, or --model-gb and --bandwidth-mbit")
        t_bcast = model_gb * 8000 / bandwidth_mbit
    if (prices is None) == (not swarm["initial_peers"]):
        raise click.UsageError("give either PRICES, or --initial-peers for the workers of a swarm")
    workers = _read_prices(prices) if prices is not None else _ask_swarm(run, timeout_s, swarm)

    def at(s: int) -> Plan:
        fixed = kappa if s == staleness else None
        cap = price_cap or math.inf
        return plan(Inputs(rollouts, t_train, t_bcast, s, gamma, fixed, cap, at_once or 0), workers)

    chosen = at(staleness)
    others = [at(s) for s in range(max(1, staleness - 2), staleness + 4)]
    if as_json:
        print_json({"plan": _facts(chosen), "by_staleness": [_facts(other) for other in others]})
        return
    facts = {key: value for key, value in _facts(chosen).items() if key != "why" or value}
    print_table(["", ""], [[key.replace("_", " "), value] for key, value in facts.items()], empty="")
    click.echo()
    print_table(
        ["S", "κ", "feasible", "μ_min/s", "workers", "$/h", "$/step", "Δ_cons", "why not"],
        [
            [
                row["staleness"],
                row["kappa"],
                "yes" if row["feasible"] else "no",
                row["mu_min"],
                len(row["workers"]) if row["feasible"] else None,
                row["price_per_hour"],
                row["price_per_step"],
                row["predicted_staleness"],
                row["why"],
            ]
            for row in map(_facts, others)
        ],
        empty="",
    )


def _facts(result: Plan) -> dict[str, Any]:
    """A plan for people and programs. One that is not feasible has no price: nobody can buy it."""
    return {
        "staleness": result.inputs.staleness,
        "kappa": result.kappa,
        "feasible": result.feasible,
        "why": result.why,
        "mu_min": None if result.mu_min == float("inf") else result.mu_min,
        "mu_target": None if result.mu_target == float("inf") else result.mu_target,
        "mu_pool": result.mu_pool,
        "workers": [worker.peer for worker in result.workers],
        "price_per_hour": result.price_per_hour if result.feasible else None,
        "price_per_step": result.price_per_step if result.feasible else None,
        "predicted_staleness": result.delta_cons if result.feasible else None,
    }


def _ask_swarm(run: str | None, timeout_s: float, swarm: dict[str, Any]) -> list[Candidate]:
    """The workers that are with a run's learner. Raises SwarmError where it does not answer."""
    from echo2p2p.cli.inspect import join_and_look, look_up, unknown, unreachable
    from echo2p2p.learning.status import ask_status

    async def look(network: Any) -> list[Candidate]:
        directory, learner = await look_up(network, run, timeout_s)
        try:
            status = await ask_status(network, directory.keys, timeout_s=timeout_s)
        except (PeerUnreachable, DeadlineExceeded) as error:
            run_name = directory.keys.run
            raise (unreachable(run_name, learner) if learner else unknown(run_name)) from error
        return [Candidate(w.peer, w.price_per_hour, w.mu) for w in status.workers if w.gone_s is None]

    return join_and_look(swarm, look, timeout_s)


def _read_prices(file: Path) -> list[Candidate]:
    """Raises SettingsError, naming file and line."""
    if file.stat().st_size > MAX_CSV_BYTES:
        raise SettingsError(f"{file} is larger than {MAX_CSV_BYTES} bytes")
    try:
        return _parse_prices(file)
    except (UnicodeDecodeError, csv.Error) as error:
        raise SettingsError(f"{file} is not a CSV file: {error}") from error


def _parse_prices(file: Path) -> list[Candidate]:
    found: list[Candidate] = []
    with file.open(newline="", encoding="utf-8") as lines:
        reader = csv.DictReader(lines)
        missing = {"worker", "price_per_hour", "rollouts_per_s"} - set(reader.fieldnames or ())
        if missing:
            raise SettingsError(f"{file} lacks the column {', '.join(sorted(missing))}")
        for row in reader:
            try:
                price = _number(row, "price_per_hour", float, 0, 1e9)
                mu = _number(row, "rollouts_per_s", float, 0, 1e9)
                count = int(_number(row, "count", int, 1, 100_000)) if row.get("count") else 1
            except ValueError as error:
                raise SettingsError(f"{file} line {reader.line_num}: {error}") from None
            names = [row["worker"]] if count == 1 else [f"{row['worker']}-{i + 1}" for i in range(count)]
            found += [Candidate(name, price, mu) for name in names]
    return found


def _number(
    row: dict[str, Any], column: str, kind: type[int] | type[float], low: float, high: float
) -> float:
    """Raises ValueError, naming the column, its value and what is allowed."""
    try:
        found = kind(row[column])
    except (ValueError, TypeError):
        found = None
    if found is None or not low <= found <= high:
        what = "whole number" if kind is int else "number"
        raise ValueError(f"{column} = {row[column]!r} is no {what} from {low:g} to {high:g}")
    return found
