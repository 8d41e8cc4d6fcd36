"""Weights that must not be published, and disks without room: the real learner and workers, under virtual time."""

import asyncio

import numpy as np
import pytest

from echo2p2p.errors import OutOfDisk, UnsoundWeights
from echo2p2p.layering import load
from echo2p2p.simulation.swarm import SimulatedRun, WorkerModel, simulate
from echo2p2p.swarm.memory import MemorySwarm
from echo2p2p.swarm.virtual_time import run_virtual
from echo2p2p.telemetry.events import read_events
from echo2p2p.weights.gate import Passed
from echo2p2p.weights.snapshot import Layout, Snapshot, TensorSpec
from echo2p2p.weights.store import MemoryStore

LAYOUT = Layout((TensorSpec("w", "float32", (4096,), 0, 16384),), {})
POOL = [WorkerModel(0.3, 200) for _ in range(3)]


def settings_for(*overrides):
    return load(
        overrides=[
            "learner.prompts_per_step=8",
            "learner.samples_per_prompt=4",
            "learner.max_new_tokens=400",
            "learner.steps=100000",
            "provisioning.t_train_prior_s=10",
            "weights.chunk_kib=4",
            *overrides,
        ]
    )


def floats(run, bad_steps, value):
    """Give ``run`` a policy of floats; training step ``n`` in ``bad_steps`` breaks it, and it stays broken."""
    trainer, broken = run.trainer, []
    train, restore = trainer.train, trainer.restore

    async def snapshot():
        data = np.random.default_rng(trainer.step).normal(size=4096).astype(np.float32)
        if broken:
            data[17] = value
        return Snapshot(LAYOUT, data.tobytes())

    calls = iter(range(1, 1_000_000))

    async def train_(groups):
        if next(calls) in bad_steps:
            broken.append(True)
        return await train(groups)

    def restore_(checkpoint):
        broken.clear()
        restore(checkpoint)

    trainer.snapshot, trainer.train, trainer.restore = snapshot, train_, restore_


def played(tmp_path, bad_steps, value=float("nan"), *overrides, duration_s=900):
    async def main():
        async with MemorySwarm(seed=1, default_delay_s=0.05) as swarm:
            run = SimulatedRun(swarm, settings_for(*overrides), t_train_s=10, events=tmp_path / "e.jsonl")
            floats(run, bad_steps, value)
            learner = await simulate(run, POOL, duration_s=duration_s)
            return run, learner

    run, learner = run_virtual(main)
    return run, learner, list(read_events(tmp_path / "e.jsonl"))


@pytest.mark.parametrize("value", [float("nan"), float("inf"), 1e30])
@pytest.mark.parametrize("mode", ["async", "sequential"])
def test_unsound_weights_are_never_published_and_the_run_goes_on_from_the_last_good_ones(
    tmp_path, value, mode
):
    run, learner, events = played(tmp_path, {5, 20}, value, f"learner.mode={mode}")
    withheld = [e for e in events if e["event"] == "withheld"]
    forward = [e for e in events if e["event"] == "rolled_forward"]
    published = [e["version"] for e in events if e["event"] == "published"]
    assert len(forward) == 2
    assert not {e["version"] for e in withheld} & set(published)
    assert all(e["version"] in published for e in forward)
    assert published == sorted(set(published))
    assert learner.step > 25
    assert len(run.trainer.trained) == len(set(run.trainer.trained))
    assert all(np.isfinite(e["gate"]["change"]) for e in events if e["event"] == "published")
    assert max(e["staleness_max"] for e in events if e["event"] == "step") <= 3


def test_weights_that_break_again_and_again_end_the_run_with_the_reason(tmp_path):
    with pytest.raises(ExceptionGroup) as caught:
        played(tmp_path, set(range(5, 10_000)))
    first = caught.value
    while isinstance(first, ExceptionGroup):
        first = first.exceptions[0]
    assert isinstance(first, UnsoundWeights)
    assert "4 times in a row" in str(first)
    assert "tensor w is not finite" in str(first)


def test_a_broken_policy_does_not_overwrite_the_last_checkpoint_when_the_run_is_stopped(tmp_path):
    run, learner, events = played(tmp_path, {3}, float("nan"), "learner.kappa=1000", duration_s=200)
    assert learner.step > 3
    assert [c.step for c in run.trainer.checkpoints] == [0]
    assert any(e["event"] == "withheld" for e in events)


