"""Virtual time: an asyncio loop whose clock jumps to the next timer as soon as nothing else is left to do.

Whole swarms run on it in one thread, hours in seconds, and twice the same way. Two mistakes that would hang
a real loop become errors here: :class:`DeadlockError` when every task waits and no timer is set, and
:class:`LivelockError` when tasks keep each other busy while the time stands still, or run past the limit.

Nothing outside the loop exists for it: no sockets, no threads, no signals.
"""

from __future__ import annotations

import asyncio
import collections
import heapq
import math
from collections.abc import Callable, Coroutine
from contextvars import Context
from typing import Any, TypeVar, TypeVarTuple

T = TypeVar("T")
Ts = TypeVarTuple("Ts")

START_UNIX = 1_900_000_000.0
"""What the time is when a virtual loop starts; a round date far from any real one, to tell them apart."""
MAX_TURNS_AT_ONE_INSTANT = 1_000_000
_TASKS_NAMED = 12


class DeadlockError(RuntimeError):
    """Every task waits for another one and no timer is set. The message names tasks and where they wait."""


class LivelockError(RuntimeError):
    """The tasks never come to rest: the time stands still or has passed the limit of the run."""


class VirtualLoop(asyncio.BaseEventLoop):
    """An asyncio loop under virtual time, from 0 on. Timers of equal time fire in the order of setting.

    It replaces asyncio's turn of the loop and its heap of timers: tuples compare several times as fast as
    timer handles do, and there is nothing outside to poll.

    Args:
        start_unix: the date at ``time()`` 0, in seconds since 1970.
        limit_s: virtual seconds after which :class:`LivelockError` ends the run.
    """

    _ready: collections.deque[asyncio.Handle]

    def __init__(self, *, start_unix: float = START_UNIX, limit_s: float = math.inf) -> None:
        super().__init__()
        self.start_unix = start_unix
        self._limit_s = limit_s
        self._now = 0.0
        self._turns = 0
        self._timers: list[tuple[float, int, asyncio.TimerHandle]] = []
        self._timers_set = 0
        self._timers_cancelled = 0

    def time(self) -> float:
        return self._now

    def call_later(
        self, delay: float, callback: Callable[[*Ts], object], *args: *Ts, context: Context | None = None
    ) -> asyncio.TimerHandle:
        return self.call_at(self._now + delay, callback, *args, context=context)

    def call_at(
        self, when: float, callback: Callable[[*Ts], object], *args: *Ts, context: Context | None = None
    ) -> asyncio.TimerHandle:
        if self.is_closed():
            raise RuntimeError("the loop is closed")
        if math.isnan(when):
            raise ValueError("a timer cannot be set for no time at all")
        timer = asyncio.TimerHandle(when, callback, args, self, context)
        # Asks the handle to tell this loop if it is cancelled.
        timer._scheduled = True  # type: ignore[attr-defined]  # noqa: SLF001
        self._timers_set += 1
        heapq.heappush(self._timers, (when, self._timers_set, timer))
        return timer

    def _timer_handle_cancelled(self, handle: asyncio.TimerHandle) -> None:  # noqa: ARG002
        self._timers_cancelled += 1
        # Deadlines are set and cancelled all the time; they must not pile up.
        if self._timers_cancelled > 1000 and self._timers_cancelled * 2 > len(self._timers):
            self._timers = [entry for entry in self._timers if not entry[2].cancelled()]
            heapq.heapify(self._timers)
            self._timers_cancelled = 0

    def _run_once(self) -> None:
        ready = self._ready
        if ready:
            self._turns += 1
            if self._turns > MAX_TURNS_AT_ONE_INSTANT:
                self._turns = 0
                raise LivelockError(f"time stands still at {self._now:.3f} s; {_waiting(self)}")
        else:
            self._turns = 0
            self._rest()
        self._fire()
        # What becomes ready in this turn runs in the next one.
        for _ in range(len(ready)):
            handle = ready.popleft()
            if not handle.cancelled():
                handle._run()  # noqa: SLF001

    def _rest(self) -> None:
        """Let the time jump to the next timer."""
        timers = self._timers
        while timers and timers[0][2].cancelled():
            heapq.heappop(timers)
            self._timers_cancelled -= 1
        if not timers or timers[0][0] == math.inf:
            raise DeadlockError(f"deadlock at {self._now:.3f} s: no timer is set; {_waiting(self)}")
        self._now = max(self._now, timers[0][0])
        if self._now > self._limit_s:
            # The tasks have all the time they need to end after that.
            self._limit_s = math.inf
            raise LivelockError(f"not done after {self._now:.0f} s of virtual time; {_waiting(self)}")

    def _fire(self) -> None:
        """Make the timers of this instant ready."""
        timers = self._timers
        while timers and timers[0][0] <= self._now:
            timer = heapq.heappop(timers)[2]
            timer._scheduled = False  # type: ignore[attr-defined]  # noqa: SLF001
            if timer.cancelled():
                self._timers_cancelled -= 1
            else:
                self._ready.append(timer)

    def _write_to_self(self) -> None:
        """Nobody has to be woken from a wait for files: there is none."""


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
