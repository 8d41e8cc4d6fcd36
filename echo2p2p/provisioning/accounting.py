"""What a run has cost, and what it would have cost with every worker on. Pure: time is an argument."""

from __future__ import annotations

import math


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


class Budget:
    """How much may still be spent, and for how long that lasts.

    Args:
        usd: never to be exceeded; infinite for no limit.
        reserve_s: the active set is stopped when what is left pays for so many seconds of it: to be late by less
            than this costs nothing.
    """

    def __init__(self, usd: float, *, reserve_s: float) -> None:
        self.usd = usd
        self._reserve_s = reserve_s

    def seconds_left(self, spent_usd: float, committed_usd: float, active_per_hour: float) -> float:
        """Until the money that is neither spent nor committed is used up; infinite where nothing costs anything.

        Args:
            spent_usd: so far.
            committed_usd: the price of the work that has been given out and has not come back.
            active_per_hour: $/h of the active workers.
        """
        left = self.usd - spent_usd - committed_usd
        if math.isinf(left):
            return math.inf
        if active_per_hour <= 0:
            return math.inf if left > 0 else 0.0
        return max(0.0, left / active_per_hour * 3600 - self._reserve_s)
