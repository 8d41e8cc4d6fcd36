"""The command line as a person meets it: instant help, one-line errors, documented exit codes."""

import json
import os
import re
import resource
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from echo2p2p.cli.main import COMMANDS, EXIT_CODES, LazyGroup, cli, main
from echo2p2p.errors import Echo2p2pError
from echo2p2p.layering import load
from echo2p2p.rundir import RunDir

ROOT = Path(__file__).parents[2]
PEER = "/ip4/127.0.0.1/tcp/9/p2p/12D3KooWLYdTyB4sXWDgi2bL1bf3619zA4W1rpf8Fp2qnCzAbYLP"
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
        "doctor", "bootstrap", "learner", "worker", "inspect", "simulate", "plan", "demo", "report", "eval", "export",
    ]  # fmt: skip
    assert isinstance(cli, LazyGroup)


def test_every_exit_code_is_in_the_help_and_in_the_operator_s_page():
    kinds, codes = [Echo2p2pError], set()
    while kinds:
        kind = kinds.pop()
        codes.add(kind.exit_code)
        kinds += kind.__subclasses__()
    page = (ROOT / "docs/operations.md").read_text().partition("## Exit codes")[2]
    for text in (EXIT_CODES, page):
        assert {0, 2, 130} | codes == {
            int(code) for code in re.findall(r"(?:^|· |: )\s*(\d+) ", text, re.MULTILINE)
        }


def test_help_is_instant():
    best = min(timed_help() for _ in range(3))
    assert best < 0.4


