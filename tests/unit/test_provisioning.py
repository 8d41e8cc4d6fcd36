"""The capacity model against hand-computed figures, and the activation loop against its rules."""

import math
import random

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from echo2p2p.provisioning.accounting import Budget, Spending
from echo2p2p.provisioning.activation import Activator, Candidate, Decision, by_cost, cheapest
from echo2p2p.provisioning.capacity import (
    arriving_kappa,
    best_kappa,
    conservative_staleness,
    default_kappa,
    min_kappa,
    min_staleness,
    mu_min,
    mu_min_standing,
    step_s,
)
from echo2p2p.provisioning.estimators import DurationEstimator, RateEstimator, Shortfall, WorkEstimator

candidates = st.lists(
    st.builds(
        Candidate,
        peer=st.uuids().map(str),
        price_per_hour=st.floats(0.01, 10),
        mu=st.just(0.0) | st.floats(1e-3, 100),
    ),
    max_size=30,
)


def test_of_workers_that_stand_still_mu_min_is_the_papers_formula():
    assert mu_min_standing(kappa=2, rollouts=2048, t_train_s=1631, t_bcast_s=1437) == 4096 / (3262 - 1437)
    assert mu_min_standing(kappa=1, rollouts=10, t_train_s=5, t_bcast_s=5) == math.inf


def test_a_broadcast_shorter_than_a_step_asks_for_no_more_workers_under_the_default_kappa():
    for staleness in (2, 3, 4, 6):
        kappa = default_kappa(staleness)
        assert mu_min(kappa=kappa, staleness=staleness, rollouts=96, t_train_s=2, t_bcast_s=1.9) == 48


def test_a_broadcast_asks_for_more_workers_where_the_window_gives_it_too_few_steps():
    narrow = {"rollouts": 96, "t_train_s": 2.0, "t_bcast_s": 3.0}
    assert mu_min(kappa=2, staleness=3, **narrow) == 96 / (2 * 2 - 3)
    assert mu_min(kappa=2, staleness=4, **narrow) == 48
    assert mu_min(kappa=3, staleness=4, **narrow) == 96 / (2 * 2 - 3)
    assert mu_min(kappa=3, staleness=3, **narrow) == math.inf


def test_work_in_hand_makes_rollouts_older_as_a_broadcast_does():
    coarse = {"rollouts": 96, "t_train_s": 2.0, "t_bcast_s": 1.0, "t_work_s": 4.0}
    assert mu_min(kappa=2, staleness=3, **coarse) == 96 / (2 * 2 - 3)
    assert mu_min(kappa=2, staleness=4, **coarse) == 48
    assert conservative_staleness(kappa=2, mu_pool=96, **coarse) == 3
    times = {name: coarse[name] for name in ("t_train_s", "t_bcast_s", "t_work_s")}
    assert min_staleness(**times) == 2
    assert best_kappa(staleness=4, **times) == 2
    assert step_s(kappa=2, staleness=3, mu_pool=48, **coarse) == 2 + 1.0 / 2 / 2


def test_no_period_is_shorter_than_a_broadcast_where_s_has_room_for_it():
    def kappa(b):
        return arriving_kappa(1, staleness=5, t_train_s=1.0, t_bcast_s=b)

    assert [kappa(b) for b in (0.5, 1.5, 2.5, 3.5)] == [1, 2, 3, 1]
    assert arriving_kappa(2, staleness=3, t_train_s=1.0, t_bcast_s=0.5) == 2


def test_how_long_work_takes_is_the_gap_between_deliveries_of_what_came_together():
    for together in (1, 4, 64):
        work = WorkEstimator()
        assert work.seconds == 0
        for gap_s in ([6.0] + [0.0] * (together - 1)) * 10:
            work.observe(gap_s)
        assert work.seconds == pytest.approx(6.0)


def test_mu_min_is_infinite_where_versions_are_published_faster_than_they_arrive():
    assert mu_min(kappa=1, staleness=9, rollouts=10, t_train_s=5, t_bcast_s=5) == math.inf
    assert min_kappa(t_train_s=5, t_bcast_s=5) == 2
    assert min_kappa(t_train_s=5, t_bcast_s=4.9) == 1


