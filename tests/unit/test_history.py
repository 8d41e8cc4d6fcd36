import json
import math

import numpy as np
import pytest
from fake_run import FakeClock, FakeRun, peer_id
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from echo2p2p.telemetry.cumulative import Cumulative
from echo2p2p.telemetry.events import EventLog
from echo2p2p.telemetry.headline import headline, status
from echo2p2p.telemetry.history import RunHistory, freeze, load_history
from echo2p2p.telemetry.kinds import KINDS
from echo2p2p.telemetry.state import STEP_COLUMNS, RunState
from echo2p2p.telemetry.summary import format_summary
from echo2p2p.telemetry.text import ascii_only, clean, human_bytes, human_seconds, human_usd, short_peer


def printed(history: RunHistory, width: int = 120, **options) -> str:
    console = Console(width=width, color_system=None, force_terminal=False)
    with console.capture() as capture:
        console.print(format_summary(history, **options))
    return capture.get()


def learner(*events: dict) -> RunHistory:
    state = RunState()
    for event in events:
        state.add({"role": "learner", "t": 1.0, "unix": 1e9} | event)
    return freeze(state)


def test_a_whole_run(tmp_path):
    FakeRun(tmp_path / "events.jsonl").play(30)
    history = load_history(tmp_path / "events.jsonl")
    assert status(history) == "finished"
    assert history.steps.tolist() == list(range(1, 31))
    assert set(history.columns) == set(STEP_COLUMNS)
    assert all(len(column) == 30 for column in history.columns.values())
    assert [step for step, _, _ in history.evals] == [0, 10, 20, 30]
    before, after = history.reward_before_after
    assert before < after
    assert history.window == 4
    assert history.staleness_max == 4
    assert sum(history.staleness_tokens.values()) == 30 * 20_000
    assert 0 < history.bubble_ratio < 0.5
    assert len(history.versions) == 10
    assert history.bytes_from_peers > history.bytes_from_learner > 0
    assert history.spend_usd[-1] < history.all_on_usd[-1]
    assert np.all(np.diff(history.spend_usd) > 0)
    assert history.refused == {"reward differs": 1}
    assert history.dropped["outside the window"] > 0
    rho = [worker.rho for worker in history.workers]
    assert rho == sorted(rho)
    assert history.decision is not None
    assert history.decision.mu_pool >= history.decision.mu_target


def test_a_run_that_is_going_on(tmp_path):
    run = FakeRun(tmp_path / "events.jsonl")
    run.start()
    history = load_history(tmp_path / "events.jsonl")
    assert len(history.steps) == 0
    assert math.isnan(history.bubble_ratio)
    assert math.isnan(history.staleness_max)
    run.step(1)
    history = load_history(tmp_path / "events.jsonl")
    assert history.steps.tolist() == [1]
    assert status(history) != "finished"


@pytest.mark.parametrize("counters", ["restored", "from zero"])
def test_a_resume_takes_back_steps_but_not_money(tmp_path, counters):
    path = tmp_path / "events.jsonl"
    first = FakeRun(path)
    first.start()
    first.activate()
    spent = {}
    for step in range(1, 14):
        first.step(step)
        spent[step] = first.spend
    with path.open("ab") as file:
        file.write(b'{"event":"step","step":14,"rew')

    second = FakeRun(path, seed=1)
    if counters == "restored":
        second.spend = spent[10]
    second.start(resumed_from=10)
    history = load_history(path)
    assert history.steps.tolist() == list(range(1, 11)), (
        "what the dead process did after its checkpoint is gone"
    )
    second.activate()
    at_resume = second.spend
    for step in range(11, 21):
        second.step(step)
    history = load_history(path)
    assert history.resumes == 1
    assert history.steps.tolist() == list(range(1, 21))
    assert history.spend_usd[-1] == pytest.approx(spent[13] + second.spend - at_resume)
    assert sum(history.staleness_tokens.values()) == 20 * 20_000
    assert history.seconds == pytest.approx(first.clock.now - 1000 + second.clock.now - 1000, abs=0.1)


def test_the_goodbyes_at_the_end_hide_nothing(tmp_path):
    FakeRun(tmp_path / "events.jsonl").play(9)
    history = load_history(tmp_path / "events.jsonl")
    states = [worker.state for worker in history.workers]
    assert states.count("gone") == 1
    assert states.count("active") > 0
    assert {worker.left for worker in history.workers} == {"", "no sign of life for 30 s"}
    assert sum("left" in text for _, text in history.notable) == 2, "the worker that left, and what followed"


def test_a_stopped_run_is_not_a_finished_one():
    history = learner({"event": "run_started"}, {"event": "run_finished", "finished": False, "steps": 4})
    assert status(history) == "stopped"
    assert history.notable[-1][1] == "run stopped after 4 steps"


def test_later_steps_override_earlier_ones_of_the_same_number():
    history = learner(
        {"event": "run_started"},
        {"event": "step", "step": 1, "reward_mean": 0.1, "staleness_hist": {"9": 5}, "skipped": "non-finite"},
        {"event": "run_started", "resumed_from": None},
        {"event": "step", "step": 1, "reward_mean": 0.2, "staleness_hist": {"0": 7}},
    )
    assert history.columns["reward_mean"].tolist() == [0.2]
    assert history.staleness_tokens == {0: 7}
    assert history.staleness_max == 9, "a token that was ever trained stays on record"
    assert history.skipped_steps == 0


