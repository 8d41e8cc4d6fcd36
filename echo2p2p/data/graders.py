"""How libraries score an answer. Run in the sandbox's process, by path: it imports nothing else of the project.

Both libraries evaluate what the model wrote with computer algebra, which may take for ever: the deadline is the
sandbox's.
"""

from __future__ import annotations

import json
from functools import cache
from typing import Any

MAX_CHARS = 20_000
"""Of a completion, from its end: a longer one is no answer to parse."""


def math(_prompt: str, completion: str, answer: str) -> float:
    """1.0 if ``completion`` ends in a number, set or formula that equals ``answer`` (math-verify)."""
    from math_verify import parse, verify

    gold = parse(answer, parsing_timeout=None) or parse(f"${answer}$", parsing_timeout=None)
    given = parse(completion[-MAX_CHARS:], parsing_timeout=None)
    return float(verify(gold, given, timeout_seconds=None))


def reasoning(dataset: str, parameters: str, seed: int, number: int, answer: str) -> float:
    """What reasoning-gym gives for ``answer`` to item ``number`` of a data set; ``parameters`` is a JSON object."""
    return float(
        _dataset(dataset, parameters, seed).score_answer(
            answer[-MAX_CHARS:], _entry(dataset, parameters, seed, number)
        )
    )


@cache
def _dataset(dataset: str, parameters: str, seed: int) -> Any:
    import reasoning_gym

    return reasoning_gym.create_dataset(dataset, seed=seed, **json.loads(parameters))


def _entry(dataset: str, parameters: str, seed: int, number: int) -> Any:
    return _dataset(dataset, parameters, seed)[number]
