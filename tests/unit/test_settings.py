"""What settings decide together, and what they refuse together."""

import pytest

from echo2p2p.errors import SettingsError
from echo2p2p.layering import load


def test_kappa_follows_from_the_window_unless_it_is_set():
    assert load([], ["learner.staleness=6"]).learner.publication_period == 5
    assert load([], ["learner.staleness=6", "learner.kappa=2"]).learner.publication_period == 2
    assert load([], ["learner.staleness=6", "learner.mode=sequential"]).learner.publication_period == 1
    assert load([], ["learner.staleness=0"]).learner.is_sequential


@pytest.mark.parametrize(
    "way", ["kappa=4", "mode=sequential", "staleness=0", "publish=adaptive", "staleness=8"]
)
def test_a_period_that_the_window_allows_is_taken(way):
    load([], ["learner.kappa=9", f"learner.{way}"]).learner.check_period()


def test_a_period_that_outlasts_the_window_is_refused():
    with pytest.raises(SettingsError, match=r"learner\.kappa = 5 is more than S \+ 1 = 4"):
        load([], ["learner.kappa=5"]).learner.check_period()


def test_trajectory_balance_takes_no_kl_term():
    options = ["learner.optimizer.objective=trajectory-balance", "learner.optimizer.kl_beta=0.1"]
    with pytest.raises(SettingsError, match=r"learner\.optimizer: .*balance_beta"):
        load([], options)
    assert load([], options[:1]).learner.optimizer.objective == "trajectory-balance"
