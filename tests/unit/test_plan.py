import math
import random
from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from echo2p2p.swarm.identity import Identity
from echo2p2p.weights.manifest import Member
from echo2p2p.weights.plan import RelayPlan, best_tree_count, fluid_bound_s, predicted_s, relay_plan, trees
from echo2p2p.weights.schedule import MAX_FAILURES, Schedule

PEERS = [Identity.from_seed(bytes([at]) * 32).peer_id for at in range(40)]
LEARNER = Identity.from_seed(b"l" * 32).peer_id

uplinks = st.lists(st.floats(0, 10_000, allow_subnormal=False), min_size=1, max_size=40)


def members(rates: list[float], down: float = 0.0) -> list[Member]:
    return [Member(peer, rate, download_mbit=down) for peer, rate in zip(PEERS, rates, strict=False)]


def plan_for(n_chunks: int, rates: list[float], k: int, **options: int) -> RelayPlan:
    listed = members(rates)
    return relay_plan(n_chunks, options.get("n_whole", n_chunks), listed, k, options.get("k_patch", 1))


@given(uplinks, st.integers(1, 40))
def test_trees_reach_everybody_and_nobody_forwards_in_two(rates: list[float], k: int) -> None:
    planned = trees(rates, k)
    assert 1 <= len(planned) <= k
    assert math.isclose(sum(tree.share for tree in planned), 1)
    forwarders = [at for tree in planned for at, children in enumerate(tree.children) if children]
    assert len(forwarders) == len(set(forwarders))
    for tree in planned:
        assert sorted(tree.top_down) == list(range(len(rates)))
        places = {at: place for place, at in enumerate(tree.top_down)}
        for at, parent in enumerate(tree.parent):
            assert parent == -1 or places[parent] < places[at]
    if max(rates) > 1:
        assert all(rates[at] > 0 for at in forwarders)