@given(
    kappa=st.integers(1, 20),
    rollouts=st.integers(1, 10_000),
    t_train_s=st.floats(0.1, 1e4),
    bcast_fraction=st.floats(0, 0.99),
    excess=st.floats(1, 10),
)
def test_kappa_of_s_minus_one_keeps_staleness_within_s(kappa, rollouts, t_train_s, bcast_fraction, excess):
    staleness = kappa + 1
    t_bcast_s = t_train_s * bcast_fraction
    assert default_kappa(staleness) == kappa
    needed = mu_min(
        kappa=kappa, staleness=staleness, rollouts=rollouts, t_train_s=t_train_s, t_bcast_s=t_bcast_s
    )
    delta = conservative_staleness(
        kappa=kappa, rollouts=rollouts, t_train_s=t_train_s, t_bcast_s=t_bcast_s, mu_pool=needed * excess
    )
    assert delta is not None
    assert delta <= staleness


@given(staleness=st.integers(1, 30), b=st.floats(0, 0.999))
def test_the_default_kappa_is_the_best_where_a_broadcast_is_shorter_than_a_step(staleness, b):
    best = best_kappa(staleness=staleness, t_train_s=1.0, t_bcast_s=b)
    if b > 0.001:
        assert best == default_kappa(staleness)


@given(staleness=st.integers(1, 30), b=st.floats(0, 20), rollouts=st.integers(1, 10_000))
def test_the_best_kappa_overlaps_and_keeps_s_and_there_is_one_from_the_smallest_s_on(staleness, b, rollouts):
    times = {"t_train_s": 1.0, "t_bcast_s": b}
    best = best_kappa(staleness=staleness, **times)
    assert (best is not None) == (staleness >= min_staleness(**times))

    def needed(kappa):
        return mu_min(kappa=kappa, staleness=staleness, rollouts=rollouts, **times)

    if best is None:
        assert all(needed(kappa) == math.inf for kappa in range(1, 40))
        return
    mu = needed(best)
    assert mu <= min(needed(kappa) for kappa in range(1, 40)) * (1 + 1e-9)
    delta = conservative_staleness(kappa=best, rollouts=rollouts, mu_pool=mu * 1.0001, **times)
    assert delta is not None
    assert delta <= staleness


def step(staleness, kappa, b, mu):
    """Seconds of a step of one second, for one rollout a step."""
    return step_s(kappa=kappa, staleness=staleness, rollouts=1, t_train_s=1.0, t_bcast_s=b, mu_pool=mu)


def test_a_step_waits_for_rollouts_or_for_the_first_batch_of_a_version():
    assert step(3, 2, 0.5, 1.0) == 1
    assert step(3, 2, 0.5, 0.8) == 1.25
    # 1.5 + 0.86 is 0.36 steps more than the window's 2, once in 3 steps, and the next version has no time of it
    assert step(4, 3, 1.5, 1 / 0.86) == pytest.approx(1 + 0.36 / 3)
    # half of that for S = 3: every wait gives the next version as much more time
    assert step(3, 2, 1.5, 1 / 0.86) == pytest.approx(1 + 0.36 / 2 / 2)
    assert step(4, 2, 1.5, 1 / 0.86) == 1
    assert step(3, 2, 0.5, 0.0) == math.inf


@given(staleness=st.integers(1, 30), b=st.floats(0, 20), excess=st.floats(1.0001, 10))
def test_at_mu_min_nothing_waits_and_below_it_something_does(staleness, b, excess):
    for kappa in range(int(b) + 1, staleness + 1):
        mu = mu_min(kappa=kappa, staleness=staleness, rollouts=1, t_train_s=1.0, t_bcast_s=b)
        if mu < 1e6:
            assert step(staleness, kappa, b, mu * excess) == pytest.approx(1)
            assert step(staleness, kappa, b, mu / excess) > 1


def test_small_windows_publish_every_version():
    assert [default_kappa(s) for s in (0, 1, 2, 3, 6)] == [1, 1, 1, 2, 5]


def test_cheapest_takes_the_best_price_per_throughput_not_the_lowest_price():
    slow_but_cheap = Candidate("slow", price_per_hour=0.1, mu=1)
    fast = Candidate("fast", price_per_hour=0.5, mu=10)
    assert [c.peer for c in cheapest([slow_but_cheap, fast], 9)] == ["fast"]


def test_cheapest_drops_what_a_big_worker_makes_superfluous():
    small = Candidate("small", price_per_hour=0.10, mu=2)
    big = Candidate("big", price_per_hour=0.60, mu=10)
    assert [c.peer for c in cheapest([small, big], 10)] == ["big"]


