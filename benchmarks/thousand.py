"""A thousand simulated workers for two virtual hours, and a directory of ten thousand.

    python -m benchmarks.thousand [--workers 1000] [--hours 2] [--directory 10000] [--profile]

The last line is one JSON object. The limits: two minutes of CPU for the swarm, with the window, exactly-once and the
price cap holding; 2 MB for one refresh of the directory.
"""

from __future__ import annotations

import argparse
import cProfile
import json
import pstats
import sys
import time
from typing import Any

from echo2p2p.simulation.outcome import figures
from echo2p2p.simulation.play import play
from echo2p2p.simulation.scenario import Scenario, load_scenario
from echo2p2p.simulation.swarm import WorkerModel
from echo2p2p.swarm.directory import Directory
from echo2p2p.swarm.identity import Identity
from echo2p2p.swarm.memory import MemorySwarm
from echo2p2p.swarm.records import WORKER_SHARDS
from echo2p2p.swarm.virtual_time import run_virtual


def crowd(workers: int, hours: float) -> Scenario:
    """A cheap third and a dear rest; some come, go and die all the time."""
    tree = load_scenario("heavy-churn").model_dump()
    tree.update(
        name="crowd", duration_s=hours * 3600, price_changes=[], slowdowns=[], cuts=[], learner_kills=[]
    )
    for group, count in zip(tree["workers"], (workers - workers // 3, workers // 3), strict=True):
        group["count"] = count
    tree["churn"] = {"joins_per_hour": 30, "leaves_per_hour": 15, "kills_per_hour": 15}
    tree["policy"].update(nbytes=1_000_000_000, chunk_kib=8, chunks=64)
    tree["learner"]["settings"] = {
        "learner": {
            "staleness": 4,
            "prompts_per_step": 128,
            "samples_per_prompt": 16,
            "lease_s": 300,
            "beat_period_s": 60,
            "min_workers": workers,
        },
        "provisioning": {"period_s": 10, "price_cap_per_hour": 60.0},
        "swarm": {"record_ttl_s": 600},
        "worker": {"batch_groups": 4},
    }
    return Scenario(**tree)


def directory_traffic(workers: int) -> dict[str, Any]:
    """What one look at so many workers reads from the table, and how long it takes."""

    class Counting:
        """The network of whoever looks, with every answer counted."""

        def __init__(self, network: Any) -> None:
            self.network, self.nbytes, self.answers = network, 0, 0

        def __getattr__(self, name: str) -> Any:
            return getattr(self.network, name)

        async def find_records(self, key: str, *, timeout_s: float) -> dict[str, bytes]:
            found = await self.network.find_records(key, timeout_s=timeout_s)
            self.answers += 1
            self.nbytes += sum(len(owner) + len(value) for owner, value in found.items())
            return found

    async def main() -> dict[str, Any]:
        async with MemorySwarm(seed=1) as swarm:
            learner = swarm.add_peer()
            run = f"crowd@{learner.peer_id}"
            model = WorkerModel(0.3, 900.0, gpu="NVIDIA GeForce RTX 5090")
            for number in range(workers):
                peer = swarm.add_peer(Identity.from_seed(f"worker {number}".encode().ljust(32)))
                await Directory(peer, run).publish(model.advert())
            counting = Counting(learner)
            directory = Directory(counting, run)  # type: ignore[arg-type]
            looks = []
            async for seen in directory.watch_workers(period_s=30):
                looks.append((len(seen.workers), counting.nbytes, counting.answers))
                counting.nbytes = counting.answers = 0
                if len(looks) == 3:
                    break
            return {
                "workers": workers,
                "seen": looks[-1][0],
                "shards": WORKER_SHARDS,
                "bytes_per_worker": looks[0][1] / workers,
                "bytes_first_look": looks[0][1],
                "bytes_refresh": max(nbytes for _, nbytes, _ in looks[1:]),
                "shards_a_refresh": looks[1][2],
            }

    return run_virtual(main)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--workers", type=int, default=1000)
    parser.add_argument("--hours", type=float, default=2.0)
    parser.add_argument("--directory", type=int, default=10_000)
    parser.add_argument("--profile", action="store_true")
    options = parser.parse_args()
    result: dict[str, Any] = {}
    if options.workers:
        profile = cProfile.Profile()
        started = time.process_time()
        if options.profile:
            profile.enable()
        outcome = play(
            crowd(options.workers, options.hours),
            progress=lambda t, steps, active: print(
                f"{t:.0f} s, {steps} steps, {active} active", file=sys.stderr
            ),
        )
        profile.disable()
        result = {"cpu_s": time.process_time() - started, **figures(outcome)}
        if options.profile:
            pstats.Stats(profile, stream=sys.stderr).sort_stats("tottime").print_stats(45)
    if options.directory:
        result["directory"] = directory_traffic(options.directory)
    print(json.dumps(result))


if __name__ == "__main__":
    main()
