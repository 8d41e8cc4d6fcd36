"""When the overlap benchmark says that prediction and measurement agree."""

from dataclasses import replace

import pytest

from benchmarks.overlap import ROLLOUTS, T_TRAIN_S, Setting, agreement, point_of
from benchmarks.overlap_swarm import Measured

RATE = ROLLOUTS / T_TRAIN_S / 3.4


def measured(idle_s, workers, *, t_train_s=T_TRAIN_S, rate=RATE, stalled_s=0.0):
    step = {
        "t_idle_s": idle_s,
        "t_train_s": t_train_s,
        "active": workers,
        "mu_pool": workers * rate,
        "staleness_max": 2,
        "dropped": {},
    }
    return Measured(steps=[step] * 4, broadcasts=[{"t_bcast_s": 0.2}], stalled_s=stalled_s)


def point(idle_s, workers, *, chosen=False, **what):
    found = measured(idle_s, workers, **what)
    return point_of(Setting(3, 2, None if chosen else workers), found, RATE, 0.1)


SHORT = point(T_TRAIN_S * 0.4 / 3, 3)
CHOSEN = point(0.001, 4, chosen=True)


def test_a_point_says_what_the_model_predicts_of_what_was_measured():
    assert SHORT.bubble == pytest.approx(0.4 / 3.4)
    assert SHORT.predicted_bubble == pytest.approx(SHORT.bubble)
    assert SHORT.predicted_workers == pytest.approx(3.4)
    assert SHORT.paper_workers == pytest.approx(3.4 * 2 * T_TRAIN_S / (2 * T_TRAIN_S - 0.2))


def test_prediction_and_measurement_agree_where_it_waits_below_the_minimum_and_not_with_its_own_choice():
    assert agreement([SHORT, CHOSEN]) == (pytest.approx(0.001 / T_TRAIN_S, rel=0.01), True)
    assert not agreement([SHORT, replace(CHOSEN, bubble=0.03)])[1]
    assert not agreement([replace(SHORT, bubble=0.01), CHOSEN])[1]
    assert not agreement([replace(SHORT, bubble=0.2), CHOSEN])[1]
    assert agreement([SHORT]) == (None, False)


@pytest.mark.parametrize(
    "what", [{"t_train_s": 1.1 * T_TRAIN_S}, {"rate": 0.9 * RATE}, {"stalled_s": 0.5}], ids=lambda w: str(w)
)
def test_a_point_of_a_busy_machine_is_marked_and_does_not_count(what):
    disturbed = point(1.0, 4, chosen=True, **what)
    assert disturbed.disturbed
    assert agreement([SHORT, CHOSEN, disturbed])[1]
