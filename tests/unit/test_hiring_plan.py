"""The plan: who would be hired, what stands in the way, and what would help."""

import re
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from echo2p2p.provisioning.activation import Candidate
from echo2p2p.provisioning.plan import Inputs, plan


def test_a_plan_counts_what_workers_generate_at_once():
    workers = [Candidate(f"w{i}", 1.0, 1.0) for i in range(40)]
    asked = {"rollouts": 1000, "t_train_s": 100, "t_bcast_s": 50, "staleness": 1, "gamma": 1.0}
    assert plan(Inputs(**asked), workers).mu_min == 1000 / (100 - 50)
    coarse = plan(Inputs(**asked, at_once=20), workers)
    assert coarse.mu_min == pytest.approx(1000 / (100 - 60))
    assert len(coarse.workers) == 25


def test_a_plan_says_what_stands_in_the_way():
    workers = [Candidate(str(i), 0.35, 0.25) for i in range(12)]
    good = plan(Inputs(2048, 1600, 1312, 3, 1.1), workers)
    assert (good.feasible, good.kappa, good.delta_cons, len(good.workers)) == (True, 2, 3, 6)
    assert "κ must be at least 2" in plan(Inputs(2048, 1600, 1700, 1, 1.1), workers).why
    assert "all workers together" in plan(Inputs(2048, 1600, 1312, 3, 1.1), workers[:3]).why


def test_a_plan_advises_only_what_would_help():
    few = [Candidate(str(i), 0.35, 0.25) for i in range(5)]  # 1.25 rollouts/s, and γ·R/T_train is 1.41
    no_s = plan(Inputs(2048, 1600, 1312, 3, 1.1), few).why
    assert "raise S" not in no_s
    assert no_s.endswith("add workers or train on no more than 1818 rollouts a step")
    assert plan(Inputs(1818, 1600, 1312, 3, 1.1), few).feasible
    narrow = Inputs(1000, 100, 250, 5, 1.1)
    some = [Candidate(str(i), 0.35, 1.0) for i in range(12)]
    assert plan(narrow, some).why.endswith(
        "raise S to 6 or broadcast faster or train on no more than 545 rollouts a step"
    )
    assert plan(replace(narrow, staleness=6), some).feasible
    assert "set κ to 1" in plan(Inputs(1000, 100, 50, 2, 1.1, kappa=3), some * 2).why


@settings(max_examples=50)
@given(
    st.integers(1, 500),
    st.floats(0, 1000),
    st.integers(1, 6),
    st.none() | st.integers(1, 6),
    st.integers(0, 300),
    st.integers(0, 30),
)
def test_s_is_to_be_raised_exactly_where_that_helps(rollouts, t_bcast_s, staleness, kappa, at_once, n):
    workers = [Candidate(str(i), 0.35, 0.25) for i in range(n)]
    inputs = Inputs(rollouts, 100, t_bcast_s, staleness, 1.1, kappa, at_once=at_once)
    advised = re.search(r"raise S to (\d+)", plan(inputs, workers).why)
    larger = range(staleness + 1, staleness + 40)
    first = next((s for s in larger if plan(replace(inputs, staleness=s), workers).feasible), None)
    if plan(inputs, workers).feasible:
        assert advised is None
    else:
        assert (int(advised[1]) if advised else None) == first


def test_a_plan_for_long_broadcasts_takes_another_kappa_than_s_minus_one():
    workers = [Candidate(str(i), 0.35, 1.0) for i in range(100)]
    found = plan(Inputs(1000, 100, 250, 5, 1.1), workers)
    assert (found.feasible, found.kappa) == (True, 3)
    assert found.delta_cons is not None
    assert found.delta_cons <= 5
    assert "S at least 5" in plan(Inputs(1000, 100, 250, 4, 1.1), workers).why
    assert "older than S" in plan(Inputs(1000, 100, 50, 2, 1.1, kappa=3), workers).why
    assert "for $3/h" in plan(Inputs(1000, 100, 250, 5, 1.1, price_cap_per_hour=3), workers).why
