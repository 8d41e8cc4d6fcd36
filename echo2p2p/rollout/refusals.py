"""Refused groups on a worker's log: said once, then counted."""

from __future__ import annotations

from collections import Counter

PERIOD_S = 60.0
MAX_REASONS = 8
"""Reasons that are counted apart, and named in one line; they come from the learner."""


class Refusals:
    """Turns refusals into few lines, however many there are.

    The first one is told with its reason; those of the next minutes are counted, and told once a minute. After a
    minute without any, the next one is a first one again. Pure: the time is an argument.
    """

    def __init__(self) -> None:
        self._since: float | None = None
        self._counts: Counter[str] = Counter()

    def add(self, reason: str, now: float) -> str | None:
        """A group was refused at ``now`` (monotonic seconds); returns the line to log, if one is due."""
        line = self.due(now)
        if self._since is None:
            self._since = now
            return f"a group was refused: {reason}; more of them are counted and told once a minute"
        known = reason in self._counts or len(self._counts) < MAX_REASONS
        self._counts[reason if known else "other reasons"] += 1
        return line

    def due(self, now: float) -> str | None:
        """The line on what was counted, once a minute is over; for whoever comes by now and then."""
        if self._since is None or now - self._since < PERIOD_S:
            return None
        counts, self._counts = self._counts, Counter()
        # A minute without any: the next refusal is news again.
        self._since = now if counts else None
        if not counts:
            return None
        total = counts.total()
        reasons = ", ".join(f"{reason} {n}" for reason, n in counts.most_common())
        return f"{total} more group{'s' * (total > 1)} refused in the last minute: {reasons}"
