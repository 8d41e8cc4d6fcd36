import io
import subprocess
import sys
from html.parser import HTMLParser

import pytest
from fake_run import FakeRun
from PIL import Image

from echo2p2p.errors import OutOfDisk, SettingsError
from echo2p2p.telemetry.drawing import PALETTE, fit_text
from echo2p2p.telemetry.history import load_history
from echo2p2p.telemetry.page import render_page
from echo2p2p.telemetry.panels import PANELS, WIDE
from echo2p2p.telemetry.report import draw_figure, draw_panels, write_report

HOSTILE = [
    "<script>alert(1)</script>",
    '"><img src=x onerror=alert(1)>',
    "\x1b[2J\x1b]0;x\x07",
    "a\nb\u202e\u2028",
    r"$\frac{1}$ ${x}^",
    "x" * 200_000,
    "\ud800",
    "漢字 🦙",
]


class Page(HTMLParser):
    """Collects what a browser would act on."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.attributes: list[tuple[str, str | None]] = []
        self.text = ""
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        self.tags.append(tag)
        self.attributes += attrs

    def handle_data(self, data):
        self.text += data


@pytest.fixture
def undrawn(monkeypatch):
    """Reports without their panels, which take a second to draw."""
    monkeypatch.setattr("echo2p2p.telemetry.report.draw_figure", lambda history: b"png")
    monkeypatch.setattr("echo2p2p.telemetry.report.draw_panels", lambda history: [])


def hostile_log(path):
    run = FakeRun(path, workers=2)
    run.start()
    run.log.emit("run_started", run=HOSTILE[0], task=HOSTILE[1], mode=HOSTILE[4], staleness=HOSTILE[2])
    for name in HOSTILE:
        run.log.emit("worker_joined", worker=name, gpu=name, price_per_hour=1)
        run.log.emit(
            "activation", active=[name], pool=[{"worker": name, "mu": 1, "state": name}], reason=name
        )
        run.log.emit("refused", worker=name, reason=name, index=1)
        run.log.emit("worker_left", worker=name, reason=name)
        run.log.emit("step", step=1, dropped={name: 3})
    return load_history(path)


@pytest.fixture(scope="module")
def report(tmp_path_factory):
    """The report of a plausible run."""
    run_dir = tmp_path_factory.mktemp("run")
    FakeRun(run_dir / "events.jsonl").play(20)
    return write_report(run_dir)


def test_a_report_of_a_run(report):
    folder = report.png.parent
    assert sorted(path.name for path in folder.iterdir()) == ["events.jsonl", "report.html", "report.png"]
    assert Image.open(io.BytesIO(report.png.read_bytes())).size == (1716, 1870)
    page = Page(report.html.read_text())
    assert page.tags.count("svg") == len(PANELS)
    for piece in (
        "sums@",
        "finished",
        "window S = 4",
        "RTX 4090",
        "outside the window",
        "run finished",
        "Arrivals of version",
    ):
        assert piece in page.text


def test_the_page_is_self_contained(report):
    page = Page(report.html.read_text())
    assert not {"script", "link", "iframe", "object", "img"} & set(page.tags)
    for name, value in page.attributes:
        assert name != "src"
        if name in {"href", "xlink:href"}:
            assert value is not None
            assert value.startswith("#")
    ids = [value for name, value in page.attributes if name == "id"]
    assert len(ids) == len(set(ids))


def test_the_panels_follow_the_theme_of_the_page(report):
    drawn = report.html.read_text().split("</style>", 1)[1]
    assert not [colour for colour in PALETTE.values() if colour in drawn]
    assert drawn.count("var(--ink)") > len(PANELS)


def test_what_peers_chose_stays_text_on_the_page(tmp_path):
    history = hostile_log(tmp_path / "events.jsonl")
    html = render_page(history, [])
    page = Page(html)
    assert not {"script", "img"} & set(page.tags)
    assert not [name for name, _ in page.attributes if name.startswith("on")]
    assert "<script>alert(1)</script>" in page.text
    assert not set(html) & set("\x1b\x07\u202e\u2028\ud800")
    assert len(html) < 60_000
    html.encode()


def test_what_peers_chose_breaks_no_figure(tmp_path):
    history = hostile_log(tmp_path / "events.jsonl")
    assert Image.open(io.BytesIO(draw_figure(history))).format == "PNG"
    for _, svg in draw_panels(history):
        assert not {"script", "img"} & set(Page(svg).tags)


def test_long_names_stay_inside_the_figure():
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(6, 1), dpi=100)
    FigureCanvasAgg(figure)
    text = figure.text(0.008, 0.5, "", fontsize=15)
    fit_text(text, ["W" * 117], figure, lines=1)
    assert text.get_text().endswith("W~")
    fit_text(text, [f"figure {n}: value" for n in range(5)], figure, lines=2)
    assert text.get_text().count("\n") == 1
    assert text.get_window_extent(figure.canvas.get_renderer()).x1 <= figure.bbox.width
    fit_text(text, ["short", "line"], figure, lines=2)
    assert text.get_text() == "short   ·   line"


@pytest.mark.parametrize("steps", [0, 1])
def test_a_run_that_has_hardly_begun(tmp_path, steps):
    run = FakeRun(tmp_path / "events.jsonl", workers=steps)
    run.start()
    for step in range(1, steps + 1):
        run.step(step)
    history = load_history(tmp_path / "events.jsonl")
    html = render_page(history, draw_panels(history))
    assert "under way" in html
    assert ("no steps yet" in html) == (steps == 0)


@pytest.mark.parametrize("workers", [1, 200])
def test_one_dissemination_is_drawn_for_few_workers_and_for_many(tmp_path, workers):
    run = FakeRun(tmp_path / "events.jsonl", workers=workers)
    run.start()
    run.activate(target=1e9)
    run.publish()
    shown = dict(draw_panels(load_history(tmp_path / "events.jsonl"))[-WIDE:])
    assert list(shown) == [f"{name} of version 3" for name in ("Arrivals", "Senders")]
    # As many shapes for 200 workers as for a dozen.
    assert all(2_000 < len(svg) < 150_000 for svg in shown.values())


def test_an_empty_log_makes_an_honest_page(tmp_path):
    (tmp_path / "events.jsonl").touch()
    page = Page(write_report(tmp_path).html.read_text())
    assert "not started" in page.text
    assert "No worker has joined yet." in page.text


def test_logs_of_workers_within_the_run_folder_are_read(tmp_path, undrawn):
    FakeRun(tmp_path / "events.jsonl", workers=2).play(3)
    for folder, peer in (("workers/a", "12D3KooWfirst"), ("b", "12D3KooWother")):
        (tmp_path / folder).mkdir(parents=True)
        line = f'{{"event":"verdicts","role":"worker","peer":"{peer}","accepted":41}}\n'
        (tmp_path / folder / "events.jsonl").write_text(line)
    page = Page(write_report(tmp_path).html.read_text())
    assert page.text.count("041") == 2, "no groups generated, 41 accepted"
    assert "Wfirst" in page.text
    assert "Wother" in page.text


def test_a_folder_without_a_log_is_refused(tmp_path):
    with pytest.raises(SettingsError, match="cannot be read"):
        write_report(tmp_path)


def test_a_report_that_cannot_be_written_leaves_the_old_one(tmp_path, monkeypatch, undrawn):
    FakeRun(tmp_path / "events.jsonl", workers=1).start()
    (tmp_path / "report.png").write_bytes(b"old")

    def full(self, data):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("pathlib.Path.write_bytes", full)
    with pytest.raises(OutOfDisk, match="No space left"):
        write_report(tmp_path)
    assert (tmp_path / "report.png").read_bytes() == b"old"


def test_matplotlib_is_imported_only_to_draw():
    code = "import sys, echo2p2p.telemetry.report; sys.exit('matplotlib' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], timeout=60).returncode == 0
