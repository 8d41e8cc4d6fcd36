"""Who relays what: interior-disjoint trees, and the time below which no plan can go. Pure.

Every peer computes the same plan from the manifest. The chunks of a version are dealt to k trees. Each member
forwards in one tree only, and is a leaf in the others (SplitStream: Castro et al., "High-Bandwidth Multicast in
Cooperative Environments", 2003); each chunk goes from the learner to the root of its tree and down from there, so
the learner sends it once. k = 1 is a chain where uplinks are equal: one flow on each link, a depth of N. k = N is
ECHO-2's stripes: two hops, but N flows meet at each downlink. Between them, depth falls and the flows grow in
number; :func:`relay_plan` takes the k with the smallest :func:`predicted_s`.
"""

from __future__ import annotations

import heapq
import itertools

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

from echo2p2p.swarm.identity import PeerId
from echo2p2p.weights.manifest import Member

_BITS_PER_MBIT = 1e6
_LEARNER = -1


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


@dataclass(frozen=True)
class Tree:
    """The way of some of the chunks.

    Attributes:
        share: the part of all chunks that goes this way.
        parent: by member, who forwards to it; −1 for the root, which gets from the learner.
    """

    share: float
    parent: tuple[int, ...]

    @cached_property
    def children(self) -> tuple[tuple[int, ...], ...]:
        """By member, to whom it forwards."""
        listed: list[list[int]] = [[] for _ in self.parent]
        for child, parent in enumerate(self.parent):
            if parent != _LEARNER:
                listed[parent].append(child)
        return tuple(tuple(children) for children in listed)

    @cached_property
    def root(self) -> int:
        return self.parent.index(_LEARNER)

    @cached_property
    def leaves(self) -> tuple[int, ...]:
        return tuple(at for at, children in enumerate(self.children) if not children)

    @cached_property
    def depths(self) -> tuple[int, ...]:
        """By member, the hops from the learner to it."""
        depths = [0] * len(self.parent)
        level, depth = [self.root], 1
        while level:
            for at in level:
                depths[at] = depth
            level = [child for at in level for child in self.children[at]]
            depth += 1
        return tuple(depths)


def trees(uplinks_mbit: Sequence[float], k: int) -> list[Tree]:
    """``k`` interior-disjoint trees over members with these uplinks, as evenly loaded as whole children allow.

    Members are dealt to the trees so that each tree has about the same uplink; a tree's share follows from what it
    has, and within a tree the number of children follows the uplinks.
    """
    n = len(uplinks_mbit)
    uplinks = uplinks_mbit if any(uplinks_mbit) else [1.0] * n
    groups: list[list[int]] = [[] for _ in range(k)]
    lightest = [(0.0, at) for at in range(k)]
    for member in sorted(range(n), key=lambda at: -uplinks[at]):
        if uplinks[member] <= 0:
            break
        weight, at = heapq.heappop(lightest)
        groups[at].append(member)
        heapq.heappush(lightest, (weight + uplinks[member], at))
    total = sum(uplinks)
    return [
        Tree(sum(uplinks[at] for at in group) / total, _attach(uplinks, group)) for group in groups if group
    ]


def _attach(uplinks: Sequence[float], interior: Sequence[int]) -> tuple[int, ...]:
    """The parents of one tree whose ``interior`` members have n − 1 children between them."""
    n = len(uplinks)
    slots = dict(zip(interior, _apportion([uplinks[at] for at in interior], n - 1), strict=True))
    by_slots = sorted(interior, key=lambda at: -slots[at])
    inside = set(interior)
    parent = [_LEARNER] * n
    free = [by_slots[0]] * slots[by_slots[0]]
    at = 0
    for member in [*by_slots[1:], *(member for member in range(n) if member not in inside)]:
        parent[member] = free[at]
        at += 1
        free.extend([member] * slots.get(member, 0))
    return tuple(parent)


def _apportion(weights: Sequence[float], count: int) -> list[int]:
    """``count`` in whole parts proportional to ``weights``, by largest remainders."""
    total = sum(weights)
    exact = [count * weight / total for weight in weights]
    parts = [int(each) for each in exact]
    by_remainder = sorted(range(len(weights)), key=lambda at: (parts[at] - exact[at], at))
    for at in by_remainder[: count - sum(parts)]:
        parts[at] += 1
    return parts


FLOW_COST = 0.02
HOP_S = 0.05


