"""A learner that is resumed although its run is finished says so, and nothing else happens."""

import pytest

from echo2p2p.layering import load
from echo2p2p.simulation.swarm import SimulatedRun, WorkerModel, simulate
from echo2p2p.swarm.directory import Directory
from echo2p2p.swarm.memory import MemorySwarm
from echo2p2p.swarm.virtual_time import run_virtual
from echo2p2p.telemetry.events import read_events

SETTINGS = [
    "learner.prompts_per_step=4",
    "learner.samples_per_prompt=2",
    "learner.steps=6",
    "provisioning.t_train_prior_s=10",
    "weights.chunk_kib=16",
]


@pytest.mark.parametrize("steps", [6, 3])
def test_a_finished_run_is_left_as_it_was(tmp_path, steps):
    log = tmp_path / "e.jsonl"

    async def main():
        async with MemorySwarm(seed=1, default_delay_s=0.05) as swarm:
            run = SimulatedRun(swarm, load(overrides=SETTINGS), t_train_s=10, events=log)
            first = await simulate(run, [WorkerModel(5.0, 150.0)], duration_s=7200)
            before = first.status()
            swarm.kill(swarm.living(run.identity.peer_id))
            logged = list(read_events(log))

            run.settings = load(overrides=[*SETTINGS, f"learner.steps={steps}"])
            again, network = await run.start_learner()
            assert again.done
            assert await again.run()
            assert again.status().step == before.step == 6
            assert again.status().spend_usd == pytest.approx(before.spend_usd)
            assert before.spend_usd > 0
            assert list(read_events(log)) == logged, "nothing ran"
            record = await Directory(swarm.add_peer(), run.run).learner(5)
            return network, record

    _, record = run_virtual(main)
    assert (record.state, record.step, record.published_version) == ("finished", 6, 6)


def test_more_steps_are_not_done(tmp_path):
    async def main():
        async with MemorySwarm(seed=1, default_delay_s=0.05) as swarm:
            run = SimulatedRun(swarm, load(overrides=SETTINGS), t_train_s=10, events=tmp_path / "e.jsonl")
            await simulate(run, [WorkerModel(5.0, 150.0)], duration_s=7200)
            swarm.kill(swarm.living(run.identity.peer_id))
            run.settings = load(overrides=[*SETTINGS, "learner.steps=7"])
            learner, _ = await run.start_learner()
            return learner.done

    assert run_virtual(main) is False
