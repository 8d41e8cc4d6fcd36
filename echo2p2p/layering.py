"""Where settings come from: TOML files layer over the defaults, then the environment, then ``--set a.b=c``.

In the environment a setting is ``ECHO2P2P_LEARNER__STALENESS=3``. What is wrong is named with its key, its value and
where it comes from; ``echo2p2p learner --dry-run`` prints the tree as resolved.
"""

from __future__ import annotations

import difflib
import json
import os
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import NoneType, UnionType
from typing import Any, Union, get_args, get_origin

from pydantic import BaseModel, ValidationError

from echo2p2p.errors import Contradiction, SettingsError
from echo2p2p.settings import Settings

DEFAULT = "default"
PREFIX = "ECHO2P2P_"
"""Of a setting's environment variable."""
OTHER_VARIABLES = frozenset({"ECHO2P2P_VLLM_OWNER", "ECHO2P2P_TEST_KILLS"})
"""Environment variables of the project that are no settings."""

_TABLE = 'should be a table, such as { key = "value" }'
_SHOULD = {
    "tuple_type": 'should be a list, such as ["a", "b"]',
    "dict_type": _TABLE,
    "model_type": _TABLE,
    "string_type": "should be text",
    "path_type": "should be a path",
    **dict.fromkeys(("int_type", "int_parsing", "int_from_float"), "should be a whole number"),
    **dict.fromkeys(("float_type", "float_parsing"), "should be a number"),
    **dict.fromkeys(("bool_type", "bool_parsing"), "should be true or false"),
}
"""What is said of a value, by pydantic's type of error; of the others pydantic's own words are said."""

Layer = tuple[str, dict[str, Any]]
"""Where settings come from, for people, and the tree of those that come from there."""


