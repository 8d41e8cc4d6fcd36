"""Settings come in layers, and errors name key and value."""

import re
from operator import attrgetter
from pathlib import Path

import pytest

from echo2p2p.errors import Contradiction, SettingsError
from echo2p2p.layering import OTHER_VARIABLES, layers, load, merge, read_environment, to_toml, with_sources
from echo2p2p.settings import Settings

ROOT = Path(__file__).parents[2]
SHIPPED = sorted(
    [*ROOT.glob("configs/*.toml"), *ROOT.glob("examples/**/*.toml"), ROOT / "echo2p2p/demo.toml"]
)


@pytest.mark.parametrize("file", SHIPPED, ids=lambda file: f"{file.parent.name}/{file.name}")
def test_every_shipped_file_is_valid(file):
    assert isinstance(load([file]), Settings)


def test_files_layer_and_overrides_win(tmp_path, monkeypatch):
    first, second = tmp_path / "1.toml", tmp_path / "2.toml"
    first.write_text('name = "a"\n[learner]\nstaleness = 5\nsteps = 7\n')
    second.write_text("[learner]\nstaleness = 6\n")
    monkeypatch.setenv("ECHO2P2P_LEARNER__PROMPTS_PER_STEP", "9")
    monkeypatch.setenv("ECHO2P2P_LEARNER__STEPS", "8")
    settings = load([first, second], ["learner.steps=10", "worker.gpu=RTX 5090"])
    assert (settings.name, settings.learner.staleness, settings.learner.steps) == ("a", 6, 10)
    assert settings.learner.prompts_per_step == 9
    assert settings.worker.gpu == "RTX 5090"


def test_resolved_settings_read_back_equal(tmp_path):
    settings = load([ROOT / "echo2p2p/demo.toml"], ["learner.kappa=4"])
    file = tmp_path / "resolved.toml"
    file.write_text(to_toml(settings))
    assert load([file]) == settings


@pytest.mark.parametrize(
    ("override", "says"),
    [
        ("learner.stalenes=3", "learner.stalenes is not a setting"),
        ("learner.staleness=-1", "learner.staleness = -1"),
        ("learner.mode=sometimes", "learner.mode = 'sometimes'"),
        ("name=a b", "name = 'a b'"),
        ("learner", "section.key=value"),
        ("worker.price_per_hour=nan", "worker.price_per_hour = nan"),
    ],
)
def test_a_wrong_setting_is_named_with_its_value(override, says):
    with pytest.raises(SettingsError) as caught:
        load([], [override])
    assert says in str(caught.value)
    assert caught.value.exit_code == 3


def test_what_is_wrong_is_named_with_where_it_comes_from(tmp_path, monkeypatch):
    first, second = tmp_path / "1.toml", tmp_path / "2.toml"
    first.write_text("[learner]\nsteps = 0\nnope = 1\n[learner.optimizer]\nbeta = 1\n")
    second.write_text("[learner]\nnope = 2\n[[task.stages]]\nstart = 1\nwhen = 2\n")
    monkeypatch.setenv("ECHO2P2P_WORKER__GPUS", "2")
    with pytest.raises(SettingsError) as caught:
        load([first, second], ["weights.chunk_kb=4", "task.options.deep={a = 1}"])
    said = {line.partition(" ")[0]: line for line in str(caught.value).split("; ")}
    assert f"is not a setting (from {second})" in said["learner.nope"]
    assert said["learner.optimizer.beta"].endswith(f"(from {first}): the closest is learner.optimizer.beta2")
    assert said["learner.steps"].startswith(f"learner.steps = 0 (from {first}): ")
    assert said["task.stages.0.when"].endswith(f"(from {second})")
    assert said["worker.gpus"].endswith("(from ECHO2P2P_WORKER__GPUS): the closest is ECHO2P2P_WORKER__GPU")
    assert said["weights.chunk_kb"].endswith("(from --set): the closest is weights.chunk_kib")
    assert "default" not in str(caught.value)


def test_a_broken_file_is_named(tmp_path):
    file = tmp_path / "broken.toml"
    file.write_text("[learner\n")
    with pytest.raises(SettingsError, match=r"broken\.toml is not TOML"):
        load([file])
    with pytest.raises(SettingsError, match="cannot be read"):
        load([tmp_path / "missing.toml"])


A, B = "/ip4/203.0.113.7/tcp/1/p2p/a", "/ip4/203.0.113.7/tcp/1/p2p/b"