def test_ties_are_broken_by_price_then_peer():
    order = by_cost([Candidate("b", 1, 1), Candidate("a", 1, 1), Candidate("c", 0.5, 0.5)])
    assert [c.peer for c in order] == ["c", "a", "b"]


@given(pool=candidates, target=st.floats(0, 500), cap=st.floats(0.1, 50))
def test_cheapest_reaches_the_target_or_takes_all_it_may(pool, target, cap):
    chosen = cheapest(pool, target, price_cap_per_hour=cap)
    assert sum(c.price_per_hour for c in chosen) <= cap + 1e-9
    mu = sum(c.mu for c in chosen)
    if mu < target * (1 - 1e-9):
        price = sum(c.price_per_hour for c in chosen)
        left_out = [c for c in pool if c not in chosen and c.mu > 0]
        assert all(price + c.price_per_hour > cap - 1e-9 for c in left_out)


def pool(*active):
    workers = [("a", 0.1, 10), ("b", 0.2, 10), ("c", 0.3, 10), ("d", 3.0, 10)]
    return [Candidate(name, price, mu, name in active) for name, price, mu in workers]


def test_the_first_choice_is_made_at_once_and_leaves_the_dearest_idle():
    activator = Activator(persistence_s=30, margin=0.2)
    assert activator.decide(0, pool(), 25).activate == ("a", "b", "c")


def test_a_lost_worker_is_replaced_at_once():
    activator = Activator(persistence_s=30, margin=0.2)
    activator.decide(0, pool(), 25)
    survivors = [c for c in pool("b", "c") if c.peer != "a"]
    decision = activator.decide(1, survivors, 25)
    assert decision.activate == ("d",)
    assert "lost" in decision.reason


def test_a_drifting_target_moves_nobody_before_the_persistence_window():
    activator = Activator(persistence_s=30, margin=0.2)
    activator.decide(0, pool(), 20)
    for second in range(1, 30):
        assert activator.decide(second, pool("a", "b"), 25).activate == ()
    assert activator.decide(31, pool("a", "b"), 25).activate == ("c",)


def test_a_shortfall_that_comes_and_goes_adds_nobody():
    activator = Activator(persistence_s=30, margin=0.2)
    activator.decide(0, pool(), 20)
    for second in range(1, 200):
        target = 25 if second % 20 else 20
        assert activator.decide(second, pool("a", "b"), target).activate == ()


def test_excess_releases_the_dearest_and_never_undercuts_the_target():
    activator = Activator(persistence_s=30, margin=0.2)
    activator.decide(0, pool("a", "b", "c"), 15)
    decision = activator.decide(31, pool("a", "b", "c"), 15)
    assert decision.release == ("c",)


def test_excess_within_the_margin_is_tolerated():
    activator = Activator(persistence_s=0, margin=0.5)
    for second in range(100):
        assert activator.decide(second, pool("a", "b", "c"), 21).release == ()


def test_a_cheaper_worker_that_comes_late_replaces_the_dear_one_once_that_has_lasted():
    activator = Activator(persistence_s=30, margin=0.5)
    late = [Candidate("dear", 1.0, 10, active=True), Candidate("cheap", 0.1, 10)]
    activator.decide(0, [Candidate("dear", 1.0, 10)], 9)
    assert activator.decide(1, late, 9) == activator.decide(30, late, 9)
    decision = activator.decide(31, late, 9)
    assert (decision.activate, decision.release) == (("cheap",), ())
    both = [Candidate("dear", 1.0, 10, True), Candidate("cheap", 0.1, 10, True, arriving=True)]
    assert activator.decide(200, both, 9) == Decision()
    both[1] = Candidate("cheap", 0.1, 10, active=True)
    assert activator.decide(201, both, 9).release == ("dear",)


def test_a_cheaper_worker_that_delivers_less_than_it_announced_replaces_nobody():
    activator = Activator(persistence_s=30, margin=0.5)
    activator.decide(0, [Candidate("dear", 1.0, 10)], 9)
    for second in (1, 31):
        decision = activator.decide(
            second, [Candidate("dear", 1.0, 10, active=True), Candidate("cheap", 0.1, 10)], 9
        )
    assert decision.activate == ("cheap",)
    both = [Candidate("dear", 1.0, 10, active=True), Candidate("cheap", 0.1, 2, active=True)]
    assert "dear" not in activator.decide(60, both, 9).release


