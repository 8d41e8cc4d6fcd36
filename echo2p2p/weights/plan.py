"""Who relays what: interior-disjoint trees, and the time below which no plan can go. Pure.

Every peer computes the same plan from the manifest. The chunks of a version are dealt to k trees. Each member
forwards in one tree only, and is a leaf in the others (SplitStream: Castro et al., "High-Bandwidth Multicast in
Cooperative Environments", 2003); each chunk goes from the learner to the root of its tree and down from there, so
the learner sends it once. k = 1 is a chain where uplinks are equal: one flow on each link, a depth of N. k = N is
ECHO-2's stripes: two hops, but N flows meet at each downlink. Between them, depth falls and the flows grow in
number; the learner takes the k with the smallest :func:`predicted_s` (:func:`best_tree_count`) and says so in the
manifest.
"""

from __future__ import annotations

import heapq
import itertools
import math
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

from echo2p2p.swarm.identity import PeerId
from echo2p2p.weights.manifest import MAX_TREES, Member

MEETING_COST = 0.2
"""f flows that meet at a downlink take 1 + MEETING_COST · (1 − 1/f) times as long to fill it as one does: each waits
now and then for its own source, and what the link has missed then is lost. Measured with 2, 4, 8 and 16."""
HOP_S = 0.05
"""How much later a chunk is one hop further down, besides its own time on the wire."""
MAX_FAN_OUT = 32
_TREE_COUNTS = (1, 2, 3, 4, 5, 6, 7, 8, 12, 16, 24, 32)
_BITS_PER_MBIT = 1e6
_MIN_MBIT = 1e-3
"""Who has less than that to give is not asked to forward anything."""
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

    def passes_on(self, uplinks_mbit: Sequence[float]) -> float:
        """The rate at which all members can forward what they get this way, in Mbit/s."""
        rates = [up / len(kids) for up, kids in zip(uplinks_mbit, self.children, strict=True) if kids]
        return max(_MIN_MBIT, min(rates, default=math.inf))

    @cached_property
    def top_down(self) -> tuple[int, ...]:
        """Every member after its parent."""
        order = [self.root]
        for at in order:
            order.extend(self.children[at])
        return tuple(order)


def trees(uplinks_mbit: Sequence[float], k: int, fan_out: int = MAX_FAN_OUT) -> list[Tree]:
    """``k`` interior-disjoint trees over members with these uplinks, as evenly loaded as whole children allow.

    Members are dealt to the trees so that each tree has about the same uplink; a tree's share follows from what it
    has, and within a tree the number of children follows the uplinks. Members without uplink are leaves everywhere.

    Args:
        fan_out: no member has more children than this, unless there are too few uplinks for it.
    """
    n = len(uplinks_mbit)
    uplinks = [up if up >= _MIN_MBIT else 0.0 for up in uplinks_mbit]
    if not any(uplinks):
        uplinks = [1.0] * n
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
        Tree(sum(uplinks[at] for at in group) / total, _attach(uplinks, group, fan_out))
        for group in groups
        if group
    ]


def _attach(uplinks: Sequence[float], interior: Sequence[int], fan_out: int) -> tuple[int, ...]:
    """The parents of one tree whose ``interior`` members have n − 1 children between them."""
    n = len(uplinks)
    slots = dict(zip(interior, _apportion([uplinks[at] for at in interior], n - 1, fan_out), strict=True))
    by_slots = sorted(interior, key=lambda at: -slots[at])
    inside = set(interior)
    parent = [_LEARNER] * n
    free = [by_slots[0]] * slots[by_slots[0]]
    leaves = (member for member in range(n) if member not in inside)
    for at, member in enumerate([*by_slots[1:], *leaves]):
        parent[member] = free[at]
        free.extend([member] * slots.get(member, 0))
    return tuple(parent)


