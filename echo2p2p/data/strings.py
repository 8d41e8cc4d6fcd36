"""Task ``strings``: reverse, sort or copy a string of random characters.

Options: ``kind`` (reverse, sort, copy), ``length`` (characters), ``alphabet`` (digits, letters), ``style``
(terse, ``r40718=``, for small character policies; sentence, for instruction-tuned ones) and ``partial``
(pay for right characters; default: only for the whole answer).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from echo2p2p.data.draw import Dice, draw, option, refuse_unknown, score
from echo2p2p.data.task import TRAIN, register

_KINDS = ("reverse", "sort", "copy")
_ALPHABETS = {"digits": "0123456789", "letters": "abcdefghijklmnopqrstuvwxyz"}
_STYLES = ("terse", "sentence")
_SENTENCES = {
    "reverse": "Write the string {text} backwards.",
    "sort": "Sort the characters of the string {text} in ascending order.",
    "copy": "Repeat the string {text}.",
}


@dataclass(frozen=True)
class StringsTask:
    """Reverse, sort or copy ``length`` characters."""

    seed: int
    kind: str
    length: int
    alphabet: str
    style: str
    partial: bool

    @property
    def name(self) -> str:
        return "strings"

    def prompt(self, index: int, split: str = TRAIN) -> str:
        text = self._text(index, split)
        if self.style == "terse":
            return f"{self.kind[0]}{text}="
        return _SENTENCES[self.kind].format(text=text) + " Answer with the result only."

    def answer(self, index: int, split: str = TRAIN) -> str:
        text = self._text(index, split)
        if self.kind == "reverse":
            return text[::-1]
        return "".join(sorted(text)) if self.kind == "sort" else text

    def reward(self, index: int, completion: str, split: str = TRAIN) -> float:
        return score(completion, self.answer(index, split), partial=self.partial)

    def _text(self, index: int, split: str) -> str:
        letters = _ALPHABETS[self.alphabet]

        def make(dice: Dice) -> str:
            return "".join(letters[dice.below(len(letters))] for _ in range(self.length))

        return draw(f"strings {self.alphabet} {self.length}", self.seed, split, index, make)


def make_strings(seed: int, options: Mapping[str, Any]) -> StringsTask:
    """The task with ``options``.

    Raises:
        SettingsError: an option is unknown or out of bounds.
    """
    refuse_unknown("strings", options, ("kind", "length", "alphabet", "style", "partial"))
    return StringsTask(
        seed=seed,
        kind=option(options, "kind", "reverse", _KINDS),
        length=option(options, "length", 5, range(2, 257)),
        alphabet=option(options, "alphabet", "digits", tuple(_ALPHABETS)),
        style=option(options, "style", "terse", _STYLES),
        partial=option(options, "partial", False, (False, True)),
    )


register("strings", make_strings)
