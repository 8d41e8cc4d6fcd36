"""The choice of workers against the MILP optimum, on price lists of every kind the benchmark knows."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.activation import KINDS, SHARES, greedy, make_pool, optimum
from echo2p2p.provisioning.activation import Candidate, cheapest


def price_of(workers):
    return sum(c.price_per_hour for c in workers)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("n", [50, 200])
def test_the_choice_is_within_one_percent_of_the_optimum(kind, n):
    pool = make_pool(kind, n, seed=n)
    for share in SHARES[:2]:
        target = share * sum(c.mu for c in pool)
        chosen = cheapest(pool, target)
        best, _ = optimum(pool, target, time_limit_s=0.2)
        assert sum(c.mu for c in chosen) >= target * (1 - 1e-9)
        assert price_of(chosen) <= min(1.01 * best, greedy(pool, target)) + 1e-9


def test_a_huge_cheap_worker_is_left_out_where_a_few_small_ones_do():
    huge = Candidate("huge", 40, 1000)
    small = [Candidate(f"s{i}", 0.5, 2) for i in range(100)]
    assert "huge" not in {c.peer for c in cheapest([huge, *small], 20)}
    assert {c.peer for c in cheapest([huge, *small], 190)} == {"huge"}


def test_free_workers_come_first_and_the_fast_ones_before_the_slow():
    pool = [Candidate("a", 0, 1), Candidate("b", 0, 5), Candidate("c", 0.1, 50)]
    assert {c.peer for c in cheapest(pool, 4)} == {"b"}


@settings(max_examples=100, deadline=None)
@given(
    workers=st.lists(st.tuples(st.integers(0, 6), st.integers(1, 9)), min_size=1, max_size=9),
    share=st.floats(0.01, 1),
    cap=st.integers(0, 30),
)
def test_small_pools_are_decided_as_by_trying_every_set(workers, share, cap):
    pool = [Candidate(str(i), float(c), float(m)) for i, (c, m) in enumerate(workers)]
    target = share * sum(c.mu for c in pool)
    sets = [[c for i, c in enumerate(pool) if bits >> i & 1] for bits in range(2 ** len(pool))]
    affordable = [(price_of(s), sum(c.mu for c in s)) for s in sets if price_of(s) <= cap]
    reaching = [price for price, mu in affordable if mu >= target * (1 - 1e-9)]
    chosen = cheapest(pool, target, price_cap_per_hour=cap)
    assert price_of(chosen) <= cap
    if reaching:
        assert price_of(chosen) <= min(reaching) * 1.001
    else:
        assert sum(c.mu for c in chosen) >= max(mu for _, mu in affordable) * 0.99
