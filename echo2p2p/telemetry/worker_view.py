"""A worker on the terminal: one line for every change that its owner would want to know of."""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Callable
from types import TracebackType
from typing import Self, TextIO

from echo2p2p.telemetry.events import Event, EventLog
from echo2p2p.telemetry.story import tell

QUIET_S = {"installed": 30.0, "session": 0.0, "state": 0.0}
"""The kinds that are shown, and how long a kind keeps quiet after a line of it."""
FIRST_REPEAT_S = 60.0
LONGEST_REPEAT_S = 3600.0


class WorkerView:
    """A context manager that prints what ``log`` says until it is left.

    What has not changed is not said again: a learner that stays away is told of after one minute, two, four, up to an
    hour, and the worker's own state only when it is another one, or in a new session.

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
        self._told: dict[str, object] = {}
        self._repeat_s = FIRST_REPEAT_S
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
        waited_s = now - self._shown_at.get(kind, -math.inf)
        # Of a session that stays lost, only the reason may vary: that is no change.
        said = event.get("state", line)
        if said == self._told.get(kind):
            if kind != "session" or waited_s < self._repeat_s:
                return
            self._repeat_s = min(LONGEST_REPEAT_S, 2 * self._repeat_s)
        elif waited_s < QUIET_S[kind]:
            return
        elif kind == "session":
            self._repeat_s = FIRST_REPEAT_S
            if said == "open":
                self._told.pop("state", None)
        self._shown_at[kind] = now
        self._told[kind] = said
        print(f"{time.strftime('%H:%M:%S')} {line}", file=self._stream, flush=True)
