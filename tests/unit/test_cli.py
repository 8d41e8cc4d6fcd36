"""The command line as a person meets it: instant help, one-line errors, documented exit codes."""

import json
import subprocess
import sys
import time

import pytest

from echo2p2p.cli.main import COMMANDS, LazyGroup, cli

PRICES = "worker,price_per_hour,rollouts_per_s,count\nrtx5090,0.35,0.2,20\na100,3.06,1.0,2\n"


def run(*arguments, timeout=60, **options):
    return subprocess.run(
        [sys.executable, "-m", "echo2p2p", *arguments],
        capture_output=True,
        text=True,
        timeout=timeout,
        **options,
    )


def test_the_commands_are_the_documented_ones():
    assert list(COMMANDS) == [
        "bootstrap", "learner", "worker", "inspect", "simulate", "plan", "demo", "report", "export",
    ]  # fmt: skip
    assert isinstance(cli, LazyGroup)


def test_help_is_instant():
    best = min(timed_help() for _ in range(3))
    assert best < 0.4


def timed_help():
    started = time.monotonic()
    assert run("--help").returncode == 0
    return time.monotonic() - started


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_explains_itself_without_heavy_imports(command):
    probe = (
        "import sys; sys.argv = ['echo2p2p', sys.argv[1], '--help']\n"
        "from echo2p2p.cli.main import main\n"
        "try: main()\n"
        "finally: assert not {'torch', 'transformers', 'hivemind', 'matplotlib'} & set(sys.modules)\n"
    )
    done = subprocess.run([sys.executable, "-c", probe, command], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert "Usage" in done.stdout


def test_a_plan_for_people_and_for_programs(tmp_path):
    prices = tmp_path / "prices.csv"
    prices.write_text(PRICES)
    question = ["plan", str(prices), "-R", "2048", "--t-train", "1600", "--t-bcast", "1312"]
    answer = json.loads(run(*question, "--json").stdout)
    assert answer["plan"]["feasible"] is True
    assert len(answer["plan"]["workers"]) == 8
    assert answer["plan"]["predicted_staleness"] == 3
    assert "mu target" in run(*question).stdout
    assert [p["staleness"] for p in answer["by_staleness"]] == [1, 2, 3, 4, 5, 6]
    capped = json.loads(run(*question, "--price-cap", "2", "--json").stdout)["plan"]
    assert capped["price_per_hour"] <= 2
    assert not capped["feasible"]


def test_a_bad_price_list_is_refused_by_line(tmp_path):
    prices = tmp_path / "prices.csv"
    prices.write_text(PRICES + "x,-1,2,1\n")
    done = run("plan", str(prices), "-R", "1", "--t-train", "1", "--t-bcast", "0")
    assert done.returncode == 3
    assert "line 4" in done.stderr


def test_dry_run_prints_the_settings_and_starts_nothing():
    done = run("learner", "--dry-run", "--set", "learner.staleness=7", "--initial-peers", "/a/p2p/x,/b/p2p/y")
    assert done.returncode == 0
    assert "staleness = 7" in done.stdout
    assert "/b/p2p/y" in done.stdout


@pytest.mark.parametrize(
    ("arguments", "code", "says"),
    [
        (["learner", "--set", "learner.nope=1"], 3, "learner.nope is not a setting"),
        (["worker"], 2, "--run"),
        (["nonsense"], 2, "nonsense"),
        (["plan", "-R", "1", "--t-train", "1", "--t-bcast", "0"], 2, "PRICES"),
        (["inspect", "peers"], 2, "--initial-peers"),
        (["report", "/nonexistent"], 2, "/nonexistent"),
        (["export", "x", "out", "--run-dir", "."], 2, "VERSION"),
    ],
)
def test_bad_input_gets_one_clear_line_and_its_exit_code(arguments, code, says, tmp_path):
    done = run(*arguments, cwd=tmp_path)
    assert done.returncode == code
    assert says in done.stderr
    assert "Traceback" not in done.stderr
