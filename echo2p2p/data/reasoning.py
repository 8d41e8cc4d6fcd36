"""Task ``reasoning-gym``: any data set of the reasoning-gym library, generated and scored by it.

Options: ``dataset`` (knights_knaves, sokoban, countdown, …), ``extract`` (tags: what stands in the last
``<answer>…</answer>``; whole: the whole completion) and every parameter of the data set itself, such as ``n_people``,
but none that names a file: the learner's word would make workers read any of theirs, and send it in their prompts.
Worker and learner need the same release of the library: its generators may change.

The library runs in the sandbox's process alone. To make a question codeio runs snippets that a model wrote; to score
an answer n_queens, binary_matrix, spiral_matrix and string_insertion evaluate it as Python, and so do countdown,
puzzle24, polynomial_multiplication, simple_integration and intermediate_integration through sympy: there literals and
formulas are read and nothing is run. With some parameters a question takes for ever: it has :data:`PROMPT_S` seconds.
"""

from __future__ import annotations

import json
import re
import time
from collections.abc import Mapping
from functools import lru_cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from echo2p2p.data.draw import Dice, draw, option
from echo2p2p.data.sandbox import Sandbox, SandboxLimits
from echo2p2p.data.task import TRAIN, register
from echo2p2p.errors import RewardFailed, SettingsError

PROMPT_S = 10.0
SCORE_S = 5.0
"""An answer has longer than elsewhere: where its process was ended, its question is made again first."""
_GRADERS = Path(__file__).with_name("graders.py")
_ITEMS = 2**31 - 1
_OPENS, _CLOSES = "<answer>", "</answer>"
_ASK = "\nPut the final answer, and nothing else, between <answer> and </answer>.\n"
_KEPT = 4096
_NAMES_A_FILE = re.compile("file|path|folder|url")


class ReasoningTask:
    """One data set of reasoning-gym with its parameters.

    Raises:
        SettingsError: the library refuses the data set or a parameter, or makes no first question in time.
    """

    def __init__(self, seed: int, dataset: str, parameters: Mapping[str, Any], *, extract: str) -> None:
        self._seed = seed
        self._dataset = dataset
        self._parameters = json.dumps({**parameters, "size": _ITEMS}, sort_keys=True)
        self._extract = extract
        self._sandbox = Sandbox(f"{_GRADERS}:reasoning", SandboxLimits(call_s=SCORE_S))
        self._item = lru_cache(_KEPT)(self._drawn)
        try:
            self._sandbox.start()
            self._made(0, PROMPT_S)
        except (RewardFailed, SettingsError) as error:
            self.close()
            shown = ", ".join(f"{name} = {value!r}" for name, value in parameters.items())
            raise SettingsError(
                f"reasoning-gym makes no question of {dataset!r} with {shown or 'its defaults'}: {error.message}",
                hint="data sets are for example knights_knaves, sokoban, countdown",
            ) from error

    @property
    def name(self) -> str:
        return "reasoning-gym"

    @property
    def pins(self) -> Mapping[str, str]:
        return {"reasoning-gym": version("reasoning-gym")}

    def prompt(self, index: int, split: str = TRAIN) -> str:
        question = self._item(index, split)[1]
        return question + _ASK if self._extract == "tags" else question

    def answer(self, index: int, split: str = TRAIN) -> str:
        answer = self._item(index, split)[2]
        return f"<answer>{answer}</answer>" if self._extract == "tags" else answer

    def reward(self, index: int, completion: str, split: str = TRAIN) -> float:
        """Raises RewardFailed where the library gives no number in time."""
        given = completion.strip()
        if self._extract == "tags":
            tagged = _tagged(completion)
            if tagged is None:
                return 0.0
            given = tagged
        number = self._item(index, split)[0]
        return self._sandbox.call(self._dataset, self._parameters, 0, number, given)

    def close(self) -> None:
        self._sandbox.close()

    def _drawn(self, index: int, split: str) -> tuple[int, str, str]:
        """Number in the data set, question, answer. Raises RewardFailed if the library does not make them in time."""
        made: dict[str, tuple[int, str]] = {}
        deadline = time.monotonic() + PROMPT_S

        def make(dice: Dice) -> str:
            number = dice.below(_ITEMS)
            question, answer = self._made(number, deadline - time.monotonic())
            made[question] = number, answer
            return question

        names = f"reasoning-gym {self._dataset} {self._parameters}"
        question = draw(names, self._seed, split, index, make)
        return made[question][0], question, made[question][1]

    def _made(self, number: int, seconds: float) -> list[str]:
        """Question and answer of an item of the data set."""
        return self._sandbox.ask(self._dataset, self._parameters, 0, number, seconds=max(0.01, seconds))


def _tagged(completion: str) -> str | None:
    """What stands between the last two tags that belong together; in one pass, whatever was written."""
    head, closed, _ = completion.rpartition(_CLOSES)
    _, opened, given = head.rpartition(_OPENS)
    return given.partition(_CLOSES)[0].strip() if opened and closed else None


def make_reasoning(seed: int, options: Mapping[str, Any]) -> ReasoningTask:
    """The task with ``options``.

    Raises:
        SettingsError: the library is not there, it refuses the data set or a parameter, or one names a file.
    """
    try:
        version("reasoning-gym")
    except PackageNotFoundError as error:
        raise SettingsError(
            "the task reasoning-gym needs its library", hint="pip install 'echo2p2p[tasks]'"
        ) from error
    parameters = {name: value for name, value in options.items() if name not in ("dataset", "extract")}
    for name, value in parameters.items():
        if isinstance(value, str) and _NAMES_A_FILE.search(name):
            raise SettingsError(f"task option {name} of reasoning-gym names a file, which is not allowed")
    return ReasoningTask(
        seed,
        str(options.get("dataset", "knights_knaves")),
        parameters,
        extract=option(options, "extract", "tags", ("tags", "whole")),
    )


register("reasoning-gym", make_reasoning)
