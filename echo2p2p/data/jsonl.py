"""Task ``jsonl``: questions with answers from a file of one's own, one JSON object a line.

Options: ``path``; ``question`` and ``answer``, the names of the fields; ``score`` (math: math-verify says whether the
completion ends in the same value; exact: the same text, or the same last line of it) and ``template``, with
``{question}`` in it. Learner and workers each need the file, wherever it lies: its digest is pinned.

Each question is in one split, by its own content. Training goes over all of them again and again, in an order of its
own each time.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from functools import lru_cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import numpy as np

from echo2p2p.data.draw import Dice, option, refuse_unknown, split_of
from echo2p2p.data.sandbox import Sandbox, file_digest
from echo2p2p.data.task import HELD_OUT, TRAIN, register
from echo2p2p.errors import SettingsError

_GRADERS = Path(__file__).with_name("graders.py")
_MAX_FILE_BYTES = 2**31
_MAX_LINE_BYTES = 2**20
_OPTIONS = ("path", "question", "answer", "score", "template")
_KEPT_ORDERS = 4


class JsonlTask:
    """Questions of one file."""

    def __init__(
        self, seed: int, path: Path, *, question: str, answer: str, score: str, template: str
    ) -> None:
        self._seed = seed
        self._template = template
        self._digest = file_digest(path, _MAX_FILE_BYTES)
        self._items = _read(path, question, answer)
        self._of = {
            split: [i for i, (text, _) in enumerate(self._items) if split_of(text) == split]
            for split in (TRAIN, HELD_OUT)
        }
        for split, members in self._of.items():
            if not members:
                raise SettingsError(f"{path} has too few questions for a {split} split")
        self._sandbox = Sandbox(f"{_GRADERS}:math") if score == "math" else None
        self._order = lru_cache(_KEPT_ORDERS)(self._shuffled)

    @property
    def name(self) -> str:
        return "jsonl"

    @property
    def pins(self) -> Mapping[str, str]:
        if self._sandbox is None:
            return {"path": self._digest}
        return {"path": self._digest, "math-verify": version("math-verify")}

    def prompt(self, index: int, split: str = TRAIN) -> str:
        return self._template.replace("{question}", self._item(index, split)[0])

    def answer(self, index: int, split: str = TRAIN) -> str:
        return self._item(index, split)[1]

    def reward(self, index: int, completion: str, split: str = TRAIN) -> float:
        """Raises RewardFailed where math-verify comes to no end in time."""
        question, answer = self._item(index, split)
        if self._sandbox is not None:
            return self._sandbox.call(question, completion, answer) if completion.strip() else 0.0
        given = completion.strip()
        return float(answer in (given, given.rpartition("\n")[2].strip()))

    def close(self) -> None:
        if self._sandbox is not None:
            self._sandbox.close()

    def _item(self, index: int, split: str) -> tuple[str, str]:
        if split not in self._of:
            raise SettingsError(f"there is no split {split!r}", hint=f"splits: {TRAIN}, {HELD_OUT}")
        members = self._of[split]
        order = self._order(index // len(members), split)
        return self._items[members[order[index % len(members)]]]

    def _shuffled(self, epoch: int, split: str) -> list[int]:
        dice = Dice(f"echo2p2p jsonl|{self._seed}|{split}|{epoch}")
        keys = np.array([dice.below(2**62) for _ in self._of[split]])
        order: list[int] = np.argsort(keys, kind="stable").tolist()
        return order


def _read(path: Path, question: str, answer: str) -> list[tuple[str, str]]:
    items = []
    with path.open("rb") as file:
        for number, line in enumerate(iter(lambda: file.readline(_MAX_LINE_BYTES + 1), b""), start=1):
            if len(line) > _MAX_LINE_BYTES:
                raise SettingsError(f"{path}, line {number}: longer than {_MAX_LINE_BYTES} bytes")
            if not line.strip():
                continue
            try:
                row = json.loads(line)
                items.append((str(row[question]), str(row[answer]).strip()))
            except (ValueError, TypeError, KeyError, RecursionError) as error:
                raise SettingsError(
                    f"{path}, line {number}: no object with {question!r} and {answer!r}: {error!r}",
                    hint="name the fields with the options question and answer",
                ) from error
    return items


def make_jsonl(seed: int, options: Mapping[str, Any]) -> JsonlTask:
    """The task with ``options``.

    Raises:
        SettingsError: an option is unknown, the file cannot be used, or math-verify is not installed.
    """
    refuse_unknown("jsonl", options, _OPTIONS)
    if not options.get("path"):
        raise SettingsError(
            "the task jsonl needs the option path", hint="task.options.path = 'questions.jsonl'"
        )
    score = option(options, "score", "math", ("math", "exact"))
    if score == "math":
        try:
            version("math-verify")
        except PackageNotFoundError as error:
            raise SettingsError(
                "score = 'math' needs math-verify", hint="pip install 'echo2p2p[tasks]', or score = 'exact'"
            ) from error
    template = str(options.get("template", "{question}"))
    if "{question}" not in template:
        raise SettingsError("task option template does not contain {question}")
    return JsonlTask(
        seed,
        Path(str(options["path"])),
        question=str(options.get("question", "question")),
        answer=str(options.get("answer", "answer")),
        score=score,
        template=template,
    )


register("jsonl", make_jsonl)
