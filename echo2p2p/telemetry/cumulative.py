"""A counter that grows over a run whose process was started again in between."""

from __future__ import annotations

import math

import numpy as np


class Cumulative:
    """Puts the readings of one growing counter together across restarts.

    After a restart a process either counts from zero again or goes on from the value of its checkpoint; the
    first reading tells which: one that went on cannot lie below the reading at the step of the checkpoint.
    Either way, what was counted before the restart stays counted.
    """

    def __init__(self) -> None:
        self.total = 0.0
        """The newest value over all processes."""
        self._readings: dict[int, float] = {}
        self._totals: dict[int, float] = {}
        self._base = 0.0
        self._resumed_from: int | None = None

    def restart(self, resumed_from: int) -> None:
        """The process starts again from the checkpoint of step ``resumed_from`` (0: from none)."""
        self._resumed_from = resumed_from

    def at(self, step: int, reading: float) -> None:
        """The counter read ``reading`` after ``step``; NaN is passed over."""
        if math.isnan(reading):
            return
        if self._resumed_from is not None:
            at_checkpoint = self._readings.get(self._resumed_from, math.nan)
            went_on = reading >= at_checkpoint  # never so where there is no reading: NaN
            self._base = self.total - at_checkpoint if went_on else self.total
            self._resumed_from = None
        self._readings[step] = reading
        self.total = self._totals[step] = self._base + reading

    def series(self, steps: list[int]) -> np.ndarray:
        """The total after each of ``steps``, NaN where it was not read; shape (steps,)."""
        return np.array([self._totals.get(step, math.nan) for step in steps])
