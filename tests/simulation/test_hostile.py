"""One test for each way in which a worker, a clock or a restart has broken a run on the memory network."""

import asyncio
import random

import pytest

from echo2p2p.data.work import (
    WORK_PROTOCOL,
    Beat,
    Decline,
    FromLearner,
    Goodbye,
    Join,
    Lease,
    Submit,
    Welcome,
)
from echo2p2p.errors import EngineError, IncompatibleVersion
from echo2p2p.layering import load
from echo2p2p.simulation.engine import Lengths, ModelledEngine
from echo2p2p.simulation.swarm import SimulatedRun, WorkerModel
from echo2p2p.swarm.directory import Directory
from echo2p2p.swarm.memory import MemorySwarm
from echo2p2p.swarm.messages import PROTOCOL_VERSION, protocol_id, receive, send
from echo2p2p.swarm.records import WorkerAdvert
from echo2p2p.swarm.virtual_time import VirtualClock, run_virtual

SETTINGS = [
    "learner.prompts_per_step=8",
    "learner.samples_per_prompt=4",
    "learner.max_new_tokens=400",
    "learner.steps=100000",
    "provisioning.t_train_prior_s=10",
    "weights.chunk_kib=16",
]


class World:
    """A learner and honest workers, all of them running."""

    def __init__(self, swarm, *settings):
        self.swarm = swarm
        self.run = SimulatedRun(
            swarm, load(overrides=[*SETTINGS, *settings]), t_train_s=10, snapshot_bytes=65536
        )
        self.tasks = []

    async def start(self, n_workers, *, tokens_per_s=150.0):
        self.learner, self.network = await self.run.start_learner()
        self.life = asyncio.ensure_future(self.learner.run())
        for number in range(n_workers):
            worker, _ = await self.run.start_worker(WorkerModel(0.3, tokens_per_s), number)
            self.tasks.append(asyncio.ensure_future(worker.run()))

    async def restart_learner(self):
        self.swarm.kill(self.network)
        self.life.cancel()
        await asyncio.gather(self.life, return_exceptions=True)
        self.learner, self.network = await self.run.start_learner()
        self.life = asyncio.ensure_future(self.learner.run())

    async def steps_in(self, seconds):
        before = self.learner.step
        await asyncio.sleep(seconds)
        return self.learner.step - before

    async def stop(self):
        self.learner.stop()
        for worker in self.run.workers.values():
            worker.stop()
        await asyncio.gather(self.life, *self.tasks)


class Liar:
    """A worker of its own making: joins as it likes, and does with leases what ``treat`` does."""

    def __init__(self, world, *, price=0.0, tokens_per_s=1e9):
        self.network = world.swarm.add_peer()
        self.world, self.run = world, world.run.run
        self.price, self.tokens_per_s = price, tokens_per_s
        self.leases = 0

    def advert(self):
        return WorkerAdvert("x", 1, 1, 100, 100, self.price, self.tokens_per_s, -1, "x", "standby", "0")

    async def join(self):
        learner = self.world.run.identity.peer_id
        self.stream = await self.network.open_stream(learner, protocol_id(WORK_PROTOCOL), timeout_s=5)
        self.directory = Directory(self.network, self.run)
        sealed = self.directory.seal(self.advert())
        await send(self.stream, Join(self.run, PROTOCOL_VERSION, sealed, -1, ""))
        answer = await receive(self.stream, Welcome | Goodbye, max_bytes=65536, timeout_s=5)
        assert isinstance(answer, Welcome)

    async def live(self, treat):
        async def beat():
            while True:
                await send(self.stream, Beat(-1, 0))
                await asyncio.sleep(4)

        beating = asyncio.ensure_future(beat())
        try:
            while True:
                message = await receive(self.stream, FromLearner, max_bytes=65536, timeout_s=1e6)
                if isinstance(message, Lease):
                    self.leases += 1
                    for answer in treat(message):
                        await send(self.stream, answer)
        finally:
            beating.cancel()


def played(play, *settings):
    async def main():
        async with MemorySwarm(seed=9, default_delay_s=0.02) as swarm:
            return await play(World(swarm, *settings))

    return run_virtual(main)


