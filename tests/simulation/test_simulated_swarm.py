"""The real learner and worker code on the memory network: hours in seconds, every failure on a seed."""

import asyncio
import random
import time

import pytest

from echo2p2p.data.work import WORK_PROTOCOL, Beat, FromLearner, Goodbye, Join, Submit, Verdict, Welcome
from echo2p2p.layering import load
from echo2p2p.learning.journal import read
from echo2p2p.simulation.engine import ModelledScorer
from echo2p2p.simulation.swarm import SimulatedRun, WorkerModel, simulate
from echo2p2p.swarm.directory import Directory
from echo2p2p.swarm.memory import MemorySwarm
from echo2p2p.swarm.messages import PROTOCOL_VERSION, protocol_id, receive, send
from echo2p2p.swarm.virtual_time import run_virtual
from echo2p2p.telemetry.events import read_events


def settings_for(*overrides):
    return load(
        overrides=[
            "learner.prompts_per_step=8",
            "learner.samples_per_prompt=4",
            "learner.max_new_tokens=400",
            "learner.steps=100000",
            "learner.lease_s=60",
            "provisioning.t_train_prior_s=10",
            "weights.chunk_kib=16",
            *overrides,
        ]
    )


def models(n, rng, *, tokens_per_s=(60, 240)):
    return [WorkerModel(rng.uniform(0.2, 0.6), rng.uniform(*tokens_per_s)) for _ in range(n)]


async def trained_run(run, pool, duration_s):
    return await simulate(run, pool, duration_s=duration_s)


