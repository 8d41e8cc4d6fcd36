"""Who relays what: the striped relay plan, and the time below which no plan can go. Pure.

Every peer computes the same plan from the manifest's member list. Each chunk has a first holder, who gets
it from the learner and forwards it to all other members: the learner sends each chunk once. A member that
forwards a share s of M bytes to N − 1 others needs (N − 1)·s·M / u seconds, so shares in proportion to the
uplinks u let all members finish together (ECHO-2's stripes, weighted).
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator, Sequence

from echo2p2p.swarm.identity import PeerId
from echo2p2p.weights.manifest import Member

_BITS_PER_MBIT = 1e6


def fluid_bound_s(
    nbytes: int, learner_up_mbit: float, uplinks_mbit: Sequence[float], downlinks_mbit: Sequence[float]
) -> float:
    """Seconds that N peers need at least until the last of them has M = ``nbytes``.

    max(M/u_s, M/d_min, N·M/(u_s + Σu_i)): every byte leaves the learner once, enters the slowest peer
    once, and N·M bytes leave somebody (Kumar and Ross, "Peer-Assisted File Distribution").
    Rates in Mbit/s, all above 0; one uplink and one downlink a peer.
    """
    if not uplinks_mbit:
        return 0.0
    mbit = nbytes * 8 / _BITS_PER_MBIT
    together = learner_up_mbit + sum(uplinks_mbit)
    return max(mbit / learner_up_mbit, mbit / min(downlinks_mbit), len(uplinks_mbit) * mbit / together)


def relay_plan(n_chunks: int, members: Sequence[Member]) -> RelayPlan:
    """The plan for ``n_chunks`` chunks among ``members``; the same on every peer.

    Shares follow the announced uplinks and are interleaved, so that every first holder is busy from the
    first moment to the last. A member without uplink relays nothing, unless no member has any.
    """
    relays = [member for member in members if member.upload_mbit > 0] or list(members)
    weights = [member.upload_mbit or 1.0 for member in relays]
    # Relay i's k-th chunk is due at (k + ½)/weight; the next chunk goes to whoever is due first.
    due = [(0.5 / weight, at) for at, weight in enumerate(weights)]
    heapq.heapify(due)
    counts = [0] * len(relays)
    holders: list[int] = []
    for _ in range(n_chunks if relays else 0):
        at = due[0][1]
        holders.append(at)
        counts[at] += 1
        heapq.heapreplace(due, ((counts[at] + 0.5) / weights[at], at))
    return RelayPlan([member.peer for member in relays], holders)


class RelayPlan:
    """The first holder of every chunk, and who stands in for it. ``relays`` may be empty."""

    def __init__(self, relays: Sequence[PeerId], holders: Sequence[int]) -> None:
        self.relays = tuple(relays)
        self._holders = holders

    def first_holder(self, chunk: int) -> PeerId:
        """Who gets ``chunk`` from the learner."""
        return self.relays[self._holders[chunk]]

    def order(self, chunk: int) -> Iterator[PeerId]:
        """The first holder of ``chunk``, then the others in the order in which they stand in for it.

        Chunks of one holder have different deputies, so the stripe of one that is gone is spread over all.
        """
        count = len(self.relays)
        if not count:
            return
        first = self._holders[chunk]
        yield self.relays[first]
        turn = chunk // count
        for step in range(count - 1):
            yield self.relays[(first + 1 + (turn + step) % (count - 1)) % count]
