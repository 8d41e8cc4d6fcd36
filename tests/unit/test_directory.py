"""The directory: who is there, who has left, and whose word counts."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any

import msgspec
import pytest

from echo2p2p.errors import DeadlineExceeded, RecordError, SwarmError, VerificationError
from echo2p2p.swarm.directory import Directory, WorkersSeen
from echo2p2p.swarm.identity import Identity
from echo2p2p.swarm.memory import MemoryNetwork, MemorySwarm
from echo2p2p.swarm.records import (
    WORKER_SHARDS,
    Keys,
    LearnerRecord,
    ManifestRecord,
    RunRecord,
    WorkerAdvert,
    check,
    seal,
)
from echo2p2p.swarm.virtual_time import VirtualClock, VirtualLoop, run_virtual

ADVERT = WorkerAdvert(
    gpu="RTX 4090",
    gpu_count=1,
    gpu_memory_gib=24,
    upload_mbit=40,
    download_mbit=200,
    price_per_hour=0.35,
    tokens_per_s=1500,
    version=-1,
    engine="vllm",
    state="standby",
    software="0.1.0",
)
LEARNER = LearnerRecord(
    task="arithmetic",
    mode="async",
    staleness=3,
    kappa=2,
    step=7,
    max_steps=100,
    published_version=6,
    state="running",
    active_workers=4,
    mu_pool=900,
    mu_target=800,
    spend_per_hour=1.4,
    software="0.1.0",
)
MANIFEST = ManifestRecord(version=6, manifest_digest="ab" * 32, manifest_bytes=4000, snapshot_bytes=10**9)


class World:
    """A swarm with a learner and its run."""

    def __init__(self, swarm: MemorySwarm) -> None:
        self.swarm = swarm
        self.learner = swarm.add_peer()
        self.run = f"quick@{self.learner.peer_id}"

    def directory(self, network: MemoryNetwork | None = None) -> Directory:
        return Directory(network or self.swarm.add_peer(), self.run)


def virtual(test: Callable[[World], Coroutine[Any, Any, None]]) -> Callable[[], None]:
    async def main() -> None:
        async with MemorySwarm(seed=11) as swarm:
            await test(World(swarm))

    def run() -> None:
        run_virtual(main)

    run.__name__ = test.__name__
    return run


def clock(skew_s: float) -> VirtualClock:
    loop = asyncio.get_running_loop()
    assert isinstance(loop, VirtualLoop)
    return VirtualClock(loop, skew_s=skew_s)


@virtual
async def test_what_is_published_is_found(world: World) -> None:
    learner, reader = world.directory(world.learner), world.directory()
    assert (await reader.learner(1), await reader.manifest(1), await reader.workers(1)) == (None, None, {})
    await learner.publish(RunRecord(world.run, "arithmetic"))
    await learner.publish(LEARNER)
    sealed = await learner.publish(MANIFEST)
    worker = world.swarm.add_peer()
    await world.directory(worker).publish(ADVERT)
    assert await reader.learner(1) == LEARNER
    assert await reader.workers(1) == {worker.peer_id: ADVERT}
    assert await Directory.runs(world.learner, 1) == [world.run]
    found = await reader.manifest(1)
    assert found is not None
    assert found.body == MANIFEST
    assert found == check(sealed, owner=world.learner.peer_id, now_unix=world.learner.clock.unix())


@virtual
async def test_a_hundred_workers_spread_over_all_shards(world: World) -> None:
    workers = [world.swarm.add_peer() for _ in range(100)]
    for worker in workers:
        await world.directory(worker).publish(ADVERT)
    shards = [
        len(await world.learner.find_records(Keys(world.run).worker_shard(shard), timeout_s=1))
        for shard in range(WORKER_SHARDS)
    ]
    assert sum(shards) == 100
    assert min(shards) > 0
    assert max(shards) < 20
    assert (await world.directory().workers(1)).keys() == {worker.peer_id for worker in workers}


@virtual
async def test_records_that_are_not_renewed_vanish(world: World) -> None:
    await world.directory(world.learner).publish(LEARNER)
    await world.directory().publish(ADVERT)
    reader = world.directory()
    await asyncio.sleep(89)
    assert await reader.learner(1) == LEARNER
    assert len(await reader.workers(1)) == 1
    await asyncio.sleep(2)
    assert await reader.learner(1) is None
    assert await reader.workers(1) == {}


@virtual
async def test_only_the_learner_of_a_run_may_speak_for_it(world: World) -> None:
    stranger = world.directory()
    for publish in (
        stranger.publish(LEARNER),
        stranger.publish(MANIFEST),
        stranger.publish(RunRecord(world.run, "arithmetic")),
    ):
        with pytest.raises(RecordError, match="may not stand"):
            await publish


@virtual
async def test_what_nobody_would_believe_is_not_published(world: World) -> None:
    directory = world.directory()
    with pytest.raises(RecordError):
        await directory.publish(msgspec.structs.replace(ADVERT, price_per_hour=float("nan")))
    with pytest.raises(RecordError):
        directory.seal(msgspec.structs.replace(ADVERT, state="asleep"))


@virtual
async def test_sequences_grow_across_a_restart(world: World) -> None:
    worker = world.swarm.add_peer()
    sequences = []
    for price in (0.1, 0.2, 0.3):
        directory = world.directory(worker)  # a fresh process: it remembers nothing
        for _ in range(3):
            sealed = await directory.publish(msgspec.structs.replace(ADVERT, price_per_hour=price))
            record = check(sealed, owner=worker.peer_id, now_unix=worker.clock.unix())
            sequences.append(record.sequence)
        await asyncio.sleep(0.01)
    assert sequences == sorted(set(sequences))
    assert (await world.directory().workers(1))[worker.peer_id].price_per_hour == 0.3


@virtual
async def test_a_restart_with_an_earlier_date_still_gets_through(world: World) -> None:
    ahead = world.swarm.add_peer(clock=clock(20))
    await world.directory(ahead).publish(ADVERT)
    await ahead.close()
    again = world.swarm.add_peer(ahead.identity)
    changed = msgspec.structs.replace(ADVERT, state="active")
    await world.directory(again).publish(changed)
    assert await world.directory().workers(1) == {again.peer_id: changed}


@virtual
async def test_of_two_stores_at_once_the_later_one_counts(world: World) -> None:
    worker, reader = world.swarm.add_peer(), world.directory()
    directory = world.directory(worker)
    world.swarm.lookup_delay_s = 5
    async with asyncio.TaskGroup() as group:
        slow = group.create_task(directory.publish(ADVERT))
        await asyncio.sleep(1)
        world.swarm.lookup_delay_s = 1
        await directory.retire(ADVERT)
    assert slow.result()
    assert await reader.workers(2) == {}


@virtual
async def test_an_older_record_handed_out_later_changes_nothing(world: World) -> None:
    worker = world.swarm.add_peer()
    directory, reader = world.directory(worker), world.directory()
    old = await directory.publish(ADVERT)
    new = await directory.publish(msgspec.structs.replace(ADVERT, state="active"))
    assert (await reader.workers(1))[worker.peer_id].state == "active"
    key = Keys(world.run).worker(worker.peer_id)
    expires = check(old, owner=worker.peer_id, now_unix=worker.clock.unix()).expires_unix
    # The table refuses it, and so does a directory that meets it at a node which has only this one.
    assert not world.swarm.table.store(key, worker.peer_id, old, expires_unix=expires)
    assert (await world.learner.find_records(key, timeout_s=1))[worker.peer_id] == new
    world.swarm.table = type(world.swarm.table)(world.learner.clock)
    assert world.swarm.table.store(key, worker.peer_id, old, expires_unix=expires)
    assert (await reader.workers(1))[worker.peer_id].state == "active"


@virtual
async def test_forgeries_do_not_get_into_the_table(world: World) -> None:
    victim, forger = world.swarm.add_peer(), world.swarm.add_peer()
    key = Keys(world.run).worker(victim.peer_id)
    expires = forger.clock.unix() + 90
    signed_by_forger = seal(forger.identity, key, ADVERT, sequence=1, expires_unix=expires)
    honest = seal(victim.identity, key, ADVERT, sequence=1, expires_unix=expires)
    for owner, value, where, until in (
        (victim.peer_id, signed_by_forger, key, expires),
        (forger.peer_id, honest, key, expires),
        (victim.peer_id, honest, Keys.RUNS, expires),
        (victim.peer_id, honest, key, expires + 1),
    ):
        with pytest.raises(RecordError):
            world.swarm.table.store(where, owner, value, expires_unix=until)
    assert await world.directory().workers(1) == {}
    with pytest.raises(RecordError):
        await forger.store_record(key, honest, expires_unix=expires, timeout_s=1)


@virtual
async def test_a_record_is_kept_while_its_owner_lives(world: World) -> None:
    worker, reader = world.swarm.add_peer(), world.directory()
    keeping = asyncio.ensure_future(world.directory(worker).keep(lambda: ADVERT))
    for _ in range(20):
        await asyncio.sleep(29)
        assert await reader.workers(1) == {worker.peer_id: ADVERT}
    keeping.cancel()
    with pytest.raises(asyncio.CancelledError):
        await keeping
    await asyncio.sleep(91)
    assert await reader.workers(1) == {}


@virtual
async def test_a_change_is_published_at_once(world: World) -> None:
    worker, reader, changed = world.swarm.add_peer(), world.directory(), asyncio.Event()
    advert = ADVERT
    keeping = asyncio.ensure_future(world.directory(worker).keep(lambda: advert, changed=changed))
    for version in range(5):
        await asyncio.sleep(2)
        advert = msgspec.structs.replace(ADVERT, version=version)
        changed.set()
        await asyncio.sleep(0.1)
        assert (await reader.workers(1))[worker.peer_id].version == version
    keeping.cancel()


@virtual
async def test_changes_without_end_do_not_flood_the_table(world: World) -> None:
    changed, stores = asyncio.Event(), 0

    def make() -> WorkerAdvert:
        nonlocal stores
        stores += 1
        return ADVERT

    keeping = asyncio.ensure_future(world.directory().keep(make, changed=changed))
    for _ in range(900):
        changed.set()
        await asyncio.sleep(0.1)
    keeping.cancel()
    assert 50 <= stores <= 101


@virtual
async def test_keep_outlives_a_table_that_does_not_answer(world: World) -> None:
    worker, reader = world.swarm.add_peer(), world.directory()
    world.swarm.lookup_delay_s = 1000
    keeping = asyncio.ensure_future(world.directory(worker).keep(lambda: ADVERT))
    await asyncio.sleep(120)
    world.swarm.lookup_delay_s = 0
    await asyncio.sleep(30)
    assert await reader.workers(1) == {worker.peer_id: ADVERT}
    keeping.cancel()


@virtual
async def test_a_table_that_does_not_answer_is_an_error_with_a_deadline(world: World) -> None:
    world.swarm.lookup_delay_s = 1000
    reader = world.directory()
    loop = asyncio.get_running_loop()
    for call in (reader.workers(3), reader.learner(3), reader.manifest(3), Directory.runs(world.learner, 3)):
        started = loop.time()
        with pytest.raises(DeadlineExceeded):
            await call
        assert loop.time() - started == pytest.approx(3)
    with pytest.raises(SwarmError):
        await reader.publish(ADVERT)


@virtual
async def test_a_watcher_hears_of_joins_changes_and_departures(world: World) -> None:
    first, second, third = (world.swarm.add_peer() for _ in range(3))
    keeping = asyncio.ensure_future(world.directory(first).keep(lambda: ADVERT))
    await world.directory(second).publish(ADVERT)
    watch = world.directory().watch_workers(10)

    async def look() -> WorkersSeen:
        return await anext(watch)

    seen = await look()
    assert set(seen.joined) == seen.workers.keys() == {first.peer_id, second.peer_id}
    await world.directory(third).publish(ADVERT)
    await world.directory(second).publish(msgspec.structs.replace(ADVERT, price_per_hour=9))
    seen = await look()
    assert (seen.joined, seen.left, seen.changed) == ((third.peer_id,), (), (second.peer_id,))
    # The second says goodbye, the third dies without a word.
    await world.directory(second).retire(ADVERT)
    world.swarm.kill(third)
    seen = await look()
    assert (seen.joined, seen.left, seen.changed) == ((), (second.peer_id,), ())
    looks = 0
    while third.peer_id in seen.workers:
        seen = await look()
        looks += 1
        assert looks < 10
    assert seen.left == (third.peer_id,)
    assert seen.workers.keys() == {first.peer_id}
    keeping.cancel()
    await watch.aclose()  # type: ignore[attr-defined]


@virtual
async def test_a_watch_of_a_large_run_reads_a_bounded_part_of_it_a_look(world: World) -> None:
    workers = [world.swarm.add_peer() for _ in range(200)]
    for worker in workers:
        await world.directory(worker).publish(ADVERT)
    reader = world.swarm.add_peer()
    read: list[int] = []
    find = reader.find_records

    async def counted(key: str, *, timeout_s: float) -> dict[str, bytes]:
        found = await find(key, timeout_s=timeout_s)
        read[-1] += sum(len(owner) + len(value) for owner, value in found.items())
        return found

    reader.find_records = counted  # type: ignore[method-assign]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("echo2p2p.swarm.directory.REFRESH_BYTES", 40_000)
        watch = world.directory(reader).watch_workers(5)
        gone: set[str] = set()
        for look in range(8):
            read.append(0)
            seen = await anext(watch)
            assert not seen.joined or look == 0
            if look == 0:
                assert len(seen.workers) == 200
                await world.directory(workers[0]).retire(ADVERT)
            else:
                assert read[-1] <= 40_000
            gone |= set(seen.left)
        assert gone == {workers[0].peer_id}
        await watch.aclose()  # type: ignore[attr-defined]


@virtual
async def test_a_worker_that_has_left_is_not_brought_back_by_a_replay(world: World) -> None:
    worker, reader = world.swarm.add_peer(), world.directory()
    directory = world.directory(worker)
    old = await directory.publish(ADVERT)
    await directory.retire(ADVERT)
    assert await reader.workers(1) == {}
    world.swarm.table = type(world.swarm.table)(world.learner.clock)
    expires = check(old, owner=worker.peer_id, now_unix=worker.clock.unix()).expires_unix
    key = Keys(world.run).worker(worker.peer_id)
    assert world.swarm.table.store(key, worker.peer_id, old, expires_unix=expires)
    assert await reader.workers(1) == {}


@virtual
async def test_one_silent_shard_makes_nobody_disappear(world: World) -> None:
    worker, reader = world.swarm.add_peer(), world.directory()
    await world.directory(worker).publish(ADVERT)
    assert len(await reader.workers(1)) == 1
    silent = Keys(world.run).worker(worker.peer_id)
    find = reader._network.find_records

    async def find_some(key: str, *, timeout_s: float) -> dict[str, bytes]:
        if key == silent:
            raise DeadlineExceeded("silent")
        return await find(key, timeout_s=timeout_s)

    reader._network.find_records = find_some  # type: ignore[method-assign]
    assert await reader.workers(1) == {worker.peer_id: ADVERT}
    await asyncio.sleep(91)
    assert await reader.workers(1) == {}


@virtual
async def test_readers_with_a_wrong_date_within_the_margin_find_everything(world: World) -> None:
    worker = world.swarm.add_peer()
    await world.directory(worker).publish(ADVERT)
    for skew in (-30, 30):
        reader = Directory(world.swarm.add_peer(clock=clock(skew)), world.run)
        assert await reader.workers(1) == {worker.peer_id: ADVERT}


@virtual
async def test_a_name_that_is_no_run_is_refused(world: World) -> None:
    other = Identity.from_seed(bytes(32)).peer_id
    for name in ("", "quick", f"@{other}", f"a/b@{other}", "quick@" + "1" * 46, f"quick@{other}\n"):
        with pytest.raises(VerificationError):
            Directory(world.learner, name)
