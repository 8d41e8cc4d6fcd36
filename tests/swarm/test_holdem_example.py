"""The run of docs/runs/holdem.md, a few steps of it: its policy, its swarm, its curve."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
EXAMPLE = ROOT / "examples/holdem"


@pytest.mark.timeout(300)
def test_the_holdem_run_makes_a_policy_trains_it_and_draws_its_curve(tmp_path):
    def run(*command: str | Path) -> str:
        done = subprocess.run(
            [str(part) for part in command],
            capture_output=True,
            text=True,
            timeout=240,
            env={
                **os.environ,
                "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
                "PYTHONPATH": str(ROOT),
                "OMP_NUM_THREADS": "1",
            },
        )
        assert done.returncode == 0, done.stderr
        return done.stdout

    policy, folder, evaluation = tmp_path / "policy", tmp_path / "run", tmp_path / "eval.json"
    run(sys.executable, EXAMPLE / "make_policy.py", EXAMPLE / "run.toml", policy, "--steps", "5")
    said = run(
        "sh",
        EXAMPLE / "run.sh",
        folder,
        "--policy",
        policy,
        "--steps",
        "3",
        "--set",
        "learner.eval_prompts=8",
    )
    assert "finished" in said
    evaluation.write_text(run("echo2p2p", "eval", folder, "--prompts", "8", "--json"))
    run(sys.executable, EXAMPLE / "curve.py", folder, evaluation, evaluation, tmp_path / "curve.png")
    assert (tmp_path / "curve.png").stat().st_size > 0
