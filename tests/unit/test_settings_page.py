"""docs/settings.md says what the settings say of themselves."""

from __future__ import annotations

import runpy
from pathlib import Path

from pydantic import BaseModel

from echo2p2p.settings import Settings

ROOT = Path(__file__).parents[2]


def sections(model: type[BaseModel]) -> list[type[BaseModel]]:
    inner = [each.annotation for each in model.model_fields.values()]
    found = [each for each in inner if isinstance(each, type) and issubclass(each, BaseModel)]
    return [model, *(deeper for each in found for deeper in sections(each))]


def test_the_page_is_the_one_that_the_settings_make() -> None:
    page = runpy.run_path(str(ROOT / "scripts" / "settings_page.py"))["page"]()
    written = (ROOT / "docs" / "settings.md").read_text(encoding="utf-8")
    assert written == page, "run python scripts/settings_page.py"


def test_every_setting_says_what_it_does() -> None:
    silent = [
        f"{section.__name__}.{name}"
        for section in sections(Settings)
        for name, field in section.model_fields.items()
        if not field.description
        and not (isinstance(field.annotation, type) and issubclass(field.annotation, BaseModel))
    ]
    assert not silent
