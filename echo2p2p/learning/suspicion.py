"""Which workers should not relay the next version: those that others say they caught lying. Pure.

A worker bans a peer whose chunk does not hash to what the learner signed for. Nobody can prove that to a third, so
what workers report is believed as far as it can do little harm: whoever is named becomes a leaf of the relay plan,
still gets every version, and loses nothing else; one accuser names few, and never more than a third of the members
are leaves for this reason.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from echo2p2p.swarm.identity import PeerId

MAX_NAMED = 4
"""Peers of whom one accuser is believed anything: its latest."""


class Suspicion:
    """Who was named by whom, for the length of a run."""

    def __init__(self) -> None:
        self._named: dict[PeerId, tuple[PeerId, ...]] = {}

    def heard(self, accuser: PeerId, named: Iterable[PeerId]) -> bool:
        """Take note of all that ``accuser`` has banned; whether that is news."""
        latest = tuple(dict.fromkeys(peer for peer in named if peer != accuser))[-MAX_NAMED:]
        if not latest or self._named.get(accuser) == latest:
            return False
        self._named[accuser] = latest
        return True

    def leaves(self, members: Sequence[PeerId]) -> list[PeerId]:
        """The ``members`` that should forward nothing, the most accused first; only members are heard.

        Named by one who is not named itself, or by two. Of two that name each other, neither is believed alone.
        """
        accusers: dict[PeerId, set[PeerId]] = {}
        for accuser in members:
            for peer in self._named.get(accuser, ()):
                accusers.setdefault(peer, set()).add(accuser)
        suspects = [
            peer
            for peer in members
            if len(accusers.get(peer, ())) >= 2 or any(by not in accusers for by in accusers.get(peer, ()))
        ]
        suspects.sort(key=lambda peer: (-len(accusers[peer]), peer))
        return suspects[: len(members) // 3]