def test_a_forced_publication_of_nan_is_loaded_by_no_worker(tmp_path, monkeypatch):
    monkeypatch.setattr("echo2p2p.learning.publication.check", lambda *_: Passed(0.0, ""))

    async def main():
        async with MemorySwarm(seed=1, default_delay_s=0.05) as swarm:
            run = SimulatedRun(swarm, settings_for(), t_train_s=10, events=tmp_path / "e.jsonl")
            floats(run, {5}, float("nan"))
            learner, _ = await run.start_learner()
            life = asyncio.ensure_future(learner.run())
            working = []
            for number, model in enumerate(POOL):
                worker, _ = await run.start_worker(model, number)
                working.append(asyncio.ensure_future(worker.run()))
            await asyncio.sleep(300)
            versions = {worker.version for worker in run.workers.values()}
            refused = all(
                worker._fetcher._subscriber.newest_seen > worker.version for worker in run.workers.values()
            )
            learner.stop()
            await life
            for worker in run.workers.values():
                worker.stop()
            await asyncio.gather(*working)
            return versions, refused

    versions, refused = run_virtual(main)
    # κ = 2: version 6 was the first with the NaN. A worker that is not active may have stayed behind.
    assert 4 in versions
    assert versions <= {0, 2, 4}
    assert refused


def test_a_learner_on_a_full_disk_waits_and_goes_on_within_ten_seconds_of_room(tmp_path):
    async def main():
        async with MemorySwarm(seed=1, default_delay_s=0.05) as swarm:
            run = SimulatedRun(swarm, settings_for(), t_train_s=10, events=tmp_path / "e.jsonl")
            save, full = run.trainer.save, [False]

            async def save_(*arguments):
                if full[0]:
                    raise OutOfDisk("no room for a checkpoint")
                await save(*arguments)

            run.trainer.save = save_
            learner, _ = await run.start_learner()
            life = asyncio.ensure_future(learner.run())
            working = []
            for number, model in enumerate(POOL):
                worker, _ = await run.start_worker(model, number)
                working.append(asyncio.ensure_future(worker.run()))
            await asyncio.sleep(100)
            full[0] = True
            await asyncio.sleep(200)
            assert not life.done()
            before = len(run.trainer.checkpoints)
            full[0] = False
            await asyncio.sleep(10)
            assert len(run.trainer.checkpoints) > before
            await asyncio.sleep(100)
            step = learner.step
            full[0] = True
            await asyncio.sleep(50)
            learner.stop()
            with pytest.raises(OutOfDisk):
                await life
            for worker in run.workers.values():
                worker.stop()
            await asyncio.gather(*working)
            return step

    assert run_virtual(main) > 10
    kinds = [e["event"] for e in read_events(tmp_path / "e.jsonl")]
    assert kinds.count("disk_has_room") == 1
    assert kinds.count("disk_full") == 2


class SmallStore(MemoryStore):
    """A memory store on a disk that somebody else may fill."""

    full = False

    def put_verified(self, digest, data):
        if self.full and not self.has(digest):
            raise OutOfDisk("no space left")
        super().put_verified(digest, data)

    def room(self):
        return 0 if self.full else super().room()


def test_a_worker_on_a_full_disk_keeps_its_version_and_goes_on_within_ten_seconds_of_room(monkeypatch):
    monkeypatch.setattr("echo2p2p.simulation.swarm.MemoryStore", SmallStore)

    async def main():
        async with MemorySwarm(seed=1, default_delay_s=0.05) as swarm:
            run = SimulatedRun(swarm, settings_for(), t_train_s=10)
            run.store = MemoryStore()
            learner, _ = await run.start_learner()
            life = asyncio.ensure_future(learner.run())
            worker, _ = await run.start_worker(WorkerModel(0.3, 600), 0)
            working = asyncio.ensure_future(worker.run())
            await asyncio.sleep(100)
            store = worker._fetcher._subscriber._store
            store.full = True
            await asyncio.sleep(50)
            held = worker.version
            assert held >= 0
            assert not working.done()
            assert learner._dispatcher.published > held
            store.full = False
            await asyncio.sleep(10)
            assert worker.version > held
            learner.stop()
            await life
            worker.stop()
            await working

    run_virtual(main)