def layers(
    files: Sequence[Path] = (), overrides: Sequence[str] = (), options: Sequence[str] = ()
) -> list[Layer]:
    """What is laid over the defaults, in order: ``files``, the environment, ``overrides`` (``--set``), ``options``.

    Args:
        files: TOML files.
        overrides: ``section.key=value``; the value is TOML or a JSON list or table, and plain text where it is
            neither or where the setting is text. A list of text may be plain, too: its entries, with commas between.
        options: the same, from options of a command that stand for settings.

    Raises:
        SettingsError: a file cannot be read, or an override is malformed.
    """
    return [
        *((str(file), read_toml(file)) for file in files),
        *read_environment(os.environ),
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
        tree = overlay(tree, layer)
    try:
        return Settings.model_validate(tree)
    except ValidationError as error:
        raise SettingsError(
            "; ".join(_explain(each, layered) for each in error.errors(include_url=False))
        ) from None


def overlay(base: Mapping[str, Any], over: Mapping[str, Any]) -> dict[str, Any]:
    """``base`` with ``over`` laid on it; tables that both have are laid on each other."""
    merged = dict(base)
    for key, value in over.items():
        old = merged.get(key)
        is_both = isinstance(value, Mapping) and isinstance(old, Mapping)
        merged[key] = overlay(merged[key], value) if is_both else value
    return merged


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


def with_sources(error: Contradiction, layered: Sequence[Layer]) -> SettingsError:
    """``error``, which also says where each of the settings concerned comes from."""
    sources = {name: source_of(name.split("."), layered) for name in error.names}
    said = (
        f"{name} by default" if source == DEFAULT else f"{name} from {source}"
        for name, source in sources.items()
    )
    return SettingsError(f"{error}: {', '.join(said)}")


def read_environment(environ: Mapping[str, str]) -> list[Layer]:
    """A layer for each variable that starts with :data:`PREFIX`; those of whole sections come first."""
    found = []
    for variable, raw in environ.items():
        name = variable.upper()
        if name.startswith(PREFIX) and name not in OTHER_VARIABLES:
            found.append((name.removeprefix(PREFIX).lower().split("__"), variable, raw))
    found.sort(key=lambda each: (len(each[0]), each[1]))
    return [(variable, _tree(keys, raw)) for keys, variable, raw in found]


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
    return _tree(keys, raw)


def to_toml(settings: Settings) -> str:
    """The resolved tree as TOML that :func:`load` reads back to an equal tree."""
    import tomli_w

    return tomli_w.dumps(settings.model_dump(mode="json", exclude_none=True))


def _tree(keys: Sequence[str], raw: str) -> dict[str, Any]:
    tree = _value(raw, _type_of(keys))
    for key in reversed(keys):
        tree = {key: tree}
    result: dict[str, Any] = tree
    return result


def _value(raw: str, annotation: Any) -> Any:
    """What ``raw`` means for a setting of that type; as :func:`layers` says."""
    try:
        value: Any = tomllib.loads(f"value = {raw}")["value"]
    except tomllib.TOMLDecodeError:
        value = _json(raw)
    if _is_text(annotation) and not isinstance(value, str):
        return raw
    is_list_of_text = get_origin(annotation) is tuple and _is_text(get_args(annotation)[0])
    if is_list_of_text and raw.lstrip()[:1] not in ("[", "{"):  # those are a list or a table gone wrong
        text = value if isinstance(value, str) else raw
        return [part.strip() for part in text.split(",") if part.strip()]
    return value


def _json(raw: str) -> Any:
    """A list or a table; anything else stays text."""
    try:
        value = json.loads(raw)
    except ValueError:
        return raw
    return value if isinstance(value, list | dict) else raw


def _type_of(keys: Sequence[str]) -> Any:
    """The type of the setting of that name; None if there is none."""
    annotation: Any = Settings
    for key in keys:
        if isinstance(annotation, type) and issubclass(annotation, BaseModel):
            field = annotation.model_fields.get(key)
            annotation = field.annotation if field is not None else None
        else:
            annotation = get_args(annotation)[1] if get_origin(annotation) is dict else None
    return annotation


def _is_text(annotation: Any) -> bool:
    if get_origin(annotation) in (Union, UnionType):
        return all(_is_text(each) for each in get_args(annotation) if each is not NoneType)
    return annotation in (str, Path)


def _names(model: type[BaseModel], prefix: str = "") -> Iterator[str]:
    """Of all settings and sections, dotted."""
    for name, field in model.model_fields.items():
        yield f"{prefix}{name}"
        if isinstance(field.annotation, type) and issubclass(field.annotation, BaseModel):
            yield from _names(field.annotation, f"{prefix}{name}.")


def _explain(error: Any, layered: Sequence[Layer]) -> str:
    if error["type"] == "extra_forbidden":
        return _explain_unknown(error, layered)
    path = ".".join(str(part) for part in error["loc"]) or "settings"
    if error["type"] == "value_error":
        raised = error["ctx"]["error"]
        return f"{path}: {with_sources(raised, layered) if isinstance(raised, Contradiction) else raised}"
    source = source_of(error["loc"], layered)
    if source == DEFAULT:  # the last part is one that pydantic adds: a type, or what is missing
        source = source_of(error["loc"][:-1], layered)
    where = f" (from {source})" if source != DEFAULT else ""
    says = _SHOULD.get(error["type"]) or f"{error['msg'][0].lower()}{error['msg'][1:]}"
    return f"{path} = {error['input']!r:.80}{where}: {says}"


def _explain_unknown(error: Any, layered: Sequence[Layer]) -> str:
    path, below = list(error["loc"]), error["input"]
    # Pydantic stops at the first part that it does not know; the hint wants the whole name.
    while isinstance(below, dict) and len(below) == 1:
        ((key, below),) = below.items()
        path.append(key)
    name, source = ".".join(str(part) for part in path), source_of(path, layered)
    in_a_list = any(isinstance(part, int) for part in path)
    closest = [] if in_a_list else difflib.get_close_matches(name, _names(Settings), n=1)
    hint = f": the closest is {closest[0]}" if closest else ""
    if closest and source.upper().startswith(PREFIX):
        hint = f": the closest is {PREFIX}{closest[0].replace('.', '__').upper()}"
    return f"{name} is not a setting (from {source}){hint}"
