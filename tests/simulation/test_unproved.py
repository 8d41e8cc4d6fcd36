"""Between the swap of a version and its proof: what a worker says, what it keeps to itself, and what it does if
the engine turns out to hold something else."""

import asyncio
from dataclasses import replace

import pytest

from echo2p2p.data.work import Join, Ready, Submit
from echo2p2p.errors import FingerprintMismatch
from echo2p2p.layering import load
from echo2p2p.simulation.engine import Lengths, ModelledEngine, ModelledScorer
from echo2p2p.simulation.swarm import SimulatedRun, WorkerModel
from echo2p2p.swarm.memory import MemorySwarm
from echo2p2p.swarm.virtual_time import run_virtual

PROOF_S = 40.0
"""Longer than a batch of the modelled engine, shorter than a lease."""


class Doubted(ModelledEngine):
    """An engine whose swaps of the versions in ``spoiled`` write something else; it says what it does when.

    ``beyond_repair``: writing everything does not help either.
    """

    def __init__(self, spoiled=(), *, beyond_repair=False):
        super().__init__(tokens_per_s=400.0, lengths=Lengths(50.0), install_s=0.1)
        self.spoiled, self.beyond_repair = set(spoiled), beyond_repair
        self.wrong = False
        self.log = []

    async def generate(self, prompts, **rest):
        done = await super().generate(prompts, **rest)
        self.log.append(("generated", self.version))
        # Weights that are wrong make tokens that nobody may see.
        return (
            [[replace(c, tokens=[0] * len(c.tokens)) for c in each] for each in done] if self.wrong else done
        )

    async def stage(self, snapshot, version):
        swap = await super().stage(snapshot, version)

        async def spoiling():
            await swap()
            self.wrong = version in self.spoiled
            self.log.append(("swapped", version))

        return spoiling

    async def fingerprint(self):
        await asyncio.sleep(PROOF_S)
        held = await super().fingerprint()
        self.log.append(("read back", self.version))
        return "00" * 32 if self.wrong else held

    async def install(self, snapshot, version):
        await super().install(snapshot, version)
        self.wrong = self.beyond_repair
        self.log.append(("installed", version))
        return "00" * 32 if self.wrong else snapshot.fingerprint()


class Watched:
    """A run of one learner and one worker on ``engine``; what the worker tells the learner is in its log."""

    def __init__(self, swarm, engine):
        settings = [
            "learner.prompts_per_step=8",
            "learner.samples_per_prompt=4",
            "learner.max_new_tokens=100",
            "learner.steps=100000",
            "provisioning.t_train_prior_s=10",
            "weights.chunk_kib=16",
        ]
        self.run = SimulatedRun(swarm, load(overrides=settings), t_train_s=10, snapshot_bytes=65536)
        self.swarm, self.engine = swarm, engine

    async def start(self):
        self.learner, self.network = await self.run.start_learner()
        self.worker, self.peer = await self.run.start_worker(WorkerModel(0.3, 400.0), 0)

        async def build(*_):
            return self.engine, ModelledScorer()

        self.worker._build = build
        tell = self.worker._session.tell

        def overheard(message):
            if isinstance(message, Ready):
                self.engine.log.append(("ready", message.version))
            elif isinstance(message, Submit):
                versions = {sample.version_min for sample in message.group.samples}
                self.engine.log.append(("submitted", *versions))
                assert any(any(sample.completion) for sample in message.group.samples)
            tell(message)

        self.worker._session.tell = overheard
        self.life = asyncio.ensure_future(self.learner.run())
        self.working = asyncio.ensure_future(self.worker.run())

    async def stop(self):
        self.learner.stop()
        self.worker.stop()
        await asyncio.gather(self.life, self.working)


def watched(engine, *, seconds, meanwhile=None):
    async def main():
        async with MemorySwarm(seed=3, default_delay_s=0.02) as swarm:
            world = Watched(swarm, engine)
            await world.start()
            if meanwhile is not None:
                await meanwhile(world)
            await asyncio.wait({world.working}, timeout=seconds)
            if world.working.done():
                world.learner.stop()
                await world.life
                await world.working
            await world.stop()
            return world

    return run_virtual(main)


def between(log, first, last):
    return log[log.index(first) + 1 : log.index(last)]


def test_a_worker_generates_while_a_version_is_proven_and_sends_nothing_of_it_before():
    engine = Doubted()
    world = watched(engine, seconds=600)
    log = engine.log
    proven = [version for event, version in log if event == "ready"]
    assert len(proven) >= 3
    generated_early = 0
    for version in proven:
        unproved = between(log, ("swapped", version), ("ready", version))
        assert ("submitted", version) not in unproved
        assert ("read back", version) in unproved
        generated_early += unproved.count(("generated", version))
    assert generated_early >= 3
    # What was kept back was not lost.
    assert ("submitted", proven[0]) in log
    assert world.learner.step >= 3


def test_no_other_version_is_swapped_in_before_the_proof():
    engine = Doubted()
    watched(engine, seconds=600)
    open_since = None
    for event, version in engine.log:
        if event == "swapped":
            assert open_since is None
            open_since = version
        elif event == "ready":
            assert version == open_since
            open_since = None


def test_a_swap_that_went_wrong_is_written_whole_and_nothing_of_it_is_sent():
    engine = Doubted(spoiled=range(1000))
    world = watched(engine, seconds=900)
    log = engine.log
    proven = [version for event, version in log if event == "ready"]
    assert len(proven) >= 2
    for version in proven:
        doubtful = between(log, ("swapped", version), ("ready", version))
        assert ("installed", version) in doubtful
        assert not any(event == "submitted" for event, _ in doubtful)
    assert log.count(("generated", proven[0])) > 0
    assert world.learner.step >= 2


def test_an_engine_that_cannot_be_made_to_hold_a_version_ends_its_worker():
    engine = Doubted(spoiled={0}, beyond_repair=True)
    with pytest.raises(ExceptionGroup) as caught:
        watched(engine, seconds=600)
    assert caught.group_contains(FingerprintMismatch)
    assert not any(event in ("ready", "submitted") for event, _ in engine.log)


def test_a_worker_that_joins_again_before_the_proof_does_not_claim_the_version():
    engine = Doubted()
    claims = []

    async def cut(world):
        while not any(event == "swapped" and version > 0 for event, version in engine.log):
            await asyncio.sleep(1)
        version = engine.log[-1][1]
        welcome = world.learner.welcome

        def overhear(session, join: Join):
            claims.append((join.version, version, ("ready", version) in engine.log))
            return welcome(session, join)

        world.learner.welcome = overhear
        world.swarm.cut(world.network, world.peer)
        await asyncio.sleep(0.5)
        world.swarm.heal(world.network, world.peer)

    watched(engine, seconds=600, meanwhile=cut)
    assert claims
    claimed, version, ready = claims[0]
    assert not ready
    assert claimed < version
    assert ("ready", version) in engine.log


def test_what_is_kept_back_is_handed_back_by_a_worker_that_leaves():
    engine = Doubted()

    async def leave(world):
        while not any(event == "generated" for event, _ in engine.log):
            await asyncio.sleep(1)
        assert not any(event == "ready" for event, _ in engine.log)
        waiting = world.worker.queued
        assert waiting > 0
        assert sum(len(decline.indices) for decline in world.worker.leaving()) == waiting
        assert world.worker.queued == 0
        world.worker.stop()
        world.learner.stop()

    watched(engine, seconds=60, meanwhile=leave)
    assert not any(event == "submitted" for event, _ in engine.log)