def predicted_s(
    plan: Sequence[Tree],
    nbytes: int,
    chunk_bytes: int,
    learner_up_mbit: float,
    uplinks_mbit: Sequence[float],
    downlinks_mbit: Sequence[float],
) -> float:
    """Seconds until the last member has ``nbytes`` over the trees of ``plan``, as links share themselves.

    The busiest link decides: the learner's uplink, a member's uplink with its children, or a downlink, on which
    each further flow that it shares costs :data:`FLOW_COST`. Then each hop of the deepest tree is a chunk and
    :data:`HOP_S` late.
    """
    mbit, chunk_mbit = nbytes * 8 / _BITS_PER_MBIT, min(chunk_bytes, nbytes) * 8 / _BITS_PER_MBIT
    slowest = mbit / learner_up_mbit
    deepest = 0.0
    for at, (up, down) in enumerate(zip(uplinks_mbit, downlinks_mbit, strict=True)):
        sent = sum(tree.share * len(tree.children[at]) for tree in plan)
        flows = len({tree.parent[at] for tree in plan})
        slowest = max(slowest, mbit * (1 + FLOW_COST * (flows - 1)) / down)
        if sent:
            slowest = max(slowest, sent * mbit / up)
    for tree in plan:
        late = [0.0] * len(tree.parent)
        for at in sorted(range(len(tree.parent)), key=lambda at: tree.depths[at]):
            parent = tree.parent[at]
            if parent != _LEARNER:
                late[at] = late[parent] + HOP_S + chunk_mbit / max(uplinks_mbit[parent], 1e-3)
        deepest = max(deepest, *late)
    return slowest + deepest


def relay_plan(n_chunks: int, members: Sequence[Member], k: int | None = None) -> RelayPlan:
    """The plan for ``n_chunks`` chunks among ``members``; the same on every peer.

    The trees' chunks are interleaved, so that every member is busy from the first moment to the last.
    """
    import os

    if k is None:
        k = int(os.environ.get("ECHO_K", len(members)))
    planned = trees([member.upload_mbit for member in members], k) if members else []
    # The j-th chunk of a tree is due at (j + ½)/share; the next chunk goes to whichever is due first.
    due = [(0.5 / tree.share, at) for at, tree in enumerate(planned)]
    heapq.heapify(due)
    counts = [0] * len(planned)
    dealt: list[int] = []
    for _ in range(n_chunks if planned else 0):
        at = due[0][1]
        dealt.append(at)
        counts[at] += 1
        heapq.heapreplace(due, ((counts[at] + 0.5) / planned[at].share, at))
    return RelayPlan([member.peer for member in members], planned, dealt)


class RelayPlan:
    """From whom each member gets each chunk, and who stands in for whom. ``relays`` may be empty."""

    def __init__(self, relays: Sequence[PeerId], planned: Sequence[Tree], dealt: Sequence[int]) -> None:
        self.relays = tuple(relays)
        self._places = {peer: at for at, peer in enumerate(relays)}
        self._trees = planned
        self._dealt = dealt

    def first_holder(self, chunk: int) -> PeerId:
        """Who gets ``chunk`` from the learner."""
        return self.relays[self._trees[self._dealt[chunk]].root]

    def source(self, chunk: int, me: PeerId) -> PeerId | None:
        """From whom ``me`` gets ``chunk``; None if from the learner."""
        return next(self.ahead(chunk, me), None)

    def ahead(self, chunk: int, me: PeerId) -> Iterator[PeerId]:
        """The members that get ``chunk`` before ``me``: its source first, then who stands in for whom.

        For a member that is gone stands in one of its children, another one for each chunk: the eldest, who gets
        the chunk from further up, while its siblings get it from the eldest. A peer that is no member gets its
        chunks from leaves.
        """
        if not self.relays:
            return
        tree = self._trees[self._dealt[chunk]]
        turn = chunk // len(self._trees)
        at = self._places.get(me, _LEARNER)
        if at == _LEARNER:
            at = tree.leaves[turn % len(tree.leaves)]
            yield self.relays[at]
        while (parent := tree.parent[at]) != _LEARNER:
            yield self.relays[parent]
            for sibling in _rotated(tree.children[parent], turn):
                if sibling == at:
                    break
                yield self.relays[sibling]
            at = parent

    def others(self, chunk: int) -> Iterator[PeerId]:
        """All members, beginning with another one for each chunk."""
        return (self.relays[at] for at in _rotated(range(len(self.relays)), chunk))


def _rotated(items: Sequence[int], turn: int) -> Iterator[int]:
    start = turn % len(items)
    return itertools.chain(items[start:], items[:start])
