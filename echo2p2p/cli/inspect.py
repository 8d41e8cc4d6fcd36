"""``echo2p2p inspect``: joins the swarm as a client, looks, prints, leaves."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any, TypeVar

import msgspec
import rich_click as click

from echo2p2p.cli.options import checked_run, json_option, resolve, swarm_options
from echo2p2p.cli.table import print_json, print_table
from echo2p2p.errors import DeadlineExceeded, Echo2p2pError, PeerUnreachable, SwarmError

if TYPE_CHECKING:  # what a command needs of the swarm is imported when it looks
    from echo2p2p.swarm.directory import Directory
    from echo2p2p.swarm.records import LearnerRecord

T = TypeVar("T")

TIMEOUT_S = 15.0


def look_options(command: Callable[..., Any]) -> Callable[..., Any]:
    command = json_option(command)
    command = click.option(
        "--timeout",
        "timeout_s",
        default=TIMEOUT_S,
        show_default=True,
        help="Seconds to join, and for each answer.",
    )(command)
    return swarm_options(command)


def run_option(command: Callable[..., Any]) -> Callable[..., Any]:
    return click.option(
        "--run",
        "run",
        callback=checked_run,
        metavar="NAME@LEARNER",
        help="The run; may be left out where the swarm has only one.",
    )(command)


@click.group("inspect")
def command() -> None:
    """Look into a swarm: peers, workers, learners, manifests, records.

    Every look joins through --initial-peers with an identity of its own, reads, and leaves.
    """


@command.command("peers")
@look_options
def peers(as_json: bool, timeout_s: float, **swarm: Any) -> None:
    """The peers that a newcomer is connected to, and where they are."""

    async def look(network: Any) -> list[Any]:
        return list(await network.peers())

    found = join_and_look(swarm, look, timeout_s)
    if as_json:
        print_json([{"peer": p.peer, "addresses": list(p.addresses)} for p in found])
        return
    print_table(["peer", "addresses"], [[p.peer, " ".join(p.addresses)] for p in found], empty="no peers")


@command.command("workers")
@look_options
@run_option
def workers(as_json: bool, timeout_s: float, run: str | None, **swarm: Any) -> None:
    """The workers of a run: what they announce, and what the learner makes of it."""
    from echo2p2p.learning.status import ask_status
    from echo2p2p.provisioning.activation import Candidate
    from echo2p2p.telemetry.text import human_seconds

    async def look(network: Any) -> tuple[dict[str, Any], Any]:
        directory, record = await look_up(network, run, timeout_s)
        adverts = await directory.workers(timeout_s)
        try:
            status = await ask_status(network, directory.keys, timeout_s=timeout_s)
        except SwarmError as error:
            if record is None and not adverts:
                raise unknown(directory.keys.run) from error
            click.echo(f"{_silent(record, error)}; this is what workers announce", err=True)
            status = None
        return adverts, status

    adverts, status = join_and_look(swarm, look, timeout_s)
    seen = {w.peer: w for w in status.workers} if status else {}
    rows = []
    for peer in {**adverts, **seen}:
        advert, worker = adverts.get(peer), seen.get(peer)
        rows.append(
            {
                "peer": peer,
                **(msgspec.structs.asdict(advert) if advert else {}),
                **(
                    {k: v for k, v in msgspec.structs.asdict(worker).items() if v is not None}
                    if worker
                    else {}
                ),
                "state": _state(advert, worker),
                "version": _version(advert, worker),
            }
        )
    rows.sort(key=lambda row: (row["state"] != "active", row["state"], row["peer"]))
    if as_json:
        print_json(rows)
        return
    table = []
    for row in rows:
        price, mu = row.get("price_per_hour"), row.get("mu")
        rho = Candidate(row["peer"], price, mu).rho if price is not None and mu else None
        state = row["state"]
        if row.get("gone_s") is not None:
            state = f"gone {human_seconds(row['gone_s'])} ago"
        table.append(
            [
                row["peer"],
                state,
                row.get("gpu"),
                price,
                row.get("upload_mbit"),
                row.get("download_mbit"),
                row.get("tokens_per_s") or None,
                mu,
                row.get("mu_source") or None,
                rho,
                row.get("version"),
                row.get("accepted"),
                row.get("refused"),
            ]
        )
    print_table(
        [
            "peer",
            "state",
            "gpu",
            "$/h",
            "up Mbit/s",
            "down Mbit/s",
            "tokens/s",
            "μ/s",
            "μ is",
            "ρ $/1k",
            "version",
            "accepted",
            "refused",
        ],
        table,
        empty="no workers",
    )


@command.command("learner")
@look_options
@run_option
def learner(as_json: bool, timeout_s: float, run: str | None, **swarm: Any) -> None:
    """A run as its learner describes it, with what became of the groups it was sent."""
    from echo2p2p.learning.status import ask_status

    async def look(network: Any) -> dict[str, Any]:
        directory, record = await look_up(network, run, timeout_s)
        facts: dict[str, Any] = {"run": directory.keys.run}
        if record is not None:
            facts |= msgspec.structs.asdict(record)
        try:
            status = await ask_status(network, directory.keys, timeout_s=timeout_s)
        except SwarmError as error:
            if record is None:
                raise unknown(directory.keys.run) from error
            click.echo(f"{_silent(record, error)}; this is what it last announced", err=True)
        else:
            facts |= {k: v for k, v in msgspec.structs.asdict(status).items() if k != "workers"}
            facts["workers"] = len([w for w in status.workers if w.gone_s is None])
        return facts

    facts = join_and_look(swarm, look, timeout_s)
    if as_json:
        print_json(facts)
        return
    print_table(["", ""], [[key.replace("_", " "), value] for key, value in facts.items()], empty="")


@command.command("manifest")
@look_options
@run_option
def manifest(as_json: bool, timeout_s: float, run: str | None, **swarm: Any) -> None:
    """The newest published version: fetched, verified, and what it consists of."""

    async def look(network: Any) -> dict[str, Any]:
        from echo2p2p.swarm.records import ManifestRecord
        from echo2p2p.weights.lane import DEFAULT_FETCH_LIMITS, get_manifest
        from echo2p2p.weights.manifest import ManifestVerifier

        directory, learner = await look_up(network, run, timeout_s)
        record = await directory.manifest(timeout_s)
        if record is None or not isinstance(record.body, ManifestRecord):
            if learner is None:
                raise unknown(directory.keys.run)
            if learner.state != "running":  # the record of what it published has run out before this one
                raise unreachable(directory.keys.run, learner)
            raise SwarmError(f"{directory.keys.run} has published nothing yet")
        try:
            body = await get_manifest(
                network,
                directory.keys.learner_id,
                record.body.manifest_digest,
                record.body.version,
                max_bytes=record.body.manifest_bytes,
                limits=DEFAULT_FETCH_LIMITS,
            )
        except (PeerUnreachable, DeadlineExceeded) as error:
            raise unreachable(directory.keys.run, learner) from error
        verified = ManifestVerifier(directory.keys.run).accept(body, record.body.manifest_digest)
        return {
            "run": verified.run,
            "version": verified.version,
            "patches": [f"on version {it.base_version}: {it.nbytes} bytes" for it in verified.patches],
            "manifest_digest": record.body.manifest_digest,
            "manifest_bytes": len(body),
            "fingerprint": verified.fingerprint,
            "snapshot_bytes": verified.nbytes,
            "tensors": len(verified.layout.tensors),
            "chunks": verified.n_chunks,
            "chunk_bytes": verified.chunk_bytes,
            "members": [member.peer for member in verified.members],
            "assets": [f"{asset.name} {asset.digest.hex()}" for asset in verified.assets],
            "signature": "verified",
        }

    facts = join_and_look(swarm, look, timeout_s)
    if as_json:
        print_json(facts)
        return
    print_table(["", ""], [[key.replace("_", " "), value] for key, value in facts.items()], empty="")


@command.command("record")
@click.argument("key")
@look_options
def record(key: str, as_json: bool, timeout_s: float, **swarm: Any) -> None:
    """The records under KEY, such as echo2p2p/1/runs, with their owners. Only verified ones are shown."""
    from echo2p2p.swarm.records import check

    async def look(network: Any) -> list[dict[str, Any]]:
        found = await network.find_records(key, timeout_s=timeout_s)
        now = network.clock.unix()
        rows = []
        for owner, value in found.items():
            opened = check(value, owner=owner, now_unix=now)
            rows.append(
                {
                    "owner": owner,
                    "sequence": opened.sequence,
                    "expires_in_s": round(opened.expires_unix - now, 1),
                    "bytes": len(value),
                    "body": msgspec.to_builtins(opened.body),
                }
            )
        return rows

    rows = join_and_look(swarm, look, timeout_s)
    if as_json:
        print_json(rows)
        return
    print_table(
        ["owner", "sequence", "expires in s", "bytes", "body"],
        [
            [row["owner"], row["sequence"], row["expires_in_s"], row["bytes"], _pairs(row["body"])]
            for row in rows
        ],
        empty=f"no records under {key}",
    )


def join_and_look(swarm: dict[str, Any], ask: Callable[[Any], Awaitable[T]], timeout_s: float) -> T:
    """Join with a throw-away identity, ask, leave."""
    if not swarm.get("initial_peers"):
        raise click.UsageError(
            "--initial-peers is needed: the line that the bootstrap peer or the learner printed"
        )
    own = ('swarm.host_maddrs=["/ip4/0.0.0.0/tcp/0"]', f"swarm.startup_timeout_s={timeout_s}")
    settings = resolve((), own, swarm)
    from echo2p2p.cli.run import run_role, setup_logging
    from echo2p2p.roles import join

    setup_logging(0)

    async def main(stop: asyncio.Event) -> T:
        with TemporaryDirectory() as folder:
            identity = settings.swarm.identity_path or Path(folder) / "identity.key"
            async with join(settings, identity, stop=stop, client_mode=True) as network:
                return await ask(network)

    return run_role(main)


async def look_up(network: Any, run: str | None, timeout_s: float) -> tuple[Directory, LearnerRecord | None]:
    """The directory of the run that was named, or of the only one, and what its learner says of the run.

    With that record the network knows where to dial the learner.
    """
    from echo2p2p.swarm.directory import Directory

    directory = Directory(network, await _only_run(network, run, timeout_s))
    return directory, await directory.learner(timeout_s)


def unknown(run: str) -> SwarmError:
    """What to say where there is no record of ``run``, and its learner does not answer."""
    return SwarmError(
        f"nothing is known of {run}",
        hint="it is spelled otherwise, or its learner left more than 90 s ago; "
        "`echo2p2p inspect record echo2p2p/1/runs` lists the runs of a swarm",
    )


def unreachable(run: str, record: LearnerRecord | None) -> SwarmError:
    """What to say where there are records of ``run``, and its learner, whose last is ``record``, does not answer."""
    return SwarmError(
        f"the learner of {run} cannot be reached: {_why_gone(record)}",
        hint="what it published is in its run folder, for `echo2p2p eval` and `export`; a run that was stopped goes "
        "on with `echo2p2p learner --resume latest`",
    )


def _silent(record: LearnerRecord | None, error: SwarmError) -> str:
    """Why there is no answer of the learner whose last record is ``record``, in words of ours."""
    if isinstance(error, PeerUnreachable | DeadlineExceeded):
        return f"the learner does not answer: {_why_gone(record)}"
    return f"the learner gives no answer that can be used: {error.message}"


def _why_gone(record: LearnerRecord | None) -> str:
    if record is not None and record.state != "running":
        return f"the run is {record.state}"
    return "it may have finished, or be down"


async def _only_run(network: Any, run: str | None, timeout_s: float) -> str:
    """The run that was named, or the only one there is."""
    if run is not None:
        return run
    from echo2p2p.swarm.directory import Directory

    runs = await Directory.runs(network, timeout_s)
    if len(runs) == 1:
        return runs[0]
    if not runs:
        raise Echo2p2pError("no run is announced in this swarm", hint="name one with --run if you know it")
    raise click.UsageError("the swarm has several runs; name one with --run:\n  " + "\n  ".join(runs))


def _state(advert: Any, worker: Any) -> str:
    if worker is not None:
        return "gone" if worker.gone_s is not None else str(worker.state)
    return f"{advert.state}, not with the learner"


def _version(advert: Any, worker: Any) -> int | None:
    """The version that the worker holds; None for none."""
    version = (worker or advert).version
    return version if version >= 0 else None


def _pairs(values: dict[str, Any]) -> str:
    return " ".join(f"{key}={value}" for key, value in values.items())


__all__: Sequence[str] = ["command", "join_and_look", "look_up", "unknown", "unreachable"]
