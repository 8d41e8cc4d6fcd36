"""A policy that runs away from its samples: whoever runs the learner is told, once."""

import logging

import pytest

from echo2p2p.layering import load
from echo2p2p.simulation.swarm import SimulatedRun, WorkerModel, simulate
from echo2p2p.swarm.memory import MemorySwarm
from echo2p2p.swarm.virtual_time import run_virtual


@pytest.mark.parametrize(("drift_kl", "told"), [(1e-3, 0), (2.0, 1)])
def test_a_policy_far_from_its_samples_is_told_once(tmp_path, caplog, drift_kl, told):
    async def main():
        async with MemorySwarm(seed=1, default_delay_s=0.05) as swarm:
            settings = load(
                overrides=[
                    "learner.prompts_per_step=8",
                    "learner.samples_per_prompt=4",
                    "learner.steps=12",
                    "learner.min_workers=4",
                    "provisioning.t_train_prior_s=10",
                    "weights.chunk_kib=16",
                ]
            )
            run = SimulatedRun(
                swarm, settings, t_train_s=10, drift_kl=drift_kl, events=tmp_path / "events.jsonl"
            )
            await simulate(run, [WorkerModel(1.0, 150.0) for _ in range(4)], duration_s=3600)
        return run

    with caplog.at_level(logging.WARNING, logger="echo2p2p.learner"):
        run = run_virtual(main)
    assert run.trainer.checkpoints[-1].step == 12
    lines = [line for line in caplog.messages if "nats a token away" in line]
    assert len(lines) == told
    assert all("at most 3 versions ago" in line for line in lines)
