"""When a version is published: whatever was measured, never too late for the window and never too fast."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from echo2p2p.learning.cadence import Cadence, due, latest
from echo2p2p.provisioning.capacity import conservative_staleness, min_kappa
from echo2p2p.settings import LearnerSettings

measurements = st.none() | st.floats(0, 10)
models = {
    "staleness": st.integers(1, 12),
    "t_train_s": st.floats(0.1, 1000),
    "t_bcast_s": st.floats(0, 5000),
    "rollouts": st.integers(1, 5000),
    "mu_pool": st.floats(0.01, 1e4),
}


def cadence(**options):
    return Cadence(LearnerSettings(publish="adaptive", **options), 0)


@given(**models, kappa=st.none() | st.integers(1, 20))
def test_the_latest_moment_is_the_longest_period_that_keeps_the_window(kappa, **model):
    found = latest(kappa=kappa, **model)
    assert 1 <= found <= min(model["staleness"], kappa or math.inf)

    def delta(period):
        return conservative_staleness(
            kappa=period,
            rollouts=model["rollouts"],
            t_train_s=model["t_train_s"],
            t_bcast_s=model["t_bcast_s"],
            mu_pool=model["mu_pool"],
        )

    assert found == 1 or delta(found) <= model["staleness"]
    if found < min(model["staleness"], kappa or math.inf):
        assert delta(found + 1) > model["staleness"]


@given(
    **models,
    bound=st.floats(1e-6, 1),
    drifts=st.lists(st.tuples(measurements, st.floats(0, 12)), max_size=60),
)
def test_whatever_is_measured_a_version_is_never_later_than_the_window_allows(bound, drifts, **model):
    staleness = model["staleness"]
    following = cadence(
        staleness=staleness,
        publish_divergence=bound,
        prompts_per_step=model["rollouts"],
        samples_per_prompt=2,
    )
    published = 0
    times = {name: model[name] for name in ("t_train_s", "t_bcast_s", "mu_pool")}
    for version, (kl, age) in enumerate(drifts, start=1):
        following.stepped(mismatch_kl=kl, square_age=age)
        why = following.due(version, **times)
        at_latest = latest(staleness=staleness, kappa=None, rollouts=2 * model["rollouts"], **times)
        assert bool(why) or version - published < at_latest
        if why == "divergence":
            earliest = min_kappa(t_train_s=model["t_train_s"], t_bcast_s=model["t_bcast_s"])
            assert version - published >= earliest
        if why:
            following.published(version)
            published = version
        assert version - published < staleness


@given(
    steps=st.integers(0, 20),
    earliest=st.integers(1, 20),
    latest=st.integers(1, 20),
    divergence=st.none() | st.floats(0, 1),
    bound=st.floats(1e-6, 1),
)
def test_a_larger_divergence_never_publishes_later(steps, earliest, latest, divergence, bound):
    now = due(steps=steps, earliest=earliest, latest=latest, divergence=divergence, bound=bound)
    more = due(steps=steps, earliest=earliest, latest=latest, divergence=1.1, bound=bound)
    assert not now or more


def test_a_policy_that_moves_fast_is_published_sooner_than_one_that_stands_still():
    times = {"t_train_s": 10.0, "t_bcast_s": 0.0, "mu_pool": 1000.0}
    reasons = {}
    for kl in (0.0, 0.03):
        following = cadence(staleness=4, publish_divergence=0.02)
        reasons[kl] = []
        for version in range(1, 13):
            following.stepped(mismatch_kl=kl, square_age=4.0)
            why = following.due(version, **times)
            if why:
                following.published(version)
                reasons[kl].append((version, why))
    assert reasons[0.0] == [(4, "window"), (8, "window"), (12, "window")]
    assert reasons[0.03] == [(version, "divergence") for version in range(2, 13, 2)]


def test_tokens_of_the_own_version_and_steps_that_trained_nothing_tell_no_drift():
    following = cadence(staleness=4)
    following.stepped(mismatch_kl=0.5, square_age=0.0)
    following.stepped(mismatch_kl=None, square_age=4.0)
    assert following.divergence(3) is None


@pytest.mark.parametrize(("options", "period"), [({"kappa": 3}, 3), ({}, 4), ({"mode": "sequential"}, 1)])
def test_period_publishes_every_kappa_steps_whatever_the_drift(options, period):
    following = Cadence(LearnerSettings(staleness=5, **options), 7)
    following.stepped(mismatch_kl=9.0, square_age=1.0)
    whys = [following.due(7 + n, t_train_s=1, t_bcast_s=50, mu_pool=0) for n in range(1, 6)]
    assert whys.index("period") == period - 1


def test_a_swarm_in_which_nothing_generates_gets_every_version():
    assert latest(staleness=9, kappa=None, t_train_s=1, t_bcast_s=0, rollouts=4, mu_pool=0) == 1
