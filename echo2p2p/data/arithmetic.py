"""Task ``arithmetic``: add, subtract or multiply two numbers.

Options: ``operation`` (add, subtract, multiply), ``digits`` (of either number, at most), ``style`` (terse,
``37+58=``, for small character policies; sentence, for instruction-tuned ones) and ``partial`` (pay for right
digits; default: only for the whole answer).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from echo2p2p.data.draw import Dice, draw, option, refuse_unknown, score
from echo2p2p.data.task import TRAIN, register

_SIGNS = {"add": "+", "subtract": "-", "multiply": "*"}
_STYLES = ("terse", "sentence")


@dataclass(frozen=True)
class ArithmeticTask:
    """One operation on two numbers below 10**``digits``."""

    seed: int
    operation: str
    digits: int
    style: str
    partial: bool

    @property
    def name(self) -> str:
        return "arithmetic"

    def prompt(self, index: int, split: str = TRAIN) -> str:
        a, b = self._numbers(index, split)
        terms = f"{a}{_SIGNS[self.operation]}{b}"
        return f"{terms}=" if self.style == "terse" else f"What is {terms}? Answer with the number only."

    def answer(self, index: int, split: str = TRAIN) -> str:
        a, b = self._numbers(index, split)
        if self.operation == "add":
            return str(a + b)
        return str(a - b if self.operation == "subtract" else a * b)

    def reward(self, index: int, completion: str, split: str = TRAIN) -> float:
        return score(completion, self.answer(index, split), partial=self.partial)

    def _numbers(self, index: int, split: str) -> tuple[int, int]:
        bound = 10**self.digits

        def make(dice: Dice) -> tuple[int, int]:
            return dice.below(bound), dice.below(bound)

        return draw(f"arithmetic {self.operation} {self.digits}", self.seed, split, index, make)


def make_arithmetic(seed: int, options: Mapping[str, Any]) -> ArithmeticTask:
    """The task with ``options``.

    Raises:
        SettingsError: an option is unknown or out of bounds.
    """
    refuse_unknown("arithmetic", options, ("operation", "digits", "style", "partial"))
    return ArithmeticTask(
        seed=seed,
        operation=option(options, "operation", "add", tuple(_SIGNS)),
        digits=option(options, "digits", 2, range(1, 16)),
        style=option(options, "style", "terse", _STYLES),
        partial=option(options, "partial", False, (False, True)),
    )


register("arithmetic", make_arithmetic)
