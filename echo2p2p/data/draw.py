"""Where prompts get their randomness: a hash of what names them, the same on every machine and Python.

Train and held-out prompts are disjoint by content, not merely by index: a drawn prompt belongs to exactly one
split, decided by its own hash, and :func:`draw` goes on drawing until it has one of the split asked for.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, TypeVar

import numpy as np
from blake3 import blake3

from echo2p2p.data.task import HELD_OUT, TRAIN
from echo2p2p.errors import SettingsError

T = TypeVar("T")

HELD_OUT_ONE_IN = 8
"""Of all possible prompts, one in so many belongs to the held-out split."""

_MAX_DRAWS = 4096
_WORD_BYTES = 8


class Dice:
    """An endless, stable stream of integers that ``key`` decides."""

    def __init__(self, key: str) -> None:
        self._hasher = blake3(key.encode())
        self._offset = 0

    def below(self, bound: int) -> int:
        """The next integer in [0, ``bound``); ``bound`` is far below 2**64, so the bias is negligible."""
        word = self._hasher.digest(length=_WORD_BYTES, seek=self._offset)
        self._offset += _WORD_BYTES
        return int.from_bytes(word, "little") % bound

    def all_below(self, bound: int, n: int) -> np.ndarray:
        """The next ``n`` integers at once: uint64, shape (n,)."""
        words = self._hasher.digest(length=_WORD_BYTES * n, seek=self._offset)
        self._offset += _WORD_BYTES * n
        return np.frombuffer(words, dtype="<u8") % np.uint64(bound)


def draw(task: str, seed: int, split: str, index: int, make: Callable[[Dice], T]) -> T:
    """Prompt ``index`` of ``split``: what ``make`` builds, drawn until its hash puts it into ``split``.

    Args:
        task: names the task and the options that shape its prompts.
        make: builds a prompt's content from dice; equal contents have equal ``repr``.

    Raises:
        SettingsError: ``split`` is none, or the task has (nearly) no prompt in it.
    """
    if split not in (TRAIN, HELD_OUT):
        raise SettingsError(f"there is no split {split!r}", hint=f"splits: {TRAIN}, {HELD_OUT}")
    dice = Dice(f"echo2p2p prompt|{task}|{seed}|{split}|{index}")
    for _ in range(_MAX_DRAWS):
        content = make(dice)
        if split_of(repr(content)) == split:
            return content
    raise SettingsError(f"{task} has too few different prompts to split", hint="choose a longer length")


def split_of(content: str) -> str:
    """The one split that a prompt of this content belongs to."""
    held_out = Dice(f"echo2p2p split|{content}").below(HELD_OUT_ONE_IN) == 0
    return HELD_OUT if held_out else TRAIN


def option(options: Mapping[str, Any], name: str, default: T, allowed: range | tuple[T, ...]) -> T:
    """``options[name]`` or ``default``, checked for its type and against ``allowed``.

    Raises:
        SettingsError: it is of another type, or not allowed.
    """
    value = options.get(name, default)
    if type(value) is not type(default) or value not in allowed:
        shown = (
            f"{allowed.start}–{allowed.stop - 1}"
            if isinstance(allowed, range)
            else ", ".join(map(str, allowed))
        )
        raise SettingsError(f"task option {name} = {value!r} is not allowed", hint=f"allowed: {shown}")
    return value


def refuse_unknown(task: str, options: Mapping[str, Any], known: tuple[str, ...]) -> None:
    """Refuse options that the task does not have, so that a typo never trains the wrong task.

    Raises:
        SettingsError: there is one.
    """
    unknown = sorted(set(options) - set(known))
    if unknown:
        raise SettingsError(
            f"task {task} has no option {', '.join(unknown)}", hint=f"its options: {', '.join(known)}"
        )


def score(completion: str, answer: str, *, partial: bool) -> float:
    """1.0 for exactly ``answer`` (white space around it aside).

    Otherwise 0.0 or, if ``partial``, the fraction of places that hold the right character, places that only
    one of the two has counting as wrong.
    """
    given = completion.strip()
    if given == answer:
        return 1.0
    if not partial:
        return 0.0
    right = sum(a == b for a, b in zip(given, answer, strict=False))
    return right / max(len(given), len(answer))
