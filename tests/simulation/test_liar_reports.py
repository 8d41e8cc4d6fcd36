"""A member that sends wrong bytes loses its place in the plans that follow, and nothing else."""

import asyncio

from echo2p2p.layering import load
from echo2p2p.simulation.swarm import SimulatedRun, WorkerModel
from echo2p2p.swarm.memory import MemorySwarm
from echo2p2p.swarm.virtual_time import run_virtual
from echo2p2p.telemetry.events import read_events
from echo2p2p.weights.manifest import ManifestVerifier


def test_who_was_caught_lying_relays_nothing_of_the_next_versions(tmp_path):
    settings = load(
        overrides=[
            "learner.prompts_per_step=8",
            "learner.samples_per_prompt=4",
            "learner.max_new_tokens=400",
            "learner.steps=16",
            "learner.min_workers=6",
            "weights.chunk_kib=16",
            "provisioning.gamma=3",
        ]
    )

    async def main():
        async with MemorySwarm(seed=1, default_delay_s=0.02) as swarm:
            run = SimulatedRun(swarm, settings, t_train_s=10, events=tmp_path / "events.jsonl")
            learner, _ = await run.start_learner()
            started = [await run.start_worker(WorkerModel(0.3, 100), number) for number in range(6)]
            networks = [network for _, network in started]
            liar = networks[2]
            for other in networks:
                if other is not liar:
                    swarm.corrupt(liar, other, every=1, min_bytes=4096)
            async with asyncio.TaskGroup() as tasks:
                for worker, _ in started:
                    tasks.create_task(worker.run())
                async with asyncio.timeout(3600):
                    await learner.run()
                for worker, _ in started:
                    worker.stop()
            newest = max(run.store.manifests().items())[1]
            plan = {each.peer: each.upload_mbit for each in ManifestVerifier(run.run).accept(newest).members}
            return liar.peer_id, plan

    liar, plan = run_virtual(main)
    assert [peer for peer, upload_mbit in plan.items() if not upload_mbit] == [liar]
    events = list(read_events(tmp_path / "events.jsonl"))
    ready = [event for event in events if event["event"] == "ready"]
    published = [event for event in events if event["event"] == "published"]
    assert {peer for event in published for peer in event["suspects"]} == {liar}
    first = min(event["version"] for event in published if event["suspects"])
    later = [e for e in events if e["event"] == "relayed" and e["version"] >= first and e["reports"]]
    assert later
    assert all(event["sent"].get(liar, 0) == 0 for event in later)
    assert sum(sum(event["sent"].values()) for event in later) > 0
    # It still gets every version itself.
    assert any(event["worker"] == liar and event["version"] >= first for event in ready)