def test_where_the_price_cap_has_no_room_for_both_they_change_places_at_once():
    activator = Activator(persistence_s=30, margin=0.5, price_cap_per_hour=1.05)
    late = [Candidate("dear", 1.0, 10, active=True), Candidate("cheap", 0.1, 10)]
    activator.decide(0, [Candidate("dear", 1.0, 10)], 9)
    activator.decide(1, late, 9)
    decision = activator.decide(31, late, 9)
    assert (decision.activate, decision.release) == (("cheap",), ("dear",))


def test_who_delivers_is_not_let_go_for_those_that_are_still_arriving():
    activator = Activator(persistence_s=0, margin=0.2)
    pool = [Candidate(str(i), 1.0 + i, 10, active=True, arriving=i >= 2) for i in range(6)]
    assert activator.decide(0, pool, 20) == Decision()


def test_a_saving_that_is_not_worth_it_moves_nobody():
    activator = Activator(persistence_s=0, margin=0.5)
    for second in range(50):
        pool = [Candidate("a", 1.0, 10, active=True), Candidate("b", 0.95, 10)]
        assert not activator.decide(second, pool, 9).activate


def test_the_price_cap_is_never_exceeded():
    activator = Activator(persistence_s=0, margin=0.2, price_cap_per_hour=0.35)
    assert activator.decide(0, pool(), 1000).activate == ("a", "b")
    assert activator.decide(1, pool("a", "b"), 1000).activate == ()


@settings(max_examples=50)
@given(
    mus=st.lists(st.floats(0.5, 20), min_size=1, max_size=12),
    wobble=st.lists(st.floats(0.9, 1.1), min_size=60, max_size=60),
)
@example([4.0, 4.0, 4.0, 4.0, 5.0], ([0.9375] * 6 + [1.0625] * 6) * 5)
def test_estimates_that_wobble_within_the_margin_thrash_nobody(mus, wobble):
    activator = Activator(persistence_s=5, margin=0.5)
    target = sum(mus) / 1.25
    active = set()
    moves = 0
    for second, factor in enumerate(wobble):
        now = [Candidate(str(i), 1 + i / 10, mu * factor, str(i) in active) for i, mu in enumerate(mus)]
        decision = activator.decide(second, now, target)
        active |= set(decision.activate)
        active -= set(decision.release)
        if second:
            moves += len(decision.activate) + len(decision.release)
    assert moves <= len(mus)


def test_a_rate_is_measured_over_busy_time_and_refused_work_lowers_it():
    rate = RateEstimator(100.0, prior_weight_s=1.0, memory_s=1e9)
    for _ in range(50):
        rate.observe(10, 1.0)
    assert 10 <= rate.per_s <= 12
    before = rate.per_s
    rate.observe(0, 10.0)
    assert rate.per_s < before


def test_a_wrong_prior_of_a_duration_fades():
    duration = DurationEstimator(100.0, weight=0.1)
    for _ in range(100):
        duration.observe(2.0)
    assert abs(duration.seconds - 2) < 0.1


def test_spending_counts_active_time_only_and_all_on_counts_everybody():
    spending = Spending()
    spending.advance(0, 0, 0)
    spending.advance(3600, 0.5, 2.0)
    spending.advance(7200, 2.5, 0)
    assert spending.usd == 0.5 + 2.5
    assert spending.all_on_usd == 2.5 + 2.5


def test_a_shortfall_that_the_learner_feels_waits_for_no_persistence():
    activator = Activator(persistence_s=30, margin=0.2)
    activator.decide(0, pool(), 20)
    assert activator.decide(1, pool("a", "b"), 25).activate == ()
    decision = activator.decide(2, pool("a", "b"), 25, waiting=True)
    assert decision.activate == ("c",)
    assert "waits" in decision.reason


def test_a_wait_is_believed_once_and_forgotten_slowly():
    shortfall = Shortfall()
    shortfall.waits(15, 60)
    assert shortfall.factor == 1.25
    shortfall.waits(40, 60)
    shortfall.stepped(40, 60)
    assert shortfall.factor == 1.25  # what it brought has had no step to begin
    shortfall.stepped(0, 60)
    assert 1.2 < shortfall.factor < 1.25
    for _ in range(50):
        shortfall.stepped(0, 60)
    assert shortfall.factor < 1.01


