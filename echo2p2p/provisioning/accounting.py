"""What a run has cost, and what it would have cost with every worker on. Pure: time is an argument."""

from __future__ import annotations


class Spending:
    """Integrates prices over time.

    Attributes:
        usd: paid to active workers so far.
        all_on_usd: what all workers that were there, active or not, would have cost together.
        per_worker_usd: paid so far, by peer.
    """

    def __init__(self) -> None:
        self.usd = 0.0
        self.all_on_usd = 0.0
        self.per_worker_usd: dict[str, float] = {}
        self._last: float | None = None

    def advance(self, now: float, active: dict[str, float], standby: dict[str, float]) -> None:
        """Account for the time since the last call.

        Args:
            now: seconds, monotonic.
            active: $/h of every worker that was paid since the last call, by peer.
            standby: $/h of the others.
        """
        hours = 0.0 if self._last is None else max(0.0, now - self._last) / 3600
        self._last = now
        for peer, price in active.items():
            self.per_worker_usd[peer] = self.per_worker_usd.get(peer, 0.0) + price * hours
        paid = sum(active.values()) * hours
        self.usd += paid
        self.all_on_usd += paid + sum(standby.values()) * hours
