"""Task ``jsonl``: questions with answers from a file of one's own, one JSON object a line.

Options: ``path``; ``question`` and ``answer``, the names of the fields; ``after`` (the answer is what follows the
last such mark); ``score`` (math: math-verify says whether the completion ends in the same value; exact: the same
text, or the same last line of it) and ``template``, with ``{question}`` in it. Learner and workers each need the
file, wherever it lies: its digest is pinned. Each question is in one split, by its own content.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from echo2p2p.data.draw import refuse_unknown
from echo2p2p.data.questions import MAX_QUESTION_BYTES, OPTIONS, Asking, QuestionTask, Rows, by_content
from echo2p2p.data.sandbox import file_digest
from echo2p2p.data.task import register
from echo2p2p.errors import SettingsError

_MAX_FILE_BYTES = 2**31


def make_jsonl(seed: int, options: Mapping[str, Any]) -> QuestionTask:
    """The task with ``options``.

    Raises:
        SettingsError: an option is unknown, the file cannot be used, or math-verify is not installed.
    """
    refuse_unknown("jsonl", options, OPTIONS)
    if not options.get("path"):
        raise SettingsError(
            "the task jsonl needs the option path", hint="task.options.path = 'questions.jsonl'"
        )
    asking = Asking.of(options)
    path = Path(str(options["path"]))
    if path.is_dir():
        raise SettingsError(f"{path} is a folder", hint="task.name = 'dataset' reads data set folders")
    digest = file_digest(path, _MAX_FILE_BYTES)
    rows = _read(path, asking)
    return QuestionTask("jsonl", seed, rows, by_content(rows), asking, {"path": digest})


def _read(path: Path, asking: Asking) -> Rows:
    rows = Rows(asking.after)
    with path.open("rb") as file:
        for number, line in enumerate(iter(lambda: file.readline(MAX_QUESTION_BYTES + 1), b""), start=1):
            if len(line) > MAX_QUESTION_BYTES:
                raise SettingsError(f"{path}, line {number}: longer than {MAX_QUESTION_BYTES} bytes")
            if not line.strip():
                continue
            try:
                row = json.loads(line)
            except (ValueError, RecursionError) as error:
                raise SettingsError(
                    f"{path}, line {number} is no JSON",
                    hint="one object a line; task.name = 'dataset' reads parquet",
                ) from error
            try:
                question, answer = str(row[asking.question]), str(row[asking.answer])
            except (TypeError, KeyError) as error:
                raise SettingsError(
                    f"{path}, line {number}: no object with {asking.question!r} and {asking.answer!r}: {error!r}",
                    hint="name the fields with the options question and answer",
                ) from error
            try:
                rows.append(question, answer)
            except SettingsError as error:
                raise SettingsError(f"{path}, line {number}: {error.message}", hint=error.hint) from error
    return rows


register("jsonl", make_jsonl)
