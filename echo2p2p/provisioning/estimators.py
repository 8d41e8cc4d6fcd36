"""Online estimates of what the capacity model needs: μ_i of each worker, T_train and T_bcast.

Pure: durations are arguments. What a worker announces is a prior that a few seconds of its work outweigh.
"""

from __future__ import annotations

import math


class RateEstimator:
    """Accepted rollouts a second while busy, with exponential forgetting.

    Idle time does not count against a worker: it measures what the worker *can* deliver, which is what
    activation buys, not what it was asked for. Refused work counts as time spent for nothing, so such a
    worker's ρ rises and it sinks in the order by itself.

    Args:
        prior_per_s: the announced rate.
        prior_weight_s: the prior counts like this many seconds of observation.
        memory_s: an observation's weight falls by e over this much busy time.
    """

    def __init__(self, prior_per_s: float, *, prior_weight_s: float = 2.0, memory_s: float = 60.0) -> None:
        self._count = prior_per_s * prior_weight_s
        self._seconds = prior_weight_s
        self._memory_s = memory_s

    def observe(self, accepted: int, busy_s: float) -> None:
        """``accepted`` rollouts came out of ``busy_s`` seconds during which the worker had work."""
        if busy_s > 0:
            keep = math.exp(-busy_s / self._memory_s)
            self._count *= keep
            self._seconds = self._seconds * keep + busy_s
        self._count += accepted

    @property
    def per_s(self) -> float:
        return self._count / self._seconds


class DurationEstimator:
    """A duration's moving mean.

    The prior counts like one measurement; until ``weight`` takes over, all measurements count alike, so that
    neither a wrong prior nor an odd first measurement (warm-up) stays for long.

    Args:
        prior_s: used until something has been measured.
        weight: of each new measurement, in the long run.
    """

    def __init__(self, prior_s: float, *, weight: float = 0.2) -> None:
        self.seconds = prior_s
        self._weight = weight
        self._count = 1

    def observe(self, seconds: float) -> None:
        self._count += 1
        self.seconds += max(self._weight, 1 / self._count) * (seconds - self.seconds)
