import io
import math

import pytest
from fake_run import FakeClock, FakeRun
from rich.console import Console

from echo2p2p.telemetry.events import EventLog
from echo2p2p.telemetry.live import REFRESH_PER_SECOND, LiveView, sparkline, wants_plain

HIDE, SHOW = "\x1b[?25l", "\x1b[?25h"


class Terminal(io.StringIO):
    encoding = "utf-8"

    def isatty(self) -> bool:
        return True


class ClosedPipe(io.StringIO):
    def write(self, text: str) -> int:
        raise BrokenPipeError


def shown(view: LiveView, width: int = 100) -> str:
    console = Console(width=width, color_system=None, force_terminal=False)
    with console.capture() as capture:
        console.print(view.render())
    return capture.get()


def test_the_panel_shows_the_run(monkeypatch):
    monkeypatch.setenv("TERM", "xterm")
    run = FakeRun(None, workers=14)
    with LiveView(run.log, plain=False, stream=Terminal()) as view:
        assert "waiting for the run to start" in shown(view)
        run.play(30)
        text = shown(view)
    for piece in (
        "sums · step 30/60 · version 30",
        "▁",
        "0.589 @ 30",
        "window S = 4",
        "RTX 4090",
        "+ 4 more",
    ):
        assert piece in text
    assert "from the learner" in text
    assert "run finished after 30 steps" in text
    assert max(map(len, text.splitlines())) <= 100


def test_it_fits_a_narrow_terminal():
    run = FakeRun(None)
    view = LiveView(run.log, plain=False, stream=Terminal())
    with view:
        run.play(12)
        assert max(map(len, shown(view, 50).splitlines())) <= 50


def test_it_says_how_far_off_policy_the_newest_step_was(monkeypatch):
    monkeypatch.setenv("TERM", "xterm")
    run = FakeRun(None)
    with LiveView(run.log, plain=False, stream=Terminal()) as view:
        run.start()
        run.step(1)
        text = shown(view)
    for piece in ("off-policy", "KL ", "clipped 1.0%", "masked 0.2%", "wasted 20%", "entropy", "gradient"):
        assert piece in text


def test_what_was_spent_before_a_resume_is_in_the_first_line():
    log = EventLog(None, role="learner", peer="p", clock=FakeClock())
    stream = io.StringIO()
    with LiveView(log, plain=True, stream=stream):
        log.emit("run_started", max_steps=300, resumed_from=230, spend_usd=1.5, all_on_usd=3.0)
    assert "step 230/300" in stream.getvalue()
    assert "spent $1.5" in stream.getvalue()


def test_it_redraws_at_most_four_times_a_second():
    assert REFRESH_PER_SECOND <= 4


def test_the_terminal_is_restored_when_the_run_fails(monkeypatch):
    monkeypatch.setenv("TERM", "xterm")
    run, terminal = FakeRun(None), Terminal()

    def fail() -> None:
        with LiveView(run.log, plain=False, stream=terminal):
            run.start()
            raise RuntimeError

    with pytest.raises(RuntimeError):
        fail()
    text = terminal.getvalue()
    assert HIDE in text
    assert text.rindex(SHOW) > text.rindex(HIDE)
    before = len(text)
    run.step(1)
    assert len(terminal.getvalue()) == before, "an event after the end draws nothing"


def test_what_peers_chose_moves_no_cursor_and_forges_no_markup(monkeypatch):
    monkeypatch.setenv("TERM", "xterm")
    run, terminal = FakeRun(None, workers=0), Terminal()
    with LiveView(run.log, plain=False, stream=terminal) as view:
        run.start()
        for name in ("\x1b[2J\x1b]0;owned\x07", "[red on blue]p[/]", "a\nb\r\u202ec", "x" * 200_000, "[/]"):
            run.log.emit("worker_joined", worker=name, gpu=name, price_per_hour=1.0)
            run.log.emit("worker_left", worker=name, reason=name)
            run.log.emit("refused", worker=name, reason=name, index=1)
            run.log.emit("activation", active=[name], pool=[{"worker": name, "state": name}], reason=name)
        text = shown(view)
    assert not set(text) & set("\x1b\x07\r\u202e")
    for forged in ("\x1b[2J", "\x1b]", "\x07", "\r\u202e"):
        assert forged not in terminal.getvalue()
    assert "[red on blue]p[/]" in text
    assert len(text) < 5000


def test_plain_lines_come_now_and_then_and_at_moments_that_matter():
    run, stream = FakeRun(None, workers=3), io.StringIO()
    with LiveView(run.log, plain=True, stream=stream, plain_every_s=60, clock=run.clock.monotonic):
        run.play(20)
    lines = stream.getvalue().splitlines()
    assert len(lines) < 12
    assert stream.getvalue().isascii()
    assert "\x1b" not in stream.getvalue()
    assert lines[0].startswith("step 0/60")
    assert lines[-1].endswith("finished")
    assert "staleness 4 (S 4)" in lines[-1]


def test_a_closed_pipe_ends_the_lines_and_not_the_run():
    run = FakeRun(None, workers=2)
    seen = []
    with LiveView(run.log, plain=True, stream=ClosedPipe()):
        run.log.subscribe(seen.append)
        run.play(3)
    assert any(event["event"] == "run_finished" for event in seen)


def test_when_lines_are_wanted():
    terminal, pipe = Terminal(), io.StringIO()
    assert not wants_plain(terminal, {"TERM": "xterm"})
    assert wants_plain(pipe, {})
    assert wants_plain(terminal, {"NO_COLOR": "1"})
    assert wants_plain(terminal, {"TERM": "dumb"})
    latin = Terminal()
    latin.encoding = "latin-1"
    assert wants_plain(latin, {})


def test_sparklines():
    assert sparkline([0, 1, 2, 3, 4, 5, 6, 7]) == "▁▂▃▄▅▆▇█"
    assert sparkline([2.0, 2.0]) == "▄▄"
    assert sparkline([math.nan, math.inf]) == ""
    assert len(sparkline(list(range(100)), width=10)) == 10
