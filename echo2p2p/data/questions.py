"""Questions with answers, wherever they come from: on the disk, in splits, in an order of their own, scored.

Guarantees: a prompt is a function of (seed, split, index) and of the questions; what is in memory is some tens of
bytes a question, however long it is. Training goes over all questions again and again, each time in another order.
"""

from __future__ import annotations

import json
import os
import tempfile
import weakref
from array import array
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import numpy as np
from blake3 import blake3

from echo2p2p.data.conversation import Conversation
from echo2p2p.data.draw import Dice, option, split_of
from echo2p2p.data.sandbox import Sandbox
from echo2p2p.data.task import HELD_OUT, TRAIN
from echo2p2p.errors import SettingsError

OPTIONS = ("path", "question", "answer", "after", "score", "template")
"""What every task of questions understands."""

MAX_QUESTION_BYTES = 2**20
_GRADERS = Path(__file__).with_name("graders.py")
_KEPT_ORDERS = 4
_TEXT, _CONVERSATION = b"\0", b"\1"


class Rows:
    """Questions with their answers in a file without a name, which goes with this process.

    Args:
        after: of an answer what counts is what stands behind the last such mark; empty for the whole.

    Raises:
        SettingsError: there is no room for it where temporary files go.
    """

    def __init__(self, after: str = "") -> None:
        self._after = after
        self._marked = False
        file, path = tempfile.mkstemp(prefix="echo2p2p-questions-")
        Path(path).unlink()
        self._file = file
        self._ends = array("Q", [0])  # of question, answer, question, answer, …
        self._hasher = blake3()
        self.close = weakref.finalize(self, os.close, file)

    def append(self, question: str, answer: str) -> None:
        """Add one. Raises SettingsError if it is empty, no text or too long, or the disk is full."""
        if not question:
            raise SettingsError("the question is empty")
        if self._after:
            _, mark, answer = answer.rpartition(self._after)
            self._marked |= bool(mark)
        answer = answer.strip()
        if isinstance(question, Conversation):
            _encoded(question)
            asked = _CONVERSATION + json.dumps(question.messages).encode()
        else:
            asked = _TEXT + _encoded(question)
        for part in (asked, _encoded(answer)):
            if len(part) > MAX_QUESTION_BYTES:
                raise SettingsError(f"a question or answer is longer than {MAX_QUESTION_BYTES} bytes")
            try:
                written = os.pwrite(self._file, part, self._ends[-1])
            except OSError as error:
                raise SettingsError(
                    f"no room for the questions: {error}", hint="set TMPDIR to a disk with more"
                ) from error
            if written != len(part):
                raise SettingsError("no room for the questions", hint="set TMPDIR to a disk with more")
            self._ends.append(self._ends[-1] + written)
            self._hasher.update(len(part).to_bytes(8, "little") + part)

    def __len__(self) -> int:
        return len(self._ends) // 2

    def __getitem__(self, number: int) -> tuple[str, str]:
        """Question and answer. The question is a :class:`Conversation` if it was one."""
        start, middle, end = self._ends[2 * number : 2 * number + 3]
        kind, asked, answer = (
            self._read(start, start + 1),
            self._read(start + 1, middle),
            self._read(middle, end),
        )
        if kind == _CONVERSATION:
            return Conversation([(role, content) for role, content in json.loads(asked)]), _decoded(answer)
        return _decoded(asked), _decoded(answer)

    def check_mark(self) -> None:
        """Raises SettingsError if ``after`` stands in no answer: each of them would count as a whole."""
        if self._after and not self._marked:
            raise SettingsError(
                f"no answer holds the mark {self._after!r} of task option after",
                hint="leave it out where the answers are nothing else",
            )

    def digest(self) -> str:
        """Of all questions and answers in their order: BLAKE3, hexadecimal."""
        return self._hasher.hexdigest()

    def _read(self, start: int, end: int) -> bytes:
        return os.pread(self._file, end - start, start)


def by_content(rows: Rows) -> dict[str, np.ndarray]:
    """Each question in one split, by what it asks: the numbers of each split's rows, int64, ascending."""
    held_out = np.array([split_of(rows[i][0]) == HELD_OUT for i in range(len(rows))], dtype=bool)
    return {TRAIN: np.flatnonzero(~held_out), HELD_OUT: np.flatnonzero(held_out)}