def test_a_counter_across_several_restarts():
    counter = Cumulative()
    for step, value in ((1, 5.0), (2, 10.0), (3, 15.0)):
        counter.at(step, value)
    counter.restart(2)
    counter.at(3, 14.0)
    assert counter.total == 19.0
    counter.restart(3)
    counter.at(4, 1.0)
    assert counter.total == 20.0
    counter.at(5, math.nan)
    assert counter.series([1, 2, 3, 4, 5])[:4].tolist() == [5.0, 10.0, 19.0, 20.0]


def test_workers_own_logs_are_added(tmp_path):
    FakeRun(tmp_path / "events.jsonl", workers=2).play(6)
    peer = peer_id(0)
    own = EventLog(tmp_path / "w.jsonl", role="worker", peer=peer, clock=FakeClock(5e6))
    own.emit("joined", run="r")
    own.emit("generated", groups=4, samples=32, tokens=4000, seconds=2.0, version=1)
    for accepted in (1, 2, 1):  # the worker was started again before the last
        own.emit("verdicts", accepted=accepted, refused={"late": 1})
    history = load_history(tmp_path / "events.jsonl", [tmp_path / "w.jsonl"])
    worker = next(worker for worker in history.workers if worker.peer == peer)
    assert (worker.generated_groups, worker.generated_tokens, worker.accepted) == (4, 4000, 3)
    assert history.seconds < 1000, "a worker's clock is not the run's"


JUNK = [None, True, "", "x", "\x1b[2J", -1, 0, 3, 2**70, 10**400, 1e308, -1e308, math.nan, math.inf]
JUNK += [
    [],
    [None],
    ["a", {}],
    {},
    {"3": 2},
    {"x": None},
    {"1": "y"},
    {"worker": "w", "mu": 0},
    [{"worker": [], "mu": 1e-300}],
]
FIELDS = sorted({name for kind in KINDS.values() for name in kind.fields} | {"t", "unix"})
junk_events = st.builds(
    lambda kind, values: {"role": "learner", "event": kind} | values,
    st.sampled_from(sorted(KINDS)),
    st.dictionaries(st.sampled_from(FIELDS), st.sampled_from(JUNK), max_size=8),
)


@given(st.lists(junk_events, max_size=8))
def test_no_event_makes_it_raise(events):
    history = learner(*events)
    headline(history)
    printed(history)


def test_a_figure_beyond_every_integer_type_is_no_figure():
    history = learner(
        {"event": "run_started"},
        {"event": "step", "step": 10**400, "tokens": 10**400, "staleness_hist": {"9" * 5000: 1, "²": 1}},
        {"event": "ready", "worker": "w", "version": 1e300},
    )
    assert history.steps.tolist() == [0]
    assert history.staleness_tokens == {}


def test_the_window_that_does_not_hold_is_said():
    history = learner(
        {"event": "run_started", "staleness": 3}, {"event": "step", "step": 1, "staleness_hist": {"4": 10}}
    )
    figure = next(figure for figure in headline(history) if figure.label == "oldest trained token")
    assert (figure.value, figure.tone) == ("4 versions", "bad")
    assert "broken" in figure.note


def test_the_summary_says_what_matters(tmp_path):
    FakeRun(tmp_path / "events.jsonl").play(60)
    text = printed(load_history(tmp_path / "events.jsonl"), report=tmp_path / "report.html")
    for piece in ("0.132 → 0.841", "window S = 4", "until Σμ reaches 28/s", "with every worker on", "active"):
        assert piece in text
    assert f"report: {tmp_path / 'report.html'}" in text


def test_the_summary_of_nothing(tmp_path):
    (tmp_path / "events.jsonl").touch()
    assert "not started" in printed(load_history(tmp_path / "events.jsonl"))


def test_a_summary_shows_strangers_text_as_text():
    history = learner(
        {"event": "run_started", "run": "[red]r\x1b[2J"},
        {"event": "worker_joined", "worker": "[bold]p\n", "gpu": "[blink]\x1b]0;x\x07"},
        {
            "event": "activation",
            "active": ["[bold]p\n"],
            "pool": [{"worker": "[bold]p\n", "price_per_hour": 1, "mu": 1, "state": "[/]"}],
        },
    )
    text = printed(history)
    assert "\x1b" not in text
    assert "\x07" not in text
    assert "[red]r?[2J" in text
    assert "[blink]?]0;x?" in text


def test_cleaned_text():
    assert clean("a\x1b[31m\n\u202eb\u2028\ud800\ue000\x85") == "a?[31m??b????"
    assert clean("x" * 200_000, 5) == "xxxx…"
    assert clean(None) == ""
    assert clean({"a": 1}) == "{'a': 1}"
    assert ascii_only("ρ…é") == "?~?"
    assert short_peer("12D3KooWabcdefghij") == "…efghij"
    assert short_peer("short") == "short"
    json.dumps(clean("\ud800")).encode()


def test_figures_for_people():
    assert [human_bytes(n) for n in (0, 1023, 1024, 5 * 2**30)] == ["0 B", "1023 B", "1.0 KiB", "5.0 GiB"]
    assert [human_seconds(s) for s in (0.25, 3.14, 59, 185, 7620)] == [
        "0.25 s",
        "3.1 s",
        "59 s",
        "3 min 05 s",
        "2 h 07 min",
    ]
    assert [human_usd(x) for x in (0, 1234.5, 0.14, 0.0012)] == ["$0.00", "$1,234.50", "$0.140", "$0.0012"]
