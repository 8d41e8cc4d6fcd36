"""The processes of a benchmark: one for each host, told what to do in one JSON object a line, and answering so.

Both ends of that line are here: :class:`Node` is the parent's, :func:`messages` and :func:`answer` the child's.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from typing import Any

from benchmarks.netns import Host

_ANSWER_S = 900.0
_END_S = 5.0


class NodeError(RuntimeError):
    """A process of the benchmark ended, or was ended, before it answered."""


class Node:
    """The parent's end of one process.

    Args:
        module: is run as ``python -m module --node settings``.
        host: where it runs; None for the network of this process.
    """

    def __init__(self, module: str, settings: dict[str, Any], host: Host | None) -> None:
        self.name = host.address if host is not None else "127.0.0.1"
        self.peer_id = ""
        argv = [sys.executable, "-m", module, "--node", json.dumps(settings)]
        self._process = subprocess.Popen(
            host.command(*argv) if host is not None else argv,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=os.environ | {"OMP_NUM_THREADS": "1"},
        )

    @property
    def pid(self) -> int:
        return self._process.pid

    def tell(self, message: dict[str, Any]) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(message) + "\n")
        self._process.stdin.flush()

    def answer(self) -> dict[str, Any]:
        """The next answer. Raises NodeError where none comes."""
        assert self._process.stdout is not None
        deadline = threading.Timer(_ANSWER_S, self._process.kill)
        deadline.start()
        try:
            line = self._process.stdout.readline()
        finally:
            deadline.cancel()
        if not line:
            raise NodeError(f"the process on {self.name} ended before it answered")
        answered: dict[str, Any] = json.loads(line)
        return answered

    def ask(self, message: dict[str, Any]) -> dict[str, Any]:
        self.tell(message)
        return self.answer()

    def end(self) -> None:
        """Close its line, upon which it leaves; kill it if it doesn't."""
        assert self._process.stdin is not None
        with suppress(BrokenPipeError):
            self._process.stdin.close()
        try:
            self._process.wait(_END_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()


@contextmanager
def ended_together() -> Iterator[list[Node]]:
    """A list for nodes; those in it are ended, all at once, when the block is left."""
    nodes: list[Node] = []
    try:
        yield nodes
    finally:
        with ThreadPoolExecutor(max(1, len(nodes))) as pool:
            list(pool.map(Node.end, nodes))


def ask_all(nodes: Sequence[Node], message: dict[str, Any]) -> list[dict[str, Any]]:
    for node in nodes:
        node.tell(message)
    return [node.answer() for node in nodes]


def messages() -> Iterator[dict[str, Any]]:
    """What the parent tells this process, until it closes the line; blocks."""
    while line := sys.stdin.readline():
        yield json.loads(line)


def answer(message: dict[str, Any]) -> None:
    print(json.dumps(message), flush=True)


def say(text: str) -> None:
    """A line for whoever watches."""
    print(text, file=sys.stderr, flush=True)
