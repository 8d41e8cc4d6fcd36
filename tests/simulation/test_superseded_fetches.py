"""Versions published faster than they can be fetched: workers turn to newer ones, and still install."""

from test_simulated_swarm import settings_for

from echo2p2p.simulation.swarm import SimulatedRun, WorkerModel, simulate
from echo2p2p.swarm.memory import MemorySwarm
from echo2p2p.swarm.virtual_time import run_virtual
from echo2p2p.telemetry.events import EventLog, read_events

DURATION_S = 200


def test_with_publications_faster_than_its_fetches_a_slow_worker_installs_again_and_again(tmp_path):
    # The learner waits for most of them before it publishes again; one is slower than that.
    pool_mbit = (20, 20, 20, 20, 0.25)
    settings = settings_for(
        *("learner.staleness=200", "learner.kappa=1", "learner.min_workers=5", "provisioning.gamma=1.6")
    )

    async def main():
        async with MemorySwarm(seed=1, default_delay_s=0.02) as swarm:
            # A step takes 3 s, and 512 KiB through a downlink of 0.25 Mbit/s 17 s.
            run = SimulatedRun(swarm, settings, t_train_s=3, snapshot_bytes=2**19, install_s=0.1)
            pool = [WorkerModel(0.3, 400, download_mbit=mbit) for mbit in pool_mbit]
            start_worker, logs = run.start_worker, []

            async def logged(model, number):
                worker, network = await start_worker(model, number)
                path = tmp_path / f"{number}.jsonl"
                logs.append(EventLog(path, role="worker", peer=network.peer_id, clock=network.clock))
                worker._events = logs[-1]
                return worker, network

            run.start_worker = logged
            await simulate(run, pool, duration_s=DURATION_S)
            for log in logs:
                log.close()

    run_virtual(main)
    for number in range(len(pool_mbit)):
        events = list(read_events(tmp_path / f"{number}.jsonl"))
        installed = [event["version"] for event in events if event["event"] == "installed"]
        given_up = [event["version"] for event in events if event["event"] == "superseded"]
        assert installed == sorted(set(installed))
        assert not set(given_up) & set(installed)
    # The slow one, the last: at worst one fetch in two is given up, with less than a fifth of it here.
    assert given_up
    assert len(installed) >= DURATION_S / 40
    assert len(given_up) <= len(installed) + 1
