"""Which missing chunk is asked from whom, and where to turn when a source fails. Pure: no I/O, no clock.

Every chunk has a route, the same rule on every peer: who is ahead of this peer in the chunk's tree, and then the
learner. So nobody waits for a peer that waits for it, and what a member that is gone should have forwarded leaves
the learner once more at most, not once for every peer. A peer that none of these could give the chunk gives up its
place: those who wait for it turn elsewhere, and it may wait for any of them.

A chunk may be open at several sources at once (endgame); the first copy counts, the others are cancelled.
"""

from __future__ import annotations

from collections import Counter, defaultdict, deque
from collections.abc import Collection, Iterable, Iterator, Mapping
from itertools import islice

from echo2p2p.swarm.identity import PeerId
from echo2p2p.weights.plan import RelayPlan

MAX_ROUNDS = 20
"""Times that a route is walked to its end before a chunk counts as unobtainable."""
MAX_FAILURES = 3
"""Failures after which a source is not asked again in one fetch."""
_GUESSES = 2
"""Members that are asked whether they happen to have a chunk before the learner sends it once more."""


class Schedule:
    """The state of one fetch.

    Args:
        n_chunks: chunks 0 … n_chunks − 1.
        plan: who holds what first.
        me: this peer; may or may not be one of the plan's relays.
        learner: the source of last resort, and the first for this peer's own stripe.
        have: chunks that are here already.
        unreliable: sources that failed lately; asked only after the others.
        banned: sources that are never asked.
        others: peers outside the plan that may have chunks; asked when everybody else has been.
    """

    def __init__(
        self,
        n_chunks: int,
        plan: RelayPlan,
        *,
        me: PeerId,
        learner: PeerId,
        have: Collection[int] = (),
        unreliable: Collection[PeerId] = (),
        banned: Collection[PeerId] = (),
        others: Collection[PeerId] = (),
    ) -> None:
        self._plan = plan
        self._me = me
        self._learner = learner
        self._unreliable = frozenset(unreliable)
        self._gone = set(banned)
        known = {me, learner, *plan.relays}
        self._others = [peer for peer in dict.fromkeys(others) if peer not in known]
        self._failures: Counter[PeerId] = Counter()
        self._missing = set(range(n_chunks)) - set(have)
        self._queues: dict[PeerId, deque[tuple[int, bool]]] = defaultdict(deque)
        self._open: dict[PeerId, dict[int, None]] = defaultdict(dict)
        self._copies: Counter[int] = Counter()
        self._step: dict[int, int] = {}
        self._unobtainable: set[int] = set()
        self._renounced: list[int] = []
        self._parked: list[int] = []
        # Chunks whose first source is too slow to count on: one open copy is not enough for them.
        self._relieved: set[int] = set()
        for chunk in sorted(self._missing):
            self._begin(chunk)

    @property
    def missing(self) -> frozenset[int]:
        return frozenset(self._missing)

    @property
    def done(self) -> bool:
        return not self._missing

    @property
    def unobtainable(self) -> frozenset[int]:
        """Missing chunks that nobody is left to be asked for. If there are any, the fetch has failed."""
        return frozenset(self._unobtainable)

    @property
    def gone(self) -> frozenset[PeerId]:
        """Sources that are not asked any more."""
        return frozenset(self._gone)

    def take_renounced(self) -> list[int]:
        """The chunks for which this peer has given up its place since it was asked last."""
        renounced, self._renounced = self._renounced, []
        return renounced

    def failures(self, source: PeerId) -> int:
        return self._failures[source]

    def busy_sources(self) -> list[PeerId]:
        """Sources with chunks queued or open."""
        return [source for source in list(self._queues) if self.load(source)]

    def load(self, source: PeerId) -> int:
        """Chunks that are queued for or open at ``source``."""
        return len(self._queues[source]) + len(self._open[source])

    def open_at(self, source: PeerId) -> int:
        """Chunks that ``source`` was asked for and has not answered."""
        return len(self._open[source])

    def is_open(self, source: PeerId, chunk: int) -> bool:
        return chunk in self._open[source]

    def take(self, source: PeerId, limit: int) -> dict[bool, list[int]]:
        """Up to ``limit`` queued chunks to ask ``source`` for, now open; by whether it shall wait."""
        asked: dict[bool, list[int]] = {}
        queue = self._queues[source]
        while queue and limit > 0:
            chunk, wait = queue.popleft()
            if chunk in self._missing and chunk not in self._open[source]:
                self._open[source][chunk] = None
                asked.setdefault(wait, []).append(chunk)
                limit -= 1
            else:
                self._copies[chunk] -= 1
        return asked

    def arrived(self, chunk: int) -> list[PeerId]:
        """``chunk`` is here, verified. Returns the sources at which it was open."""
        self._missing.discard(chunk)
        self._unobtainable.discard(chunk)
        if chunk in self._parked:
            self._parked.remove(chunk)
        holders = [source for source, chunks in self._open.items() if chunk in chunks]
        for source in holders:
            del self._open[source][chunk]
            self._copies[chunk] -= 1
        return holders

    def lacks(self, source: PeerId, chunks: Iterable[int]) -> None:
        """``source`` does not have ``chunks``: turn to the next on their routes."""
        for chunk in chunks:
            if chunk in self._open[source]:
                del self._open[source][chunk]
                self._drop_copy(chunk)

    def failed(self, source: PeerId, *, for_good: bool = False) -> None:
        """The lane to ``source`` broke, stalled or lied: turn elsewhere with all that it was to send."""
        self._failures[source] += 1
        if for_good or self._failures[source] >= MAX_FAILURES:
            self._gone.add(source)
        chunks = [*self._open[source], *(chunk for chunk, _ in self._queues[source])]
        self._open[source].clear()
        self._queues[source].clear()
        for chunk in chunks:
            self._relieved.discard(chunk)
            self._drop_copy(chunk)

    def replan(self, plan: RelayPlan) -> dict[PeerId, list[int]]:
        """The plan has become this one, with other suspects: everything missing is asked as if it had begun so.

        In the order in which it is planned, too: who has turned from one liar to the next has lost that. A peer that
        comes under suspicion itself gives up its place.

        Returns:
            By source, the chunks that it was asked for and that are now asked of others.
        """
        if self._me in plan.suspects and self._me not in self._plan.suspects:
            self._renounced.extend(sorted(self._missing))
        self._plan = plan
        for queue in self._queues.values():
            queue.clear()
        for state in (self._step, self._parked, self._relieved, self._unobtainable, self._copies):
            state.clear()
        first = {chunk: self._first(chunk) for chunk in sorted(self._missing)}
        moved: dict[PeerId, list[int]] = {}
        for source, chunks in self._open.items():
            moved[source] = [chunk for chunk in chunks if first[chunk] != source]
            self._open[source] = {chunk: None for chunk in chunks if first[chunk] == source}
            self._copies.update(list(self._open[source]))
        for chunk in first:
            if not self._copies[chunk]:
                self._begin(chunk)
        return moved

    def _first(self, chunk: int) -> PeerId:
        """Who is asked for ``chunk`` before all others, of those that can be."""
        passed = self._gone | self._unreliable
        return next((peer for peer in self._plan.ahead(chunk, self._me) if peer not in passed), self._learner)

    def relieve(self, slow: Mapping[PeerId, int]) -> int:
        """Ask others too for what slow sources will not send soon; how many chunks that were.

        What they have been asked for stays open there: whoever is first wins.

        Args:
            slow: by source, how many of its chunks are left to it alone, the first ones.
        """
        late = Counter(chunk for source, keep in slow.items() for chunk in list(self._open[source])[keep:])
        count = 0
        for chunk, copies in late.items():
            # Only if all that were asked for it are slow; and once, for each time is another copy.
            if chunk not in self._relieved and copies == self._copies[chunk] and self._queue_elsewhere(chunk):
                self._relieved.add(chunk)
                count += 1
        return count + sum(self._unqueue(source, keep) for source, keep in slow.items())

    def _unqueue(self, source: PeerId, keep: int) -> int:
        """Ask others for what ``source`` has not been asked for yet, beyond its first ``keep`` chunks."""
        count = 0
        queue = self._queues[source]
        kept: deque[tuple[int, bool]] = deque()
        for _ in range(max(0, self.load(source) - keep)):
            if not queue:
                break
            chunk, wait = queue.pop()
            if self._queue_elsewhere(chunk):
                self._copies[chunk] -= 1
                count += 1
            else:
                kept.appendleft((chunk, wait))
        queue.extend(kept)
        return count

    def rescue(self, limit: int) -> int:
        """Ask the learner too for up to ``limit`` chunks that it was not asked for; how many that were.

        For when those who should send do not and say that they will: who stands in for them may do the same.
        """
        if self._learner in self._gone:
            return 0
        asked = self._open[self._learner].keys() | {chunk for chunk, _ in self._queues[self._learner]}
        waited = (chunk for chunk in sorted(self._missing) if self._copies[chunk] > 0 and chunk not in asked)
        rescued = list(islice(waited, limit))
        for chunk in rescued:
            self._relieved.add(chunk)
            self._copies[chunk] += 1
            self._queues[self._learner].append((chunk, True))
        return len(rescued)

    def next_round(self) -> None:
        """Ask once more for the chunks that nobody had so far; not at once, for those asked may get them."""
        parked, self._parked = self._parked, []
        for chunk in parked:
            self._forward(chunk)

    def _begin(self, chunk: int) -> None:
        """As :meth:`_forward`, without laying out the whole route of a chunk whose first source is there."""
        source = self._plan.source(chunk, self._me) or self._learner
        if source in self._gone or source in self._unreliable:
            self._forward(chunk)
        else:
            self._queue(chunk, source, True, 1)

    def _drop_copy(self, chunk: int) -> None:
        self._copies[chunk] -= 1
        if chunk in self._missing and self._copies[chunk] <= (chunk in self._relieved):
            self._forward(chunk)

    def _forward(self, chunk: int) -> None:
        """Queue ``chunk`` at the next source of its route that can be asked; after the last, the round is over."""
        step = self._step.get(chunk, 0)
        route = list(self._route(chunk))
        end = (step // len(route) + 1) * len(route)
        for at in range(step, end):
            if at and route[(at - 1) % len(route)] == (self._learner, True):
                self._renounced.append(chunk)
            source, wait = route[at % len(route)]
            if source not in self._gone and chunk not in self._open[source]:
                self._queue(chunk, source, wait, at + 1)
                return
        self._step[chunk] = end
        if self._copies[chunk] <= 0:
            gone = all(source in self._gone for source, _ in route)
            if gone or end >= MAX_ROUNDS * len(route):
                self._unobtainable.add(chunk)
            else:
                self._parked.append(chunk)

    def _queue_elsewhere(self, chunk: int) -> bool:
        """Queue ``chunk`` at one more source that will have it, without giving up this peer's place."""
        step = self._step.get(chunk, 0)
        route = list(self._route(chunk))
        for at in range(step, route.index((self._learner, True)) + 1):
            source, wait = route[at]
            if source not in self._gone and chunk not in self._open[source]:
                self._queue(chunk, source, wait, at + 1)
                return True
        return False

    def _queue(self, chunk: int, source: PeerId, wait: bool, step: int) -> None:
        self._step[chunk] = step
        self._copies[chunk] += 1
        self._queues[source].append((chunk, wait))

    def _route(self, chunk: int) -> Iterator[tuple[PeerId, bool]]:
        """The sources of ``chunk`` in the order in which they are asked, and whether each shall wait."""
        ahead = list(self._plan.ahead(chunk, self._me))
        passed = {self._me, *ahead}
        behind = [peer for peer in self._plan.others(chunk) if peer not in passed]
        trusted = [source for source in ahead if source not in self._unreliable]
        yield from ((source, True) for source in trusted)
        # The first holder gets its chunks from the learner; who stands in for it first looks around.
        guesses = [peer for peer in behind if peer not in self._plan.suspects][: _GUESSES if ahead else 0]
        yield from ((source, False) for source in guesses)
        yield self._learner, True
        yield from ((source, True) for source in ahead if source in self._unreliable)
        yield from ((source, True) for source in behind if source not in guesses)
        yield from ((source, True) for source in guesses)
        yield from ((source, False) for source in self._others)