async def with_liar(world, treat, **claims):
    await world.start(0)
    liar = Liar(world, **claims)
    await liar.join()
    living = asyncio.ensure_future(liar.live(treat))
    for number in range(5):
        worker, _ = await world.run.start_worker(WorkerModel(0.3, 150.0), number)
        world.tasks.append(asyncio.ensure_future(worker.run()))
    await asyncio.sleep(1200)
    steps = await world.steps_in(1200)
    living.cancel()
    await asyncio.gather(living, return_exceptions=True)
    await world.stop()
    return steps, liar


@pytest.mark.parametrize(("price", "speed"), [(0.0, 1e9), (0.2, 400.0)])
def test_a_cheap_worker_that_delivers_nothing_does_not_stop_the_run(price, speed):
    steps, liar = played(lambda w: with_liar(w, lambda _: [], price=price, tokens_per_s=speed))
    assert liar.leases >= 1
    assert steps > 80


def test_a_worker_that_hands_every_lease_back_does_not_stop_the_run():
    def hand_back(lease):
        # Twice the same index, and one that it was never given.
        return [Decline(lease.lease, [*lease.indices, lease.indices[0], 10**9], "no")]

    steps, liar = played(lambda w: with_liar(w, hand_back, price=0.1, tokens_per_s=400.0))
    assert steps > 80
    assert liar.leases < 200


def test_a_prompt_that_no_engine_can_roll_out_is_set_aside_and_kills_nobody():
    class Allergic(ModelledEngine):
        async def generate(self, prompts, **rest):
            if any(prompt[0] == 13 for prompt in prompts):
                raise EngineError("unlucky prompt")
            return await super().generate(prompts, **rest)

    async def play(world):
        await world.start(0)
        for number in range(4):
            worker, _ = await world.run.start_worker(WorkerModel(0.3, 200.0), number)
            engine = Allergic(tokens_per_s=200.0, lengths=Lengths(100.0))

            async def build(*_, engine=engine):
                from echo2p2p.simulation.engine import ModelledScorer

                return engine, ModelledScorer()

            worker._build = build
            world.tasks.append(asyncio.ensure_future(worker.run()))
        await asyncio.sleep(1800)
        dead = [task for task in world.tasks if task.done()]
        steps = await world.steps_in(600)
        await world.stop()
        return dead, steps, world.run.trainer.trained

    dead, steps, trained = played(play)
    assert not dead
    assert steps > 30
    assert 13 not in trained
    assert 12 in trained
    assert 14 in trained


def test_groups_of_a_version_that_the_sender_never_proved_are_refused():
    def claim(lease):
        from echo2p2p.data.trajectory import Group, Trajectory, pack_logprobs
        from echo2p2p.simulation.engine import ModelledScorer

        scorer = ModelledScorer()
        for index in lease.indices:
            reward = scorer.reward(index, [5])
            sample = Trajectory(
                [5], pack_logprobs([-1.0]), lease.min_version, lease.min_version, reward, "stop"
            )
            group = Group(index, scorer.prompt_tokens(index), [sample] * lease.n_samples)
            yield Submit(lease.lease, group)

    async def play(world):
        result = await with_liar(world, claim, price=0.1, tokens_per_s=400.0)
        return result, dict(world.learner.status().dropped)

    (steps, _), dropped = played(play)
    assert steps > 80
    assert dropped["of a version that the sender has not proved to hold"] > 0


def test_a_raised_price_is_not_paid_to_the_worker_that_was_chosen_at_another():
    async def play(world):
        await world.start(3, tokens_per_s=300.0)
        await asyncio.sleep(200)
        dear = next(iter(world.run.workers.values()))
        import msgspec

        from echo2p2p.data.work import Advertise

        dear._describe = msgspec.structs.replace(dear._describe, price_per_hour=1e6)
        before = world.learner.status().spend_usd
        dear._session.tell(Advertise(dear.seal_advert()))
        await asyncio.sleep(3600)
        spent = world.learner.status().spend_usd - before
        await world.stop()
        return spent

    # At its new price it is over the cap; without one it could be chosen again, knowingly.
    assert played(play, "provisioning.price_cap_per_hour=5") < 1.0


