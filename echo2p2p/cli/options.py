"""Options that several commands share, and how they become settings."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from pathlib import Path
from typing import Any, TypeVar

import rich_click as click

from echo2p2p.layering import Layer, layers, merge
from echo2p2p.settings import Settings, SwarmSettings

F = TypeVar("F", bound=Callable[..., Any])

_SWARM_KEYS = (
    "initial_peers",
    "host_maddrs",
    "announce_maddrs",
    "identity_path",
    "use_relay",
    "use_auto_relay",
)


def swarm_options(command: F) -> F:
    """``--initial-peers`` and its siblings, in hivemind's words; underscores are accepted too."""
    for option in reversed(
        [
            click.option(
                "--initial-peers",
                "--initial_peers",
                multiple=True,
                metavar="MADDR",
                help="Bootstrap peers to join through, each ending in /p2p/ID. Repeatable, or separated by commas.",
            ),
            click.option(
                "--host-maddrs",
                "--host_maddrs",
                multiple=True,
                metavar="MADDR",
                help="Addresses to listen on, such as /ip4/0.0.0.0/tcp/31337. Repeatable.",
            ),
            click.option(
                "--announce-maddrs",
                "--announce_maddrs",
                multiple=True,
                metavar="MADDR",
                help="Addresses to announce, where others see different ones than this machine.",
            ),
            click.option(
                "--identity-path",
                "--identity_path",
                type=click.Path(dir_okay=False, path_type=Path),
                help="Identity file (Ed25519); made if it does not exist.",
            ),
            click.option(
                "--use-relay/--no-use-relay", default=None, help="Reach peers behind NATs through relays."
            ),
            click.option(
                "--use-auto-relay",
                is_flag=True,
                default=None,
                help="Be reachable through a relay behind a NAT.",
            ),
        ]
    ):
        command = option(command)
    return command


def settings_options(command: F) -> F:
    """``--config``, ``--set`` and ``--dry-run``."""
    for option in reversed(
        [
            click.option(
                "--config",
                "-c",
                "files",
                multiple=True,
                type=click.Path(exists=True, dir_okay=False, path_type=Path),
                help="Settings (TOML). Repeatable; later files win.",
            ),
            click.option(
                "--set",
                "overrides",
                multiple=True,
                metavar="KEY=VALUE",
                help="One setting, such as learner.staleness=4. Repeatable; wins over files.",
            ),
            click.option("--dry-run", is_flag=True, help="Print the settings as resolved, and stop."),
        ]
    ):
        command = option(command)
    return command


def json_option(command: F) -> F:
    return click.option("--json", "as_json", is_flag=True, help="Print JSON instead of a table.")(command)


def resolve(
    files: tuple[Path, ...],
    overrides: tuple[str, ...],
    swarm: dict[str, Any] | None = None,
    **sections: dict[str, Any],
) -> Settings:
    """Settings from files, environment and the command line, which wins.

    Args:
        swarm: the values of :func:`swarm_options`; what was not given is left alone.
        sections: further settings from a command's own options, by section.

    Raises:
        SettingsError: as :func:`echo2p2p.layering.load`, or an address is malformed.
    """
    return resolve_layers(files, overrides, swarm, **sections)[0]


def resolve_layers(
    files: tuple[Path, ...],
    overrides: tuple[str, ...],
    swarm: dict[str, Any] | None = None,
    **sections: dict[str, Any],
) -> tuple[Settings, list[Layer]]:
    """:func:`resolve`, with what the settings were merged from, for :func:`print_settings`."""
    options = []
    sections = {"swarm": {key: (swarm or {}).get(key) for key in _SWARM_KEYS}, **sections}
    for section, values in sections.items():
        for key, raw in values.items():
            if raw is None or raw == ():
                continue
            value = [p for item in raw for p in item.split(",") if p] if isinstance(raw, tuple) else raw
            options.append(
                f"{section}.{key}={_toml_value(value)}" if section else f"{key}={_toml_value(value)}"
            )
    layered = layers(files, overrides, options)
    settings = merge(layered)
    _check_addresses(settings)
    return settings, layered


def _check_addresses(settings: Settings) -> None:
    """Before anything is loaded or started. Raises SettingsError."""
    swarm = settings.swarm
    if swarm == SwarmSettings():
        return  # to check them is to import hivemind, which takes seconds
    from echo2p2p.swarm.hivemind.control import checked_maddr, checked_peer

    for address in swarm.initial_peers:
        checked_peer(address)
    for address in swarm.host_maddrs:
        checked_maddr(address, "host")
    for address in swarm.announce_maddrs:
        checked_maddr(address, "announce")


def checked_run(_: click.Context, __: click.Parameter, run: str | None) -> str | None:
    """The callback of ``--run``: refuses what is not NAME@LEARNER."""
    if run is None:
        return None
    from echo2p2p.errors import RecordError
    from echo2p2p.swarm.records import Keys

    try:
        Keys(run)
    except RecordError as error:
        raise click.BadParameter(str(error)) from None
    return run


def print_settings(settings: Settings, layered: Sequence[Layer], without: Collection[str] = ()) -> None:
    """The answer to ``--dry-run``: every value in force, with its source, but for what no value is in force of."""
    from echo2p2p.explained import explain

    click.echo(explain(settings, layered, without), nl=False)


def _toml_value(value: Any) -> str:
    import tomli_w

    if isinstance(value, Path):
        value = str(value)
    return tomli_w.dumps({"v": value}).partition("=")[2].strip()
