"""The process in which rewards run. Started by its path, so it imports nothing but the standard library.

Usage: sandbox_child.py CHANNEL LIFELINE TARGET MEMORY_BYTES HOME READABLE…, with CHANNEL one end of a socket pair and
LIFELINE of a pipe. TARGET is ``path.py:function`` and is loaded once. Then every line that comes is a JSON list of
arguments, and every line that goes back is its number, a space, and ``{"value": …}`` or ``{"error": "…"}``; number 0
says that the function was loaded, and what of the jail could not be had here.

Before the function's module is loaded the process is confined (``jail.py``): it ends with the node, with whatever it
has started. How long a call may take is the node's to say.
"""

from __future__ import annotations

import importlib.util
import json
import os
import signal
import socket
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

_MAX_ERROR_CHARS = 400


def load(path: Path) -> ModuleType:
    """The module in ``path``."""
    spec = importlib.util.spec_from_file_location(path.stem, path)
    if spec is None or spec.loader is None:
        raise ImportError(f"{path} is no Python file")
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


def load_function(target: str) -> Callable[..., Any]:
    """The function of ``path.py:function``, prepared for its first call if it has an attribute ``prepare``."""
    path, _, name = target.rpartition(":")
    function: Callable[..., Any] = getattr(load(Path(path)), name)
    if not callable(function):
        raise TypeError(f"{name} is not a function")
    prepare = getattr(function, "prepare", None)
    if prepare is not None:
        prepare()
    return function


def answer(compute: Callable[[], Any]) -> bytes:
    """What ``compute`` returns or raises, as one line: texts and lists as they are, the rest as a number."""
    try:
        value = compute()
        said = json.dumps({"value": value if isinstance(value, str | list) else float(value)})
    except BaseException as error:  # noqa: BLE001 - whatever foreign code raises is an answer
        said = json.dumps({"error": f"{type(error).__name__}: {error}"[:_MAX_ERROR_CHARS]})
    return said.encode() + b"\n"


def main() -> None:
    fd, lifeline, target, memory_bytes, home, *readable = sys.argv[1:]
    sys.dont_write_bytecode = True
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the node decides when it is over
    path = target.rpartition(":")[0]
    missing = load(Path(__file__).with_name("jail.py")).confine(
        int(lifeline), int(fd), readable=[path, *readable], home=home, memory_bytes=int(memory_bytes)
    )
    channel = socket.socket(fileno=int(fd))
    functions: list[Callable[..., Any]] = []

    def ready() -> list[str]:
        functions.append(load_function(target))
        return list(missing)

    channel.sendall(b"0 " + answer(ready))
    if not functions:
        return
    with channel.makefile("rb") as lines:
        for number, line in enumerate(lines, start=1):
            arguments = json.loads(line)
            channel.sendall(b"%d " % number + answer(lambda: functions[0](*arguments)))  # noqa: B023 - called at once
    os._exit(0)  # threads that a reward left behind end with it


if __name__ == "__main__":
    main()