def timed_help():
    """Processor seconds: what the command costs, however busy the machine is."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    assert run("--help").returncode == 0
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


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


@pytest.mark.parametrize(
    ("variable", "raw", "says"),
    [
        ("ECHO2P2P_LEARNER", "foo", "(from ECHO2P2P_LEARNER): should be a table"),
        ("ECHO2P2P_LERNER__STALENESS", "4", "the closest is ECHO2P2P_LEARNER__STALENESS"),
        ("ECHO2P2P_LEARNER__KAPPA", "9", "learner.kappa from ECHO2P2P_LEARNER__KAPPA, learner.staleness by"),
    ],
)
def test_a_wrong_variable_gets_one_line(variable, raw, says, monkeypatch, capsys):
    monkeypatch.setenv(variable, raw)
    monkeypatch.setattr(sys, "argv", ["echo2p2p", "learner", "--dry-run"])
    with pytest.raises(SystemExit) as ended:
        main()
    told = capsys.readouterr().err
    assert ended.value.code == 3, told
    assert says in told
    assert told.count("\n") == 1


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
    assert 0.35 * len(capped["workers"]) <= 2
    assert not capped["feasible"]
    assert capped["price_per_hour"] is None
    assert "raise the price cap to $2.80/h" in capped["why"]


def test_a_plan_that_is_not_feasible_shows_no_price_and_says_what_is_missing(tmp_path):
    prices = tmp_path / "prices.csv"
    prices.write_text(PRICES)
    shown = run("plan", str(prices), "-R", "9999", "--t-train", "1600", "--t-bcast", "1312").stdout
    rows = [line for line in shown.splitlines() if line[:1].isdigit()]
    assert len(rows) == 6
    assert all("must be at least" in row or "rollouts/s are missing" in row for row in rows)
    assert "$" not in shown.replace("$/h", "").replace("$/step", "")
    assert all(row.split()[5:7] == ["–", "–"] for row in rows)


def test_a_bad_price_list_is_refused_by_line(tmp_path):
    prices = tmp_path / "prices.csv"
    prices.write_text(PRICES + "x,-1,2,1\n")
    done = run("plan", str(prices), "-R", "1", "--t-train", "1", "--t-bcast", "0")
    assert done.returncode == 3
    assert "line 4" in done.stderr


def test_dry_run_shows_every_value_with_its_source_and_starts_nothing(tmp_path):
    file = tmp_path / "one.toml"
    file.write_text("[learner]\nprompts_per_step = 9\n")
    done = run(
        *("learner", "-c", str(file), "--set", "learner.staleness=7", "--initial-peers", f"{PEER},{PEER}"),
        "--dry-run",
        env={**os.environ, "ECHO2P2P_LEARNER__STEPS": "12"},
        cwd=tmp_path,
    )
    assert done.returncode == 0, done.stderr
    comments = dict(re.findall(r"^([a-z_]+) = .*  # (.*)$", done.stdout, re.MULTILINE))
    assert comments["prompts_per_step"] == str(file)
    assert comments["staleness"] == "--set"
    assert comments["initial_peers"] == "command line"
    assert comments["steps"] == "ECHO2P2P_LEARNER__STEPS"
    assert comments["temperature"] == "default"
    assert re.search("^# kappa is not set: .+κ", done.stdout, re.MULTILINE)
    resolved = tmp_path / "resolved.toml"
    resolved.write_text(done.stdout)
    expected = load(
        [file], ["learner.staleness=7", "learner.steps=12", f'swarm.initial_peers=["{PEER}","{PEER}"]']
    )
    assert load([resolved]) == expected
    assert {path.name for path in tmp_path.iterdir()} == {"one.toml", "resolved.toml"}


def test_dry_run_of_a_worker_shows_what_is_a_worker_s(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    run_name = f"spark@{PEER[-52:]}"
    given = ["--run", run_name, "--price", "2", "--set", "learner.staleness=7", "--initial-peers", PEER]
    monkeypatch.setattr(sys, "argv", ["echo2p2p", "worker", *given, "--dry-run"])
    with pytest.raises(SystemExit) as ended:
        main()
    shown = capsys.readouterr().out
    assert ended.value.code == 0
    assert run_name in shown.splitlines()[0]
    told = tomllib.loads(shown)
    assert told["worker"]["price_per_hour"] == 2
    assert set(told) == {"seed", "swarm", "task", "policy", "worker", "weights"}


def shipped_lines():
    unit = (ROOT / "bootstrap/echo2p2p-bootstrap.service").read_text()
    compose = (ROOT / "bootstrap/compose.yaml").read_text()
    yield re.search(r"^ExecStart=\S+ (.*)$", unit, re.MULTILINE)[1]
    folded = re.search(r"command: >\n((?:      .*\n)+)", compose)[1]
    yield re.sub(r"\$\{ANNOUNCE:.*?\}", "/ip4/203.0.113.7/tcp/31337", folded)


@pytest.mark.parametrize("line", list(shipped_lines()), ids=["systemd", "compose"])
def test_the_shipped_bootstrap_lines_are_right(line, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["echo2p2p", *line.split(), "--dry-run"])
    with pytest.raises(SystemExit) as ended:
        main()
    told = capsys.readouterr()
    assert ended.value.code == 0, told.err
    assert "/tcp/31337" in told.out


@pytest.mark.parametrize(
    ("arguments", "code", "says"),
    [
        (["learner", "--set", "learner.nope=1"], 3, "learner.nope is not a setting"),
        (["learner", "--dry-run", "--set", "learner.kappa=5"], 3, "learner.kappa = 5 is more than S + 1 = 4"),
        (
            ["plan", "p.csv", "-R", "1", "--t-train", "1", "--t-bcast", "0"],
            3,
            "price_per_hour = 'cheap' is no",
        ),
        (["export", "latest", "out", "--run-dir", "."], 3, "there is no chunk store store (name the folder"),
        (["worker"], 2, "--run"),
        (["nonsense"], 2, "nonsense"),
        (["plan", "-R", "1", "--t-train", "1", "--t-bcast", "0"], 2, "PRICES"),
        (["inspect", "peers"], 2, "--initial-peers"),
        (["worker", "--dry-run", "--run", "spark"], 2, "NAME@LEARNER"),
        (["learner", "--dry-run", "--name", "a b"], 3, "name = 'a b'"),
        (["learner", "--dry-run", "--initial-peers", "/ip4/1.2.3.4/tcp/1"], 3, "does not end in /p2p/"),
        (["learner", "--dry-run", "--initial-peers", "here"], 3, "is not a multiaddr"),
        (["bootstrap", "--dry-run", "--host-maddrs", "/ip4/0.0.0.0/tcp/99999"], 3, "is not a multiaddr"),
        (["bootstrap", "--dry-run", "--announce-maddrs", "/ip4/1.2.3.4/tcp/0"], 3, "names no port"),
        (["bootstrap", "-c", "missing"], 2, "missing"),
        (["learner", "-c", "missing"], 2, "missing"),
        (["worker", "-c", "missing"], 2, "missing"),
        (["doctor", "-c", "missing"], 2, "missing"),
        (["learner", "--policy", "missing"], 2, "missing"),
        (["doctor", "--policy", "missing"], 2, "missing"),
        (["learner", "--dry-run", "-c", "broken.toml"], 3, "broken.toml is not TOML"),
        (["simulate", "missing.toml"], 2, "missing.toml"),
        (["simulate", "missing"], 2, "heavy-churn"),
        (["simulate", "broken.toml"], 3, "broken.toml is not TOML"),
        (["plan", "missing", "-R", "1", "--t-train", "1", "--t-bcast", "0"], 2, "missing"),
        (["export", "latest", "out", "--run-dir", "missing"], 2, "missing"),
        (["report", "/nonexistent"], 2, "/nonexistent"),
        (["report", "door"], 3, "door is a bootstrap peer's folder: no learner or worker ran here"),
        (["eval", "door"], 3, "door is neither a run folder nor a policy folder"),
        (["export", "x", "out", "--run-dir", "."], 2, "VERSION"),
    ],
)
def test_bad_input_gets_one_clear_line_and_its_exit_code(
    arguments, code, says, tmp_path, monkeypatch, capsys
):
    (tmp_path / "broken.toml").write_text("[learner\n")
    (tmp_path / "p.csv").write_text("worker,price_per_hour,rollouts_per_s\na,cheap,2\n")
    (tmp_path / "door").mkdir()
    (tmp_path / "door/events.jsonl").write_text('{"role":"bootstrap","event":"peers","count":0}\n')
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["echo2p2p", *arguments])
    with pytest.raises(SystemExit) as ended:
        main()
    told = capsys.readouterr()
    assert ended.value.code == code, told.err
    assert says in told.err
    assert not told.out


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["learner", "--resume", "latest"], "there is no checkpoint under"),
        (["learner", "--policy", "."], ". is not a policy folder: it holds no config.json"),
        (["learner", "--run-dir", "deep/er", "--set", "policy.device=abacus"], "no device 'abacus'"),
        (["worker", "--run", f"spark@{PEER[-52:]}", "--initial-peers", PEER, "--device", "abacus"], "abacus"),
        (["learner", "--run-dir", "other"], "holds checkpoints of an earlier run"),
        (["learner", "--run-dir", "empty", "--set", "policy.device=abacus"], "no device 'abacus'"),
    ],
)
def test_a_start_that_is_refused_leaves_no_folder_behind(arguments, says, tmp_path, monkeypatch, capsys):
    (tmp_path / "other/checkpoints/step-000000000007").mkdir(parents=True)
    (tmp_path / "empty").mkdir()
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["echo2p2p", *arguments])
    with pytest.raises(SystemExit) as ended:
        main()
    assert ended.value.code == 3
    assert says in capsys.readouterr().err
    assert {path.name for path in tmp_path.iterdir()} == {
        "other",
        "empty",
    }  # not its own, and not to be removed


def test_a_worker_is_told_of_settings_that_are_its_learner_s(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    given = ["--run", f"spark@{PEER[-52:]}", "--initial-peers", PEER, "--device", "abacus"]
    for more, told in (["learner.staleness=9", "--set", "name=x"], True), (["worker.threads=1"], False):
        monkeypatch.setattr(sys, "argv", ["echo2p2p", "worker", *given, "--set", *more])
        with pytest.raises(SystemExit):
            main()
        assert ("--set of name, learner has no effect" in capsys.readouterr().err) == told


def test_a_folder_with_something_in_it_stays(tmp_path):
    first = RunDir.open(tmp_path / "runs/a")
    second = RunDir.first_free(tmp_path / "runs/a")
    assert second.path.name == "a-2"
    second.close()
    assert [path.name for path in (tmp_path / "runs").iterdir()] == ["a"]
    first.identity.write_text("key")
    first.close()
    assert first.identity.is_file()
    RunDir.open(first.path).close()  # it was there before
    assert first.identity.is_file()
