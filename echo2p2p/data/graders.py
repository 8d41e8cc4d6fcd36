"""How libraries score an answer. Run in the sandbox's process, by path: it imports nothing else of the project.

Both libraries evaluate what the model wrote with computer algebra, or as Python, which may take for ever and do
anything: deadline and confinement are the sandbox's. What is plainly out of bounds is not evaluated at all.
"""

from __future__ import annotations

import ast
import builtins
import importlib
import json
import re
from collections.abc import Callable
from functools import cache, lru_cache
from typing import Any

MAX_CHARS = 20_000
"""Of a completion, from its end: a longer one is no answer to parse."""
MAX_EXPRESSION_CHARS = 500
MAX_NESTING = 10
MAX_POWER = 10_000
"""Of a number in an exponent."""
MAX_POWER_OF_BRACKETS = 100
"""Of the product of all exponents that brackets are raised to."""
MAX_FACTORIAL = 2_000
"""Of a number whose factorial is taken, or that things are chosen from."""

_POWER = re.compile(r"(?:\^|\*\*)\s*")
_NUMBER = re.compile(r"\d+")
_TOWER = re.compile(r"\d[\s)}\]]*(?:\^|\*\*)")
_FACTORIAL = re.compile(r"(\d+)?([\s)}\]]*)(!+)")
_CHOSEN_FROM = re.compile(r"binom\s*\{?\s*(\d+)")
_EVALUATING = (
    "reasoning_gym.algorithmic.binary_matrix",
    "reasoning_gym.algorithmic.spiral_matrix",
    "reasoning_gym.algorithmic.string_insertion",
    "reasoning_gym.games.n_queens",
)
"""Modules of reasoning-gym that hand the model's answer to ``eval``."""
_PARSING = ("reasoning_gym.games.countdown", "reasoning_gym.games.puzzle24", "sympy")
"""Where it finds sympy's ``parse_expr``, which is ``eval`` behind a few replacements."""
_NAME = re.compile(r"[^\W\d]\w*")
_NO_FORMULA = re.compile(r"""['"`_;:@\[\]{}\\]|\.\s*[^\W\d]""")
_HARMLESS = {"abs", "max", "min", "pow", "round", "sum"}
_OPENING, _CLOSING = "{([", "})]"


def math(_prompt: str, completion: str, answer: str) -> float:
    """1.0 if ``completion`` ends in a number, set or formula that equals ``answer`` (math-verify)."""
    from math_verify import parse, verify

    gold = parse(answer, parsing_timeout=None) or parse(f"${answer}$", parsing_timeout=None)
    given = parse(completion[-MAX_CHARS:], parsing_timeout=None)
    return float(verify(gold, given, timeout_seconds=None))


def _prepare_math() -> None:
    """Everything that is slow once: the import, and the library's tables."""
    import math_verify.parser

    for name in ("parse_latex_cached", "parse_expr_cached"):
        setattr(math_verify.parser, name, _bounded(getattr(math_verify.parser, name)))
    math("", r"\boxed{\frac{1}{2}}", "0.5")


def _bounded(parse: Callable[[str], Any]) -> Callable[[str], Any]:
    """``parse``, which takes an expression that is out of bounds for one that it cannot read."""

    def parse_bounded(expression: str) -> Any:
        if is_excessive(expression):
            raise ValueError("out of bounds")
        return parse(expression)

    return parse_bounded


def is_excessive(expression: str) -> bool:
    """Whether an expression is too long, too deep, or a number beyond all bounds, by its looks."""
    if len(expression) > MAX_EXPRESSION_CHARS or _nesting(expression) > MAX_NESTING:
        return True
    of_brackets = 1
    for power in _POWER.finditer(expression):
        exponent = _operand(expression, power.end())
        numbers = [int(number[:9]) for number in _NUMBER.findall(exponent)]
        if max(numbers, default=0) > MAX_POWER or _TOWER.search(exponent):
            return True
        if numbers and _POWER.match(expression, power.end() + len(exponent)):
            return True
        if expression[: power.start()].rstrip()[-1:] in tuple(_CLOSING):
            of_brackets *= max([1, *numbers])
    if of_brackets > MAX_POWER_OF_BRACKETS:
        return True
    taken = _CHOSEN_FROM.findall(expression)
    brackets = 0
    for number, closed, marks in _FACTORIAL.findall(expression):
        brackets += bool(closed.strip()) + len(marks) - 1
        taken.append(number)
    if any(int(number[:9] or 0) > MAX_FACTORIAL for number in taken):
        return True
    return brackets > 1 or (brackets == 1 and bool(_POWER.search(expression)))


def _nesting(expression: str) -> int:
    depth = deepest = 0
    for sign in expression:
        depth += (sign in _OPENING) - (sign in _CLOSING)
        deepest = max(deepest, depth)
    return deepest


def _operand(expression: str, start: int) -> str:
    """What stands at ``start``: a bracket with all that is in it, or what comes until the next operator."""
    if expression[start : start + 1] not in tuple(_OPENING):
        found = re.compile(r"[-+]?[\w.\\]*").match(expression, start)
        return found.group() if found else ""
    depth = 0
    for end in range(start, len(expression)):
        depth += (expression[end] in _OPENING) - (expression[end] in _CLOSING)
        if depth == 0:
            return expression[start : end + 1]
    return expression[start:]


def reasoning(
    dataset: str, parameters: str, seed: int, number: int, given: str | None = None
) -> float | list[str]:
    """Question and answer of item ``number`` of a data set of reasoning-gym, or what it gives for ``given``.

    ``parameters`` is a JSON object.
    """
    item = _item(dataset, parameters, seed, number)
    if given is None:
        return [str(item["question"]), str(item["answer"])]
    return float(_dataset(dataset, parameters, seed).score_answer(given[-MAX_CHARS:], item))


def _prepare_reasoning() -> None:
    """The import, which takes seconds; and no answer is run as Python, or it could score the next ones itself."""
    sympy = importlib.import_module("sympy")
    parse = sympy.parse_expr

    def parse_formula(answer: str, *arguments: Any, **more: Any) -> Any:
        if is_code(answer):
            raise ValueError("not a formula")
        return parse(answer, *arguments, **more)

    for name, function, stands_in in (
        *((name, "eval", ast.literal_eval) for name in _EVALUATING),
        *((name, "parse_expr", parse_formula) for name in _PARSING),
    ):
        setattr(importlib.import_module(name), function, stands_in)


def is_code(answer: str) -> bool:
    """Whether an answer that should be a formula reaches for more: attributes, texts, Python's own functions."""
    names = set(_NAME.findall(answer)) - _HARMLESS
    return bool(_NO_FORMULA.search(answer)) or any(hasattr(builtins, name) for name in names)


@cache
def _dataset(dataset: str, parameters: str, seed: int) -> Any:
    import reasoning_gym
    from reasoning_gym.factory import DATASETS

    if dataset not in DATASETS:
        raise LookupError(f"there is no data set {dataset!r}")
    return reasoning_gym.create_dataset(dataset, seed=seed, **json.loads(parameters))


@lru_cache(64)
def _item(dataset: str, parameters: str, seed: int, number: int) -> Any:
    return _dataset(dataset, parameters, seed)[number]


# The sandbox calls it before the first call, whose deadline is meant for an answer.
setattr(math, "prepare", _prepare_math)  # noqa: B010
setattr(reasoning, "prepare", _prepare_reasoning)  # noqa: B010
