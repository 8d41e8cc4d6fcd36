"""The process in which an environment of the verifiers library runs.

Usage: python -m echo2p2p.data.environment_child FD NAME ARGUMENTS SEED CALL_S, with FD one end of a socket pair and
ARGUMENTS a JSON object. The first line that goes back says what was loaded; then every line that comes is a JSON
list, and every line that goes back is ``{"value": …}`` or ``{"error": "…"}``.

The library rolls out itself, with its own loop, its own stops and its own scoring. Only its model is replaced: by one
that says again what the model of the run has said, and when that is at an end, keeps what it was asked. A process of
its own has what the library takes for itself: an event loop, signal handlers, log levels, and threads without an end.
"""

from __future__ import annotations

import asyncio
import json
import os
import random
import signal
import socket
import sys
from collections.abc import Callable, Mapping, Sequence
from importlib.metadata import PackageNotFoundError, packages_distributions, version
from pathlib import Path
from typing import Any

import numpy as np
import verifiers as vf
from blake3 import blake3
from verifiers.clients import Client
from verifiers.types import Response, ResponseMessage

from echo2p2p.data.draw import split_of
from echo2p2p.data.questions import Epochs
from echo2p2p.data.task import HELD_OUT, TRAIN

_MAX_ERROR_CHARS = 400
_MODEL = "echo2p2p"
_SPOKEN = ("system", "user", "assistant")


class Waiting(vf.Error):  # type: ignore[misc]
    """The environment asks for a turn that nobody has taken yet."""


class Refused(Exception):  # noqa: N818 - reads as what happened
    """An environment that this cannot drive."""


class Replay(Client):  # type: ignore[misc]
    """A model that takes the turns that it is given, and remembers what it was asked."""

    def __init__(self, actions: Sequence[str]) -> None:
        super().__init__(None)
        self.actions = actions
        self.asked: list[list[tuple[str, str]]] = []

    async def get_response(self, prompt: Any, *_: Any, **__: Any) -> Any:
        number = len(self.asked)
        self.asked.append([_spoken(message) for message in prompt])
        if number >= len(self.actions):
            raise Waiting
        message = ResponseMessage(content=self.actions[number], finish_reason="stop", is_truncated=False)
        return Response(id=str(number), created=0, model=_MODEL, message=message)

    async def _no_provider(self, *_: Any) -> Any:
        raise NotImplementedError("there is no provider behind it")

    setup_client = to_native_tool = to_native_prompt = get_native_response = _no_provider
    raise_from_native_response = from_native_response = _no_provider

    async def close(self) -> None:
        return


class Replays:
    """An environment as functions of (split, index, the model's turns)."""

    def __init__(self, name: str, arguments: Mapping[str, Any], seed: int) -> None:
        self._env = vf.load_environment(name, **arguments)
        if getattr(self._env, "tool_defs", None):
            raise Refused("it calls tools, and turns here are text")
        if self._env.requires_group_rollouts:
            raise Refused(
                "it scores the samples of a group by each other, and rewards here are each their own"
            )
        self._seed = seed
        self._rows, members, self._digest = _rows(self._env)
        for split, numbers in members.items():
            if not len(numbers):
                raise Refused(f"it has too few rows for a {split} split")
        self._epochs = Epochs(f"verifiers|{name}|{seed}", members)
        self._runner = asyncio.Runner()

    def facts(self) -> dict[str, Any]:
        """What the other side of the socket is told first."""
        return {
            "max_turns": int(getattr(self._env, "max_turns", -1)),
            "pins": {
                "verifiers": version("verifiers"),
                "environment": _release(sys.modules[type(self._env).__module__], self._env),
                "rows": self._digest,
            },
        }

    def prompt(self, split: str, index: int) -> list[tuple[str, str]]:
        """The messages with which the environment begins."""
        client, _ = self._replay(split, index, [])
        if not client.asked:
            raise Refused("it ends before the model's first turn")
        return client.asked[0]

    def answer(self, split: str, index: int) -> str:
        """The row's own; empty where it has none."""
        return str(self._row(split, index).get("answer") or "")

    def respond(self, split: str, index: int, actions: Sequence[str]) -> str | None:
        """What the environment says to the last of ``actions``; None if it is done.

        One that fails at what the model has said is done too: its reward fails, and the run goes on.
        """
        try:
            client, _ = self._replay(split, index, actions)
        except Refused:
            raise
        except Exception:  # noqa: BLE001 - whatever foreign code raises
            return None
        if len(client.asked) <= len(actions):
            return None
        known = [*client.asked[-2], ("assistant", actions[-1])]
        now = client.asked[-1]
        if now[: len(known)] != known:
            raise Refused("it rewrites what was said before, and what was trained on cannot change")
        said = "\n\n".join(content for _, content in now[len(known) :])
        if not said:
            raise Refused("it asks for a turn and says nothing")
        return said

    def reward(self, split: str, index: int, actions: Sequence[str]) -> float:
        """What its rubric gives, for an episode that is over or not."""
        _, state = self._replay(split, index, actions)
        failed = state.get("error")
        if isinstance(failed, Waiting):
            state["error"], state["is_truncated"] = None, True
        elif failed is not None:
            raise failed
        self._runner.run(self._env.rubric.score_rollout(state))
        return float(state["reward"])

    def _row(self, split: str, index: int) -> dict[str, Any]:
        row: dict[str, Any] = self._rows[self._epochs.number(index, split)]
        return row

    def _replay(self, split: str, index: int, actions: Sequence[str]) -> tuple[Replay, Any]:
        """The same dice whoever replays it, whatever was replayed before."""
        random.seed(f"echo2p2p|{self._seed}|{split}|{index}")
        np.random.seed(random.getrandbits(32))
        client = Replay(actions)
        row = self._row(split, index)
        return client, self._runner.run(self._env.rollout(row, client, _MODEL, {}))