@given(st.lists(st.floats(1, 100), min_size=1, max_size=300), st.integers(1, 32), st.integers(1, 40))
def test_nobody_has_more_children_than_the_limit(rates: list[float], k: int, limit: int) -> None:
    for tree in trees(rates, k, limit):
        inside = sum(1 for children in tree.children if children)
        least = -(-(len(rates) - 1) // max(1, inside))
        assert max(map(len, tree.children)) <= max(limit, least)


def test_equal_links_make_a_chain_of_one_tree_and_stripes_of_as_many_as_there_are_members() -> None:
    (chain,) = trees([50.0] * 8, 1)
    assert max(map(len, chain.children)) == 1
    stripes = trees([50.0] * 8, 8)
    assert [len(tree.children[tree.root]) for tree in stripes] == [7] * 8
    assert {tree.root for tree in stripes} == set(range(8))


@given(st.integers(0, 400), st.lists(st.floats(1, 100), min_size=1, max_size=12), st.integers(1, 12))
def test_chunks_are_dealt_by_the_shares_of_the_trees(n_chunks: int, rates: list[float], k: int) -> None:
    plan = plan_for(n_chunks, rates, k)
    counts = Counter(plan.first_holder(chunk) for chunk in range(n_chunks))
    for tree in trees(rates, k):
        assert abs(counts[PEERS[tree.root]] - n_chunks * tree.share) <= len(rates) / 2 + 1


@given(st.integers(1, 60), st.lists(st.floats(0, 100), min_size=1, max_size=12), st.integers(1, 12))
def test_every_chunk_comes_from_somebody_who_gets_it_before(
    n_chunks: int, rates: list[float], k: int
) -> None:
    plan = plan_for(n_chunks, rates, k, n_whole=n_chunks // 2, k_patch=3)
    for chunk in range(n_chunks):
        ahead = {me: list(plan.ahead(chunk, me)) for me in plan.relays}
        assert [me for me in plan.relays if not ahead[me]] == [plan.first_holder(chunk)]
        assert all(plan.source(chunk, me) == next(iter(ahead[me]), None) for me in plan.relays)
        # Nobody waits for a peer that waits for it: to be ahead is an order.
        for me, before in ahead.items():
            assert len(before) == len(set(before))
            assert all(me not in ahead[peer] for peer in before)
        assert sorted(plan.others(chunk)) == sorted(plan.relays)
        assert plan.first_holder(chunk) in plan.ahead(chunk, LEARNER)


def test_a_member_that_is_gone_is_stood_in_for_by_another_of_its_children_for_each_chunk() -> None:
    plan = plan_for(800, [50.0] * 8, 8)
    eldest = Counter(
        next(me for me in PEERS[1:8] if list(plan.ahead(chunk, me)) == [PEERS[0]])
        for chunk in range(800)
        if plan.first_holder(chunk) == PEERS[0]
    )
    assert set(eldest) == set(PEERS[1:8])
    assert max(eldest.values()) <= 2 * min(eldest.values())


def test_in_a_chain_the_one_before_stands_in() -> None:
    plan = plan_for(10, [50.0] * 5, 1)
    order = sorted(PEERS[:5], key=lambda me: len(list(plan.ahead(0, me))))
    for place, me in enumerate(order):
        assert list(plan.ahead(7, me)) == order[:place][::-1]


@given(
    st.integers(1, 30),
    st.lists(st.floats(0, 100), min_size=1, max_size=12),
    st.integers(1, 12),
    st.sets(st.integers(0, 11)),
)
def test_nobody_gets_anything_from_a_suspect_that_gets_its_own_from_leaves(
    n_chunks: int, rates: list[float], k: int, chosen: set[int]
) -> None:
    suspects = {PEERS[at] for at in chosen}
    plan = relay_plan(n_chunks, n_chunks, members(rates), k, 1, suspects)
    honest = set(PEERS[: len(rates)]) - suspects
    for chunk in range(n_chunks):
        ahead = {peer: list(plan.ahead(chunk, peer)) for peer in PEERS[: len(rates)]}
        assert all(honest.issuperset(before) for before in ahead.values())
        assert all(bool(before) == bool(honest) for peer, before in ahead.items() if peer in suspects)
        assert sum(not ahead[peer] for peer in honest) == bool(honest)
        assert sorted(plan.others(chunk)) == sorted(PEERS[: len(rates)])


def test_without_members_there_is_nobody_to_relay() -> None:
    plan = plan_for(5, [], 1)
    assert plan.relays == ()
    assert plan.source(3, PEERS[0]) is None
    assert list(plan.others(3)) == []
    assert best_tree_count(10**9, 2**16, 100, []) == 1


MIB = 2**20


@pytest.mark.parametrize(
    ("nbytes", "learner", "ups", "down", "expected"),
    [
        (64 * MIB, 50.0, [50.0] * 8, 50.0, 1),  # full links that are all alike: one flow on each
        (32 * MIB, 20.0, [20.0] * 16, 20.0, 1),
        (32 * MIB, 20.0, [40.0, 40.0, 20.0, 20.0, 8.0, 8.0, 8.0, 8.0], 80.0, 3),
        (10_000, 20.0, [20.0] * 8, 20.0, 8),  # so little that only the hops count
    ],
)
def test_the_number_of_trees_follows_from_the_links(
    nbytes: int, learner: float, ups: list[float], down: float, expected: int
) -> None:
    assert best_tree_count(nbytes, 2**16, learner, members(ups, down)) == expected


@given(st.lists(st.floats(1, 100), min_size=1, max_size=12), st.integers(1, 12), st.floats(1, 100))
def test_no_prediction_is_below_the_fluid_bound(rates: list[float], k: int, learner: float) -> None:
    nbytes, downs = 10 * MIB, [150.0] * len(rates)
    predicted = predicted_s(trees(rates, k), nbytes, 2**16, learner, rates, downs)
    assert predicted >= fluid_bound_s(nbytes, learner, rates, downs) * (1 - 1e-9) - 1e-9


@pytest.mark.parametrize(
    ("learner", "ups", "downs", "expected"),
    [
        (8.0, [8.0] * 4, [8.0] * 4, 1.0),  # the learner's uplink
        (80.0, [80.0] * 4, [80.0, 80.0, 4.0, 80.0], 2.0),  # the slowest downlink
        (8.0, [2.0] * 4, [80.0] * 4, 2.0),  # all uplinks together
        (8.0, [0.0], [8.0], 1.0),
        (8.0, [], [], 0.0),
    ],
)
def test_fluid_bound(learner: float, ups: list[float], downs: list[float], expected: float) -> None:
    assert fluid_bound_s(10**6, learner, ups, downs) == pytest.approx(expected)


@given(st.floats(0.1, 1e4), st.lists(st.floats(0.1, 1e4), min_size=1, max_size=9))
def test_the_bound_is_at_least_each_of_its_parts(learner: float, ups: list[float]) -> None:
    bound = fluid_bound_s(10**6, learner, ups, ups)
    assert bound >= 8 / learner - 1e-9
    assert bound * (learner + sum(ups)) >= 8 * len(ups) - 1e-6


def schedule(me: str = PEERS[0], n_chunks: int = 40, n: int = 4, **options: object) -> Schedule:
    plan = plan_for(n_chunks, [50.0] * n, max(1, n))
    return Schedule(n_chunks, plan, me=me, learner=LEARNER, **options)  # type: ignore[arg-type]


def take_all(it: Schedule, source: str) -> list[int]:
    return sorted(chunk for chunks in it.take(source, 10_000).values() for chunk in chunks)


def test_a_member_asks_the_learner_for_its_own_stripe_and_each_member_for_its() -> None:
    it = schedule()
    plan = plan_for(40, [50.0] * 4, 4)
    asked = {source: take_all(it, source) for source in (LEARNER, *PEERS[:4])}
    assert asked[PEERS[0]] == []
    for source, owner in zip([LEARNER, *PEERS[1:4]], PEERS[:4], strict=True):
        assert asked[source] == [chunk for chunk in range(40) if plan.first_holder(chunk) == owner]


def test_a_late_joiner_asks_the_members_and_not_the_learner() -> None:
    it = schedule(me=PEERS[11])
    assert it.load(LEARNER) == 0
    assert sum(it.load(peer) for peer in PEERS[:4]) == 40
    assert all(7 <= it.load(peer) <= 13 for peer in PEERS[:4])


def test_when_a_holder_is_gone_for_all_its_stripe_leaves_the_learner_once_more_not_once_a_peer() -> None:
    asked: Counter[int] = Counter()
    for me in PEERS[1:4]:
        it = schedule(me=me)
        own = set(take_all(it, LEARNER))
        it.failed(PEERS[0], for_good=True)
        # Whoever is asked on a guess does not have it either; whoever is asked to wait will get it.
        for peer in PEERS[1:4] * 2:
            it.lacks(peer, it.take(peer, 10_000).get(False, []))
        asked.update(set(take_all(it, LEARNER)) - own)
    assert set(asked.values()) == {1}
    assert len(asked) == 10


def test_nobody_waits_for_a_peer_that_waits_for_it() -> None:
    waits: dict[int, set[tuple[str, str]]] = {}
    for me in PEERS[:4]:
        it = schedule(me=me)
        for gone in (PEERS[1], PEERS[2]):
            it.failed(gone, for_good=True)
        for peer in PEERS[:4]:
            for chunk in it.take(peer, 10_000).get(True, []):
                waits.setdefault(chunk, set()).add((me, peer))
    for edges in waits.values():
        assert not any((peer, me) in edges for me, peer in edges)


def test_what_a_suspect_owes_is_asked_of_who_is_ahead_of_it_and_cancelled_there() -> None:
    def without(*suspects: str) -> RelayPlan:
        return relay_plan(10, 10, members([50.0] * 4), 1, 1, suspects)

    first, second, third, last = sorted(PEERS[:4], key=lambda me: len(list(without().ahead(0, me))))
    it = Schedule(10, without(), me=last, learner=LEARNER)
    opened = it.take(third, 4)[True]
    assert it.replan(without(third)) == {third: opened}
    assert (it.load(third), it.load(second)) == (0, 10)
    assert it.take_renounced() == []
    suspected = Schedule(10, without(), me=second, learner=LEARNER)
    suspected.replan(without(first, second))
    assert suspected.take_renounced() == list(range(10))
    assert suspected.load(last) == 10


def test_the_first_of_two_copies_counts_and_names_where_to_cancel() -> None:
    it = schedule()
    owed = take_all(it, PEERS[1])
    assert it.relieve({PEERS[1]: 2}) == len(owed) - 2
    chunk = next(chunk for chunk in take_all(it, PEERS[2]) if chunk in owed)
    assert set(it.arrived(chunk)) == {PEERS[1], PEERS[2]}
    assert it.arrived(chunk) == []


def test_a_fetch_with_nobody_left_says_so() -> None:
    it = schedule()
    for source in (LEARNER, *PEERS[1:4]):
        it.failed(source, for_good=True)
    assert it.unobtainable == it.missing == frozenset(range(40))


@settings(deadline=None)
@given(st.randoms(use_true_random=False), st.integers(1, 30), st.integers(0, 6))
def test_whatever_fails_a_fetch_ends_with_all_or_says_what_is_unobtainable(
    rng: random.Random, n_chunks: int, n: int
) -> None:
    it = schedule(n_chunks=n_chunks, n=n, have=rng.sample(range(n_chunks), rng.randint(0, n_chunks)))
    have = set(range(n_chunks)) - it.missing
    honest = rng.random() < 0.5
    words = 20
    for _ in range(20_000):
        it.next_round()
        busy = it.busy_sources()
        if not busy and (it.done or it.unobtainable == it.missing):
            break
        if not busy:
            continue
        source = rng.choice(busy)
        chunks = take_all(it, source)
        match rng.randrange(6):
            case 5 if words:
                words -= 1
                suspects = rng.sample(PEERS[:n], rng.randint(0, n // 2))
                it.replan(relay_plan(n_chunks, n_chunks, members([50.0] * n), max(1, n), 1, suspects))
            case 0 if source != LEARNER or not honest:
                it.failed(source, for_good=rng.random() < 0.2)
            case 1 if source != LEARNER or not honest:
                it.lacks(source, chunks)
            case 2:
                it.relieve({source: rng.randint(0, 3)})
            case _:
                for chunk in (each for each in range(n_chunks) if it.is_open(source, each)):
                    it.arrived(chunk)
                    have.add(chunk)
    assert it.missing == set(range(n_chunks)) - have
    assert it.done or it.unobtainable == it.missing
    assert it.done or not honest


def test_a_source_is_given_up_after_enough_failures() -> None:
    it = schedule()
    for _ in range(MAX_FAILURES):
        assert PEERS[1] not in it.gone
        it.failed(PEERS[1])
    assert PEERS[1] in it.gone
    assert it.load(PEERS[1]) == 0
