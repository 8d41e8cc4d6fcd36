"""Two processes train one policy: the same loss, gradients, weights and checkpoints as one."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from dataclasses import asdict
from pathlib import Path

import pytest
import torch
from architectures import make_architecture
from click.testing import CliRunner
from policies import make_groups
from processes import Processes
from safetensors.torch import load_file
from sharded_run import OBJECTIVES, settings

from echo2p2p.cli.export import command as export
from echo2p2p.learning.trainer import GRPOTrainer, TrainerState
from echo2p2p.parts import SEED_POLICY
from echo2p2p.telemetry.events import read_events

DEADLINE_S = 100


def free_port() -> str:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return str(free.getsockname()[1])


def run_ranks(size: int, *arguments: object) -> None:
    """What torchrun does, without its agent: as many processes, joined over a free port of loopback."""
    script = Path(__file__).with_name("sharded_run.py")
    paths = os.pathsep.join([str(Path(__file__).parents[1]), *filter(None, sys.path)])
    common = {
        "PYTHONPATH": paths,
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": free_port(),
        "WORLD_SIZE": str(size),
    }
    running = [
        subprocess.Popen(
            [sys.executable, script, *map(str, arguments)],
            env={**os.environ, **common, "RANK": str(rank), "LOCAL_RANK": str(rank), "OMP_NUM_THREADS": "1"},
            stderr=subprocess.PIPE,
        )
        for rank in range(size)
    ]
    try:
        for process in running:
            _, errors = process.communicate(timeout=DEADLINE_S)
            assert process.returncode == 0, errors.decode()[-3000:]
    finally:
        for process in running:
            process.kill()
            process.wait()


@pytest.mark.timeout(300)
@pytest.mark.parametrize(("name", "adapter_rank"), [("smollm", 0), ("gemma3", 2)])
def test_two_ranks_train_as_one(tmp_path: Path, name: str, adapter_rank: int) -> None:
    folder = make_architecture(tmp_path / "policy", name)
    run_ranks(2, folder, tmp_path, adapter_rank)
    for number, objective in enumerate(OBJECTIVES):
        alone = GRPOTrainer(folder, settings(objective, adapter_rank))
        found = json.loads((tmp_path / f"found-{number}.json").read_text())
        for step, metrics in enumerate(found["steps"]):
            expected = asdict(alone.train(make_groups(step)))
            assert metrics.pop("skipped") == expected.pop("skipped") == ""
            assert metrics == pytest.approx(expected, rel=1e-3, abs=1e-5)
            if step == 0:
                # After one update exp_avg is a tenth of the gradient.
                tensors = load_file(tmp_path / f"state-{number}.safetensors")
                one = alone.state().tensors
                # A checkpoint of two processes is one of one process.
                alone.check_state(TrainerState(tensors, found["counters"]))
                assert tensors.keys() == one.keys()
                for key, tensor in tensors.items():
                    if "exp_avg." in key:
                        torch.testing.assert_close(tensor, one[key], atol=1e-6, rtol=1e-3)
        assert found["same"]
        snapshot = alone.snapshot()
        assert found["aliases"] == snapshot.layout.aliases
        for key, tensor in load_file(tmp_path / f"snapshot-{number}.safetensors").items():
            # Adam's first steps are the gradient's sign times the learning rate, also where that is but rounding.
            torch.testing.assert_close(tensor, snapshot.state_dict()[key], atol=5e-3, rtol=0)
        expected_logprobs = alone.logprobs(make_groups(2))[0][0].tolist()
        assert found["logprobs"] == pytest.approx(expected_logprobs, abs=2e-2)


SETTINGS = """
name = "ranks"
[swarm]
host_maddrs = ["/ip4/127.0.0.1/tcp/0"]
use_relay = false
[policy.lora]
rank = 4
[learner]
steps = 2
prompts_per_step = 4
samples_per_prompt = 4
max_new_tokens = 8
threads = 1
eval_prompts = 4
[worker]
threads = 1
"""


@pytest.mark.timeout(300)
def test_a_learner_of_two_ranks_trains_an_adapter_in_a_swarm_and_ends_with_both(tmp_path: Path) -> None:
    group = Processes(tmp_path, SETTINGS)
    try:
        door = group.line(group.start("bootstrap", "--run-dir", "bootstrap"))
        common = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": free_port(), "WORLD_SIZE": "2"}
        learner, follower = (
            group.start(
                "learner",
                *("--run-dir", "learner", *door),
                environment={**common, "RANK": str(rank), "LOCAL_RANK": str(rank)},
            )
            for rank in range(2)
        )
        worker = group.start(*group.line(learner)[1:], "--run-dir", "worker")
        for process in (learner, follower, worker):
            assert process.wait(timeout=200) == 0
    finally:
        group.close()
    steps = [e for e in read_events(tmp_path / "learner" / "events.jsonl") if e["event"] == "step"]
    assert [e["step"] for e in steps] == [1, 2]
    arguments = ["latest", tmp_path / "merged", "--run-dir", tmp_path / "worker", "--base", SEED_POLICY]
    done = CliRunner().invoke(export, list(map(str, arguments)))
    assert done.exit_code == 0, done.output
    assert (tmp_path / "merged" / "model.safetensors").is_file()