def _rows(env: Any) -> tuple[Any, dict[str, np.ndarray], str]:
    """All rows, which of them are in which split, and their digest.

    The environment's own split for evaluation is held out, without what it trains on; without one, each row is in one
    split by its content.
    """
    train = env.build_dataset()
    held_out = env.build_eval_dataset()
    if train is None:
        raise Refused("it has rows to evaluate on and none to train on")
    hasher = blake3()
    contents = [[_content(row, hasher) for row in rows] for rows in (train, held_out or [])]
    n_train = len(contents[0])
    if held_out is None:
        held = np.array([split_of(content.hex()) == HELD_OUT for content in contents[0]], dtype=bool)
        members = {TRAIN: np.flatnonzero(~held), HELD_OUT: np.flatnonzero(held)}
        return train, members, hasher.hexdigest()
    kept = set(contents[1])
    numbers = [i for i, content in enumerate(contents[0]) if content not in kept]
    members = {
        TRAIN: np.array(numbers, dtype=np.int64),
        HELD_OUT: np.arange(n_train, n_train + len(contents[1])),
    }
    return _Both(train, held_out), members, hasher.hexdigest()


class _Both:
    """Two data sets one behind the other."""

    def __init__(self, first: Any, second: Any) -> None:
        self._first = first
        self._second = second

    def __getitem__(self, number: int) -> Any:
        n = len(self._first)
        return self._first[number] if number < n else self._second[number - n]


def _content(row: Mapping[str, Any], hasher: blake3) -> bytes:
    """What tells a row from others, and into the digest of all."""
    told = {name: value for name, value in row.items() if name != "example_id"}
    digest = blake3(json.dumps(told, sort_keys=True, default=str).encode()).digest(length=16)
    hasher.update(digest)
    return digest


def _spoken(message: Any) -> tuple[str, str]:
    """Role and text of a message; plain text is a user's."""
    role = "user" if message.role == "text" else str(message.role)
    content = message.content
    if isinstance(content, list):
        parts = [part if isinstance(part, dict) else part.model_dump() for part in content]
        if any(part.get("type") != "text" for part in parts):
            raise Refused("it shows more than text")
        content = "".join(part["text"] for part in parts)
    if role not in _SPOKEN or content is None:
        raise Refused(f"a message of {role} is no text of {', '.join(_SPOKEN)}")
    return role, str(content)


def _release(module: Any, env: Any) -> str:
    """The release of the package that the environment is from, or the digest of its source."""
    module = sys.modules.get(env.env_id.replace("-", "_").split("/")[-1], module)
    for distribution in packages_distributions().get(module.__name__.partition(".")[0], ()):
        try:
            return f"{distribution} {version(distribution)}"
        except PackageNotFoundError:
            continue
    source = Path(str(module.__file__))
    files = sorted(source.parent.rglob("*.py")) if source.name == "__init__.py" else [source]
    hasher = blake3()
    for path in files:
        hasher.update(path.read_bytes())
    return hasher.hexdigest()


def _answered(compute: Callable[[], Any]) -> bytes:
    """What ``compute`` returns or raises, as one line."""
    try:
        said: dict[str, Any] = {"value": compute()}
    except BaseException as error:  # noqa: BLE001 - whatever foreign code raises is an answer
        cause = str(error) if isinstance(error, Refused) else f"{type(error).__name__}: {error}"
        said = {"error": cause[:_MAX_ERROR_CHARS]}
    return json.dumps(said).encode() + b"\n"


def main() -> None:
    fd, name, arguments, seed, call_s = sys.argv[1:6]
    channel = socket.socket(fileno=int(fd))
    made: list[Replays] = []
    ready = _answered(
        lambda: made.append(Replays(name, json.loads(arguments), int(seed))) or made[0].facts()  # type: ignore[func-returns-value]
    )
    signal.signal(
        signal.SIGINT, signal.SIG_IGN
    )  # the parent decides when it is over; the library has its own ideas
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    channel.sendall(ready)
    if not made:
        return
    with channel.makefile("rb") as lines:
        for line in lines:
            method, *given = json.loads(line)
            signal.setitimer(
                signal.ITIMER_REAL, float(call_s)
            )  # so that it does not outlive a parent that died
            said = _answered(lambda: getattr(made[0], method)(*given))  # noqa: B023 - called at once
            signal.setitimer(signal.ITIMER_REAL, 0)
            channel.sendall(said)
    os._exit(0)  # threads that an environment left behind end with it


if __name__ == "__main__":
    main()
