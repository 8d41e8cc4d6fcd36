"""A cap on a rate: a token bucket. Pure: the time is an argument.

Guarantee: from any moment on, what may be sent within t seconds is at most rate · t and one bucket, or one piece
where that is larger.
"""

from __future__ import annotations

import math

BURST_S = 0.25
"""A bucket holds what its rate brings in this time, if nothing else is said."""
_BYTES_PER_MBIT = 125_000


class TokenBucket:
    """Tokens are bytes. They come at a rate, and none come while the bucket is full.

    Args:
        mbit: the rate in Mbit/s; infinite for no cap.
        burst_s: a full bucket is what the rate brings in this time.
        now: monotonic seconds, as for all methods; the bucket is full then.
    """

    def __init__(self, mbit: float, now: float, *, burst_s: float = BURST_S) -> None:
        self._rate = mbit * _BYTES_PER_MBIT
        self._size = self._rate * burst_s
        self._tokens = self._size
        self._now = now

    @property
    def capped(self) -> bool:
        return math.isfinite(self._rate)

    def seconds(self, nbytes: int) -> float:
        """How long ``nbytes`` take at the rate."""
        return nbytes / self._rate

    def reserve(self, nbytes: int, now: float) -> float:
        """Take tokens for ``nbytes``, also such as are still to come; the moment from which they count.

        Who reserves first is first. What is not used after all is to be given back.
        """
        if not self.capped:
            return now
        self._fill(now)
        self._tokens -= nbytes
        return now + max(0.0, -self._tokens / self._rate)

    def give_back(self, nbytes: int) -> None:
        """Of a reservation, ``nbytes`` were not used; fewer than none if it was too small."""
        if self.capped:
            self._tokens = min(self._size, self._tokens + nbytes)

    def missing_s(self, nbytes: int, now: float) -> float:
        """Seconds until the tokens for ``nbytes`` are there, or the bucket is full, if nobody else takes any."""
        if not self.capped:
            return 0.0
        self._fill(now)
        missing = min(nbytes, self._size) - self._tokens
        # Less than a byte is rounding.
        return missing / self._rate if missing >= 1 else 0.0

    def _fill(self, now: float) -> None:
        self._tokens = min(self._size, self._tokens + max(0.0, now - self._now) * self._rate)
        self._now = max(self._now, now)
