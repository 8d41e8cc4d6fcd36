"""What this peer thinks of its sources, from one fetch to the next."""

from __future__ import annotations

from collections import Counter

from echo2p2p.swarm.identity import PeerId

_SUSPECT_FAULTS = 2
_MAX_FAULTS = 8


class Standing:
    """One proven bad chunk bans a source for the run; failures only put it behind the others for a while.

    The learner is never banned: what it cannot give, nobody can.
    """

    def __init__(self, learner: PeerId) -> None:
        self._learner = learner
        self._faults: Counter[PeerId] = Counter()
        self._banned: dict[PeerId, str] = {}

    @property
    def banned(self) -> dict[PeerId, str]:
        """Banned sources, each with what it did."""
        return dict(self._banned)

    def lied(self, source: PeerId, what: str) -> None:
        if source != self._learner:
            self._banned.setdefault(source, what)

    def failed(self, source: PeerId) -> None:
        self._faults[source] = min(_MAX_FAULTS, self._faults[source] + 1)

    def unreliable(self) -> frozenset[PeerId]:
        """Sources that failed more than once lately, the learner apart."""
        return frozenset(
            source
            for source, faults in self._faults.items()
            if faults >= _SUSPECT_FAULTS and source != self._learner
        )

    def forgive(self) -> None:
        """Time heals: call once a fetch."""
        self._faults -= Counter(dict.fromkeys(self._faults, 1))
