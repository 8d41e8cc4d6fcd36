"""``echo2p2p eval``: the figure, its interval, and what it can be asked about."""

from __future__ import annotations

import json
import math
import re
from pathlib import Path

import pytest
from click.testing import CliRunner

from echo2p2p.cli.eval import command
from echo2p2p.data.trajectory import Group, Trajectory, pack_logprobs
from echo2p2p.errors import SettingsError
from echo2p2p.evaluate import _summary
from echo2p2p.learning.trainer import AdapterSettings, GRPOTrainer, TrainerSettings
from echo2p2p.parts import SEED_POLICY, read_assets
from echo2p2p.swarm.memory import MemorySwarm
from echo2p2p.swarm.virtual_time import run_virtual
from echo2p2p.weights.publisher import WeightPublisher
from echo2p2p.weights.store import DiskStore

OPTIONS = ["--set", "learner.max_new_tokens=6", "--set", "learner.threads=1"]


def group(index, *rewards):
    return Group(index, [5], [Trajectory([7, 8], pack_logprobs([-1, -1]), 0, 0, r, "stop") for r in rewards])


def test_the_interval_is_over_prompts_because_samples_of_one_are_alike():
    found = _summary(
        "strings", [group(0, 1.0, 1.0), group(1, 0.0, 0.0), group(2, 1.0, 0.0), group(3, 0.0, 1.0)]
    )
    assert found.reward == 0.5
    half = 1.96 * math.sqrt((0.25 + 0.25) / 3) / 2
    assert found.low == pytest.approx(0.5 - half)
    assert found.high == pytest.approx(0.5 + half)
    assert (found.prompts, found.samples_per_prompt, found.samples, found.tokens_mean) == (4, 2, 8, 2)


def test_a_policy_folder_is_evaluated_on_the_task_that_the_settings_name():
    arguments = [str(SEED_POLICY), *OPTIONS, "--prompts", "64", "--samples", "2", "--json"]
    done = CliRunner().invoke(command, arguments)
    assert done.exit_code == 0, done.output
    found = json.loads(done.output)
    assert 0.15 < found["low"] < found["reward"] < found["high"] < 0.6  # the seed policy reverses some
    assert (found["task"], found["version"], found["failed"]) == ("strings", None, 0)
    assert (found["prompts"], found["samples_per_prompt"], found["samples"]) == (64, 2, 128)
    page = (Path(__file__).parents[2] / "docs/operations.md").read_text()
    documented = page.partition("`--json` prints")[2].partition("\n\n")[0]
    assert list(found) == re.findall(r"`(\w+)`", documented)
    again = CliRunner().invoke(command, arguments)
    assert json.loads(again.output) == found


def test_a_version_that_is_an_adapter_is_evaluated_on_the_run_s_base(tmp_path):
    trainer = GRPOTrainer(SEED_POLICY, TrainerSettings(threads=1, adapter=AdapterSettings(2, 4, ("q_proj",))))

    async def publish():
        async with MemorySwarm(seed=0) as swarm:
            learner = swarm.add_peer()
            store = DiskStore(tmp_path / "store")
            publisher = WeightPublisher(learner, f"run@{learner.peer_id}", store, keep_versions=2)
            await publisher.start()
            await publisher.publish(trainer.snapshot(), 0, [], read_assets(SEED_POLICY, trainer.adapter))

    run_virtual(publish)
    (tmp_path / "checkpoints").mkdir()
    wanted = [*OPTIONS, "--prompts", "8", "--json"]
    done = CliRunner().invoke(command, [str(tmp_path), *wanted])
    assert done.exit_code == 0, done.exception
    base = CliRunner().invoke(command, [str(SEED_POLICY), *wanted])  # an untrained adapter changes nothing
    assert json.loads(done.output) == {**json.loads(base.output), "version": 0}


def test_what_is_no_policy_is_said_so(tmp_path):
    done = CliRunner().invoke(command, [str(tmp_path), *OPTIONS])
    assert isinstance(done.exception, SettingsError)
    assert "neither a run folder nor a policy folder" in str(done.exception)
    done = CliRunner().invoke(command, [str(SEED_POLICY), "7", *OPTIONS])
    assert "has no versions" in str(done.exception)


def test_a_worker_s_folder_needs_the_run_s_settings(tmp_path):
    (tmp_path / "store").mkdir()
    (tmp_path / "config.resolved.toml").write_text("")
    done = CliRunner().invoke(command, [str(tmp_path)])
    assert "a worker's folder" in str(done.exception)
    done = CliRunner().invoke(command, [str(tmp_path), "--task", "strings"])
    assert "does not hold version None" in str(done.exception)
