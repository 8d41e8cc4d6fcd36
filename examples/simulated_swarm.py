"""An hour of a swarm in seconds: the real learner and workers on the memory network, with engines modelled.

python examples/simulated_swarm.py
"""

import random

from echo2p2p import load
from echo2p2p.simulation.swarm import SimulatedRun, WorkerModel, simulate
from echo2p2p.swarm.memory import MemorySwarm
from echo2p2p.swarm.virtual_time import run_virtual

SETTINGS = [
    "learner.staleness=4",
    "learner.prompts_per_step=32",
    "learner.samples_per_prompt=16",
    "learner.max_new_tokens=1000",
    "learner.steps=100000",
    "learner.min_workers=20",
    "provisioning.t_train_prior_s=30",
]


async def an_hour():
    rng = random.Random(0)
    async with MemorySwarm(seed=0, default_delay_s=0.05) as swarm:
        run = SimulatedRun(swarm, load(overrides=SETTINGS), t_train_s=30, snapshot_bytes=2**20)
        market = [WorkerModel(rng.uniform(0.2, 0.6), tokens_per_s=rng.uniform(100, 400)) for _ in range(20)]
        learner = await simulate(run, market, duration_s=3600)
        status = learner.status()
        by_learner = swarm.bytes_sent(sender=run.identity.peer_id, protocol="/echo2p2p/1/chunks")
        by_all = swarm.bytes_sent(protocol="/echo2p2p/1/chunks")
    print(f"{status.step} steps, bubble ratio {status.bubble_ratio:.1%}, ${status.spend_usd:.2f} spent")
    print(f"{by_all / 2**20:.0f} MiB of weights moved, {by_learner / by_all:.0%} of them by the learner")


if __name__ == "__main__":
    run_virtual(an_hour)
