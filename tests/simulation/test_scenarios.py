"""Scenarios: typed files, the same events every time, and books that hold."""

import json
import os
import subprocess
import sys

import pytest

from echo2p2p.errors import SettingsError
from echo2p2p.simulation.play import play
from echo2p2p.simulation.scenario import Scenario, load_scenario, shipped_scenarios
from echo2p2p.telemetry.events import read_events

SMALL = """
name = "small"
duration_s = 900
seed = 3

[learner]
t_train_s = 10
jitter = 0.1
price_per_hour = 1

[learner.settings.learner]
staleness = 3
prompts_per_step = 8
samples_per_prompt = 4
min_workers = 6

[learner.settings.worker]
batch_groups = 2

[policy]
nbytes = 20_000_000
changed_share = 0.01
chunks = 32

[completions]
mean_tokens = 100
max_tokens = 400
tail = "lognormal"
tokens_each = 4

[[workers]]
name = "cheap"
count = 5
price_per_hour = 0.2
tokens_per_s = 200
speed_spread = 0.3

[[workers]]
name = "dear"
count = 3
price_per_hour = 0.9
tokens_per_s = 400

[churn]
joins_per_hour = 30
leaves_per_hour = 15
kills_per_hour = 15

[[price_changes]]
at_s = 300
workers = "cheap"
factor = 2

[[slowdowns]]
at_s = 200
for_s = 100
share = 0.5
factor = 0.2

[[cuts]]
at_s = 400
for_s = 30
workers = "dear"

[[learner_kills]]
at_s = 600
for_s = 20
"""


@pytest.fixture
def small(tmp_path):
    file = tmp_path / "small.toml"
    file.write_text(SMALL)
    return file


def changed(small, **over):
    return Scenario(**{**load_scenario(small).model_dump(), **over})


def test_every_shipped_scenario_is_one():
    assert set(shipped_scenarios()) == {"echo2", "heavy-churn", "slow-links"}
    for name in shipped_scenarios():
        scenario = load_scenario(name)
        assert scenario.name == name
        assert scenario.description
        assert scenario.scale >= 1


def test_every_key_of_a_scenario_is_documented():
    def walk(schema):
        for kind in (schema, *schema["$defs"].values()):
            for name, field in kind["properties"].items():
                whole = (
                    name in ("learner", "policy", "completions", "workers", "churn", "rules")
                    or "items" in field
                )
                assert whole or "description" in field, name

    walk(Scenario.model_json_schema())


@pytest.mark.parametrize(
    ("old", "new", "told"),
    [
        ("seed = 3", "sed = 3", "sed is not known"),
        ("staleness = 3", "stalenes = 3", "learner.settings.learner.stalenes is not known"),
        ("duration_s = 900", "", "duration_s is missing"),
        ("factor = 2", "factor = -2", "price_changes.0.factor = -2"),
        ('workers = "cheap"', 'workers = "chep"', "no class of workers called chep"),
        ('name = "dear"', 'name = "cheap"', "same name"),
        ("nbytes = 20_000_000", "nbytes = 20_000", "policy"),
    ],
)
def test_a_mistake_in_a_scenario_is_named(small, old, new, told):
    small.write_text(SMALL.replace(old, new, 1))
    with pytest.raises(SettingsError, match=told.replace(".", r"\.")):
        load_scenario(small)


def test_a_scenario_that_is_not_there_names_those_that_are():
    with pytest.raises(SettingsError, match="heavy-churn"):
        load_scenario("hevy-churn")


def test_everything_happens_and_the_promises_hold(small, tmp_path):
    outcome = play(load_scenario(small), events=tmp_path / "events.jsonl")
    assert outcome.broken == ()
    assert outcome.steps > 25
    assert outcome.happened["learner killed"] == 1
    assert outcome.happened["joined"] > 0
    events = list(read_events(tmp_path / "events.jsonl"))
    assert sum(event["event"] == "run_started" for event in events) == 2
    # Sizes in the log are those of the real world.
    published = [event for event in events if event["event"] == "published"]
    assert {event["snapshot_bytes"] for event in published} == {20_000_000}
    assert 0 < published[1]["patch_bytes"] < 2_000_000
    assert 90 < max(e["upload_mbit"] for e in events if e["event"] == "worker_joined") < 110


def test_the_bill_is_the_one_that_the_learner_keeps(small, tmp_path):
    scenario = changed(small, learner_kills=[], churn={}, price_changes=[], warmup_steps=0)
    outcome = play(scenario, events=tmp_path / "events.jsonl")
    steps = [e for e in read_events(tmp_path / "events.jsonl") if e["event"] == "step"]
    theirs = (steps[-1]["spend_usd"] - steps[0]["spend_usd"]) / (len(steps) - 1)
    assert outcome.worker_usd_per_step == pytest.approx(theirs, rel=0.01)


def test_a_learner_that_does_not_see_prices_pays_more(small):
    quiet = {
        "learner_kills": [],
        "churn": {},
        "price_changes": [],
        "slowdowns": [],
        "cuts": [],
        "duration_s": 600,
    }
    aware = play(changed(small, **quiet))
    blind = play(changed(small, **quiet, rules={"cost_aware": False}))
    assert blind.worker_usd_per_step > 1.2 * aware.worker_usd_per_step


def test_without_relay_the_learner_sends_everything(small):
    outcome = play(
        changed(small, churn={}, learner_kills=[], cuts=[], duration_s=300, rules={"relay": False})
    )
    assert outcome.by_learner == 1
    assert play(changed(small, churn={}, learner_kills=[], cuts=[], duration_s=300)).by_learner < 0.6


def simulate(small, folder, hash_seed="0", *options):
    return subprocess.run(
        [
            sys.executable,
            "-m",
            "echo2p2p",
            "simulate",
            str(small),
            "--run-dir",
            str(folder),
            "--json",
            *options,
        ],
        capture_output=True,
        text=True,
        timeout=110,
        env={**os.environ, "PYTHONHASHSEED": hash_seed},
    )


def test_the_same_scenario_gives_the_same_events_in_another_process(small, tmp_path):
    small.write_text(SMALL.replace("duration_s = 900", "duration_s = 700"))
    logs = []
    for hash_seed in ("1", "2"):
        done = simulate(small, tmp_path / hash_seed, hash_seed)
        assert done.returncode == 0, done.stderr
        assert json.loads(done.stdout)["broken"] == []
        assert "steps" in done.stderr
        logs.append((tmp_path / hash_seed / "events.jsonl").read_bytes())
    assert logs[0] == logs[1]
    done = simulate(small, tmp_path / "3", "1", "--seed", "4")
    assert (tmp_path / "3" / "events.jsonl").read_bytes() != logs[0]
    report = subprocess.run(
        [sys.executable, "-m", "echo2p2p", "report", str(tmp_path / "1")], capture_output=True, timeout=100
    )
    assert report.returncode == 0, report.stderr
    assert (tmp_path / "1" / "report.html").stat().st_size > 10_000


def test_a_scenario_that_is_not_there_is_exit_code_2(tmp_path):
    assert simulate(tmp_path / "missing.toml", tmp_path / "run").returncode == 2
    done = simulate("nobody-shipped-this", tmp_path / "run")
    assert done.returncode == 2
    assert "slow-links" in done.stderr


def test_a_run_folder_with_events_is_not_written_over(small, tmp_path):
    events = tmp_path / "run" / "events.jsonl"
    events.parent.mkdir()
    events.write_text("kept\n")
    done = simulate(small, events.parent)
    assert done.returncode == 3
    assert "earlier run" in done.stderr
    assert events.read_text() == "kept\n"
