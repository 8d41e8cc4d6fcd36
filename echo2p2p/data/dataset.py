"""Task ``dataset``: questions with answers from a Hugging Face data set on the disk.

That is a folder of parquet files, as it comes from the hub, or one that ``save_to_disk`` of the library wrote.

Options: those of ``jsonl``, with ``question`` and ``answer`` the names of columns (``a.b`` is field b of column a),
and ``train`` and ``held_out``, the names of splits. Without ``held_out`` it is the validation split, or else the test
split; where neither is there, each question is in one split by its content. A training question that is held out as
well is left out.

A column may hold messages, with role and content each: the question is then what comes before the last of an
assistant's, and the answer what that one says.

Files are read a batch at a time, with pyarrow. What both sides hold alike is the questions, not the files: one may
have them as parquet, the other as arrow.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from blake3 import blake3

from echo2p2p.data.conversation import Conversation
from echo2p2p.data.dataset_files import batches, find_splits
from echo2p2p.data.draw import refuse_unknown
from echo2p2p.data.questions import OPTIONS, Asking, QuestionTask, Rows, by_content
from echo2p2p.data.task import HELD_OUT, TRAIN, register
from echo2p2p.errors import SettingsError

_HELD_OUT_SPLITS = ("validation", "test")
_DIGEST_BYTES = 16


def make_dataset(seed: int, options: Mapping[str, Any]) -> QuestionTask:
    """The task with ``options``.

    Raises:
        SettingsError: an option is unknown, the folder cannot be used, or a library is not installed.
    """
    refuse_unknown("dataset", options, (*OPTIONS, "train", "held_out"))
    if not options.get("path"):
        raise SettingsError("the task dataset needs the option path", hint="task.options.path = 'gsm8k/main'")
    asking = Asking.of(options)
    folder = Path(str(options["path"]))
    splits = find_splits(folder)
    train = _named(folder, splits, str(options.get("train", "train")))
    held_out = str(options.get("held_out", ""))
    if held_out:
        held_out = _named(folder, splits, held_out)
    else:
        held_out = next((name for name in _HELD_OUT_SPLITS if name in splits and name != train), "")
    rows = Rows(asking.after)
    _read(rows, splits[train], asking)
    if held_out and held_out != train:
        n_train = len(rows)
        _read(rows, splits[held_out], asking)
        members = {
            TRAIN: _without(rows, n_train),
            HELD_OUT: np.arange(n_train, len(rows)),
        }
    else:
        members = by_content(rows)
    if rows and isinstance(rows[0][0], Conversation) and "template" in options:
        raise SettingsError(f"column {asking.question!r} holds messages, which take no template")
    return QuestionTask("dataset", seed, rows, members, asking, {"questions": rows.digest()})


def _named(folder: Path, splits: Mapping[str, list[Path]], name: str) -> str:
    if name not in splits:
        raise SettingsError(f"{folder} has no split {name!r}", hint=f"it has {', '.join(sorted(splits))}")
    return name


def _without(rows: Rows, n_train: int) -> np.ndarray:
    """The training rows whose question no held-out row asks."""
    held_out = {_question_digest(rows, i) for i in range(n_train, len(rows))}
    return np.array([i for i in range(n_train) if _question_digest(rows, i) not in held_out], dtype=np.int64)


def _question_digest(rows: Rows, number: int) -> bytes:
    question = rows[number][0].encode("utf-8", "surrogatepass")
    return blake3(question).digest(length=_DIGEST_BYTES)


def _read(rows: Rows, files: list[Path], asking: Asking) -> None:
    before = len(rows)
    for path in files:
        for number, (question, answer) in enumerate(_pairs(path, asking)):
            try:
                rows.append(_question(question), _answer(answer))
            except (ValueError, SettingsError) as error:
                said = error.message if isinstance(error, SettingsError) else str(error)
                hint = error.hint if isinstance(error, SettingsError) else ""
                raise SettingsError(f"{path}, row {number}: {said}", hint=hint) from error
    if len(rows) == before:
        raise SettingsError(f"{files[0].parent} holds no questions: its split is empty")


def _pairs(path: Path, asking: Asking) -> Iterator[tuple[Any, Any]]:
    for question, answer in batches(path, (asking.question, asking.answer)):
        yield from zip(question, answer, strict=True)


def _question(value: Any) -> str:
    if not isinstance(value, list):
        return _text(value, "question")
    messages = _messages(value)
    last = _last_of_assistant(messages)
    asked = messages if last is None else messages[:last]
    if not asked:
        raise ValueError("no message comes before the assistant's")
    return Conversation(asked)


def _answer(value: Any) -> str:
    if not isinstance(value, list):
        return _text(value, "answer")
    messages = _messages(value)
    last = _last_of_assistant(messages)
    if last is None:
        raise ValueError("no message is an assistant's")
    return messages[last][1]


def _text(value: Any, what: str) -> str:
    if isinstance(value, str | int | float):
        return str(value)
    raise ValueError(f"the {what} is neither text nor messages but {value!r:.80}")


def _messages(value: list[Any]) -> list[tuple[str, str]]:
    messages = []
    for message in value:
        try:
            role, content = message["role"], message["content"]
        except (TypeError, KeyError) as error:
            raise ValueError(f"no message with role and content: {message!r:.80}") from error
        if not isinstance(role, str) or not isinstance(content, str):
            raise ValueError(f"no message with role and content: {message!r:.80}")
        messages.append((role, content))
    return messages


def _last_of_assistant(messages: list[tuple[str, str]]) -> int | None:
    return next((i for i in range(len(messages) - 1, -1, -1) if messages[i][0] == "assistant"), None)


register("dataset", make_dataset)
