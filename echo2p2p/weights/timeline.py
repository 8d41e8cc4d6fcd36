"""When the bytes of one version came and from whom, for the picture of its dissemination. Bounded in size.

It says how a fetch went and decides nothing: what is wrong in it spoils a picture, not a transfer.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from echo2p2p.swarm.clock import Clock
from echo2p2p.swarm.identity import PeerId

MAX_POINTS = 128
"""Points that are kept of one fetch."""

Point = tuple[int, int, int]
"""Milliseconds since the announcement, and the bytes from the learner and from peers that were here by then."""


class Timeline:
    """Collects the arrivals of one fetch, however many chunks come.

    Args:
        since: when the version was announced, in seconds of ``clock.monotonic``.

    Attributes:
        by_source: chunk bytes by the peer that sent them, copies that were not needed included.
    """

    def __init__(self, clock: Clock, learner: PeerId, since: float) -> None:
        self._clock = clock
        self._learner = learner
        self._since = since
        self._slot_ms = 1
        self._slots: dict[int, Point] = {}
        self.by_source: Counter[PeerId] = Counter()
        self._total = 0

    def add(self, source: PeerId, nbytes: int) -> None:
        """``nbytes`` of ``source`` have arrived now."""
        self.by_source[source] += nbytes
        self._total += nbytes
        ms = max(0, round((self._clock.monotonic() - self._since) * 1000))
        from_learner = self.by_source[self._learner]
        self._slots[ms // self._slot_ms] = (ms, from_learner, self._total - from_learner)
        while len(self._slots) > MAX_POINTS:
            self._slot_ms *= 2
            self._slots = _coarser(self._slots, self._slot_ms)

    def points(self, limit: int) -> list[Point]:
        """The cumulative bytes at up to ``limit`` moments, ascending; the last is that of the last arrival."""
        slots, slot_ms = self._slots, self._slot_ms
        while len(slots) > max(1, limit):
            slot_ms *= 2
            slots = _coarser(slots, slot_ms)
        return list(slots.values())

    def sent_by(self, peers: Sequence[PeerId]) -> list[int]:
        """Chunk bytes from each of ``peers``, in their order."""
        return [self.by_source[peer] for peer in peers]


def _coarser(slots: dict[int, Point], slot_ms: int) -> dict[int, Point]:
    """One point a slot of ``slot_ms``: the last, since its bytes include the others'."""
    return {point[0] // slot_ms: point for point in slots.values()}
