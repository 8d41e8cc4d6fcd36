"""The replay buffer: finished groups by the version that generated them, and the window that guards them.

Pure, no clock. The window is the promise that everything else rests on: at learner version v_t only groups
whose oldest token has v ≥ v_t − S are handed out. It is checked here, at the moment of sampling, whatever
was checked before.

Groups are handed out oldest version first, and in order of arrival within a version: the oldest are the ones
that the next step would lose, so this order wastes least. Training on the freshest first would keep the
sampled staleness lower while throwing paid-for work away.
"""

from __future__ import annotations

from collections import Counter, deque
from dataclasses import dataclass

from echo2p2p.data.trajectory import Group


@dataclass(frozen=True)
class Entry:
    """A buffered group, who delivered it, and under which lease."""

    group: Group
    worker: str
    lease: int = 0


class ReplayBuffer:
    """Bounded, indexed by version.

    Args:
        staleness: S, in versions.
        capacity_groups: :meth:`add` refuses more than this.
    """

    def __init__(self, *, staleness: int, capacity_groups: int) -> None:
        self._staleness = staleness
        self.capacity_groups = capacity_groups
        self._by_version: dict[int, deque[Entry]] = {}

    def __len__(self) -> int:
        return sum(len(entries) for entries in self._by_version.values())

    def admissible(self, group_version: int, learner_version: int) -> bool:
        """Whether a group of ``group_version`` is inside the window at ``learner_version``.

        A version from the future is as foreign as one that is too old.
        """
        return learner_version - self._staleness <= group_version <= learner_version

    def add(self, entry: Entry) -> bool:
        """Take a group in; False if the buffer is full."""
        if len(self) >= self.capacity_groups:
            return False
        self._by_version.setdefault(entry.group.version, deque()).append(entry)
        return True

    def waiting(self) -> list[Entry]:
        """All that is in the buffer, oldest version first."""
        return [entry for version in sorted(self._by_version) for entry in self._by_version[version]]

    def drop_stale(self, learner_version: int) -> list[Entry]:
        """Remove and return every group that has left the window at ``learner_version``."""
        stale = [v for v in self._by_version if not self.admissible(v, learner_version)]
        return [entry for version in sorted(stale) for entry in self._by_version.pop(version)]

    def drop_of(self, worker: str) -> list[Entry]:
        """Remove and return every group that ``worker`` delivered."""
        dropped = [entry for entry in self.waiting() if entry.worker == worker]
        for entry in dropped:
            self._by_version[entry.group.version].remove(entry)
        return dropped

    def take(self, n_groups: int, learner_version: int) -> list[Entry] | None:
        """Remove and return ``n_groups`` admissible groups, oldest version first; None if there are fewer."""
        versions = sorted(v for v in self._by_version if self.admissible(v, learner_version))
        if sum(len(self._by_version[v]) for v in versions) < n_groups:
            return None
        taken: list[Entry] = []
        for version in versions:
            entries = self._by_version[version]
            while entries and len(taken) < n_groups:
                taken.append(entries.popleft())
            if not entries:
                del self._by_version[version]
        return taken


def staleness_histogram(batch: list[Entry], learner_version: int) -> Counter[int]:
    """Completion tokens by staleness Δ = v_t − v; a sample counts with its oldest token."""
    histogram: Counter[int] = Counter()
    for entry in batch:
        for sample in entry.group.samples:
            histogram[learner_version - sample.version_min] += len(sample.completion)
    return histogram