def test_two_hundred_workers_train_for_two_hours_in_under_a_minute(tmp_path):
    settings = settings_for(
        "learner.prompts_per_step=128",
        "learner.samples_per_prompt=16",
        "learner.max_new_tokens=1000",
        "learner.staleness=4",
        "learner.min_workers=200",
        "learner.lease_s=300",
        "learner.beat_period_s=30",
        "provisioning.t_train_prior_s=60",
        "provisioning.period_s=10",
        "swarm.record_ttl_s=600",
        "weights.chunk_kib=64",
    )

    async def main():
        async with MemorySwarm(seed=1, default_delay_s=0.02) as swarm:
            run = SimulatedRun(swarm, settings, t_train_s=60, events=tmp_path / "events.jsonl")
            learner = await simulate(
                run, models(200, random.Random(0), tokens_per_s=(50, 200)), duration_s=7200
            )
            return run, learner

    started = time.process_time()  # on a machine that does nothing else, this is the time on the clock
    run, learner = run_virtual(main)
    assert time.process_time() - started < 60
    steps = [e for e in read_events(tmp_path / "events.jsonl") if e["event"] == "step"]
    assert learner.step == len(steps) >= 118
    assert max(e["staleness_max"] for e in steps) <= 4
    assert len(run.trainer.trained) == len(set(run.trainer.trained)) == 128 * learner.step
    second_hour = steps[len(steps) // 2 :]
    idle, busy = (sum(e[name] for e in second_hour) for name in ("t_idle_s", "t_train_s"))
    assert idle / (idle + busy) < 0.02
    # The first choice trusts announcements; what the learner then feels is mended within a few steps.
    first_batch_s = steps[0]["t"] - steps[0]["t_train_s"]
    assert max(e["t_idle_s"] for e in steps if e["t"] > first_batch_s + 300) < 0.1 * 60
    assert steps[-1]["spend_usd"] < 15.98
    # The cheap ones suffice: the rest is idle, and the bill shows it.
    assert steps[-1]["active"] < 60
    assert steps[-1]["spend_usd"] < 0.3 * steps[-1]["all_on_usd"]
    by_peers, by_learner = (
        sum(e[name] for e in read_events(tmp_path / "events.jsonl") if e["event"] == "ready")
        for name in ("bytes_from_peers", "bytes_from_learner")
    )
    assert by_peers > 10 * by_learner


@pytest.mark.parametrize("seed", range(12))
def test_nothing_is_trained_twice_or_skipped_when_workers_and_learner_are_killed(seed, tmp_path):
    """Random kills of workers and crashes of the learner: the window holds, and every index is trained once."""
    rng = random.Random(seed)
    settings = settings_for("learner.staleness=3", f"learner.mode={rng.choice(['async', 'sequential'])}")

    async def main():
        async with MemorySwarm(seed=seed, default_delay_s=0.05) as swarm:
            run = SimulatedRun(
                swarm,
                settings,
                t_train_s=10,
                snapshot_bytes=64 * 1024,
                events=tmp_path / "e.jsonl",
                journal=rng.choice([tmp_path / "journal", None]),
            )
            running, numbers = {}, iter(range(1000))

            async def add_worker():
                number = next(numbers)
                worker, network = await run.start_worker(WorkerModel(0.3, rng.uniform(60, 240)), number)
                running[network.peer_id] = (asyncio.ensure_future(worker.run()), worker, network)

            async def kill_worker():
                peer = rng.choice(sorted(running))
                task, _, network = running.pop(peer)
                swarm.kill(network)
                task.cancel()
                await asyncio.gather(task, return_exceptions=True)

            for _ in range(5):
                await add_worker()
            learner, network = await run.start_learner()
            life = asyncio.ensure_future(learner.run())
            for _ in range(12):
                await asyncio.sleep(rng.uniform(5, 60))
                action = rng.random()
                if action < 0.3 and len(running) > 2:
                    await kill_worker()
                elif action < 0.6:
                    await add_worker()
                elif action < 0.8:
                    swarm.kill(network)
                    life.cancel()
                    await asyncio.gather(life, return_exceptions=True)
                    await asyncio.sleep(rng.uniform(1, 20))
                    learner, network = await run.start_learner()
                    life = asyncio.ensure_future(learner.run())
            before = learner.step
            await asyncio.sleep(300)
            assert learner.step > before  # the run is alive after all of it
            learner.stop()
            await life
            for task, worker, _ in running.values():
                worker.stop()
                await task
            return run, learner

    run, learner = run_virtual(main)
    trained = run.trainer.trained
    assert len(trained) == len(set(trained)) == 8 * learner.step
    # No index is lost: what is missing below the highest one is still in its line, a few steps' worth at most.
    missing = set(range(max(trained) + 1)) - set(trained)
    assert len(missing) <= 8 * 6
    steps = [e for e in read_events(tmp_path / "e.jsonl") if e["event"] == "step"]
    assert max(e["staleness_max"] for e in steps) <= 3


@pytest.mark.parametrize("seed", range(4))
def test_a_killed_learner_makes_the_same_versions_again_and_loses_nothing_it_accepted(seed, tmp_path):
    """With its journal: what a version was trained on is the same in every life, and verdicts are promises."""
    rng = random.Random(seed)
    settings = settings_for(f"learner.mode={['async', 'sequential'][seed % 2]}")
    made_of, accepted, dropped = {}, set(), []

    async def main():
        async with MemorySwarm(seed=seed, default_delay_s=0.05) as swarm:
            run = SimulatedRun(
                swarm, settings, t_train_s=10, snapshot_bytes=64 * 1024, journal=tmp_path / "journal"
            )
            train = run.trainer.train

            async def watched(groups):
                assert made_of.setdefault(run.trainer.step, list(groups)) == list(groups)
                return await train(groups)

            run.trainer.train = watched
            working = []
            for number in range(4):
                worker, _ = await run.start_worker(WorkerModel(0.3, rng.uniform(60, 240)), number)
                settle = worker._session._settle

                def watch(verdict, settle=settle):
                    if verdict.reason == "left the window":
                        dropped.append(verdict.index)
                    elif not verdict.reason:
                        accepted.add(verdict.index)
                    settle(verdict)

                worker._session._settle = watch
                working.append((worker, asyncio.ensure_future(worker.run())))
            for _ in range(8):
                learner, network = await run.start_learner()
                life = asyncio.ensure_future(learner.run())
                await asyncio.sleep(rng.uniform(20, 120))
                swarm.kill(network)
                life.cancel()
                await asyncio.gather(life, return_exceptions=True)
            learner, _ = await run.start_learner()
            life = asyncio.ensure_future(learner.run())
            await asyncio.sleep(200)
            learner.stop()
            await life
            for worker, task in working:
                worker.stop()
                await task
            return run, learner

    run, learner = run_virtual(main)
    trained = run.trainer.trained
    assert len(trained) == len(set(trained)) == 8 * learner.step
    if settings.learner.is_sequential:
        assert set(trained) == set(range(8 * learner.step))
    assert learner.step > 20
    left = read(tmp_path / "journal")
    # A batch may have been drawn at the very moment of the stop: the next life would train it.
    waiting = {entry.group.index for batch in (left.waiting, *left.batches.values()) for entry in batch}
    assert accepted - set(dropped) <= set(trained) | waiting


def test_sequential_training_uses_rollouts_of_the_newest_version_only(tmp_path):
    settings = settings_for("learner.mode=sequential")

    async def main():
        async with MemorySwarm(seed=3, default_delay_s=0.05) as swarm:
            run = SimulatedRun(swarm, settings, t_train_s=10, events=tmp_path / "e.jsonl")
            return await simulate(run, models(6, random.Random(3)), duration_s=900)

    learner = run_virtual(main)
    steps = [e for e in read_events(tmp_path / "e.jsonl") if e["event"] == "step"]
    assert learner.step > 10
    assert max(e["staleness_max"] for e in steps) == 0


def test_a_trajectory_from_someone_without_a_lease_is_refused():
    """A stranger joins properly, then sends work that was leased to somebody else."""

    async def main():
        async with MemorySwarm(seed=5) as swarm:
            run = SimulatedRun(swarm, settings_for(), t_train_s=10)
            learner, _ = await run.start_learner()
            life = asyncio.ensure_future(learner.run())
            worker, _ = await run.start_worker(WorkerModel(0.1, 200), 0)
            working = asyncio.ensure_future(worker.run())
            stolen = asyncio.get_running_loop().create_future()
            submit = worker._session.submit

            def eavesdrop(message):
                if not stolen.done():
                    stolen.set_result(message)
                submit(message)

            worker._session.submit = eavesdrop
            message = await stolen

            thief = swarm.add_peer()
            advert = Directory(thief, run.run).seal(worker.advert())
            stream = await thief.open_stream(run.identity.peer_id, protocol_id(WORK_PROTOCOL), timeout_s=5)
            await send(stream, Join(run.run, PROTOCOL_VERSION, advert, -1, ""))
            welcome = await receive(stream, Welcome | Goodbye, max_bytes=65536, timeout_s=5)
            assert isinstance(welcome, Welcome)
            await send(stream, Beat(-1, 0))
            await send(stream, Submit(message.lease, message.group))
            verdict = None
            while not isinstance(verdict, Verdict):
                verdict = await receive(stream, FromLearner, max_bytes=65536, timeout_s=60)
            learner.stop()
            worker.stop()
            await asyncio.gather(life, working)
            return verdict

    assert run_virtual(main).reason in ("not leased to the sender", "already delivered")


def test_a_join_with_somebody_elses_advert_is_turned_away():
    async def main():
        async with MemorySwarm(seed=6) as swarm:
            run = SimulatedRun(swarm, settings_for(), t_train_s=10)
            learner, _ = await run.start_learner()
            life = asyncio.ensure_future(learner.run())
            worker, _ = await run.start_worker(WorkerModel(0.1, 200), 0)
            await asyncio.sleep(1)
            thief = swarm.add_peer()
            stream = await thief.open_stream(run.identity.peer_id, protocol_id(WORK_PROTOCOL), timeout_s=5)
            await send(stream, Join(run.run, PROTOCOL_VERSION, worker.seal_advert(), -1, ""))
            answer = await receive(stream, Welcome | Goodbye, max_bytes=65536, timeout_s=5)
            learner.stop()
            await life
            return answer

    answer = run_virtual(main)
    assert isinstance(answer, Goodbye)
    assert not answer.retry


def test_the_modelled_scorer_is_what_admission_computes_again():
    scorer = ModelledScorer()
    assert scorer.reward(3, [5, 9]) == scorer.reward(3, [5, 1])
    assert {scorer.reward(index, [5]) for index in range(4)} == {0.0, 1.0}
