"""Publisher and subscribers over real p2pd on loopback."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path

from hivemind_helpers import Join

from echo2p2p.swarm.hivemind import HivemindNetwork
from echo2p2p.weights.manifest import Member
from echo2p2p.weights.publisher import WeightPublisher
from echo2p2p.weights.snapshot import Layout, Snapshot, TensorSpec
from echo2p2p.weights.store import DiskStore
from echo2p2p.weights.subscriber import WeightSubscriber

NBYTES = 8 * 2**20
ASSETS = {"config.json": b"{}", "tokenizer.json": bytes(300_000)}
TOTAL_BYTES = NBYTES + sum(map(len, ASSETS.values()))


def snapshot() -> Snapshot:
    return Snapshot(Layout((TensorSpec("w", "uint8", (NBYTES,), 0, NBYTES),), {}), os.urandom(NBYTES))


async def subscriber(network: HivemindNetwork, run: str, folder: Path) -> WeightSubscriber:
    it = WeightSubscriber(network, run, DiskStore(folder))
    await it.start()
    return it


async def test_four_peers_fetch_two_versions_and_a_late_joiner_the_second(join: Join, tmp_path: Path) -> None:
    learner = await join("learner")
    peers = [await join(f"peer{at}", through=learner) for at in range(5)]
    run = f"run@{learner.peer_id}"
    publisher = WeightPublisher(learner, run, DiskStore(tmp_path / "learner-store"))
    await publisher.start()
    *workers, late = [await subscriber(peer, run, tmp_path / f"store-{peer.peer_id}") for peer in peers]
    members = [Member(peer.peer_id, 100.0) for peer in peers[:4]]
    for version in range(2):
        published_snapshot = snapshot()
        published = await publisher.publish(published_snapshot, version, members, ASSETS)
        async with asyncio.timeout(60):
            fetched = await asyncio.gather(*(worker.fetch(published.record) for worker in workers))
        assert all(each.snapshot.data == published_snapshot.data for each in fetched)
        assert all(each.assets == ASSETS for each in fetched)
        sent = sum(publisher.bytes_sent[version].values())
        assert sent <= 1.1 * TOTAL_BYTES
        assert sent == sum(each.bytes_from_learner for each in fetched)
    joined = await late.fetch(published.record)
    assert joined.snapshot.data == published_snapshot.data
    assert joined.bytes_from_learner == 0


async def test_a_member_that_never_comes_costs_time_only(join: Join, tmp_path: Path) -> None:
    learner = await join("learner")
    peers = [await join(f"peer{at}", through=learner) for at in range(3)]
    run = f"run@{learner.peer_id}"
    publisher = WeightPublisher(learner, run, DiskStore(tmp_path / "learner-store"))
    await publisher.start()
    members = [Member(peer.peer_id, 100.0) for peer in peers]
    await peers[2].close()
    workers = [await subscriber(peer, run, tmp_path / f"store-{peer.peer_id}") for peer in peers[:2]]
    published_snapshot = snapshot()
    published = await publisher.publish(published_snapshot, 0, members, ASSETS)
    async with asyncio.timeout(60):
        fetched = await asyncio.gather(*(worker.fetch(published.record) for worker in workers))
    assert all(each.snapshot.data == published_snapshot.data for each in fetched)


async def test_a_version_of_which_little_changed_travels_as_a_patch(join: Join, tmp_path: Path) -> None:
    learner = await join("learner")
    peers = [await join(f"peer{at}", through=learner) for at in range(4)]
    run = f"run@{learner.peer_id}"
    publisher = WeightPublisher(learner, run, DiskStore(tmp_path / "learner-store"))
    await publisher.start()
    *workers, late = [await subscriber(peer, run, tmp_path / f"store-{peer.peer_id}") for peer in peers]
    members = [Member(peer.peer_id, 100.0) for peer in peers[:3]]
    base = snapshot()
    changed = bytearray(base.data)
    for at in range(0, NBYTES, 200):
        changed[at] ^= 1
    for version, each in enumerate((base, Snapshot(base.layout, changed))):
        published = await publisher.publish(each, version, members, ASSETS)
        async with asyncio.timeout(60):
            fetched = await asyncio.gather(*(worker.fetch(published.record) for worker in workers))
    assert all(each.snapshot.data == changed for each in fetched)
    assert published.manifest.patches[0].nbytes < NBYTES / 20
    for each in fetched:
        assert each.bytes_from_learner + each.bytes_from_peers == published.manifest.patches[0].nbytes
    joined = await late.fetch(published.record)
    assert joined.snapshot.data == changed
    assert joined.bytes_from_learner == 0
