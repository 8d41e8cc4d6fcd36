"""Time and off-loop work as parameters, so that a role runs under real and under virtual time.

Roles never call ``time.time`` or ``asyncio.to_thread``. Within a role, ``asyncio.sleep`` and
``asyncio.timeout`` are fine: both follow the loop's own clock, which the memory network makes virtual.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import Protocol, TypeVar

T = TypeVar("T")


class Clock(Protocol):
    """Where a role gets the time from, and where it sends work that would block its loop."""

    def monotonic(self) -> float:
        """Seconds that never jump; for durations and deadlines."""
        ...

    def unix(self) -> float:
        """Seconds since 1970, as far as this machine knows; only for the expiry of records and for logs."""
        ...

    async def offload(self, fn: Callable[[], T]) -> T:
        """Run blocking ``fn`` off the loop and return its result (under virtual time: at once, in place)."""
        ...


class SystemClock:
    """The real clock. Blocking work goes to asyncio's default thread pool."""

    def monotonic(self) -> float:
        return time.monotonic()

    def unix(self) -> float:
        return time.time()

    async def offload(self, fn: Callable[[], T]) -> T:
        return await asyncio.to_thread(fn)
