"""Rewards that are anybody's code, in a process of their own with limits on time and memory.

Guarantees: a call returns a finite number or raises :class:`RewardFailed` within its deadline, whatever the function
does; the process is reused between calls, started again after it died or was ended, and gone after :meth:`close` as
well as after the death of this process. Safe to call from any thread; calls are made one at a time.
"""

from __future__ import annotations

import json
import math
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
import weakref
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from blake3 import blake3

from echo2p2p.errors import RewardFailed, SettingsError

_CHILD = Path(__file__).with_name("sandbox_child.py")
_MAX_ANSWER_BYTES = 2**16
_MAX_FILE_BYTES = 2**20
_GRACE_S = 1.0
_LAST_BREATH_S = 0.05  # its end of the socket goes a moment before the process does
_KEPT_VARIABLES = ("PATH", "LD_LIBRARY_PATH", "VIRTUAL_ENV", "LANG")


@dataclass(frozen=True)
class SandboxLimits:
    """What a reward may take.

    Attributes:
        call_s: seconds a call.
        start_s: seconds until its module is imported.
        memory_bytes: address space of its process.
    """

    call_s: float = 10.0
    start_s: float = 60.0
    memory_bytes: int = 2 * 2**30


class Sandbox:
    """One function in a process of its own.

    Args:
        target: ``path.py:function``. The file stands for itself: it may import installed packages, and no neighbours.
            The function takes what :meth:`call` is given (texts and numbers) and returns a number.
    """

    def __init__(self, target: str, limits: SandboxLimits | None = None) -> None:
        path, _, name = target.rpartition(":")
        if not path or not name.isidentifier():
            raise SettingsError(
                f"the reward {target!r} is not a path and a function", hint="for example rewards.py:score"
            )
        self.path = Path(path)
        self.function = name
        self._digest = file_digest(self.path)
        self._limits = limits or SandboxLimits()
        self._lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None
        self._channel: socket.socket | None = None
        self._closed = False
        # Libraries make folders for their caches; without a home of its own they would make them anywhere.
        self._home = tempfile.mkdtemp(prefix="echo2p2p-reward-")
        self._remove_home = weakref.finalize(self, shutil.rmtree, self._home, ignore_errors=True)

    @property
    def digest(self) -> str:
        """Of the file, as it was when this was made: BLAKE3, hexadecimal."""
        return self._digest

    def start(self) -> None:
        """Start the process now rather than at the first call.

        Raises:
            SettingsError: the file cannot be imported or has no such function.
        """
        with self._lock:
            try:
                self._start()
            except RewardFailed as error:
                self._end()
                raise SettingsError(
                    f"the reward {self.path}:{self.function} cannot be used: {error.message}"
                ) from error

    def call(self, *arguments: str | int | float) -> float:
        """The function's value for ``arguments``.

        Raises:
            RewardFailed: it raised, took too long, died, or returned no finite number.
        """
        line = json.dumps(arguments).encode() + b"\n"
        with self._lock:
            if self._closed:
                raise RewardFailed("the reward's process is closed")
            if self._process is None:
                self._start()
            said = self._exchange(line, self._limits.call_s)
        value = said.get("value")
        if "error" in said:
            raise RewardFailed(f"{self.function} raised {said['error']}")
        try:
            number = float(value) if isinstance(value, int | float) else math.nan
        except OverflowError:  # an integer, from a reward that writes to the socket itself
            number = math.inf
        if not math.isfinite(number):
            raise RewardFailed(f"{self.function} returned no finite number but {value!r:.80}")
        return number

    def close(self) -> None:
        """End the process, also in the middle of a call. No call works afterwards."""
        self._closed = True
        process = self._process
        if process is not None:
            _kill(process)  # outside the lock: a call in progress holds it, and fails now
        with self._lock:
            self._end()
        self._remove_home()

    def _start(self) -> None:
        if file_digest(self.path) != self._digest:
            raise RewardFailed(f"{self.path} has changed since this run began")
        ours, theirs = socket.socketpair()
        limits = self._limits
        arguments = (theirs.fileno(), f"{self.path.resolve()}:{self.function}", limits.memory_bytes)
        times = (limits.start_s + _GRACE_S, limits.call_s + _GRACE_S)
        environment = {name: os.environ[name] for name in _KEPT_VARIABLES if name in os.environ}
        with theirs:
            self._channel = ours
            self._process = subprocess.Popen(
                [sys.executable, "-I", str(_CHILD), *map(str, (*arguments, *times))],
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                env={
                    **environment,
                    "HOME": self._home,
                    "TMPDIR": self._home,
                    "OMP_NUM_THREADS": "1",
                    "OPENBLAS_NUM_THREADS": "1",
                },
                cwd="/",
                start_new_session=True,
            )
        said = self._exchange(b"", limits.start_s)
        if "error" in said:
            self._end()
            raise RewardFailed(str(said["error"]))

    def _exchange(self, line: bytes, seconds: float) -> dict[str, object]:
        """Send ``line`` and read one answer; a process that does not answer in time is ended."""
        assert self._channel is not None
        deadline = time.monotonic() + seconds
        received = b""
        try:
            self._channel.settimeout(seconds)
            self._channel.sendall(line)
            while not received.endswith(b"\n"):
                self._channel.settimeout(max(0.001, deadline - time.monotonic()))
                part = self._channel.recv(_MAX_ANSWER_BYTES)
                received += part
                if not part or len(received) > _MAX_ANSWER_BYTES:
                    raise RewardFailed(self._died())
            answer = json.loads(received)
        except TimeoutError as error:
            self._end()
            raise RewardFailed(f"{self.function} did not answer within {seconds:g} s") from error
        except (OSError, ValueError, RecursionError) as error:
            raise RewardFailed(self._died()) from error
        if not isinstance(answer, dict):
            raise RewardFailed(self._died())
        return answer

    def _died(self) -> str:
        code = self._end()
        cause = (
            f"signal {signal.Signals(-code).name}" if code is not None and code < 0 else f"exit code {code}"
        )
        return f"the process of {self.function} ended ({cause})"

    def _end(self) -> int | None:
        """End the process with all that it has started; the code that it left with."""
        process, channel, self._process, self._channel = self._process, self._channel, None, None
        if channel is not None:
            channel.close()
        if process is None:
            return None
        with suppress(subprocess.TimeoutExpired):
            process.wait(_LAST_BREATH_S)
        _kill(process)
        return process.wait(_GRACE_S)


def file_digest(path: Path, max_bytes: int = _MAX_FILE_BYTES) -> str:
    """BLAKE3 of a regular file of at most ``max_bytes``. Raises SettingsError if it is not one."""
    if not path.is_file():
        raise SettingsError(f"there is no file {path}")
    if path.stat().st_size > max_bytes:
        raise SettingsError(f"{path} is larger than {max_bytes} bytes")
    hasher = blake3()
    left = max_bytes
    with path.open("rb") as file:
        while block := file.read(2**20):
            left -= len(block)
            if left < 0:  # it grows, or has no size, like those of /proc
                raise SettingsError(f"{path} is larger than {max_bytes} bytes")
            hasher.update(block)
    return hasher.hexdigest()


def _kill(process: subprocess.Popen[bytes]) -> None:
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
