"""What the groups of each worker cost the learner to score, and when one has asked for too much. Pure.

What a completion costs to score is its sender's choice where a task evaluates what was written. So a worker may cost
per sample a few times what it costs for the others, whatever that is, and some seconds beyond it, which come back
slowly. A group that takes longer is not scored to its end. Where most workers are dear, that is the price of the
task: then nobody is refused for it, and they take turns as always.
"""

from __future__ import annotations

import math
from bisect import bisect_left, insort
from collections.abc import Callable

from echo2p2p.swarm.identity import PeerId

TIMES_USUAL = 4.0
"""A sample may take so many times what it takes for the middle one of the others, the dearer of two. So the fewer
decide nothing, neither those who are dear nor those who are cheap to have the others refused."""
ALWAYS_ALLOWED_S = 0.05
"""And so many seconds in any case."""
BURST_S = 5.0
"""Seconds that a worker may take beyond that, once."""
PER_S = 0.05
"""How many of them come back each second."""
LONGEST_SAMPLE_S = 4.0
"""No sample counts for more: longer than a sandbox takes to give up and start anew, and less than the seconds above.
So a machine that stood still for a while makes nobody's groups refused."""
_NEW_WEIGHT = 0.2
_MAX_WORKERS = 4096


class ScoringCosts:
    """Who has cost how much."""

    def __init__(self) -> None:
        self._per_sample: dict[PeerId, float] = {}
        self._sorted: list[float] = []
        self._debts: dict[PeerId, tuple[float, float]] = {}

    def wait_s(self, worker: PeerId, now: float) -> float:
        """Seconds until a group of ``worker`` is looked at again; 0 if one is now."""
        return max(0.0, self._debt(worker, now) - BURST_S) / PER_S

    def limit_s(self, worker: PeerId, samples: int, now: float) -> float:
        """What a group of ``worker`` may take; infinite where there is nobody to compare it with."""
        return samples * self._usual(worker) + max(0.0, BURST_S - self._debt(worker, now))

    def left(self, worker: PeerId) -> None:
        """It says nothing any more of what is usual; what it owes stays."""
        self._set(worker, None)

    def charge(self, worker: PeerId, seconds: float, samples: int, now: float, *, refused: bool) -> None:
        """A group of ``worker`` took ``seconds``. One that was ``refused`` for what is in it, or came of somebody who
        has left, says nothing of what is usual. One that was for its cost does, or a dear task would be measured by
        those alone for whom it is cheap.
        """
        debt = self._debt(worker, now) + max(0.0, seconds - samples * self._usual(worker))
        self._debts.pop(worker, None)
        self._debts[worker] = (debt, now)
        if len(self._debts) > _MAX_WORKERS:
            del self._debts[next(iter(self._debts))]
        if refused:
            self._set(worker, None)
            return
        each = seconds / samples
        before = self._per_sample.get(worker, each)
        self._set(worker, before + _NEW_WEIGHT * (each - before))

    def _debt(self, worker: PeerId, now: float) -> float:
        debt, since = self._debts.get(worker, (0.0, now))
        return max(0.0, debt - PER_S * (now - since))

    def _usual(self, worker: PeerId) -> float:
        own = self._per_sample.get(worker)
        others = len(self._sorted) - (own is not None)
        if not others:
            return math.inf
        at = others // 2
        if own is not None and bisect_left(self._sorted, own) <= at:
            at += 1  # its own is among the cheaper ones, and does not count
        return max(ALWAYS_ALLOWED_S, TIMES_USUAL * self._sorted[at])

    def _set(self, worker: PeerId, each: float | None) -> None:
        """``worker`` costs ``each`` a sample; None: nobody knows."""
        before = self._per_sample.pop(worker, None)
        if before is not None:
            del self._sorted[bisect_left(self._sorted, before)]
        if each is not None:
            self._per_sample[worker] = each
            insort(self._sorted, each)
            if len(self._per_sample) > _MAX_WORKERS:
                self._set(next(iter(self._per_sample)), None)


class Check:
    """One group while it is scored on another thread, sample by sample."""

    def __init__(self, monotonic: Callable[[], float], limit_s: float) -> None:
        self._monotonic = monotonic
        self._limit_s = limit_s
        self._before_s = 0.0
        self._since: float | None = None
        self._given_up = False

    @property
    def seconds(self) -> float:
        """What it took so far, waiting for the thread apart, with no sample counted for more than it may be."""
        if self._since is None:
            return 0.0
        return self._before_s + min(LONGEST_SAMPLE_S, self._monotonic() - self._since)

    def is_over(self) -> bool:
        """Whether to stop here, before the next sample."""
        self._before_s, self._since = self.seconds, self._monotonic()
        return self._given_up or self._before_s > self._limit_s

    def give_up(self) -> None:
        """Nobody waits for the result any more."""
        self._given_up = True
