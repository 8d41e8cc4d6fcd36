"""Tasks: pure functions from a prompt's index to a prompt, and from a completion to a reward.

A task holds no state and reads nothing: (seed, index) decides the prompt, so worker and learner, far apart,
compute the same one, and the learner can check every reward by computing it again. Adding a task is one
module that calls :func:`register`, named in the entry point group ``echo2p2p.tasks`` of an installed package;
configuration alone chooses it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import cache
from importlib.metadata import entry_points
from typing import Any, Protocol

from echo2p2p.errors import SettingsError

TRAIN = "train"
HELD_OUT = "held-out"
ENTRY_POINTS = "echo2p2p.tasks"


class Task(Protocol):
    """One family of prompts with its reward."""

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


TaskFactory = Callable[[int, Mapping[str, Any]], Task]
_REGISTRY: dict[str, TaskFactory] = {}


def register(name: str, factory: TaskFactory) -> None:
    """Make a task known by ``name``. ``factory(seed, options)`` raises SettingsError on options it refuses."""
    _REGISTRY[name] = factory


def names() -> list[str]:
    _load_all()
    return sorted(_REGISTRY)


def make_task(name: str, *, seed: int = 0, options: Mapping[str, Any] | None = None) -> Task:
    """The task called ``name``.

    Raises:
        SettingsError: there is none of that name, or it refuses an option.
    """
    _load_all()
    if name not in _REGISTRY:
        raise SettingsError(f"there is no task {name!r}", hint=f"tasks: {', '.join(sorted(_REGISTRY))}")
    return _REGISTRY[name](seed, options or {})


@cache
def _load_all() -> None:
    """Import the tasks that come with echo2p2p, and those of installed packages; importing registers them."""
    import echo2p2p.data.arithmetic
    import echo2p2p.data.strings  # noqa: F401

    for entry_point in entry_points(group=ENTRY_POINTS):
        entry_point.load()
