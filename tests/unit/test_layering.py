"""Settings come in layers, and errors name key and value."""

from pathlib import Path

import pytest

from echo2p2p.errors import SettingsError
from echo2p2p.layering import load, to_toml
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
    assert said["learner.nope"].endswith(f"is not a setting (from {second})")
    assert said["learner.optimizer.beta"].endswith(f"(from {first})")
    assert said["learner.steps"].startswith(f"learner.steps = 0 (from {first}): ")
    assert said["task.stages.0.when"].endswith(f"(from {second})")
    assert said["worker.gpus"].endswith("(from ECHO2P2P_WORKER__GPUS)")
    assert said["weights.chunk_kb"].endswith("(from --set)")
    assert "default" not in str(caught.value)


def test_a_broken_file_is_named(tmp_path):
    file = tmp_path / "broken.toml"
    file.write_text("[learner\n")
    with pytest.raises(SettingsError, match=r"broken\.toml is not TOML"):
        load([file])
    with pytest.raises(SettingsError, match="cannot be read"):
        load([tmp_path / "missing.toml"])
