"""Virtual time: an asyncio loop whose clock jumps to the next timer as soon as nothing else is left to do.

Whole swarms run on it in one thread, hours in seconds, and twice the same way. Two mistakes that would hang
a real loop become errors here: :class:`DeadlockError` when every task waits and no timer is set, and
:class:`LivelockError` when tasks keep each other busy while the time stands still, or run past the limit.

Nothing outside the loop exists for it: no sockets, no threads, no signals.
"""

from __future__ import annotations

import asyncio
import math
import selectors
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

T = TypeVar("T")

START_UNIX = 1_900_000_000.0
"""What the time is when a virtual loop starts; a round date far from any real one, to tell them apart."""
MAX_TURNS_AT_ONE_INSTANT = 1_000_000
_TASKS_NAMED = 12


class DeadlockError(RuntimeError):
    """Every task waits for another one and no timer is set. The message names tasks and where they wait."""


class LivelockError(RuntimeError):
    """The tasks never come to rest: the time stands still or has passed the limit of the run."""


class VirtualLoop(asyncio.SelectorEventLoop):
    """An asyncio loop under virtual time. ``time()`` starts at 0.

    Args:
        start_unix: the date at ``time()`` 0, in seconds since 1970.
        limit_s: virtual seconds after which :class:`LivelockError` ends the run.
    """

    def __init__(self, *, start_unix: float = START_UNIX, limit_s: float = float("inf")) -> None:
        self.start_unix = start_unix
        self._limit_s = limit_s
        self._now = 0.0
        self._turns = 0
        super().__init__(_NothingOutside(self._rest))

    def time(self) -> float:
        return self._now

    def _rest(self, timeout: float | None) -> None:
        """Called between two turns of the loop in place of a wait for ``timeout`` seconds."""
        if timeout == 0:
            self._turns += 1
            if self._turns > MAX_TURNS_AT_ONE_INSTANT:
                self._turns = 0
                raise LivelockError(f"time stands still at {self._now:.3f} s; {_waiting(self)}")
            return
        self._turns = 0
        if timeout is None:
            raise DeadlockError(f"deadlock at {self._now:.3f} s: no timer is set; {_waiting(self)}")
        self._now = max(self._now, self._next_timer())
        # The loop runs the timers that lie within this of now: here, those of this very instant.
        self._clock_resolution = 2 * math.ulp(self._now)
        if self._now > self._limit_s:
            self._limit_s = float("inf")
            raise LivelockError(f"not done after {self._now:.0f} s of virtual time; {_waiting(self)}")

    def _next_timer(self) -> float:
        scheduled: list[asyncio.TimerHandle] = self._scheduled  # type: ignore[attr-defined]
        return scheduled[0].when()


class _NothingOutside(selectors.BaseSelector):
    """A selector for which no file is ever ready."""

    def __init__(self, rest: Callable[[float | None], None]) -> None:
        self._rest = rest
        self._files: dict[Any, selectors.SelectorKey] = {}

    def register(self, fileobj: Any, events: int, data: Any = None) -> selectors.SelectorKey:
        key = self._files[fileobj] = selectors.SelectorKey(fileobj, 0, events, data)
        return key

    def unregister(self, fileobj: Any) -> selectors.SelectorKey:
        return self._files.pop(fileobj)

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        self._rest(timeout)
        return []

    def get_map(self) -> dict[Any, selectors.SelectorKey]:
        return self._files

    def get_key(self, fileobj: Any) -> selectors.SelectorKey:
        return self._files[fileobj]


def run_virtual(
    main: Coroutine[Any, Any, T] | Callable[[], Coroutine[Any, Any, T]],
    *,
    start_unix: float = START_UNIX,
    limit_s: float = 30 * 86400.0,
) -> T:
    """Run ``main`` to its end on a fresh virtual loop, then cancel what it left behind.

    Args:
        main: a coroutine, or a function that makes one.
        start_unix: the date at the start.
        limit_s: virtual seconds that the run may last.

    Raises:
        DeadlockError: nothing can ever happen again, and ``main`` is not done.
        LivelockError: ``main`` is not done after ``limit_s``, or the time stands still.
    """
    with asyncio.Runner(loop_factory=lambda: VirtualLoop(start_unix=start_unix, limit_s=limit_s)) as runner:
        return runner.run(main() if callable(main) else main)


class VirtualClock:
    """The :class:`~echo2p2p.swarm.clock.Clock` of one node on a virtual loop.

    ``skew_s`` is how far this node's date lies ahead of the true one; it may change at any time.
    """

    def __init__(self, loop: VirtualLoop, *, skew_s: float = 0.0) -> None:
        self._loop = loop
        self.skew_s = skew_s

    def monotonic(self) -> float:
        return self._loop.time()

    def unix(self) -> float:
        return self._loop.start_unix + self._loop.time() + self.skew_s

    async def offload(self, fn: Callable[[], T]) -> T:
        return fn()


def _waiting(loop: asyncio.AbstractEventLoop) -> str:
    """The tasks that are not done, with the line at which each of them waits."""
    tasks = sorted(asyncio.all_tasks(loop), key=lambda task: task.get_name())
    lines = []
    for task in tasks[:_TASKS_NAMED]:
        stack = task.get_stack(limit=1)
        place = f"{stack[-1].f_code.co_qualname} line {stack[-1].f_lineno}" if stack else "its start"
        lines.append(f"{task.get_name()} at {place}")
    more = f", and {len(tasks) - _TASKS_NAMED} more" if len(tasks) > _TASKS_NAMED else ""
    return f"{len(tasks)} tasks: " + ", ".join(lines) + more
