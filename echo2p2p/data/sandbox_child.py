"""The process in which rewards run. Started by its path, so it imports nothing but the standard library.

Usage: sandbox_child.py FD TARGET MEMORY_BYTES START_S CALL_S, with FD one end of a socket pair. TARGET is
``path.py:function`` and is loaded once. Then every line that comes is a JSON list of arguments, and every line that
goes back is ``{"value": …}`` or ``{"error": "…"}``; the first one says that the function was loaded.

Before the function's module is loaded the process gives up the network (where the kernel lets it), writing files,
core dumps, and memory above its limit. A call that lasts too long is ended by a signal that the process has set on
itself, so that it does not outlive a parent that was killed.
"""

from __future__ import annotations

import ctypes
import importlib.util
import json
import math
import os
import resource
import signal
import socket
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

_CLONE_NEWUSER_AND_NET = 0x10000000 | 0x40000000
_MAX_OPEN_FILES = 256
_MAX_ERROR_CHARS = 400


def give_up_rights(memory_bytes: int) -> None:
    """No network, no files written, no core dumps, bounded memory."""
    ctypes.CDLL(None).unshare(_CLONE_NEWUSER_AND_NET)  # best effort: some containers forbid it
    for limit, value in (
        (resource.RLIMIT_AS, memory_bytes),
        (resource.RLIMIT_FSIZE, 0),
        (resource.RLIMIT_CORE, 0),
        (resource.RLIMIT_NOFILE, _MAX_OPEN_FILES),
    ):
        _, hard = resource.getrlimit(limit)
        allowed = value if hard == resource.RLIM_INFINITY else min(value, hard)
        resource.setrlimit(limit, (allowed, allowed))


def allow(seconds: float) -> None:
    """The process ends unless this is called again, or taken back with 0, within ``seconds``."""
    signal.setitimer(signal.ITIMER_REAL, seconds)
    used = resource.getrusage(resource.RUSAGE_SELF)
    cpu_s = math.ceil(used.ru_utime + used.ru_stime + seconds) + 1
    _, hard = resource.getrlimit(resource.RLIMIT_CPU)
    soft = resource.RLIM_INFINITY if seconds == 0 else cpu_s
    resource.setrlimit(resource.RLIMIT_CPU, (soft, hard))


def load(target: str) -> Callable[..., Any]:
    """The function of ``path.py:function``."""
    path, _, name = target.rpartition(":")
    spec = importlib.util.spec_from_file_location(Path(path).stem, path)
    if spec is None or spec.loader is None:
        raise ImportError(f"{path} is no Python file")
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    function = getattr(module, name)
    if not callable(function):
        raise TypeError(f"{name} is not a function")
    return function  # type: ignore[no-any-return]


def answer(compute: Callable[[], Any]) -> bytes:
    """What ``compute`` returns or raises, as one line."""
    try:
        said: dict[str, Any] = {"value": compute()}
    except BaseException as error:  # noqa: BLE001 - whatever foreign code raises is an answer
        said = {"error": f"{type(error).__name__}: {error}"[:_MAX_ERROR_CHARS]}
    return json.dumps(said).encode() + b"\n"


def main() -> None:
    fd, target, memory_bytes, start_s, call_s = sys.argv[1:6]
    channel = socket.socket(fileno=int(fd))
    give_up_rights(int(memory_bytes))
    sys.dont_write_bytecode = True
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent decides when it is over
    functions: list[Callable[..., Any]] = []
    allow(float(start_s))
    ready = answer(lambda: functions.append(load(target)))
    allow(0)
    channel.sendall(ready)
    if not functions:
        return
    with channel.makefile("rb") as lines:
        for line in lines:
            arguments = json.loads(line)
            allow(float(call_s))
            result = answer(lambda: float(functions[0](*arguments)))  # noqa: B023 - called at once
            allow(0)
            channel.sendall(result)
    os._exit(0)  # threads that a reward left behind end with it


if __name__ == "__main__":
    main()
