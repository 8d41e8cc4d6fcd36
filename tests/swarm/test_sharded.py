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
from policies import make_groups
from safetensors.torch import load_file
from sharded_run import OBJECTIVES, settings

from echo2p2p.learning.trainer import GRPOTrainer

DEADLINE_S = 100


def run_ranks(size: int, *arguments: object) -> None:
    """What torchrun does, without its agent: as many processes, joined over a free port of loopback."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    script = Path(__file__).with_name("sharded_run.py")
    paths = os.pathsep.join([str(Path(__file__).parents[1]), *filter(None, sys.path)])
    common = {
        "PYTHONPATH": paths,
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
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
