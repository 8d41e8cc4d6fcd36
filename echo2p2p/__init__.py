"""Reinforcement learning of language models on a decentralised swarm.

The names below are the public face; everything else may change between releases. They are loaded when they
are first used, so that importing the package costs nothing.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from echo2p2p._version import __version__

if TYPE_CHECKING:
    from echo2p2p.data.task import Task, make_task, register
    from echo2p2p.errors import Echo2p2pError
    from echo2p2p.layering import load
    from echo2p2p.roles import run_bootstrap, run_learner, run_worker
    from echo2p2p.rundir import RunDir
    from echo2p2p.settings import Settings

__all__ = [
    "Echo2p2pError",
    "RunDir",
    "Settings",
    "Task",
    "__version__",
    "load",
    "make_task",
    "register",
    "run_bootstrap",
    "run_learner",
    "run_worker",
]

_HOMES = {
    "Echo2p2pError": "errors",
    "RunDir": "rundir",
    "Settings": "settings",
    "Task": "data.task",
    "load": "layering",
    "make_task": "data.task",
    "register": "data.task",
    "run_bootstrap": "roles",
    "run_learner": "roles",
    "run_worker": "roles",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'echo2p2p' has no attribute {name!r}")
    return getattr(import_module(f"echo2p2p.{_HOMES[name]}"), name)
