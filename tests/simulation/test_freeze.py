"""A worker from whom everything new is hidden: it notices, stops, and recovers by itself."""

import asyncio

from echo2p2p.data.work import Submit
from echo2p2p.errors import DeadlineExceeded
from echo2p2p.layering import load
from echo2p2p.simulation.swarm import SimulatedRun, WorkerModel
from echo2p2p.swarm.memory import MemorySwarm
from echo2p2p.swarm.virtual_time import run_virtual

SETTINGS = [
    "learner.prompts_per_step=8",
    "learner.samples_per_prompt=4",
    "learner.max_new_tokens=400",
    "learner.steps=100000",
    "learner.min_workers=4",
    "provisioning.t_train_prior_s=10",
    "weights.chunk_kib=16",
]
BEAT_S = 5.0
RENEWAL_S = 30.0
"""How often the learner promises a word: on its session, and in its records."""


class World:
    """A learner, three honest workers and a victim; it takes all of them to keep up with the training."""

    def __init__(self, swarm):
        self.swarm = swarm
        self.run = SimulatedRun(swarm, load(overrides=SETTINGS), t_train_s=10, snapshot_bytes=65536)
        self.submits = []

    async def start(self):
        self.learner, self.network = await self.run.start_learner()
        received = self.learner.received

        async def count(session, message):
            if isinstance(message, Submit) and session.peer == self.peer.peer_id:
                self.submits.append(now())
            await received(session, message)

        self.learner.received = count
        self.tasks = [asyncio.ensure_future(self.learner.run())]
        self.others = []
        for number in range(4):
            worker, network = await self.run.start_worker(WorkerModel(0.3, 80.0), number)
            self.tasks.append(asyncio.ensure_future(worker.run()))
            self.others.append(network)
        self.victim, self.peer = worker, self.others.pop()
        self.find = self.peer.find_records
        await asyncio.sleep(300)
        assert self.submits
        assert self.victim.state == "active"

    async def freeze_table(self):
        """From now on, the table shows the victim what is there now."""
        keys = self.victim._word._keys
        frozen = {key: await self.find(key, timeout_s=1) for key in (keys.learner, keys.manifest)}

        async def find(key, *, timeout_s):
            return frozen.get(key, {})

        self.peer.find_records = find

    def hide_table(self):
        async def find(key, *, timeout_s):
            await asyncio.sleep(timeout_s)
            raise DeadlineExceeded("nothing")

        self.peer.find_records = find

    async def stale_within(self, seconds):
        until = now() + seconds
        while self.victim.state != "stale":
            assert now() < until
            await asyncio.sleep(0.1)

    async def recovers_within(self, seconds):
        until = now() + seconds
        while self.victim.state == "stale":
            assert now() < until
            await asyncio.sleep(0.1)

    async def works_again(self):
        before = len(self.submits)
        await asyncio.sleep(120)
        assert len(self.submits) > before

    async def stop(self):
        self.learner.stop()
        for worker in self.run.workers.values():
            worker.stop()
        await asyncio.gather(*self.tasks)


def now():
    return asyncio.get_running_loop().time()


def played(play):
    async def main():
        async with MemorySwarm(seed=9, default_delay_s=0.02) as swarm:
            world = World(swarm)
            await world.start()
            await play(world)
            await world.stop()

    run_virtual(main, limit_s=86400)


def test_a_worker_in_an_eclipse_is_stale_after_three_periods_sends_nothing_and_recovers():
    async def play(world):
        await world.freeze_table()
        for other in (world.network, *world.others):
            world.swarm.cut(world.peer, other)
        await world.stale_within(3 * RENEWAL_S + 1)
        assert world.victim.advert().state == "stale"
        stale_at = now()
        await asyncio.sleep(600)
        assert world.victim.state == "stale"
        assert world.victim.head_age_s > 600
        assert not [at for at in world.submits if at > stale_at]
        world.peer.find_records = world.find
        for other in (world.network, *world.others):
            world.swarm.heal(world.peer, other)
        await world.recovers_within(RENEWAL_S)
        await world.works_again()

    played(play)


def test_a_session_that_falls_silent_is_stale_after_three_beats_while_its_own_words_still_get_through():
    async def play(world):
        world.hide_table()
        for other in world.others:
            world.swarm.cut(world.peer, other)
        world.swarm.stall(world.network, world.peer)
        await world.stale_within(3 * BEAT_S + 1)
        stale_at = now()
        await asyncio.sleep(300)
        assert not [at for at in world.submits if at > stale_at]
        world.swarm.unstall(world.network, world.peer)
        await world.recovers_within(RENEWAL_S)
        await world.works_again()

    played(play)


def test_a_silence_that_ends_before_the_session_does_loses_no_finished_group():
    async def play(world):
        world.hide_table()
        for other in world.others:
            world.swarm.cut(world.peer, other)
        world.swarm.stall(world.network, world.peer)
        await world.stale_within(3 * BEAT_S + 1)
        world.swarm.unstall(world.network, world.peer)
        await world.recovers_within(1)
        await world.works_again()
        assert not world.victim._session._held_back
        assert len(world.victim._session._unanswered) < 8

    played(play)


def test_other_peers_pass_on_the_word_where_the_table_is_hidden():
    async def play(world):
        world.hide_table()
        world.swarm.cut(world.peer, world.network)
        for _ in range(600):
            await asyncio.sleep(1)
            assert world.victim.state == "standby"
        for other in world.others:
            world.swarm.cut(world.peer, other)
        await world.stale_within(3 * RENEWAL_S + 1)
        world.swarm.heal(world.peer, world.others[0])
        await world.recovers_within(RENEWAL_S)

    played(play)
