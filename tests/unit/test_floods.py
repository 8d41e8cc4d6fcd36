"""Peers that take more than their part of a node: its line, its streams, its messages, its memory, its time."""

from __future__ import annotations

import asyncio
from contextlib import suppress

import pytest
from test_relay_memory import (
    CHUNK_BYTES,
    CHUNKS,
    TOTAL_BYTES,
    UP_MBIT,
    World,
    now,
    virtual,
)

from echo2p2p.errors import Echo2p2pError, PeerUnreachable, ProtocolError
from echo2p2p.swarm.budget import MessageBudget
from echo2p2p.swarm.links import LinkLimits
from echo2p2p.swarm.memory import MemoryNetwork, MemorySwarm
from echo2p2p.swarm.messages import receive, send
from echo2p2p.swarm.network import Stream
from echo2p2p.swarm.virtual_time import run_virtual
from echo2p2p.weights.exchange import ServerLimits
from echo2p2p.weights.gatekeeper import MAX_STRANGERS_QUEUED_BYTES, STRANGERS_SHARE, Gatekeeper
from echo2p2p.weights.publisher import Published, WeightPublisher
from echo2p2p.weights.wire import (
    MAX_MESSAGE_BYTES,
    Cancel,
    Chunk,
    LaneReply,
    Missing,
    OpenLane,
    Refused,
    Waiting,
    Want,
)


async def leech(peer: MemoryNetwork, source: MemoryNetwork, published: Published) -> None:
    """Download the chunks of a version over one lane, again and again, until cancelled."""
    manifest = published.manifest
    while True:
        with suppress(Echo2p2pError):
            stream = await peer.open_stream(source.peer_id, CHUNKS, timeout_s=5)
            await send(stream, OpenLane(published.digest, manifest.version))
            while True:
                await send(stream, Want(tuple(range(64)), True))
                left = 64
                while left:
                    reply: LaneReply = await receive(
                        stream, LaneReply, max_bytes=MAX_MESSAGE_BYTES, timeout_s=60
                    )
                    if isinstance(reply, Chunk):
                        await stream.read_exactly(CHUNK_BYTES)
                        left -= 1
                    elif isinstance(reply, Refused):
                        raise PeerUnreachable(reply.reason)
        await asyncio.sleep(1)


@virtual()
async def test_strangers_that_download_again_and_again_get_a_small_share_of_the_uplink(world: World) -> None:
    published = await world.publish()
    strangers = [world.swarm.add_peer(delay_s=0.01) for _ in range(4)]
    async with asyncio.TaskGroup() as tasks:
        leeching = [
            tasks.create_task(leech(each, world.learner, published)) for each in strangers for _ in range(32)
        ]
        # They have everything while nobody else wants anything.
        await asyncio.sleep(3)
        taken = [sum(world.swarm.bytes_sent(receiver=each.peer_id) for each in strangers)]
        assert taken[0] > 0.8 * 3 * UP_MBIT * 1e6 / 8
        started = now()
        published = await world.publish(1)
        await world.fetch(published)
        took_s = now() - started
        taken.append(sum(world.swarm.bytes_sent(receiver=each.peer_id) for each in strangers))
        for task in leeching:
            task.cancel()
    # Undisturbed it takes 0.8 s; what lay in the strangers' streams when it began has to leave first.
    assert took_s < 2.5
    in_flight = 4 * ServerLimits().max_streams_per_stranger * (LinkLimits().high_water + CHUNK_BYTES)
    assert taken[1] - taken[0] < TOTAL_BYTES * STRANGERS_SHARE + in_flight + 2**20


def test_the_share_of_strangers_is_of_what_members_get_at_the_same_time() -> None:
    keeper = Gatekeeper()
    assert keeper.opens(member=False, nbytes=10**6, now=0.0)
    keeper.passed(member=False, nbytes=10**6, sent=10**6, now=1.0)
    strangers = members = 0
    for at in range(10_000):
        time = 1.0 + at / 1000
        if keeper.opens(member=True, nbytes=10_000, now=time):
            keeper.passed(member=True, nbytes=10_000, sent=10_000, now=time)
            members += 10_000
        if keeper.opens(member=False, nbytes=10_000, now=time):
            keeper.passed(member=False, nbytes=10_000, sent=10_000, now=time)
            strangers += 10_000
    assert strangers <= STRANGERS_SHARE * members + 2**20
    assert strangers > 0.8 * STRANGERS_SHARE * members
    assert keeper.opens(member=False, nbytes=10_000, now=time + 1.5)


