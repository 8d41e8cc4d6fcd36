"""Settings as a person wants to read them: every value in force with its source, and what could be set as well."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from typing import Any

import tomli_w
from pydantic import BaseModel

from echo2p2p.layering import Layer, source_of
from echo2p2p.settings import Settings

SOURCE_COLUMN = 48
"""Where the comments begin, if the value leaves them room."""


def explain(settings: Settings, layered: Sequence[Layer], without: Collection[str] = ()) -> str:
    """The settings as TOML that reads back equal, with a comment at every value: where it comes from.

    What is not set has no value in TOML and stands as a comment, with its meaning.

    Args:
        layered: what ``settings`` were merged from; what none of the layers has is a default.
        without: names in the tree's first row that are left out.
    """
    return "\n".join(_section(settings, "", layered, without)) + "\n"


def _section(
    model: BaseModel, path: str, layered: Sequence[Layer], without: Collection[str] = ()
) -> Iterator[str]:
    inner: list[tuple[str, BaseModel]] = []
    for name, field in type(model).model_fields.items():
        if name in without:
            continue
        value = getattr(model, name)
        here = f"{path}.{name}" if path else name
        if isinstance(value, BaseModel):
            inner.append((here, value))
        elif value is None:
            yield f"# {name} is not set: {field.description}"
        else:
            plain = model.model_dump(mode="json", include={name})[name]
            yield f"{f'{name} = {_toml(plain)}':{SOURCE_COLUMN}}  # {source_of(here.split('.'), layered)}"
    for here, section in inner:
        yield ""
        yield f"[{here}]"
        yield from _section(section, here, layered)


def _toml(value: Any) -> str:
    """``value`` as TOML in one line."""
    if isinstance(value, list):
        return f"[{', '.join(map(_toml, value))}]"
    if isinstance(value, dict):
        pairs = (f"{_key(key)} = {_toml(inner)}" for key, inner in value.items())
        return f"{{ {', '.join(pairs)} }}" if value else "{}"
    return tomli_w.dumps({"v": value}).partition("=")[2].strip()


def _key(key: str) -> str:
    return tomli_w.dumps({key: 0}).rpartition("=")[0].strip()
