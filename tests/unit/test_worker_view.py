"""What a worker's owner reads while it works: each change once, whatever repeats counted."""

import io

from fake_run import FakeClock

from echo2p2p.rollout.refusals import MAX_REASONS, Refusals
from echo2p2p.telemetry.events import EventLog
from echo2p2p.telemetry.worker_view import WorkerView


def test_refusals_are_said_once_and_then_counted():
    refusals = Refusals()
    assert "older than the window" in refusals.add("older than the window", 0)
    lines = [refusals.add(reason, 1.0) for reason in ["older than the window"] * 12 + ["bad reward"] * 5]
    assert lines == [None] * 17
    assert refusals.due(59) is None
    expected = "17 more groups refused in the last minute: older than the window 12, bad reward 5"
    assert refusals.due(60) == expected
    assert refusals.due(119) is None
    assert refusals.due(120) is None
    assert "a group was refused: bad reward" in refusals.add("bad reward", 130)


def test_refusals_that_go_on_are_told_once_a_minute():
    refusals = Refusals()
    lines = [line for second in range(601) if (line := refusals.add("stale", second))]
    assert len(lines) == 11
    assert lines[1] == "59 more groups refused in the last minute: stale 59"


def test_a_learner_that_invents_reasons_fills_no_memory():
    refusals = Refusals()
    for number in range(1000):
        refusals.add(f"reason {number}", 0)
    line = refusals.due(60)
    assert line is not None
    assert "other reasons 991" in line
    assert line.count("reason ") == MAX_REASONS


def watched(minutes, tick):
    clock, stream = FakeClock(), io.StringIO()
    log = EventLog(None, role="worker", peer="p", clock=clock)
    with WorkerView(log, stream=stream, clock=clock.monotonic):
        for second in range(0, minutes * 60, 15):
            clock.now = 1000 + second
            tick(log, second)
    return [line.partition(" ")[2] for line in stream.getvalue().splitlines()]


def test_a_learner_that_stays_away_is_told_at_growing_intervals_and_standby_once():
    def away(log, second):
        log.emit("session", state="lost", reason=f"dial backoff {second % 2}")
        log.emit("state", state="standby", head_age_s=second)

    lines = watched(64, away)
    assert sum("standby" in line for line in lines) == 1
    assert 6 <= sum("no session" in line for line in lines) <= 7  # at once, after 1, 2, 4, … minutes


def test_a_change_is_told_at_once_and_the_state_with_it():
    def comes_back(log, second):
        back = second >= 600
        log.emit("session", state="open" if back else "lost", reason="")
        log.emit("state", state="standby", head_age_s=0.0)

    lines = watched(11, comes_back)
    opened = next(i for i, line in enumerate(lines) if "is open" in line)
    assert "standby" in lines[opened + 1]
    assert sum("standby" in line for line in lines) == 2
