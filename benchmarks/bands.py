"""What several runs of one training say together: means with 95 % bands by Student's t. Pure.

With three seeds t is 4.3, so a band is wide; one that is narrow without reason would be worse.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

_T_975 = (
    *(12.7062, 4.3027, 3.1824, 2.7764, 2.5706, 2.4469, 2.3646, 2.3060),
    *(2.2622, 2.2281, 2.2010, 2.1788, 2.1604, 2.1448, 2.1314),
)
"""The 97.5 % quantile of Student's t for 1, 2, 3, … degrees of freedom."""


@dataclass(frozen=True)
class Run:
    """One training.

    Attributes:
        curve: held-out reward by step.
        staleness_mean: versions, over all trained tokens; staleness_max: of the oldest.
    """

    seed: int
    curve: dict[int, float]
    staleness_mean: float
    staleness_max: int

    @property
    def final(self) -> float:
        """The last held-out reward."""
        return self.curve[max(self.curve)]

    @property
    def over_training(self) -> float:
        """Mean height of the curve (trapezoids): how early the reward was there, where the ends are alike."""
        steps = sorted(self.curve)
        area = sum((b - a) * (self.curve[a] + self.curve[b]) / 2 for a, b in pairwise(steps))
        return area / (steps[-1] - steps[0]) if len(steps) > 1 else self.final


@dataclass(frozen=True)
class Band:
    """A mean, and the ends of its 95 % interval."""

    mean: float
    low: float
    high: float

    def __contains__(self, value: float) -> bool:
        return self.low <= value <= self.high


def band(values: Sequence[float]) -> Band:
    """Student's interval for the mean of ``values``, two to 16 of them. Raises ValueError for other numbers."""
    n = len(values)
    if not 2 <= n <= len(_T_975) + 1:
        raise ValueError(f"a band of {n} values: 2 to {len(_T_975) + 1} are possible")
    mean = statistics.fmean(values)
    half = _T_975[n - 2] * statistics.stdev(values) / math.sqrt(n)
    return Band(mean, mean - half, mean + half)


def paired(one: Sequence[Run], other: Sequence[Run]) -> list[float]:
    """Final rewards of ``one`` less those of ``other``, seed by seed, of the seeds that both have."""
    finals = {run.seed: run.final for run in other}
    return [run.final - finals[run.seed] for run in one if run.seed in finals]


def aligned(runs: Sequence[Run]) -> tuple[list[int], list[Band]]:
    """The steps that every run evaluated, in order, and the band at each."""
    steps = sorted(set.intersection(*(set(run.curve) for run in runs)))
    return steps, [band([run.curve[step] for run in runs]) for step in steps]
