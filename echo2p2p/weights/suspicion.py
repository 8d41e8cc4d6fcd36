"""Which members of a version should not relay it, by what the others report of them. Pure.

A reader bans a source whose chunk does not hash to what the learner signed for, and tells the learner. It cannot
prove that to a third, so all that a report shows is that one of the two lies: suspects are a few members that
together explain every report. Whoever is suspected without reason loses its place in the relay, and nothing else.

Who lets others wait and never sends is reported as slow, and sits out a few versions. Those behind it wait as well,
and are reported too; so whoever has reported a source itself is excused, once in that time.
"""

from __future__ import annotations

import heapq
from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Sequence
from typing import TypeVar

from echo2p2p.swarm.identity import PeerId

T = TypeVar("T")

MAX_NAMED = 4
"""Members that one accuser can name as liars: the first, as long as they are members."""
_BELIEVED = 2
"""Members of whom a suspect is still believed to have been lied to by them; not if it names more."""
REST_VERSIONS = 8
"""Versions that a slow member sits out; twice as many each time that it is found slow again."""
_MAX_REST_VERSIONS = 64
_MAX_PEERS = 4096
"""Peers of whom anything is remembered: many more than there are members at any time."""


class Suspicion:
    """Who was named by whom, for the length of a run."""

    def __init__(self) -> None:
        self._lied: dict[PeerId, tuple[PeerId, ...]] = {}
        self._slow: dict[PeerId, tuple[int, tuple[PeerId, ...]]] = {}
        self._rests: dict[PeerId, tuple[int, int]] = {}
        self._excused: dict[PeerId, int] = {}
        self._version = -1
        self._turn = 0

    def lied(self, accuser: PeerId, named: Iterable[PeerId], members: Collection[PeerId]) -> bool:
        """``accuser`` was sent wrong bytes by ``named``; whether that is news. Only ``members`` count."""
        members = frozenset(members)
        if accuser not in members:
            return False
        known = tuple(peer for peer in self._lied.get(accuser, ()) if peer in members)
        new = [peer for peer in dict.fromkeys(named) if peer in members and peer not in (accuser, *known)]
        latest = (*known, *new)[:MAX_NAMED]
        if len(latest) == len(known):
            return False
        _remember(self._lied, accuser, latest)
        return True

    def slow(self, accuser: PeerId, named: Iterable[PeerId], version: int) -> None:
        """``accuser`` has waited in vain for what ``named`` were to send of ``version``; itself: for the learner."""
        before, already = self._slow.get(accuser, (-1, ()))
        if version >= before:
            named = dict.fromkeys([*(already if version == before else ()), *named])
            _remember(self._slow, accuser, (version, tuple(named)[:MAX_NAMED]))

    def suspects(self, members: Sequence[PeerId]) -> list[PeerId]:
        """The ``members`` that explain all reports of lies between them, the most certain first; a third at most.

        Again and again whoever stands out among those whose reports are not explained yet: by as many others as
        named it, or by all that it is at odds with but one. So one accuser is believed about two, of two that name
        each other neither is, and a chain of liars loses to the second honest member that met it. Last come those
        whom a suspect has named, for the second liar in a row was lied to as well; not if they named it too.
        """
        present = set(members)
        heard = {
            (accuser, peer)
            for accuser, named in self._lied.items()
            for peer in named
            if accuser in present and peer in present
        }
        most = len(members) // 3
        found = _explaining(heard, most)
        known = set(found)
        words = Counter(accuser for accuser, _ in heard)
        found += sorted(
            {
                peer
                for accuser, peer in heard
                if peer not in known and (peer, accuser) not in heard and words[accuser] <= _BELIEVED
            }
        )
        return found[:most]

    def leaves(self, members: Sequence[PeerId], version: int) -> list[PeerId]:
        """The ``members`` that should forward nothing of the next ``version``: suspects, and slow ones that rest."""
        if version != self._version:
            self._judge()
            self._version, self._turn = version, self._turn + 1
        resting = [peer for peer in members if self._resting(peer)]
        return list(dict.fromkeys([*self.suspects(members), *resting]))[: len(members) // 3]

    def _resting(self, peer: PeerId) -> bool:
        return self._rests.get(peer, (-1, 0))[0] >= self._turn

    def _judge(self) -> None:
        """Whoever was found slow in what has been published so far rests from the next version on."""
        reports = list(self._slow.items())
        reported_itself = {(accuser, version) for accuser, (version, _) in reports}
        self._slow.clear()
        for accuser, (version, named) in reports:
            for peer in named:
                # Who rests has nothing to send; so it is, too, with who was found slow by another one just now.
                if peer == accuser or self._resting(peer):
                    continue
                if (peer, version) in reported_itself and self._excused.get(peer, self._turn) == self._turn:
                    _remember(self._excused, peer, self._turn)
                    continue
                rest = min(_MAX_REST_VERSIONS, 2 * self._rests.get(peer, (0, 0))[1] or REST_VERSIONS)
                _remember(self._rests, peer, (self._turn + rest, rest))
        for peer in [peer for peer, turn in self._excused.items() if turn + REST_VERSIONS <= self._turn]:
            del self._excused[peer]


def _explaining(reports: Collection[tuple[PeerId, PeerId]], most: int) -> list[PeerId]:
    """Who stands out among the reports (accuser, named), then among those that this leaves, until ``most`` are found.

    The time goes with the number of reports: each is looked at once and taken away once.
    """
    named_by: dict[PeerId, set[PeerId]] = defaultdict(set)
    at_odds: dict[PeerId, set[PeerId]] = defaultdict(set)
    for accuser, peer in reports:
        named_by[peer].add(accuser)
        at_odds[peer].add(accuser)
        at_odds[accuser].add(peer)

    def weight(peer: PeerId) -> tuple[int, int, int]:
        accusers, others = len(named_by[peer]), len(at_odds[peer])
        return -max(accusers, others - 1), -accusers, -others

    heap = [(weight(peer), peer) for peer in at_odds]
    heapq.heapify(heap)
    found: list[PeerId] = []
    while heap and len(found) < most:
        heaviest = heap[0][0]
        # Weights only go down: what does not hold any more was put in again when it changed.
        alike: dict[PeerId, None] = {}
        while heap and heap[0][0] == heaviest:
            peer = heapq.heappop(heap)[1]
            if at_odds[peer] and weight(peer) == heaviest:
                alike[peer] = None
        found += alike
        relieved = set()
        for peer in alike:
            for other in at_odds[peer]:
                at_odds[other].discard(peer)
                named_by[other].discard(peer)
                relieved.add(other)
            at_odds[peer] = set()
        for peer in relieved:
            if at_odds[peer]:
                heapq.heappush(heap, (weight(peer), peer))
    return found


def _remember(memory: dict[PeerId, T], peer: PeerId, what: T) -> None:
    """Put ``what`` into ``memory`` as the newest of no more than :data:`_MAX_PEERS`."""
    memory.pop(peer, None)
    memory[peer] = what
    if len(memory) > _MAX_PEERS:
        del memory[next(iter(memory))]
