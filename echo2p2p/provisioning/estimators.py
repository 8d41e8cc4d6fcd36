"""Online estimates of what the capacity model needs: μ_i of each worker, T_train and T_bcast.

Pure: durations are arguments. What a worker announces is a prior that a few seconds of its work outweigh.

* μ_i: accepted rollouts over busy seconds, both forgotten exponentially in busy time. A ratio of sums weighs a
  measurement by the time it took, so one odd group counts for no more than its own seconds, while a mean of rates
  would let one short interval outweigh a minute.
* T_work of each worker: from the gaps between its deliveries.
* T_train and T_bcast: a moving mean of medians of five. One step that waits for a disk is no news about T_train and
  is left out whole; a change that lasts has passed the median after three measurements.
"""

from __future__ import annotations

import math
from collections import deque
from statistics import median

MEDIAN_OF = 5


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


class WorkEstimator:
    """How long a worker takes for what it generates at once, from the gaps between its deliveries.

    What was generated at once is delivered at once, so most gaps are nothing and some are the whole: Σ gap² / Σ gap
    is the gap that a moment falls into on average.

    Attributes:
        seconds: 0 until something has been measured.
    """

    WEIGHT = 0.05

    def __init__(self) -> None:
        self._gap = self._square = 0.0

    def observe(self, gap_s: float) -> None:
        """A group came ``gap_s`` seconds of work after the one before."""
        self._gap += self.WEIGHT * (gap_s - self._gap)
        self._square += self.WEIGHT * (gap_s**2 - self._square)

    @property
    def seconds(self) -> float:
        return self._square / self._gap if self._gap > 0 else 0.0


class DurationEstimator:
    """A duration's moving mean, unmoved by single outliers.

    Each measurement enters as the median of the last five. The prior counts like one measurement; until
    ``weight`` takes over, all count alike, so that a wrong prior does not stay for long.

    Args:
        prior_s: used until something has been measured.
        weight: of each new measurement, in the long run.
    """

    def __init__(self, prior_s: float, *, weight: float = 0.2) -> None:
        self.seconds = prior_s
        self._weight = weight
        self._count = 1
        self._recent: deque[float] = deque(maxlen=MEDIAN_OF)

    def observe(self, seconds: float) -> None:
        self._count += 1
        self._recent.append(seconds)
        self.seconds += max(self._weight, 1 / self._count) * (median(self._recent) - self.seconds)


class Shortfall:
    """What the model misses: by how much more the pool has to deliver because the learner really waits.

    Estimates can be wrong together (lengths, losses, bursts), and then the pool reaches its target and the learner
    still waits. A wait of a part w of T_train says that 1 + w times as much is needed; it is believed at once, but
    once for the workers that it brings have had a step to begin. With every step that does not wait, a tenth of it is
    forgotten, so that a passing shortfall is not paid for for long.
    """

    TOLERATED = 0.02
    """Waits below this part of T_train are chance."""
    LARGEST = 1.5
    """More than this is not for want of workers: the window is too narrow, or versions come too late."""
    FORGOTTEN = 0.1

    STEPS_TO_BEGIN = 2
    """The step that waits, and one for the workers that it brings."""

    def __init__(self) -> None:
        self.factor = 1.0
        self._steps_to_go = 0

    def waits(self, idle_s: float, t_train_s: float) -> bool:
        """The learner has waited for ``idle_s`` so far; returns whether that is news."""
        part = idle_s / t_train_s
        if self._steps_to_go or part <= self.TOLERATED or self.factor >= self.LARGEST:
            return False
        self.factor = min(self.LARGEST, self.factor * (1 + part))
        self._steps_to_go = self.STEPS_TO_BEGIN
        return True

    def stepped(self, idle_s: float, t_train_s: float) -> bool:
        """The learner has a batch, for which it waited ``idle_s`` in all; returns whether that is news."""
        news = self.waits(idle_s, t_train_s)
        self._steps_to_go = max(0, self._steps_to_go - 1)
        if idle_s <= self.TOLERATED * t_train_s:
            self.factor = 1 + (self.factor - 1) * (1 - self.FORGOTTEN)
        return news
