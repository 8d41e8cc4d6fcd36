"""Writes docs/settings.md from the settings' own descriptions: ``python scripts/settings_page.py``."""

from __future__ import annotations

import json
import typing
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from pydantic import BaseModel
from pydantic.fields import FieldInfo

from echo2p2p.settings import Settings

PAGE = Path(__file__).parents[1] / "docs" / "settings.md"

HEAD = """\
# Settings

Every setting of `echo2p2p`, with its default. They are one tree for all commands; each command uses its part. In a
file (`--config run.toml`) a section is a TOML table, `[learner.optimizer]`; on the command line a setting is
`--set learner.staleness=4`; in the environment `ECHO2P2P_LEARNER__STALENESS=4`, with two underscores between parts.
Defaults come first, then files in order, then the environment, then `--set`, then a command's own options. A name
that is none and a value out of bounds are refused before anything starts (exit code 3), with the file, variable or
option that they come from. `--dry-run` prints the tree as resolved, and where each value comes from.

In the environment and after `--set` a value is written as in a file, but text needs no quotes. A list of texts or
paths may be plain as well, with commas between its entries; a list or a table may also be JSON:

```sh
export ECHO2P2P_SWARM__INITIAL_PEERS=/ip4/203.0.113.7/tcp/31337/p2p/ID  # or '["/ip4/…", "/ip4/…"]'
export ECHO2P2P_TASK__OPTIONS='{ kind = "reverse" }'  # or ECHO2P2P_TASK__OPTIONS__KIND=reverse
```

Every variable that starts with `ECHO2P2P_` has to name a setting.
"""


def page() -> str:
    return HEAD + "".join([*_section("The run", "Whose it is.", Settings), *_sections(Settings, "")])


def _sections(model: type[BaseModel], prefix: str) -> Iterator[str]:
    for name, field in model.model_fields.items():
        if (inner := _model_of(field.annotation)) is not None:
            path = f"{prefix}{name}"
            is_list = typing.get_origin(field.annotation) is tuple
            title = f"`[[{path}]]`" if is_list else f"`[{path}]`"
            yield from _section(title, (inner.__doc__ or "").strip(), inner)
            yield from _sections(inner, f"{path}.")


def _section(title: str, says: str, model: type[BaseModel]) -> Iterator[str]:
    yield f"\n## {title}\n\n{says}\n\n"
    yield "| setting | default | allowed | |\n| --- | --- | --- | --- |\n"
    for name, field in model.model_fields.items():
        if _model_of(field.annotation) is None:
            yield (
                f"| `{name}` | {_default(field)} | {_allowed(field)} | "
                f"{(field.description or '').replace('|', chr(92) + '|')} |\n"
            )


def _model_of(annotation: Any) -> type[BaseModel] | None:
    """The section that a setting holds, or of which it holds a list."""
    for each in (annotation, *typing.get_args(annotation)):
        if isinstance(each, type) and issubclass(each, BaseModel):
            return each
    return None


def _default(field: FieldInfo) -> str:
    if field.is_required():
        return ""
    value = field.default
    return "empty" if value in (None, "", (), {}) else f"`{json.dumps(value, ensure_ascii=False)}`"


def _allowed(field: FieldInfo) -> str:
    """The type, and its bounds where it has any."""
    kinds, bounds = [], list(field.metadata)
    pending = [field.annotation]
    while pending:
        each = pending.pop(0)
        origin, arguments = typing.get_origin(each), typing.get_args(each)
        if origin is typing.Literal:
            kinds.extend(f"`{word}`" for word in arguments)
        elif origin is typing.Annotated:
            pending.insert(0, arguments[0])
            for extra in arguments[1:]:
                bounds.extend(getattr(extra, "metadata", [extra]))
        elif origin is dict:
            kinds.append("table")
        elif origin is tuple:
            kinds.append("list")
        elif arguments:
            pending = [*arguments, *pending]
        elif each is not type(None):
            kinds.append(
                {str: "text", int: "whole number", float: "number", bool: "`true`, `false`"}.get(each, "path")
            )
    limits = [
        f"{sign} {getattr(bound, name):g}"
        for bound in bounds
        for name, sign in (("gt", ">"), ("ge", "≥"), ("lt", "<"), ("le", "≤"))
        # Larger ones only keep nonsense out.
        if getattr(bound, name, None) is not None and getattr(bound, name) < 1e6
    ]
    return ", ".join([*kinds, *limits])


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