def test_chunks_that_nobody_reads_are_few_and_those_of_strangers_leave_room() -> None:
    keeper = Gatekeeper()
    n_strangers = sum(keeper.opens(member=False, nbytes=2**20, now=float(at)) for at in range(500))
    assert n_strangers == MAX_STRANGERS_QUEUED_BYTES // 2**20
    assert sum(keeper.opens(member=True, nbytes=2**20, now=500.0) for _ in range(500)) == 128


@virtual()
async def test_a_stranger_has_few_streams(world: World) -> None:
    published = await world.publish()
    stranger = world.swarm.add_peer(delay_s=0.01)
    streams = [
        await stranger.open_stream(world.learner.peer_id, CHUNKS, timeout_s=1)
        for _ in range(ServerLimits().max_streams_per_stranger + 1)
    ]
    for stream in streams:
        await send(stream, OpenLane(published.digest))
    assert "too many" in (await receive(streams[-1], Refused, max_bytes=1000, timeout_s=1)).reason


@virtual()
async def test_a_worker_that_was_told_of_a_version_is_no_stranger_to_the_learner(world: World) -> None:
    published = await world.publish()
    late = world.swarm.add_peer(delay_s=0.01)
    world.publisher.told(late.peer_id)
    streams = [
        await late.open_stream(world.learner.peer_id, CHUNKS, timeout_s=1)
        for _ in range(ServerLimits().max_streams_per_stranger + 1)
    ]
    for stream in streams:
        await send(stream, OpenLane(published.digest))
    await send(streams[-1], Want((0,), False))
    await receive(streams[-1], Chunk, max_bytes=1000, timeout_s=1)


@pytest.mark.parametrize("flood", [Cancel(()), Cancel((0,) * 1024), Want((), True), Want((0,) * 1024, True)])
def test_an_asker_that_floods_its_lane_loses_it_and_is_served_nothing_for_a_while(
    flood: Want | Cancel,
) -> None:
    async def main(world: World) -> None:
        published = await world.publish()
        flooder = world.peers[0]
        stream = await flooder.open_stream(world.learner.peer_id, CHUNKS, timeout_s=1)
        await send(stream, OpenLane(published.digest))
        sent = 0
        with suppress(PeerUnreachable):
            while sent < 5000:
                await send(stream, flood)
                sent += 1
                await asyncio.sleep(0.001)
        assert sent < 700
        again = await flooder.open_stream(world.learner.peer_id, CHUNKS, timeout_s=1)
        assert "messages" in (await receive(again, Refused, max_bytes=1000, timeout_s=1)).reason
        await asyncio.sleep(61)
        await world.fetch(published)

    virtual()(main)()


@pytest.mark.parametrize("flood", [Waiting(), Missing(()), Missing((0,) * 1024)])
def test_a_source_that_floods_its_lanes_counts_as_failed(flood: Waiting | Missing) -> None:
    async def main(world: World) -> None:
        published = await world.publish()
        sent = 0

        async def babble(stream: Stream) -> None:
            nonlocal sent
            while True:
                await send(stream, flood)
                sent += 1
                await asyncio.sleep(0.0001)

        await world.peers[0].handle(CHUNKS, babble)
        await world.fetch(published, 0)
        assert now() < 8
        # Three members, four lanes each, dialled three times.
        assert sent < 3 * 4 * 3 * 600

    virtual()(main)()


@virtual()
async def test_a_manifest_is_not_waited_for_among_a_flood(world: World) -> None:
    published = await world.publish()

    async def babble(stream: Stream) -> None:
        while True:
            await send(stream, Waiting())

    await world.learner.handle(CHUNKS, babble)
    with pytest.raises(PeerUnreachable, match="messages"):
        await world.subscribers[0].fetch(published.record)
    assert now() < 15


