"""Where settings come from: TOML files layer over the defaults, then the environment, then ``--set a.b=c``.

In the environment a setting is ``ECHO2P2P_LEARNER__STALENESS=3``. What is wrong is named with its key and its value;
``echo2p2p learner --dry-run`` prints the tree as resolved.
"""

from __future__ import annotations

import tomllib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from pydantic import ValidationError
from pydantic_settings import EnvSettingsSource

from echo2p2p.errors import SettingsError
from echo2p2p.settings import Settings

DEFAULT, ENVIRONMENT = "default", "environment"

Layer = tuple[str, dict[str, Any]]
"""Where settings come from, for people, and the tree of those that come from there."""


def layers(
    files: Sequence[Path] = (), overrides: Sequence[str] = (), options: Sequence[str] = ()
) -> list[Layer]:
    """What is laid over the defaults, in order: ``files``, the environment, ``overrides`` (``--set``), ``options``.

    Args:
        files: TOML files.
        overrides: ``section.key=value``; the value is TOML, or plain text where that does not parse.
        options: the same, from options of a command that stand for settings.

    Raises:
        SettingsError: a file cannot be read, or an override is malformed.
    """
    return [
        *((str(file), read_toml(file)) for file in files),
        (ENVIRONMENT, EnvSettingsSource(Settings)()),
        *(("--set", parse_override(override)) for override in overrides),
        *(("command line", parse_override(option)) for option in options),
    ]


def load(files: Sequence[Path] = (), overrides: Sequence[str] = ()) -> Settings:
    """Read and layer settings: defaults, then ``files`` in order, then the environment, then ``overrides``.

    Raises:
        SettingsError: as :func:`layers` and :func:`merge`.
    """
    return merge(layers(files, overrides))


def merge(layered: Sequence[Layer]) -> Settings:
    """The settings that result.

    Raises:
        SettingsError: a key is unknown, or a value is out of bounds; the message names the key, the value, where it
            comes from and what is allowed.
    """
    tree: dict[str, Any] = {}
    for _, layer in layered:
        tree = _merge(tree, layer)
    try:
        return Settings(**tree)
    except ValidationError as error:
        raise SettingsError(
            "; ".join(_explain(each, layered) for each in error.errors(include_url=False))
        ) from None


def source_of(path: Sequence[str | int], layered: Sequence[Layer]) -> str:
    """The name of the last layer that says something of what is at ``path``; ``DEFAULT`` if none does."""
    source = DEFAULT
    for name, tree in layered:
        node: Any = tree
        for key in path:
            if not isinstance(node, Mapping):
                break  # a list is one layer's as a whole
            node = node.get(key)
        if node is not None:
            source = name
    return source


def read_toml(file: Path) -> dict[str, Any]:
    """Parse one TOML file. Raises SettingsError, naming file and line."""
    try:
        return tomllib.loads(file.read_text(encoding="utf-8"))
    except OSError as error:
        raise SettingsError(f"settings file {file} cannot be read: {error.strerror}") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise SettingsError(f"settings file {file} is not TOML: {error}") from error


def parse_override(text: str) -> dict[str, Any]:
    """``a.b=c`` as a tree. Raises SettingsError if it is not of that form."""
    path, equals, raw = text.partition("=")
    keys = path.strip().split(".")
    if not equals or not all(keys):
        raise SettingsError(f"--set {text!r} is not of the form section.key=value")
    try:
        value: Any = tomllib.loads(f"value = {raw}")["value"]
    except tomllib.TOMLDecodeError:
        value = raw
    for key in reversed(keys):
        value = {key: value}
    result: dict[str, Any] = value
    return result


def to_toml(settings: Settings) -> str:
    """The resolved tree as TOML that :func:`load` reads back to an equal tree."""
    import tomli_w

    return tomli_w.dumps(settings.model_dump(mode="json", exclude_none=True))


def _merge(base: dict[str, Any], over: dict[str, Any]) -> dict[str, Any]:
    merged = dict(base)
    for key, value in over.items():
        old = merged.get(key)
        merged[key] = _merge(old, value) if isinstance(old, dict) and isinstance(value, dict) else value
    return merged


def _explain(error: Any, layered: Sequence[Layer]) -> str:
    path = ".".join(str(part) for part in error["loc"]) or "settings"
    source = source_of(error["loc"], layered)
    if source == ENVIRONMENT:
        source = f"{Settings.model_config['env_prefix']}{path.replace('.', '__').upper()}"
    where = f" (from {source})" if source != DEFAULT else ""
    if error["type"] == "extra_forbidden":
        return f"{path} is not a setting{where}"
    if error["type"] == "value_error":
        return f"{path}: {error['ctx']['error']}"
    shown = repr(error["input"])
    return f"{path} = {shown[:80]}{where}: {error['msg'][0].lower()}{error['msg'][1:]}"