class Epochs:
    """Endless indices over things that are finite: each once, then each again in another order.

    Args:
        key: names what is shuffled; with it, split and epoch decide the order.
        members: the numbers of each split's things, int64.
    """

    def __init__(self, key: str, members: Mapping[str, np.ndarray]) -> None:
        self._key = key
        self._members = members
        self._order = lru_cache(_KEPT_ORDERS)(self._shuffled)

    def number(self, index: int, split: str) -> int:
        """What comes at place ``index`` of ``split``. Raises SettingsError if there is no such split."""
        if split not in self._members:
            raise SettingsError(f"there is no split {split!r}", hint=f"splits: {TRAIN}, {HELD_OUT}")
        members = self._members[split]
        return int(members[self._order(index // len(members), split)[index % len(members)]])

    def _shuffled(self, epoch: int, split: str) -> np.ndarray:
        dice = Dice(f"echo2p2p {self._key}|{split}|{epoch}")
        return np.argsort(dice.all_below(2**62, len(self._members[split])), kind="stable")


@dataclass(frozen=True)
class Asking:
    """How questions are asked and answers scored, as a run's options say.

    Attributes:
        question, answer: names of fields or columns.
        after: the answer is what stands behind the last of these marks; empty for the whole.
        score: ``math`` or ``exact``.
        template: with ``{question}`` in it.
    """

    question: str
    answer: str
    after: str
    score: str
    template: str

    @classmethod
    def of(cls, options: Mapping[str, Any]) -> Asking:
        """Raises SettingsError if an option is not allowed, or math-verify is not installed."""
        score = option(options, "score", "math", ("math", "exact"))
        if score == "math":
            try:
                version("math-verify")
            except PackageNotFoundError as error:
                raise SettingsError(
                    "score = 'math' needs math-verify",
                    hint="pip install 'echo2p2p[tasks]', or score = 'exact'",
                ) from error
        template = str(options.get("template", "{question}"))
        if "{question}" not in template:
            raise SettingsError("task option template does not contain {question}")
        return cls(
            question=str(options.get("question", "question")),
            answer=str(options.get("answer", "answer")),
            after=str(options.get("after", "")),
            score=score,
            template=template,
        )


class QuestionTask:
    """A task of questions.

    Args:
        members: the numbers of each split's rows.
        pins: what says that both sides hold the same questions.
    """

    def __init__(
        self,
        name: str,
        seed: int,
        rows: Rows,
        members: Mapping[str, np.ndarray],
        asking: Asking,
        pins: Mapping[str, str],
    ) -> None:
        for split, numbers in members.items():
            if not len(numbers):
                raise SettingsError(f"there are too few questions for a {split} split")
        rows.check_mark()
        self._name = name
        self._rows = rows
        self._epochs = Epochs(f"{name}|{seed}", members)
        self._template = asking.template
        self._pins = dict(pins)
        self._sandbox = None
        if asking.score == "math":
            self._sandbox = Sandbox(f"{_GRADERS}:math")
            self._pins["math-verify"] = version("math-verify")

    @property
    def name(self) -> str:
        return self._name

    @property
    def pins(self) -> Mapping[str, str]:
        return self._pins

    def prompt(self, index: int, split: str = TRAIN) -> str:
        question = self._row(index, split)[0]
        return (
            question if isinstance(question, Conversation) else self._template.replace("{question}", question)
        )

    def answer(self, index: int, split: str = TRAIN) -> str:
        return self._row(index, split)[1]

    def reward(self, index: int, completion: str, split: str = TRAIN) -> float:
        """Raises RewardFailed where math-verify comes to no end in time."""
        question, answer = self._row(index, split)
        if self._sandbox is not None:
            return self._sandbox.call(question, completion, answer) if completion.strip() else 0.0
        given = completion.strip()
        return float(answer in (given, given.rpartition("\n")[2].strip()))

    def close(self) -> None:
        self._rows.close()
        if self._sandbox is not None:
            self._sandbox.close()

    def _row(self, index: int, split: str) -> tuple[str, str]:
        return self._rows[self._epochs.number(index, split)]


def _encoded(text: str) -> bytes:
    try:
        return text.encode()
    except UnicodeEncodeError as error:  # JSON may spell half a pair, and no tokenizer takes it
        raise SettingsError("a question or answer holds half a character") from error


def _decoded(text: bytes) -> str:
    return text.decode()
