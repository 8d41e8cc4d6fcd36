"""Which prompt is where: unleased, leased to whom, buffered, or trained. Each index is trained exactly once.

Pure: time is an argument. Guarantees:

* An index is in one place at a time. It is leased to one worker at a time, and comes back when the lease
  ends, the group is refused, or the group falls out of the window.
* What :meth:`PromptLedger.state` saves is only what was trained; after a restart everything else is leased
  again, unless it is said to be buffered still, so a crash can neither skip nor repeat an index.
"""

from __future__ import annotations

import heapq
from collections import Counter
from dataclasses import dataclass, field


@dataclass
class LeaseState:
    """One lease: who holds it, until when (monotonic seconds), and which of its indices are still out.

    ``expires_at`` lies before ``granted_until`` while its worker is gone. ``min_version`` is the oldest version
    that may have generated what it brings.
    """

    worker: str
    granted_until: float
    expires_at: float
    min_version: int
    open: set[int] = field(default_factory=set)


@dataclass(frozen=True)
class LedgerState:
    """What survives a restart: every index below ``frontier`` is trained, and those in ``beyond`` too."""

    frontier: int
    beyond: tuple[int, ...]


class PromptLedger:
    """The ledger of one run.

    Args:
        state: what an earlier life of the learner saved.
        first_lease: number of the first lease; never one that an earlier life may have used.
    """

    def __init__(self, state: LedgerState | None = None, *, first_lease: int = 1) -> None:
        self._frontier = state.frontier if state else 0
        self._beyond = set(state.beyond) if state else set()
        self._next_lease = first_lease
        self._next_index = self._frontier
        self._returned: list[int] = []
        self._leases: dict[int, LeaseState] = {}
        self._outstanding: Counter[str] = Counter()
        self._buffered: set[int] = set()

    @property
    def n_leased(self) -> int:
        """Indices that are out with workers."""
        return self._outstanding.total()

    @property
    def n_buffered(self) -> int:
        return len(self._buffered)

    @property
    def n_trained(self) -> int:
        return self._frontier + len(self._beyond)

    def outstanding(self, worker: str) -> int:
        """Indices that are out with ``worker``."""
        return self._outstanding[worker]

    def lease(
        self, worker: str, n: int, *, now: float, duration_s: float, min_version: int = 0
    ) -> tuple[int, list[int]]:
        """Give ``worker`` the ``n`` lowest free indices.

        Returns:
            The lease's number and its indices.
        """
        indices = [self._take_free() for _ in range(n)]
        number = self._next_lease
        self._next_lease += 1
        until = now + duration_s
        self._leases[number] = LeaseState(worker, until, until, min_version, set(indices))
        self._outstanding[worker] += n
        return number, indices

    def holder(self, lease: int, index: int) -> str | None:
        """Who holds ``index`` under ``lease``; None if nobody does (any more)."""
        state = self._leases.get(lease)
        return state.worker if state and index in state.open else None

    def min_version(self, lease: int) -> int:
        """The oldest version that may roll out an open lease."""
        return self._leases[lease].min_version

    def is_settled(self, index: int) -> bool:
        """Whether a group of this index is buffered or trained already."""
        return index in self._buffered or index < self._frontier or index in self._beyond

    def accept(self, lease: int, index: int) -> None:
        """The group of ``index`` has arrived and is buffered."""
        self._close(lease, index)
        self._buffered.add(index)

    def give_back(self, lease: int, index: int) -> None:
        """The group of ``index`` will not come from this lease (refused, or declined)."""
        self._close(lease, index)
        self._return(index)

    def hold(self, index: int) -> None:
        """The group of ``index`` was buffered by an earlier life of the learner, and still is."""
        self._buffered.add(index)

    def drop(self, index: int) -> None:
        """The buffered group of ``index`` will not be trained (it fell out of the window)."""
        self._buffered.remove(index)
        self._return(index)

    def train(self, indices: list[int]) -> None:
        """These buffered groups have been trained."""
        for index in indices:
            self._buffered.remove(index)
            self._beyond.add(index)
        while self._frontier in self._beyond:
            self._beyond.remove(self._frontier)
            self._frontier += 1

    def expire(self, now: float) -> list[tuple[str, int]]:
        """End every lease that has run out.

        Returns:
            (worker, number of indices that came back) for each.
        """
        due = [number for number, lease in self._leases.items() if lease.expires_at <= now]
        return [(self._leases[number].worker, self._end(number)) for number in due]

    def next_expiry(self) -> float | None:
        return min((lease.expires_at for lease in self._leases.values()), default=None)

    def shorten(self, worker: str, expires_at: float) -> None:
        """Let no lease of ``worker`` outlast ``expires_at``: it is gone, and may come back until then."""
        for lease in self._leases.values():
            if lease.worker == worker:
                lease.expires_at = min(lease.expires_at, expires_at)

    def restore(self, worker: str) -> None:
        """``worker`` is back: its leases last as long as they were granted for."""
        for lease in self._leases.values():
            if lease.worker == worker:
                lease.expires_at = lease.granted_until

    def set_aside(self, lease: int, index: int) -> None:
        """Nobody can roll ``index`` out: it counts as trained, so that it is never leased again."""
        self._close(lease, index)
        self._buffered.add(index)
        self.train([index])

    def go_back(self, state: LedgerState) -> int:
        """Forget what was trained since ``state``, an earlier one of this ledger: it is to be trained again.

        Returns:
            The number of indices that came back.
        """
        since = (set(range(state.frontier, self._frontier)) | self._beyond) - set(state.beyond)
        self._frontier, self._beyond = state.frontier, set(state.beyond)
        for index in since:
            self._return(index)
        return len(since)

    def state(self) -> LedgerState:
        return LedgerState(self._frontier, tuple(sorted(self._beyond)))

    def _take_free(self) -> int:
        if self._returned:
            return heapq.heappop(self._returned)
        # After a restart, indices past the next one may be buffered or trained already.
        while self.is_settled(self._next_index):
            self._next_index = max(self._next_index + 1, self._frontier)
        self._next_index += 1
        return self._next_index - 1

    def _return(self, index: int) -> None:
        # One that no lease of this life has reached comes by itself.
        if index < self._next_index:
            heapq.heappush(self._returned, index)

    def _close(self, lease: int, index: int) -> None:
        state = self._leases[lease]
        state.open.remove(index)
        self._count_down(state.worker, 1)
        if not state.open:
            del self._leases[lease]

    def _end(self, number: int) -> int:
        lease = self._leases.pop(number)
        self._count_down(lease.worker, len(lease.open))
        for index in lease.open:
            self._return(index)
        return len(lease.open)

    def _count_down(self, worker: str, n: int) -> None:
        self._outstanding[worker] -= n
        if not self._outstanding[worker]:
            del self._outstanding[worker]