def test_a_message_budget_refills_with_time_and_with_use() -> None:
    budget = MessageBudget("peer", burst=10, per_s=2.0, now=0.0)
    for _ in range(10):
        budget.spend(0.0)
    with pytest.raises(ProtocolError, match="peer sends more"):
        budget.spend(0.4)
    budget.spend(1.0)
    budget.earn(3)
    for _ in range(3):
        budget.spend(1.0)
    budget.earn(1000)
    for _ in range(10):
        budget.spend(1.0)
    with pytest.raises(ProtocolError):
        budget.spend(1.0)


@virtual()
async def test_a_lane_that_takes_nothing_for_a_while_ends(world: World) -> None:
    published = await world.publish()
    stream = await world.peers[0].open_stream(world.learner.peer_id, CHUNKS, timeout_s=1)
    await send(stream, OpenLane(published.digest))
    await send(stream, Want(tuple(range(published.manifest.snapshot_chunks.stop)), True))
    await asyncio.sleep(ServerLimits().write_s + 5)
    with pytest.raises(PeerUnreachable):
        await stream.read_exactly(TOTAL_BYTES)


# --- versions that are superseded -------------------------------------------------------------------------


def test_a_worker_slower_than_the_publications_still_installs_in_about_one_transfer() -> None:
    alone_s = TOTAL_BYTES * 8e-6 / 2.0

    async def main() -> None:
        # Windows so small that what has been sent has been received.
        limits = LinkLimits(16 * 1024, 32 * 1024, 64 * 1024)
        async with MemorySwarm(seed=1, limits=limits) as swarm:
            world = World(swarm, [UP_MBIT] * 4)
            world.publisher = WeightPublisher(
                world.learner, world.run, world.learner_store, chunk_bytes=CHUNK_BYTES, max_patch_share=0
            )
            await world.start()
            world.swarm.set_rate(world.peers[0], download_mbit=2.0)
            published = newest = await world.publish(0)

            async def go_on_publishing() -> None:
                nonlocal newest
                while True:
                    fetching = asyncio.create_task(world.fetch(newest, 0))
                    await asyncio.sleep(3)
                    await fetching
                    newest = await world.publish(newest.manifest.version + 1)
                    # One version beyond those that are kept, and no more.
                    assert len(world.learner_store.manifests()) <= 3

            async with asyncio.TaskGroup() as tasks:
                publishing = tasks.create_task(go_on_publishing())
                fetched = await world.subscribers[0].fetch(published.record)
                assert fetched.fetch_s < 1.25 * alone_s
                publishing.cancel()

    run_virtual(main)


@virtual()
async def test_a_member_that_takes_a_version_again_and_again_does_not_keep_it_from_going(
    world: World,
) -> None:
    published = await world.publish(0)
    async with asyncio.TaskGroup() as tasks:
        leeching = tasks.create_task(leech(world.peers[0], world.learner, published))
        for version in range(1, 5):
            await asyncio.sleep(12)
            await world.publish(version)
        leeching.cancel()
    assert sorted(world.learner_store.manifests()) == [3, 4]


@virtual()
async def test_versions_that_never_came_whole_do_not_push_out_those_that_did(world: World) -> None:
    subscriber, store = world.subscribers[0], world.stores[0]
    first = await world.publish(0)
    await subscriber.fetch(first.record)
    for version in (1, 2, 3):
        begun = asyncio.create_task(subscriber.fetch((await world.publish(version)).record))
        await asyncio.sleep(0.3)
        begun.cancel()
        await asyncio.gather(begun, return_exceptions=True)
        # The whole one, and what has come of the newest.
        assert sorted(store.manifests()) == [0, version]
    await subscriber.fetch((await world.publish(4)).record)
    assert sorted(store.manifests()) == [0, 4]
    whole = first.manifest
    assert all(store.has(whole.chunk_digest(index)) for index in whole.whole)
