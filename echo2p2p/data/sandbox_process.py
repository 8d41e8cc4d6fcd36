"""One process in which a function of anybody's runs: its start, its calls, its end. One caller at a time."""

from __future__ import annotations

import json
import logging
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from echo2p2p.data.lines import ask
from echo2p2p.errors import RewardFailed

log = logging.getLogger("echo2p2p.sandbox")

_CHILD = Path(__file__).with_name("sandbox_child.py")
_MAX_ANSWER_BYTES = 2**20
_GRACE_S = 6.0
"""For the process in front to end everything behind it."""
_LAST_BREATH_S = 0.05  # its end of the socket goes a moment before the process does
_KEPT_VARIABLES = ("PATH", "LD_LIBRARY_PATH", "VIRTUAL_ENV", "LANG")
_told: set[str] = set()


@dataclass(frozen=True)
class Confinement:
    """What a process is started with.

    Attributes:
        target: ``path.py:function``.
        home: the folder that it may write into, and works in.
        memory_bytes: address space.
        readable: what it may read besides its file and the interpreter.
        start_s: seconds until its module is imported.
    """

    target: str
    home: str
    memory_bytes: int
    readable: Sequence[str]
    start_s: float


class SandboxProcess:
    """A process that may have to be started again before the next call."""

    def __init__(self, confinement: Confinement) -> None:
        self._confinement = confinement
        self._name = confinement.target.rpartition(":")[2]
        self._process: subprocess.Popen[bytes] | None = None
        self._channel: socket.socket | None = None
        self._lifeline: BinaryIO | None = None
        self._exchanged = 0

    @property
    def runs(self) -> bool:
        return self._process is not None

    def start(self) -> None:
        """Start it and have it load its function.

        Raises:
            RewardFailed: the function cannot be loaded, or not in time. The process is gone then.
        """
        given = self._confinement
        ours, theirs = socket.socketpair()
        watched, lifeline = os.pipe()
        kept = {name: os.environ[name] for name in _KEPT_VARIABLES if name in os.environ}
        self._channel, self._lifeline = ours, os.fdopen(lifeline, "wb", buffering=0)
        arguments = (theirs.fileno(), watched, given.target, given.memory_bytes, given.home, *given.readable)
        try:
            self._process = subprocess.Popen(
                [sys.executable, "-I", str(_CHILD), *map(str, arguments)],
                pass_fds=[theirs.fileno(), watched],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                env={
                    **kept,
                    "HOME": given.home,
                    "TMPDIR": given.home,
                    "OMP_NUM_THREADS": "1",
                    "OPENBLAS_NUM_THREADS": "1",
                },
                cwd=given.home,
                start_new_session=True,
            )
        except OSError as error:
            self.end()
            raise RewardFailed(f"no process can be started for {self._name}: {error}") from error
        finally:
            theirs.close()
            os.close(watched)
        self._exchanged = 0
        said = self.exchange(b"", given.start_s)
        if "error" in said:
            self.end()
            raise RewardFailed(str(said["error"]))
        _tell(said.get("value"))

    def exchange(self, line: bytes, seconds: float) -> dict[str, object]:
        """Send ``line`` and read one answer.

        Raises:
            RewardFailed: there was none in time, or nothing that could be one; the process is gone then.
        """
        assert self._channel is not None
        try:
            received = ask(self._channel, line, seconds=seconds, max_bytes=_MAX_ANSWER_BYTES)
            number, _, text = received.partition(b" ")
            # A function that writes to the socket itself must not shift the answers of those that come after.
            if number != b"%d" % self._exchanged:
                raise RewardFailed(self._died())
            answer = json.loads(text)
        except TimeoutError as error:
            self.end()
            raise RewardFailed(f"{self._name} did not answer within {seconds:g} s") from error
        except (OSError, ValueError, RecursionError) as error:
            raise RewardFailed(self._died()) from error
        if not isinstance(answer, dict):
            raise RewardFailed(self._died())
        self._exchanged += 1
        return answer

    def stop(self) -> None:
        """Have it end, also in the middle of a call. From any thread; :meth:`end` has to follow."""
        if self._lifeline is not None:
            self._lifeline.close()

    def end(self) -> int | None:
        """End the process with all that it has started; the code that it left with."""
        process, channel, self._process, self._channel = self._process, self._channel, None, None
        if channel is not None:
            channel.close()
        self.stop()
        if process is None:
            return None
        try:
            return process.wait(_GRACE_S)
        except subprocess.TimeoutExpired:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            return process.wait(_GRACE_S)

    def _died(self) -> str:
        if self._process is not None:
            with suppress(subprocess.TimeoutExpired):
                self._process.wait(_LAST_BREATH_S)
        code = self.end()
        cause = (
            f"signal {signal.Signals(-code).name}" if code is not None and code < 0 else f"exit code {code}"
        )
        return f"the process of {self._name} ended ({cause})"


def _tell(missing: object) -> None:
    """Say once what of the jail this machine does not have."""
    shown = ", ".join(map(str, missing))[:200] if isinstance(missing, list) else ""
    if shown and shown not in _told:
        _told.add(shown)
        log.warning("rewards are less confined here, for this machine lacks %s", shown)
