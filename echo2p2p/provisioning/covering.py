"""The cheapest set that covers a need: the 0/1 covering knapsack behind the choice of workers. Pure, in numpy.

Greedy by unit cost fills the need up to the *break item*, the last one taken. With λ its unit cost, every set of
items costs at least the linear relaxation plus the sum of r_j = |c_j − λ·s_j| over the items j in which it differs
from the greedy set (Lagrangian bound). So only items with an r_j below the gap that the greedy answer leaves can be
part of a better one, and they are tried in order of r_j by dynamic programming over undominated pairs (size,
bound). What the search returns is within :data:`TOLERANCE` of the optimum unless it had to thin out its pairs;
it is never worse than the greedy answer.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
Mask = NDArray[np.bool_]
Indices = NDArray[np.intp]
History = list[tuple[int, Indices, Mask]]
"""For each item tried: its index, and for each pair then kept its parent and whether the item was flipped."""

TOLERANCE = 1e-3
"""An answer this near to the bound is not improved any further."""
ROUNDING = 1e-11
"""A need met but for this part of it is met: sums of floats depend on their order."""
GREEDY_ROUNDS = 8
"""Greedy answers, each of smaller items than the one by which the one before overshot."""
MAX_PAIRS = 1024
"""Pairs kept after each item; more are thinned out evenly over size."""
MAX_ITEMS = 192
"""Items tried at most."""
SIZE_CLASSES = 32
"""Half of the items tried are the best of as many classes of size: a hundred of one size leave no choice."""


def cover(cost: Floats, size: Floats, need: float) -> Mask:
    """Choose items with Σ size ≥ ``need`` at the least Σ cost.

    Args:
        cost: (n,), finite and at least 0, in ascending order of cost / size; ties are resolved in this order.
        size: (n,), finite and above 0.

    Returns:
        (n,), which items are chosen; all of them if even they do not reach ``need``.
    """
    n = len(cost)
    total = np.cumsum(size)
    if n == 0 or need <= 0:
        return np.zeros(n, dtype=np.bool_)
    # A need so small that it vanishes in sums of sizes is still one that asks for somebody.
    need = max(need * (1 - ROUNDING), 1e3 * ROUNDING * float(size.max()))
    if total[-1] <= need:
        return np.ones(n, dtype=np.bool_)
    best, there = np.ones(n, dtype=np.bool_), np.arange(n)
    for _ in range(GREEDY_ROUNDS):
        last = int(np.searchsorted(np.cumsum(size[there]), need))
        if last == len(there):
            break
        taken = np.zeros(n, dtype=np.bool_)
        taken[there[: last + 1]] = True
        _prune(taken, cost, size, need)
        if cost[taken].sum() < cost[best].sum():
            best = taken
        # What if the one that overshoots is left out, and all of its size?
        there = there[size[there] < size[there[last]]]
    # What costs as much as an answer that is known is no part of a better one.
    useful = np.flatnonzero(best | (cost < cost[best].sum()))
    improved = np.zeros(n, dtype=np.bool_)
    improved[useful] = _Search(cost[useful], size[useful], need, best[useful]).run()
    return improved


def _prune(chosen: Mask, cost: Floats, size: Floats, need: float) -> None:
    """Leave out, dearest first, whatever the rest can do without: a big last item makes small ones idle."""
    spare = float(size[chosen].sum()) - need
    if spare <= 0:
        return
    members = np.flatnonzero(chosen)
    members = members[np.argsort(-cost[members], kind="stable")]
    while len(members := members[size[members] <= spare]):
        fit = np.cumsum(size[members]) <= spare
        chosen[members[fit]] = False
        spare -= float(size[members[fit]].sum())
        members = members[~fit]


class _Search:
    """Dynamic programming around the break item.

    A pair is (size, gap): the set's Σ size, and by how much its Lagrangian bound exceeds ``bound``. The cost of a
    set that meets the need is bound + gap + rate · (size − need).
    """

    def __init__(self, cost: Floats, size: Floats, need: float, best: Mask) -> None:
        self._cost, self._size, self._need, self._best = cost, size, need, best
        total = np.cumsum(size)
        # The sums of ``best`` and of all may differ in their last bit.
        self._last = min(int(np.searchsorted(total, need)), len(cost) - 1)
        self._start = np.arange(len(cost)) < self._last
        self._start_size = float(total[self._last] - size[self._last])
        self._rate = float(cost[self._last] / size[self._last])
        self._bound = float(cost[: self._last].sum()) + self._rate * (need - self._start_size)
        self._best_gap = float(cost[best].sum()) - self._bound
        self._good_enough = TOLERANCE * self._bound

    def run(self) -> Mask:
        extra = np.abs(self._cost - self._rate * self._size)
        extra[self._last] = 0.0
        sizes, gaps = np.array([self._start_size]), np.zeros(1)
        history: History = []
        for item in self._worth_trying(extra):
            if self._best_gap <= self._good_enough or extra[item] >= self._best_gap or not len(sizes):
                break
            change = -self._size[item] if self._start[item] else self._size[item]
            sizes, gaps, parents, flips = _grown(sizes, gaps, change, extra[item])
            keep = np.flatnonzero(gaps < self._best_gap - self._good_enough)
            keep = keep[_undominated(sizes[keep], gaps[keep], self._rate, ROUNDING * self._bound)]
            if len(keep) > MAX_PAIRS:
                keep = keep[_thinned(sizes[keep], gaps[keep])]
            sizes, gaps = sizes[keep], gaps[keep]
            history.append((int(item), parents[keep], flips[keep]))
            self._note_best(sizes, gaps, history)
        return self._best

    def _worth_trying(self, extra: Floats) -> Indices:
        """Items that may be part of a better answer, by ``extra``."""
        items = np.flatnonzero(extra < self._best_gap)
        items = items[np.argsort(extra[items], kind="stable")]
        if len(items) <= MAX_ITEMS:
            return items
        size = np.log(self._size[items])
        spread = max(float(np.ptp(size)), 1e-9)
        classes = ((size - size.min()) / spread * (SIZE_CLASSES - 1)).astype(np.intp)
        by_class = np.argsort(classes, kind="stable")
        starts = np.searchsorted(classes[by_class], np.arange(SIZE_CLASSES))
        place = np.empty(len(items), dtype=np.intp)  # within its class
        place[by_class] = np.arange(len(items)) - starts[classes[by_class]]
        place[: MAX_ITEMS // 2] = -1
        return items[np.sort(np.argsort(place, kind="stable")[:MAX_ITEMS])]

    def _note_best(self, sizes: Floats, gaps: Floats, history: History) -> None:
        spare = sizes - self._need
        final = np.where(spare >= 0, gaps + self._rate * spare, np.inf)
        if not len(final):
            return
        at = int(np.argmin(final))
        if final[at] >= self._best_gap:
            return
        self._best_gap = float(final[at])
        best = self._start.copy()
        for item, parents, flips in reversed(history):
            best[item] ^= flips[at]
            at = int(parents[at])
        self._best = best


def _grown(sizes: Floats, gaps: Floats, change: float, extra: float) -> tuple[Floats, Floats, Indices, Mask]:
    """Every pair as it is and with one more item flipped, by size, largest first."""
    n = len(sizes)
    both = np.concatenate([sizes, sizes + change])
    gap = np.concatenate([gaps, gaps + extra])
    order = np.argsort(-both, kind="stable")  # two sorted runs: a merge
    return both[order], gap[order], order % n, order >= n


def _undominated(sizes: Floats, gaps: Floats, rate: float, rounding: float) -> Mask:
    """Of pairs by size, largest first: those that cost less than every larger one, by more than ``rounding``."""
    cost = gaps + rate * sizes
    keep = np.ones(len(cost), dtype=np.bool_)
    keep[1:] = cost[1:] < np.minimum.accumulate(cost)[:-1] - rounding
    return keep


def _thinned(sizes: Floats, gaps: Floats) -> Indices:
    """Indices of the pair with the least gap in each of MAX_PAIRS equal ranges of size."""
    low, high = sizes[-1], sizes[0]
    cell = np.minimum(((sizes - low) / (high - low) * MAX_PAIRS).astype(np.intp), MAX_PAIRS - 1)
    order = np.lexsort((gaps, cell))
    first = np.ones(len(order), dtype=np.bool_)
    first[1:] = cell[order][1:] != cell[order][:-1]
    return np.sort(order[first])
