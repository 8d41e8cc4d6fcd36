"""Tasks: pure functions from a prompt's index to a prompt, and from a completion to a reward.

A task holds no state: (seed, index) decides the prompt, so worker and learner, far apart, compute the same one, and
the learner can check every reward by computing it again. Adding a task is one module that calls :func:`register`,
named in the entry point group ``echo2p2p.tasks`` of an installed package, or a factory named by its import path,
``module:Factory``; configuration alone chooses it.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from importlib.metadata import entry_points
from typing import Any, Protocol, runtime_checkable

from echo2p2p.errors import SettingsError

TRAIN = "train"
HELD_OUT = "held-out"
ENTRY_POINTS = "echo2p2p.tasks"


class Task(Protocol):
    """One family of prompts with its reward.

    A task may have two attributes more: ``pins``, a mapping of what worker and learner must hold alike (a file's
    digest, a library's release), and ``close()``, called when it is no longer needed.
    """

    @property
    def name(self) -> str: ...

    def prompt(self, index: int, split: str = TRAIN) -> str:
        """The text of prompt ``index`` (0, 1, 2, …; there is no end) of ``split``.

        ``split`` is ``"train"`` or ``"held-out"``; the two never share a prompt's randomness.
        """
        ...

    def answer(self, index: int, split: str = TRAIN) -> str:
        """A completion that earns the full reward; for warm starts and for people who look."""
        ...

    def reward(self, index: int, completion: str, split: str = TRAIN) -> float:
        """The reward of ``completion``, in [0, 1] unless the task says otherwise. Never raises."""
        ...


@runtime_checkable
class TurnTask(Protocol):
    """A task whose prompts begin episodes: the model acts, an environment answers, and so on.

    The environment is a function of (seed, index, actions) as well, so the learner replays an episode from what the
    model wrote and believes nothing else.

    Attributes:
        max_turns: turns of the model in an episode.
        turn_tokens: tokens in one of them.
    """

    max_turns: int
    turn_tokens: int

    def respond(self, index: int, actions: Sequence[str], split: str = TRAIN) -> str | None:
        """What the environment says to the last of ``actions``; None if the episode is over."""
        ...

    def episode_reward(self, index: int, actions: Sequence[str], split: str = TRAIN) -> float:
        """The reward of an episode, over or not. Never raises."""
        ...


TaskFactory = Callable[[int, Mapping[str, Any]], Task]
_REGISTRY: dict[str, TaskFactory] = {}


def register(name: str, factory: TaskFactory) -> None:
    """Make a task known by ``name``. ``factory(seed, options)`` raises SettingsError on options it refuses."""
    _REGISTRY[name] = factory


def names() -> list[str]:
    _load_all()
    return sorted(_REGISTRY)


def make_task(name: str, *, seed: int = 0, options: Mapping[str, Any] | None = None) -> Task:
    """The task called ``name``, or made by ``module:Factory``.

    Raises:
        SettingsError: there is none of that name, or it refuses an option.
    """
    if ":" in name:
        return _import_factory(name)(seed, options or {})
    _load_all()
    if name not in _REGISTRY:
        raise SettingsError(f"there is no task {name!r}", hint=f"tasks: {', '.join(sorted(_REGISTRY))}")
    return _REGISTRY[name](seed, options or {})


def _import_factory(path: str) -> TaskFactory:
    module, _, attribute = path.partition(":")
    try:
        factory: TaskFactory = getattr(importlib.import_module(module), attribute)
    except (ImportError, AttributeError) as error:
        raise SettingsError(
            f"the task {path} cannot be imported: {error}", hint="install its package on learner and workers"
        ) from error
    return factory


@cache
def _load_all() -> None:
    """Import the tasks that come with echo2p2p, and those of installed packages; importing registers them."""
    for module in (
        "arithmetic",
        "dataset",
        "environments",
        "holdem",
        "jsonl",
        "reasoning",
        "sokoban",
        "strings",
    ):
        importlib.import_module(f"echo2p2p.data.{module}")
    for entry_point in entry_points(group=ENTRY_POINTS):
        entry_point.load()