def test_waits_that_workers_do_not_mend_buy_no_more_than_half_again():
    shortfall = Shortfall()
    for _ in range(100):
        shortfall.stepped(600, 60)
    assert shortfall.factor == Shortfall.LARGEST


def test_one_odd_step_does_not_move_a_duration_and_a_lasting_change_does():
    duration = DurationEstimator(10.0, weight=0.1)
    for _ in range(30):
        duration.observe(10.0)
    duration.observe(1000.0)
    duration.observe(10.0)
    assert duration.seconds == pytest.approx(10)
    for _ in range(40):
        duration.observe(20.0)
    assert duration.seconds == pytest.approx(20, rel=0.05)


def test_a_rate_follows_a_worker_that_drifts():
    rate = RateEstimator(10.0)
    for second in range(600):
        rate.observe(10 if second < 300 else 4, 1.0)
    assert rate.per_s == pytest.approx(4, rel=0.05)


def test_a_worker_whose_work_is_refused_sinks_and_is_replaced():
    honest, refused = RateEstimator(10.0), RateEstimator(10.0)
    activator = Activator(persistence_s=20, margin=0.25)
    active = {"refused"}
    for second in range(0, 300, 5):
        honest.observe(50, 5.0)
        refused.observe(0 if second % 10 else 50, 5.0)
        workers = [
            Candidate("refused", 1.0, refused.per_s, "refused" in active),
            Candidate("honest", 1.1, honest.per_s, "honest" in active),
        ]
        decision = activator.decide(second, workers, 8)
        active = active - set(decision.release) | set(decision.activate)
    assert [c.peer for c in by_cost(workers)] == ["honest", "refused"]
    assert "honest" in active


@pytest.mark.parametrize("seed", range(8))
def test_under_churn_drift_and_price_changes_the_loop_neither_starves_nor_thrashes(seed):
    """Two simulated hours of forty workers that come, go, slow down and change their price."""
    rng = random.Random(seed)
    activator = Activator(persistence_s=20, margin=0.25)
    workers = {i: [rng.uniform(0.2, 0.6), rng.uniform(0.5, 2.0)] for i in range(40)}
    away, active = {}, set()
    target, starved, moves, lost, paid, cheap = 15.0, 0, 0, 0, 0.0, 0.0
    seconds = range(0, 7200, 2)
    for now in seconds:
        for i in [i for i, until in away.items() if until <= now]:
            del away[i]
        if rng.random() < 0.01:
            gone = rng.choice([i for i in workers if i not in away])
            away[gone] = now + rng.uniform(60, 600)
            lost += gone in active
            active.discard(gone)
        for worker in workers.values():
            worker[1] = min(2.5, max(0.3, worker[1] * math.exp(rng.gauss(0, 0.004))))
        if rng.random() < 0.01:
            rng.choice(list(workers.values()))[0] = rng.uniform(0.2, 0.6)
        there = [
            Candidate(str(i), price, mu * rng.uniform(0.95, 1.05), i in active)
            for i, (price, mu) in workers.items()
            if i not in away
        ]
        decision = activator.decide(now, there, target)
        active = active - {int(p) for p in decision.release} | {int(p) for p in decision.activate}
        moves += len(decision.activate) + len(decision.release)
        starved += sum(workers[i][1] for i in active) < 0.9 * target
        paid += sum(workers[i][0] for i in active)
        cheap += sum(c.price_per_hour for c in cheapest(there, target))
    assert starved / len(seconds) < 0.02
    assert paid < 1.3 * cheap
    # Each loss costs a replacement; the rest is drift and prices: less than one worker moves in twenty seconds.
    assert moves < lost + 7200 / 20


def test_a_budget_counts_what_is_spent_and_what_is_out():
    budget = Budget(10.0, reserve_s=1.0)
    assert budget.seconds_left(4.0, 1.0, 3600.0) == 4.0
    assert budget.seconds_left(9.9999, 0.0, 3600.0) == 0
    assert budget.seconds_left(4.0, 0.0, 0.0) == math.inf
    assert budget.seconds_left(10.0, 0.0, 0.0) == 0
    assert Budget(math.inf, reserve_s=1.0).seconds_left(4.0, 1.0, 3600.0) == math.inf
