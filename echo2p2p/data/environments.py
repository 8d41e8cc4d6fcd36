"""Task ``verifiers``: an environment of the verifiers library, with the rubric that it scores with.

Options: ``environment``, the name of an installed one; ``turns`` (as many as it has, if that is left out) and
``turn_tokens``, where it is one of several turns; everything else is an argument of its ``load_environment``. The
library rolls out in a process of its own, which replays what the run's model said; here are only texts and numbers.

An environment is somebody's code: a worker runs one only if its own settings say the same, arguments included. Both
sides need the same release of the library, of the environment, and the same rows.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from contextlib import suppress
from functools import lru_cache
from importlib.metadata import PackageNotFoundError, version
from typing import Any

from packaging.specifiers import SpecifierSet
from packaging.version import Version

from echo2p2p.data.conversation import Conversation
from echo2p2p.data.draw import option
from echo2p2p.data.lines import ask
from echo2p2p.data.task import TRAIN, Task, register
from echo2p2p.errors import RewardFailed, SettingsError

_RELEASES = SpecifierSet(">=0.3,<0.4", prereleases=True)
"""Later ones have other environments."""

_OWN_OPTIONS = ("environment", "turns", "turn_tokens")
_CHILD = "echo2p2p.data.environment_child"
_START_S = 300.0
_CALL_S = 60.0
_GRACE_S = 1.0
_MAX_ANSWER_BYTES = 2**24
_KEPT_PROMPTS = 4096


class EnvironmentProcess:
    """One environment in a process of its own, started again after it died. Calls are made one at a time.

    Raises:
        SettingsError: the environment cannot be loaded, or not be driven.
    """

    def __init__(self, name: str, arguments: Mapping[str, Any], seed: int) -> None:
        self._name = name
        self._arguments = (name, json.dumps(dict(arguments)), str(seed), f"{_CALL_S + _GRACE_S}")
        self._lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None
        self._channel: socket.socket | None = None
        self._closed = False
        try:
            self.facts: Mapping[str, Any] = self._start()
        except RewardFailed as error:
            raise SettingsError(f"the environment {name} cannot be used: {error.message}") from error

    def call(self, method: str, *arguments: Any) -> Any:
        """What ``method`` of the environment's process returns.

        Raises:
            RewardFailed: it raised, died, or took longer than a minute.
        """
        line = json.dumps((method, *arguments)).encode() + b"\n"
        with self._lock:
            if self._closed:
                raise RewardFailed("the environment's process is closed")
            if self._process is None:
                self._start()
            return self._exchange(line, _CALL_S)

    def close(self) -> None:
        """End the process, also in the middle of a call. No call works afterwards."""
        self._closed = True
        process = self._process
        if process is not None:
            _kill(process)  # outside the lock: a call in progress holds it, and fails now
        with self._lock:
            self._end()

    def _start(self) -> Any:
        ours, theirs = socket.socketpair()
        with theirs:
            self._channel = ours
            self._process = subprocess.Popen(
                [sys.executable, "-P", "-m", _CHILD, str(theirs.fileno()), *self._arguments],
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                env={
                    **os.environ,
                    "PYTHONPATH": os.pathsep.join(filter(None, sys.path)),
                    "OMP_NUM_THREADS": "1",
                },
                start_new_session=True,
            )
        try:
            if self._closed:  # while it was being made, so that close() has not seen it
                raise RewardFailed("the environment's process is closed")
            return self._exchange(b"", _START_S)
        except RewardFailed:
            self._end()
            raise

    def _exchange(self, line: bytes, seconds: float) -> Any:
        """Send ``line`` and read one answer; a process that does not answer in time is ended."""
        assert self._channel is not None
        try:
            said = json.loads(ask(self._channel, line, seconds=seconds, max_bytes=_MAX_ANSWER_BYTES))
        except TimeoutError as error:
            self._end()
            raise RewardFailed(f"{self._name} did not answer within {seconds:g} s") from error
        except (OSError, ValueError, RecursionError) as error:
            self._end()
            raise RewardFailed(f"the process of {self._name} ended") from error
        if "error" in said:
            raise RewardFailed(str(said["error"]))
        return said["value"]

    def _end(self) -> None:
        process, channel, self._process, self._channel = self._process, self._channel, None, None
        if channel is not None:
            channel.close()
        if process is None:
            return
        _kill(process)
        process.wait()


def _kill(process: subprocess.Popen[bytes]) -> None:
    """With what it has started: it leads a session. Its number is its own until it has been waited for."""
    if process.returncode is None:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)


class EnvironmentTask:
    """An environment of one turn."""

    def __init__(self, process: EnvironmentProcess) -> None:
        self._process = process
        self._prompt = lru_cache(_KEPT_PROMPTS)(self._asked)

    @property
    def name(self) -> str:
        return "verifiers"

    @property
    def pins(self) -> Mapping[str, str]:
        pins: Mapping[str, str] = self._process.facts["pins"]
        return pins

    def prompt(self, index: int, split: str = TRAIN) -> str:
        return self._prompt(index, split)

    def answer(self, index: int, split: str = TRAIN) -> str:
        return str(self._process.call("answer", split, index))

    def reward(self, index: int, completion: str, split: str = TRAIN) -> float:
        """Raises RewardFailed where the environment gives no number in time."""
        return float(self._process.call("reward", split, index, [completion]))

    def close(self) -> None:
        self._process.close()

    def _asked(self, index: int, split: str) -> str:
        return Conversation([(role, content) for role, content in self._process.call("prompt", split, index)])


class EnvironmentTurns(EnvironmentTask):
    """An environment of several turns."""

    def __init__(self, process: EnvironmentProcess, max_turns: int, turn_tokens: int) -> None:
        super().__init__(process)
        self.max_turns = max_turns
        self.turn_tokens = turn_tokens

    def respond(self, index: int, actions: Sequence[str], split: str = TRAIN) -> str | None:
        said: str | None = self._process.call("respond", split, index, list(actions))
        return said

    def episode_reward(self, index: int, actions: Sequence[str], split: str = TRAIN) -> float:
        """Raises RewardFailed where the environment gives no number in time."""
        return float(self._process.call("reward", split, index, list(actions)))


def make_environment(seed: int, options: Mapping[str, Any]) -> Task:
    """The task with ``options``.

    Raises:
        SettingsError: the library is not installed, or the environment cannot be loaded or driven.
    """
    try:
        release = version("verifiers")
    except PackageNotFoundError as error:
        raise SettingsError(
            "the task verifiers needs the library verifiers", hint="pip install 'echo2p2p[verifiers]'"
        ) from error
    if Version(release) not in _RELEASES:
        raise SettingsError(
            f"the task verifiers needs a release {_RELEASES} of the library, this is {release}",
            hint="pip install 'echo2p2p[verifiers]'",
        )
    name = options.get("environment")
    if not isinstance(name, str) or not name:
        raise SettingsError(
            "the task verifiers needs the option environment", hint="task.options.environment = 'wordle'"
        )
    arguments = {key: value for key, value in options.items() if key not in _OWN_OPTIONS}
    process = EnvironmentProcess(name, arguments, seed)
    try:
        own_turns = int(process.facts["max_turns"])
        max_turns = option(options, "turns", max(0, own_turns), range(1, 512)) if own_turns != 1 else 1
        turn_tokens = option(options, "turn_tokens", 256, range(1, 2**16))
    except SettingsError:
        process.close()
        raise
    if max_turns == 1:
        return EnvironmentTask(process)
    return EnvironmentTurns(process, max_turns, turn_tokens)


register("verifiers", make_environment)