@pytest.mark.parametrize("jump_s", [3600.0, -3600.0])
def test_a_date_that_jumps_at_the_learner_drives_no_worker_away(jump_s):
    async def play(world):
        clock = VirtualClock(asyncio.get_running_loop())
        add_peer = world.swarm.add_peer
        world.swarm.add_peer = lambda *a, **k: (
            add_peer(*a, **k, clock=clock) if a and a[0] == world.run.identity else add_peer(*a, **k)
        )
        await world.start(3)
        await asyncio.sleep(300)
        clock.skew_s = jump_s
        steps = await world.steps_in(600)
        dead = [task for task in world.tasks if task.done()]
        clock.skew_s = 0.0
        await world.stop()
        return steps, dead

    steps, dead = played(play)
    assert steps > 40
    assert not dead


def test_a_learner_that_goes_on_from_an_older_checkpoint_uses_no_version_number_twice():
    async def play(world):
        await world.start(3)
        await asyncio.sleep(400)
        world.run.trainer.checkpoints = world.run.trainer.checkpoints[:-4]
        published = world.learner.status().published_version
        await world.restart_learner()
        await asyncio.sleep(60)
        first = world.learner.status().published_version
        steps = await world.steps_in(400)
        dropped = dict(world.learner.status().dropped)
        await world.stop()
        return published, first, steps, dropped

    published, first, steps, dropped = played(play)
    assert first > published
    assert steps > 25
    assert "of a version that was never published" not in dropped


def test_a_worker_with_much_unanswered_work_comes_back_to_a_restarted_learner():
    """Groups of more than a mebibyte, of leases that the new life of the learner knows nothing of."""

    async def play(world):
        world.run.mean_tokens = 40_000.0
        await world.start(2, tokens_per_s=50_000.0)
        await asyncio.sleep(120)
        await world.restart_learner()
        await asyncio.sleep(60)
        steps = await world.steps_in(300)
        sessions = [w.gone_s for w in world.learner.status().workers]
        await world.stop()
        return steps, sessions

    steps, sessions = played(play, "learner.max_new_tokens=100000", "learner.lease_s=200")
    assert sessions == [None, None]
    assert steps > 10


def test_a_worker_that_missed_the_goodbye_of_a_finished_run_leaves_all_the_same():
    async def play(world):
        await world.start(2)
        await asyncio.sleep(100)
        world.swarm.kill(world.network)
        world.life.cancel()
        await asyncio.gather(world.life, return_exceptions=True)
        successor = world.swarm.add_peer(world.run.identity)
        world.learner._network = successor
        world.learner._directory = Directory(successor, world.run.run)
        world.learner._life = "finished"
        await world.learner._last_word()
        done, _ = await asyncio.wait(world.tasks, timeout=300)
        return len(done)

    assert played(play) == 2


def test_a_worker_of_another_protocol_leaves_with_its_own_error():
    async def play(world):
        await world.start(0)
        await asyncio.sleep(1)

        async def answer_for_a_later_release(stream):
            await receive(stream, Join, max_bytes=65536, timeout_s=5)
            await send(stream, Goodbye("this run speaks protocol 2", False, 2))

        await world.network.handle(protocol_id(WORK_PROTOCOL), answer_for_a_later_release)
        worker, _ = await world.run.start_worker(WorkerModel(0.3, 200.0), 0)
        try:
            await worker.run()
        except* IncompatibleVersion as group:
            code = group.exceptions[0].exit_code
        world.learner.stop()
        await world.life
        return code

    assert played(play) == 6


def test_fuzzed_messages_of_a_joined_worker_harm_nobody():
    rng = random.Random(4)

    async def play(world):
        await world.start(2)
        await asyncio.sleep(60)
        for _ in range(60):
            liar = Liar(world, price=1.0)
            await liar.join()
            body = bytes(rng.randrange(256) for _ in range(rng.randrange(1, 200)))
            frame = rng.choice([body, b"\x91" * 5000, b"\xff" * 8])
            await liar.stream.write(len(frame).to_bytes(4, "big") + frame)
            await asyncio.sleep(0.5)
            await liar.stream.close()
            world.swarm.kill(liar.network)
        steps = await world.steps_in(300)
        await world.stop()
        return steps

    assert played(play) > 15
