"""Functions that are anybody's code, in processes of their own with limits on time, memory and what they reach.

Guarantees: a call returns a finite number (or a text) or raises :class:`RewardFailed` within its deadline, whatever
the function does; the processes are used again, started again after they died or were ended, and gone after
:meth:`close` as well as after the death of this process, with all that they started. Safe to call from any thread: as
many calls go on at a time as there are processes.
"""

from __future__ import annotations

import json
import math
import queue
import shutil
import subprocess
import tempfile
import weakref
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from blake3 import blake3

from echo2p2p.data.sandbox_process import Confinement, SandboxProcess
from echo2p2p.errors import RewardFailed, SettingsError

_MAX_FILE_BYTES = 2**20
_MARGIN_S = 60.0

Argument = str | int | float


@dataclass(frozen=True)
class SandboxLimits:
    """What a function may take.

    Attributes:
        call_s: seconds a call.
        start_s: seconds until its module is imported.
        memory_bytes: address space of each of its processes.
        processes: calls at a time; a process is started when it is first needed.
        readable: files and folders that it may read besides its own file, the interpreter and its packages.
    """

    call_s: float = 2.0
    start_s: float = 60.0
    memory_bytes: int = 2 * 2**30
    processes: int = 3
    readable: tuple[str, ...] = ()


class Sandbox:
    """One function in processes of its own.

    Args:
        target: ``path.py:function``. The file stands for itself: it may import installed packages, and no neighbours.
            The function takes what :meth:`call` is given (texts and numbers) and returns a number, or a list of
            texts for :meth:`ask`.
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
        self._closed = False
        # Libraries make folders for their caches; without a home of its own they would make them anywhere.
        self._home = tempfile.mkdtemp(prefix="echo2p2p-reward-")
        self._remove_home = weakref.finalize(self, _remove, self._home)
        confinement = Confinement(
            f"{self.path.resolve()}:{name}",
            self._home,
            self._limits.memory_bytes,
            self._limits.readable,
            self._limits.start_s,
        )
        self._processes = [SandboxProcess(confinement) for _ in range(self._limits.processes)]
        self._idle: queue.LifoQueue[SandboxProcess] = queue.LifoQueue()
        for process in self._processes:
            self._idle.put(process)

    @property
    def digest(self) -> str:
        """Of the file, as it was when this was made: BLAKE3, hexadecimal."""
        return self._digest

    def start(self) -> None:
        """Start a process now rather than at the first call.

        Raises:
            SettingsError: the file cannot be imported or has no such function.
        """
        process = self._take()
        try:
            if not process.runs:
                self._start(process)
        except RewardFailed as error:
            raise SettingsError(
                f"the function {self.path}:{self.function} cannot be used: {error.message}"
            ) from error
        finally:
            self._idle.put(process)

    def call(self, *arguments: Argument) -> float:
        """The function's number for ``arguments``.

        Raises:
            RewardFailed: it raised, took too long, died, or returned no finite number.
        """
        value = self._value(arguments, self._limits.call_s)
        try:
            number = float(value) if isinstance(value, int | float) else math.nan
        except OverflowError:  # an integer, from a function that writes to the socket itself
            number = math.inf
        if not math.isfinite(number):
            raise RewardFailed(f"{self.function} returned no finite number but {value!r:.80}")
        return number

    def ask(self, *arguments: Argument, seconds: float) -> list[str]:
        """The function's list of texts for ``arguments``; it may take ``seconds``.

        Raises:
            RewardFailed: it raised, took too long, died, or returned something else.
        """
        value = self._value(arguments, seconds)
        if not isinstance(value, list) or not all(isinstance(each, str) for each in value):
            raise RewardFailed(f"{self.function} returned no texts but {value!r:.80}")
        return value

    def close(self) -> None:
        """End the processes, also in the middle of a call. No call works afterwards."""
        self._closed = True
        for process in self._processes:
            process.stop()  # a call in progress fails now, and gives its process back
        ended = [self._take_back() for _ in self._processes]
        for process in ended:
            process.end()
            self._idle.put(process)
        self._remove_home()

    def _value(self, arguments: tuple[Argument, ...], seconds: float) -> object:
        line = json.dumps(arguments).encode() + b"\n"
        process = self._take()
        try:
            if not process.runs:
                self._start(process)
            try:
                said = process.exchange(line, seconds)
            finally:
                if not process.runs and not self._closed:
                    # Whoever ended it waits for the next one too, not the caller that comes after.
                    with suppress(RewardFailed, SettingsError):
                        self._start(process)
        finally:
            self._idle.put(process)
        if "error" in said:
            raise RewardFailed(f"{self.function} raised {said['error']}")
        return said.get("value")

    def _start(self, process: SandboxProcess) -> None:
        if file_digest(self.path) != self._digest:
            raise RewardFailed(f"{self.path} has changed since this run began")
        process.start()

    def _take(self) -> SandboxProcess:
        """A process that nobody uses; the one that was used last, for it is warm."""
        process = self._take_back()
        if self._closed:
            self._idle.put(process)
            raise RewardFailed("the reward's process is closed")
        return process

    def _take_back(self) -> SandboxProcess:
        # Each call has a deadline, and starts at most twice.
        longest_s = _MARGIN_S + self._limits.processes * (self._limits.call_s + 2 * self._limits.start_s)
        try:
            return self._idle.get(timeout=longest_s)
        except queue.Empty:
            raise RewardFailed(f"no process of {self.function} was free within {longest_s:g} s") from None


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


def _remove(folder: str) -> None:
    """``folder`` with all that is in it, however deep."""
    try:
        shutil.rmtree(folder, ignore_errors=True)
    except RecursionError:
        subprocess.run(["/bin/rm", "-rf", "--", folder], check=False, capture_output=True)
