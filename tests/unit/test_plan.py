import math
import random
from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from echo2p2p.swarm.identity import Identity
from echo2p2p.weights.manifest import Member
from echo2p2p.weights.plan import fluid_bound_s, relay_plan
from echo2p2p.weights.schedule import MAX_FAILURES, Schedule

PEERS = [Identity.from_seed(bytes([at]) * 32).peer_id for at in range(12)]
LEARNER = Identity.from_seed(b"l" * 32).peer_id

uplinks = st.lists(st.floats(0, 10_000, allow_subnormal=False), min_size=1, max_size=12)


def members(rates: list[float]) -> list[Member]:
    return [Member(peer, rate) for peer, rate in zip(PEERS, rates, strict=False)]


@given(st.integers(0, 400), uplinks)
def test_shares_follow_the_uplinks_and_are_interleaved(n_chunks: int, rates: list[float]) -> None:
    plan = relay_plan(n_chunks, members(rates))
    counts = Counter(plan.first_holder(chunk) for chunk in range(n_chunks))
    weights = {peer: rate for peer, rate in zip(PEERS, rates, strict=False) if rate > 0}
    if not weights:
        weights = dict.fromkeys(PEERS[: len(rates)], 1.0)
    assert set(counts) <= set(weights) == set(plan.relays)
    for peer, weight in weights.items():
        assert abs(counts[peer] - n_chunks * weight / math.fsum(weights.values())) <= len(rates) / 2 + 1


@given(st.integers(1, 60), uplinks)
def test_every_peer_computes_the_same_plan_and_every_order_names_each_relay_once(
    n_chunks: int, rates: list[float]
) -> None:
    one, other = relay_plan(n_chunks, members(rates)), relay_plan(n_chunks, members(list(rates)))
    for chunk in range(n_chunks):
        order = list(one.order(chunk))
        assert order == list(other.order(chunk))
        assert order[0] == one.first_holder(chunk)
        assert sorted(order) == sorted(one.relays)


def test_the_stripe_of_one_relay_is_spread_over_all_deputies() -> None:
    plan = relay_plan(800, members([50.0] * 8))
    deputies = Counter(
        list(plan.order(chunk))[1] for chunk in range(800) if plan.first_holder(chunk) == PEERS[0]
    )
    assert set(deputies) == set(PEERS[1:8])
    assert max(deputies.values()) <= 2 * min(deputies.values())


def test_without_members_there_is_nobody_to_relay() -> None:
    plan = relay_plan(5, [])
    assert plan.relays == ()
    assert list(plan.order(3)) == []


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
    plan = relay_plan(n_chunks, members([50.0] * n))
    return Schedule(n_chunks, plan, me=me, learner=LEARNER, **options)  # type: ignore[arg-type]


def take_all(it: Schedule, source: str) -> list[int]:
    return sorted(chunk for chunks in it.take(source, 10_000).values() for chunk in chunks)


def test_a_member_asks_the_learner_for_its_own_stripe_and_each_member_for_its() -> None:
    it = schedule()
    plan = relay_plan(40, members([50.0] * 4))
    asked = {source: take_all(it, source) for source in (LEARNER, *PEERS[:4])}
    assert asked[PEERS[0]] == []
    for source, owner in zip([LEARNER, *PEERS[1:4]], PEERS[:4], strict=True):
        assert asked[source] == [chunk for chunk in range(40) if plan.first_holder(chunk) == owner]


def test_a_late_joiner_asks_the_members_and_not_the_learner() -> None:
    it = schedule(me=PEERS[11])
    assert it.load(LEARNER) == 0
    assert {it.load(peer) for peer in PEERS[:4]} == {10}


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


def test_the_first_of_two_copies_counts_and_names_where_to_cancel() -> None:
    it = schedule()
    owed = take_all(it, PEERS[1])
    assert it.relieve(PEERS[1], keep=2) == len(owed) - 2
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
    for _ in range(20_000):
        busy = it.busy_sources()
        if not busy:
            break
        source = rng.choice(busy)
        chunks = take_all(it, source)
        match rng.randrange(5):
            case 0 if source != LEARNER or not honest:
                it.failed(source, for_good=rng.random() < 0.2)
            case 1 if source != LEARNER or not honest:
                it.lacks(source, chunks)
            case 2:
                it.relieve(source, rng.randint(0, 3))
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
