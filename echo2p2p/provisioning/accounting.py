"""What a run has cost, and what it would have cost with every worker on. Pure: time is an argument."""

from __future__ import annotations


class Spending:
    """Integrates prices over time.

    Attributes:
        usd: paid to active workers so far.
        all_on_usd: what all workers that were there, active or not, would have cost together.
    """

    def __init__(self) -> None:
        self.usd = 0.0
        self.all_on_usd = 0.0
        self._last: float | None = None

    def advance(self, now: float, active_per_hour: float, standby_per_hour: float) -> None:
        """Account for the time since the last call.

        Args:
            now: seconds, monotonic.
            active_per_hour: $/h of all workers that were paid since the last call.
            standby_per_hour: $/h of the others.
        """
        hours = 0.0 if self._last is None else max(0.0, now - self._last) / 3600
        self._last = now
        self.usd += active_per_hour * hours
        self.all_on_usd += (active_per_hour + standby_per_hour) * hours