@pytest.mark.parametrize("way", ["environment", "--set"])
@pytest.mark.parametrize(
    ("key", "raw", "value"),
    [
        ("swarm.initial_peers", A, (A,)),
        ("swarm.initial_peers", f"{A}, {B}", (A, B)),
        ("swarm.initial_peers", f'"{A}"', (A,)),
        ("swarm.initial_peers", f"['{A}', '{B}']", (A, B)),
        ("swarm.initial_peers", "", ()),
        ("task.reward_reads", "/a,/b", (Path("/a"), Path("/b"))),
        ("task.options", '{kind="reverse", length=8}', {"kind": "reverse", "length": 8}),
        ("task.options", '{"kind": "reverse", "length": 8}', {"kind": "reverse", "length": 8}),
        ("task.options.length", "8", {"length": 8}),
        ("learner", "{staleness = 4}", 4),
        ("learner", '{"staleness": 4}', 4),
        ("learner.temperature", "1e-1", 0.1),
        ("learner.journal", "false", False),
        ("name", "2026", "2026"),
        ("name", "2026-11-30", "2026-11-30"),
        ("worker.gpu", "4090", "4090"),
        ("policy.path", "7", Path("7")),
    ],
)
def test_a_value_means_the_same_in_the_environment_and_after_set(way, key, raw, value, monkeypatch):
    if way == "environment":
        monkeypatch.setenv(f"ECHO2P2P_{key.replace('.', '__').upper()}", raw)
        found = load()
    else:
        found = load([], [f"{key}={raw}"])
    shown = {"learner": "learner.staleness", "task.options.length": "task.options"}.get(key, key)
    assert attrgetter(shown)(found) == value


def test_a_variable_goes_before_one_of_its_whole_section():
    found = merge(
        read_environment(
            {"ECHO2P2P_LEARNER__STALENESS": "4", "ECHO2P2P_LEARNER": "{staleness = 2, steps = 9}"}
        )
    )
    assert (found.learner.staleness, found.learner.steps) == (4, 9)


@pytest.mark.parametrize(
    ("variable", "raw", "says"),
    [
        ("SWARM__INITIAL_PEERS", '["/ip4/', 'should be a list, such as ["a", "b"]'),
        ("TASK__STAGES", "x", "should be a list"),
        ("TASK__OPTIONS", "reverse", 'should be a table, such as { key = "value" }'),
        ("TASK__OPTIONS", "{kind = {}}", "task.options.kind.str = {}"),
        ("LEARNER", "foo", "should be a table"),
        ("LEARNER__STEPS", "many", "should be a whole number"),
        ("LEARNER__STEPS", "1.5", "should be a whole number"),
        ("LEARNER__TEMPERATURE", "hot", "should be a number"),
        ("LEARNER__JOURNAL", "perhaps", "should be true or false"),
        ("NAME__X", "1", "should be text"),
        ("LERNER__STALENESS", "4", "lerner.staleness is not a setting"),
    ],
)
def test_a_wrong_variable_is_named_in_one_line_that_says_what_to_write(variable, raw, says, monkeypatch):
    monkeypatch.setenv(f"ECHO2P2P_{variable}", raw)
    with pytest.raises(SettingsError) as caught:
        load()
    said = str(caught.value)
    assert f"(from ECHO2P2P_{variable})" in said
    assert says in said
    assert "\n" not in said
    assert caught.value.exit_code == 3


@pytest.mark.parametrize(
    ("variable", "closest"),
    [
        ("LERNER__STALENESS", "LEARNER__STALENESS"),
        ("LEARNER_STALENESS", "LEARNER__STALENESS"),
        ("STALENESS", "LEARNER__STALENESS"),
        ("WORKR__PRICE_PER_HOUR", "WORKER__PRICE_PER_HOUR"),
        ("LEARNER__OPTIMISER__BETA1", "LEARNER__OPTIMIZER__BETA1"),
        ("NAM", "NAME"),
    ],
)
def test_a_variable_that_names_no_setting_is_refused_with_the_closest_that_does(
    variable, closest, monkeypatch
):
    monkeypatch.setenv(f"ECHO2P2P_{variable}", "3")
    with pytest.raises(SettingsError) as caught:
        load()
    assert str(caught.value).endswith(
        f"is not a setting (from ECHO2P2P_{variable}): the closest is ECHO2P2P_{closest}"
    )


def test_the_project_s_own_variables_are_no_typos(monkeypatch):
    for variable in OTHER_VARIABLES:
        monkeypatch.setenv(variable, "3")
    load()
    folders = ["echo2p2p", "tests/engines", "tests/faults", "tests/swarm", "benchmarks", "examples"]
    files = [file for folder in folders for file in (ROOT / folder).rglob("*.py")]
    found = {name for file in files for name in re.findall(r"\bECHO2P2P_\w+", file.read_text("utf-8"))}
    assert found - {"ECHO2P2P_LEARNER__STALENESS"} == OTHER_VARIABLES


def test_settings_that_contradict_each_other_are_named_with_where_they_come_from(tmp_path, monkeypatch):
    file = tmp_path / "run.toml"
    file.write_text('[learner.optimizer]\nobjective = "trajectory-balance"\n')
    monkeypatch.setenv("ECHO2P2P_LEARNER__KAPPA", "9")
    layered = layers([file])
    with pytest.raises(Contradiction) as caught:
        merge(layered).learner.check_period()
    assert str(with_sources(caught.value, layered)).endswith(
        ": learner.kappa from ECHO2P2P_LEARNER__KAPPA, learner.staleness by default"
    )
    with pytest.raises(SettingsError) as refused:
        load([file], ["learner.optimizer.kl_beta=0.1"])
    assert str(refused.value).endswith(
        f": learner.optimizer.objective from {file}, learner.optimizer.kl_beta from --set"
    )