def _apportion(weights: Sequence[float], count: int, limit: int) -> list[int]:
    """``count`` in whole parts that follow ``weights``, by largest remainders; above ``limit`` only if all are."""
    limit = max(limit, -(-count // len(weights)))
    parts = [0] * len(weights)
    rest = count
    while rest:
        open_ = [at for at in range(len(weights)) if parts[at] < limit]
        total = sum(weights[at] for at in open_)
        exact = {at: rest * weights[at] / total for at in open_}
        given = {at: min(int(exact[at]), limit - parts[at]) for at in open_}
        # Nobody has a whole part to get, or nobody was held back: the rest goes by the remainders.
        if not any(given.values()) or sum(given.values()) == sum(map(int, exact.values())):
            open_.sort(key=lambda at: (given[at] - exact[at], at))
            for at in [at for at in open_ if parts[at] + given[at] < limit][: rest - sum(given.values())]:
                given[at] += 1
        for at, part in given.items():
            parts[at] += part
        rest = count - sum(parts)
    return parts


def predicted_s(
    planned: Sequence[Tree],
    nbytes: int,
    chunk_bytes: int,
    learner_up_mbit: float,
    uplinks_mbit: Sequence[float],
    downlinks_mbit: Sequence[float],
) -> float:
    """Seconds until the last member has ``nbytes`` over these trees, as links share themselves.

    The learner's uplink is shared equally between the trees that it still sends to, as TCP does it, whatever their
    shares. What a tree gets faster than its slowest member can pass it on waits there. A downlink that is full is
    filled more slowly the more flows meet at it (:data:`MEETING_COST`). The last chunk is late by a chunk's time and
    :data:`HOP_S` for every hop. Rates in Mbit/s; a downlink of 0 is not known.
    """
    mbit, chunk_mbit = nbytes * 8 / _BITS_PER_MBIT, min(chunk_bytes, nbytes) * 8 / _BITS_PER_MBIT
    done_s = 0.0
    for at, down in enumerate(downlinks_mbit):
        flows = len({tree.parent[at] for tree in planned})
        if down > 0:
            done_s = max(done_s, mbit * (1 + MEETING_COST * (1 - 1 / flows)) / down)
    sent_s = sent = 0.0
    left = sorted(planned, key=lambda tree: tree.share)
    while left:
        # By sent_s, every tree that is left has been sent the same share; what is still to come waits for that.
        for tree in left:
            done_s = max(done_s, sent_s + (tree.share - sent) * mbit / tree.passes_on(uplinks_mbit))
        sent_s += (left[0].share - sent) * mbit * len(left) / learner_up_mbit
        sent = left.pop(0).share
    done_s = max(done_s, sent_s)
    latest = 0.0
    for tree in planned:
        late = [0.0] * len(tree.parent)
        for at in tree.top_down:
            for child in tree.children[at]:
                late[child] = late[at] + HOP_S + chunk_mbit / max(uplinks_mbit[at], _MIN_MBIT)
        latest = max(latest, *late)
    return done_s + latest


def best_tree_count(
    nbytes: int,
    chunk_bytes: int,
    learner_up_mbit: float,
    members: Sequence[Member],
) -> int:
    """The number of trees with the smallest :func:`predicted_s`; the smaller of equal ones; 1 for nobody."""
    uplinks = [member.upload_mbit for member in members]
    downlinks = [member.download_mbit for member in members]
    senders = sum(up >= _MIN_MBIT for up in uplinks)
    counts = [k for k in _TREE_COUNTS if k <= min(senders, MAX_TREES)] or [1]
    # Stripes proper, where the limit on open transfers allows them.
    if senders <= MAX_TREES:
        counts.append(max(1, senders))

    def seconds(k: int) -> float:
        return predicted_s(trees(uplinks, k), nbytes, chunk_bytes, learner_up_mbit, uplinks, downlinks)

    return min(counts, key=lambda k: (seconds(k), k)) if members else 1


def relay_plan(
    n_chunks: int,
    n_whole: int,
    members: Sequence[Member],
    k: int,
    k_patch: int,
    suspects: Collection[PeerId] = (),
) -> RelayPlan:
    """The plan for the chunks of one version among ``members``; the same on every peer.

    The trees' chunks are interleaved, so that every member is busy from the first moment to the last.

    Args:
        n_whole: the first so many chunks go over ``k`` trees, the others over ``k_patch``.
        suspects: members that get their chunks as if they were none, and from whom nobody gets any.
    """
    relaying = [member for member in members if member.peer not in suspects]
    uplinks = [member.upload_mbit for member in relaying]
    planned: list[Tree] = []
    dealt: list[int] = []
    if relaying:
        for count, trees_ in ((n_whole, trees(uplinks, k)), (n_chunks - n_whole, trees(uplinks, k_patch))):
            dealt += [len(planned) + at for at in _deal(count, trees_)]
            planned += trees_
    left_out = [member.peer for member in members if member.peer in suspects]
    return RelayPlan([member.peer for member in relaying], planned, dealt, left_out)


def _deal(n_chunks: int, planned: Sequence[Tree]) -> Iterator[int]:
    """A tree for each chunk: the j-th of a tree is due at (j + ½)/share, and whichever is due first is next."""
    due = [(0.5 / tree.share, at, 0) for at, tree in enumerate(planned)]
    heapq.heapify(due)
    for _ in range(n_chunks):
        _, at, count = due[0]
        yield at
        heapq.heapreplace(due, ((count + 1.5) / planned[at].share, at, count + 1))


class RelayPlan:
    """From whom each member gets each chunk, and who stands in for whom. ``relays`` may be empty.

    ``suspects`` are members that are not among them.
    """

    def __init__(
        self,
        relays: Sequence[PeerId],
        planned: Sequence[Tree],
        dealt: Sequence[int],
        suspects: Sequence[PeerId] = (),
    ) -> None:
        self.relays = tuple(relays)
        self.suspects = tuple(suspects)
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
        """All members, beginning with another one for each chunk, the suspects last."""
        relays = (self.relays[at] for at in _rotated(range(len(self.relays)), chunk))
        return itertools.chain(relays, self.suspects)


def _rotated(items: Sequence[int], turn: int) -> Iterator[int]:
    start = turn % max(1, len(items))
    return itertools.chain(items[start:], items[:start])
