import json
import math

import pytest
from fake_run import FakeRun, peer_id
from hypothesis import given
from hypothesis import strategies as st

from echo2p2p.data.work import MAX_ARRIVALS, MIN_ARRIVALS, SHARED_ARRIVALS, Ready, arrivals_reported
from echo2p2p.errors import SettingsError
from echo2p2p.swarm.messages import decode, encode
from echo2p2p.telemetry.dissemination import choose_version, gather
from echo2p2p.telemetry.history import load_history
from echo2p2p.telemetry.state import Version
from echo2p2p.weights.timeline import MAX_POINTS, Timeline


class Clock:
    def __init__(self):
        self.now = 50.0

    def monotonic(self):
        return self.now


def timeline_of(*arrivals):
    """A timeline told of ``(seconds, source, nbytes)``."""
    clock = Clock()
    timeline = Timeline(clock, "learner", since=50.0)
    for seconds, source, nbytes in arrivals:
        clock.now = 50.0 + seconds
        timeline.add(source, nbytes)
    return timeline


def ready(worker="w", version=3, after_s=2.0, arrivals=((500, 10, 0), (1500, 10, 30)), **fields):
    points = [list(point) for point in arrivals]
    return event("ready", version=version, worker=worker, after_s=after_s, arrivals=points, **fields)


def event(kind, **fields):
    return {"role": "learner", "event": kind} | fields


def test_a_timeline_says_when_and_from_whom():
    timeline = timeline_of((0.1, "learner", 10), (0.25, "a", 20), (0.25, "b", 5), (3.0, "a", 1))
    assert timeline.points(64) == [(100, 10, 0), (250, 10, 25), (3000, 10, 26)]
    assert timeline.sent_by(["b", "c", "a"]) == [5, 0, 21]
    assert timeline_of().points(64) == []


@given(st.lists(st.integers(0, 10**7), max_size=400).map(sorted), st.integers(1, 64))
def test_a_timeline_stays_small_and_loses_no_byte(times, limit):
    timeline = timeline_of(*((ms / 1000, "learner" if at % 3 else "a", 7) for at, ms in enumerate(times)))
    assert len(timeline._slots) <= MAX_POINTS
    points = timeline.points(limit)
    assert len(points) <= limit
    if times:
        ms, from_learner, from_peers = points[-1]
        assert (ms, from_learner + from_peers) == (times[-1], 7 * len(times))
        assert points == sorted(points)


def test_an_announcement_from_another_life_of_the_clock_makes_no_negative_time():
    timeline = Timeline(Clock(), "learner", since=99.0)
    timeline.add("a", 5)
    assert timeline.points(8) == [(0, 0, 5)]


def test_a_report_fits_its_message_in_a_swarm_of_any_size():
    assert [arrivals_reported(n) for n in (0, 1, 32, 200, 5000)] == [64, 64, 64, 10, 8]
    assert MIN_ARRIVALS * 200 < SHARED_ARRIVALS
    timeline = timeline_of(*((at / 10, "a", 1000) for at in range(5000)))
    told = Ready(3, "0" * 64, 0, 5_000_000, 1.0, 0.1, timeline.points(MAX_ARRIVALS), [5_000_000, 0])
    assert decode(encode(told), Ready) == told


def test_a_worker_that_reports_nothing_is_ready_all_the_same():
    told = Ready(3, "0" * 64, 0, 0, 1.0, 0.1)
    assert decode(encode(told), Ready) == told


def test_one_dissemination_is_put_together():
    shown = gather(
        [
            event("published", version=3, prepare_s=0.5, snapshot_bytes=1000, patch_bytes=40),
            ready("late", after_s=2.5, arrivals=[(2000, 0, 40)]),
            ready("first"),
            ready("other", version=6),
            event("broadcast", version=3, t_bcast_s=2.5),
            event("relayed", version=3, from_learner=10, sent={"first": 40}),
            event("relayed", version=3, from_learner=10, sent={"first": 40, "late": 30}),
        ],
        3,
        "as asked",
    )
    assert [receipt.worker for receipt in shown.receipts] == ["first", "late"]
    assert shown.receipts[0].times_s.tolist() == [1.0, 2.0], "seconds since the publication began"
    assert shown.receipts[0].nbytes == 40
    assert (shown.t_bcast_s, shown.copy_bytes, shown.patched) == (2.5, 40, True)
    assert (shown.from_learner, shown.sent) == (10, {"first": 40, "late": 30})


def test_a_run_under_way_has_the_senders_from_the_receivers():
    shown = gather([event("published", version=3, snapshot_bytes=40), ready()], 3, "newest")
    assert shown.sent is None
    assert (shown.from_learner, shown.from_peers) == (10, 30)
    assert math.isnan(shown.t_bcast_s)


def test_a_version_that_a_resumed_learner_publishes_again_keeps_its_reports():
    again = [event("published", version=3, prepare_s=9.0)]
    shown = gather([event("published", version=3, prepare_s=0.5), ready(), *again], 3, "")
    assert shown.announced_s == 0.5


@pytest.mark.parametrize(
    "lie",
    [
        [[0, 10, 0], [1, 5, 0]],
        [[5, 1, 0], [4, 2, 0]],
        [[-1, 1, 0]],
        [[0, 0, 0]],
        [[10**9, 1, 0]],
        [[0, 1]],
        [[0, "1", 0]],
        [[0, None, 0]],
        [[10**400, 1, 0]],
        [[1, 1, 1]] * 5000,
        ["x"],
        "x",
        {},
    ],
)
def test_a_report_that_cannot_be_is_left_out(lie):
    published = event("published", version=3)
    nonsense = event("ready", version=3, worker="liar", after_s=2.0, arrivals=lie)
    assert gather([published, nonsense], 3, "") is None
    shown = gather([published, nonsense, ready("honest")], 3, "")
    assert [receipt.worker for receipt in shown.receipts] == ["honest"]


def test_the_version_of_median_t_bcast_is_shown():
    versions = {v: Version(v, t_bcast_s=t, reports=2) for v, t in ((3, 9.0), (6, 1.0), (9, 2.0), (12, 4.0))}
    versions[15] = Version(15, t_bcast_s=2.5)
    assert choose_version(versions) == (9, "median T_bcast of 4")
    assert choose_version(versions, 12) == (12, "")
    with pytest.raises(SettingsError, match="version 15") as refusal:
        choose_version(versions, 15)
    assert "from 3 to 12" in str(refusal.value.hint)


def test_without_a_t_bcast_the_newest_version_is_shown_and_without_arrivals_none():
    assert choose_version({3: Version(3, reports=1), 6: Version(6, reports=1)}) == (6, "newest")
    assert choose_version({3: Version(3, t_bcast_s=1.0)}) is None
    with pytest.raises(SettingsError, match="no arrivals"):
        choose_version({}, 3)


def test_a_log_of_a_run_has_a_dissemination(tmp_path):
    path = tmp_path / "events.jsonl"
    FakeRun(path).play(20)
    history = load_history(path)
    assert history.dissemination is not None
    assert history.dissemination.version in [version.version for version in history.versions]
    assert history.dissemination.chosen == "median T_bcast of 6"
    assert load_history(path, version=3).dissemination.version == 3


def test_a_log_from_before_arrivals_were_recorded_has_none(tmp_path):
    path = tmp_path / "events.jsonl"
    line = event("ready", worker=peer_id(0), version=3, bytes_from_peers=3)
    path.write_text("\n".join(json.dumps(each) for each in (event("published", version=3), line)) + "\n")
    assert load_history(path).dissemination is None
