"""What the roles write of a version's way, put together again."""

from echo2p2p.layering import load
from echo2p2p.simulation.swarm import SimulatedRun, WorkerModel, simulate
from echo2p2p.swarm.memory import MemorySwarm
from echo2p2p.swarm.virtual_time import run_virtual
from echo2p2p.telemetry.events import read_events
from echo2p2p.telemetry.history import load_history


def test_arrivals_and_senders_of_a_run_add_up(tmp_path):
    settings = load(
        overrides=[
            "learner.prompts_per_step=8",
            "learner.samples_per_prompt=4",
            "learner.max_new_tokens=400",
            "learner.steps=12",
            "learner.min_workers=3",
            "weights.chunk_kib=16",
        ]
    )

    async def main():
        async with MemorySwarm(seed=1, default_delay_s=0.02) as swarm:
            run = SimulatedRun(swarm, settings, t_train_s=10, events=tmp_path / "events.jsonl")
            await simulate(run, [WorkerModel(0.3, 200) for _ in range(3)], duration_s=1800)

    run_virtual(main)
    events = list(read_events(tmp_path / "events.jsonl"))
    ready = [event for event in events if event["event"] == "ready"]
    assert ready
    for event in ready:
        assert 0 < event["fetch_s"] <= event["after_s"]
        if event["arrivals"]:
            assert event["arrivals"][-1][1:] == [event["bytes_from_learner"], event["bytes_from_peers"]]
    relayed = {event["version"]: event for event in events if event["event"] == "relayed"}
    for version, event in relayed.items():
        mine = [each for each in ready if each["version"] == version]
        assert event["reports"] == len(mine)
        assert sum(event["sent"].values()) == sum(each["bytes_from_peers"] for each in mine)
        assert event["from_learner"] >= sum(each["bytes_from_learner"] for each in mine)
    shown = load_history(tmp_path / "events.jsonl").dissemination
    assert shown is not None
    assert shown.announced_s <= shown.receipts[0].times_s[0] <= shown.t_bcast_s
    assert sum(shown.sent.values()) > 0
