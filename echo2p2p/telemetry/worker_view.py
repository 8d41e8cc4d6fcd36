"""A worker on the terminal: one line for every change that its owner would want to know of."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from types import TracebackType
from typing import Self, TextIO

from echo2p2p.telemetry.events import Event, EventLog
from echo2p2p.telemetry.story import tell

QUIET_S = {"installed": 30.0, "session": 0.0, "state": 0.0}
"""The kinds that are shown, and how long a line of the kind that repeats keeps quiet."""
REPEAT_S = 60.0


class WorkerView:
    """A context manager that prints what ``log`` says until it is left.

    A line that says the same as the one before (a learner that stays away) is repeated once a minute.

    Args:
        stream: where to; stderr if None.
        clock: seconds, monotonic.
    """

    def __init__(
        self, log: EventLog, *, stream: TextIO | None = None, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._log = log
        self._stream = sys.stderr if stream is None else stream
        self._clock = clock
        self._shown_at: dict[str, float] = {}
        self._last = ""
        self._unsubscribe: Callable[[], None] | None = None

    def __enter__(self) -> Self:
        self._unsubscribe = self._log.subscribe(self._on_event)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._unsubscribe is not None:
            self._unsubscribe()

    def _on_event(self, event: Event) -> None:
        kind = str(event.get("event"))
        line = tell(event)
        if line is None or kind not in QUIET_S:
            return
        now = self._clock()
        quiet_s = max(QUIET_S[kind], REPEAT_S if line == self._last else 0.0)
        if now - self._shown_at.get(kind, -REPEAT_S) < quiet_s:
            return
        self._shown_at[kind] = now
        self._last = line
        print(f"{time.strftime('%H:%M:%S')} {line}", file=self._stream, flush=True)
