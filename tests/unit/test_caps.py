"""Rate caps on the memory network: what leaves and enters a node in any second, and what holds all the same."""

import asyncio
import math

import pytest
from test_relay_memory import ASSETS, CHUNK_BYTES, CHUNKS, TOTAL_BYTES, World, now, snapshot

from echo2p2p.errors import DeadlineExceeded, PeerUnreachable
from echo2p2p.swarm.memory import MemorySwarm
from echo2p2p.swarm.messages import receive, send
from echo2p2p.swarm.virtual_time import run_virtual
from echo2p2p.weights.exchange import ServerLimits
from echo2p2p.weights.lane import FetchLimits, get_manifest
from echo2p2p.weights.publisher import WeightPublisher
from echo2p2p.weights.rate import BURST_S
from echo2p2p.weights.store import MemoryStore
from echo2p2p.weights.subscriber import WeightSubscriber
from echo2p2p.weights.wire import Cancel, LaneReply, OpenLane, Want

LINK_MBIT = 1000.0
MBIT_BYTES = 125_000


class Capped(World):
    """All nodes have fast links and the same caps."""

    upload_mbit = math.inf
    download_mbit = math.inf

    def new_publisher(self):
        return WeightPublisher(
            self.learner,
            self.run,
            self.learner_store,
            chunk_bytes=CHUNK_BYTES,
            server_limits=ServerLimits(upload_mbit=self.upload_mbit),
        )

    def join(self, up_mbit=LINK_MBIT):
        peer = self.swarm.add_peer(upload_mbit=LINK_MBIT, download_mbit=LINK_MBIT, delay_s=0.005)
        self.peers.append(peer)
        self.stores.append(MemoryStore())
        self.subscribers.append(
            WeightSubscriber(
                peer,
                self.run,
                self.stores[-1],
                fetch_limits=FetchLimits(download_mbit=self.download_mbit),
                server_limits=ServerLimits(upload_mbit=self.upload_mbit),
            )
        )
        return self.subscribers[-1]


def run_capped(test, peers, **caps):
    async def main():
        async with MemorySwarm(seed=1) as swarm:
            kind = type("With", (Capped,), caps)
            return await test(await kind(swarm, [LINK_MBIT] * peers, learner_mbit=LINK_MBIT).start())

    return run_virtual(main)


async def watched(world, work):
    """What ``work`` returns, and the bytes that each node sent and got in the busiest second of it."""
    nodes = [world.learner, *world.peers]
    samples = []

    def sample():
        return [
            (world.swarm.bytes_sent(sender=node.peer_id), world.swarm.bytes_sent(receiver=node.peer_id))
            for node in nodes
        ]

    async def watch():
        while True:
            samples.append(sample())
            await asyncio.sleep(0.1)

    watching = asyncio.create_task(watch())
    result = await work
    watching.cancel()
    samples.append(sample())
    busiest = [
        max(
            samples[min(at + 10, len(samples) - 1)][node][way] - samples[at][node][way]
            for at in range(len(samples))
            for node in range(len(nodes))
        )
        for way in (0, 1)
    ]
    return result, busiest


@pytest.mark.parametrize("peers", [1, 4, 8])
def test_no_node_sends_more_than_its_cap_and_a_bucket_in_any_second(peers):
    async def fetch(world):
        published = await world.publish()
        fetched, (sent, _) = await watched(world, world.fetch(published))
        cap = 8 * MBIT_BYTES
        assert sent <= 1.03 * cap * (1 + BURST_S) + CHUNK_BYTES
        # A copy leaves the learner, and nobody sends faster than that.
        assert (
            0.95 * TOTAL_BYTES / cap < max(each.fetch_s for each in fetched) < 1.35 * TOTAL_BYTES / cap + 0.5
        )
        assert world.learner_copies() < 1.1

    run_capped(fetch, peers, upload_mbit=8.0)


@pytest.mark.parametrize("peers", [1, 4, 8])
def test_no_node_asks_for_more_than_its_cap_and_a_bucket_in_any_second(peers):
    async def fetch(world):
        published = await world.publish()
        fetched, (_, got) = await watched(world, world.fetch(published))
        cap = 8 * MBIT_BYTES
        # What was asked of several sources may come a little closer together.
        assert got <= 1.03 * cap * (1 + BURST_S) + peers * CHUNK_BYTES
        assert 0.9 * TOTAL_BYTES / cap < max(each.fetch_s for each in fetched) < 1.2 * TOTAL_BYTES / cap + 0.5
        assert world.learner_copies() < 1.1

    run_capped(fetch, peers, download_mbit=8.0)


def test_under_low_caps_nobody_stalls_and_nothing_is_sent_twice():
    async def fetch(world):
        published = await world.publish()
        fetched = await world.fetch(published)
        # 4.2 MB at 0.5 Mbit/s: 67 s, and each chunk has its turn only every few seconds.
        assert max(each.fetch_s for each in fetched) < 110
        assert world.learner_copies() < 1.3
        assert not any(each.banned for each in world.subscribers)

    run_capped(fetch, 12, upload_mbit=0.5)
    run_capped(fetch, 12, download_mbit=0.5)


def test_who_waits_for_its_turn_is_told_so_and_what_it_cancels_is_not_sent():
    async def ask(world):
        published = await world.publish()
        stream = await world.peers[0].open_stream(world.learner.peer_id, CHUNKS, timeout_s=1)
        await send(stream, OpenLane(published.digest))
        await send(stream, Want(tuple(range(10)), wait=False))
        # A chunk takes 5.2 s of 0.05 Mbit/s.
        kinds = []
        while kinds.count("Chunk") < 2:
            reply = await receive(stream, LaneReply, max_bytes=1024, timeout_s=1.5)
            kinds.append(type(reply).__name__)
            if kinds[-1] == "Chunk":
                await stream.read_exactly(CHUNK_BYTES)
        assert 8 < now() < 11
        assert kinds.count("Waiting") > 4
        await send(stream, Cancel(tuple(range(10))))
        with pytest.raises(DeadlineExceeded):
            await receive(stream, LaneReply, max_bytes=1024, timeout_s=10)
        await stream.close()

    run_capped(ask, 1, upload_mbit=0.05)


def round_trips_during_a_fetch(share, peers):
    """Seconds, sorted: a small message to the learner and back while all fetch over its 20 Mbit/s."""

    async def fetch(world):
        world.swarm.set_rate(world.learner, upload_mbit=20.0)
        trips = []

        async def echo(stream):
            while True:
                await stream.write(await stream.read_exactly(64))

        async def talk():
            stream = await world.peers[0].open_stream(world.learner.peer_id, "/echo", timeout_s=1)
            while True:
                began = now()
                await stream.write(bytes(64))
                await stream.read_exactly(64)
                trips.append(now() - began)
                await asyncio.sleep(0.02)

        await world.learner.handle("/echo", echo)
        published = await world.publish()
        talking = asyncio.create_task(talk())
        await world.fetch(published)
        talking.cancel()
        return sorted(trips)

    return run_capped(fetch, peers, upload_mbit=20.0 * share)


@pytest.mark.parametrize("peers", [1, 8])
def test_with_a_cap_below_the_line_other_messages_do_not_wait_behind_chunks(peers):
    capped, uncapped = (round_trips_during_a_fetch(share, peers) for share in (0.95, math.inf))
    # A slice of a chunk takes 7 ms, the way there and back 20 ms.
    assert capped[int(0.99 * len(capped))] < 0.06
    assert uncapped[len(uncapped) // 2] > 1.4 * capped[len(capped) // 2]


# --- manifests ----------------------------------------------------------------------------------------------


def test_a_manifest_older_than_what_is_served_is_refused_at_once():
    async def ask(world):
        for version in range(3):
            await world.publish(version)
        began = now()
        with pytest.raises(PeerUnreachable, match="no such version"):
            await get_manifest(
                world.peers[0], world.learner.peer_id, "0" * 64, 0, max_bytes=1000, limits=FetchLimits()
            )
        assert now() - began < 0.2

    run_capped(ask, 1)


def manifest_bytes_of_learner(nbytes, peers=20):
    async def fetch(world):
        world.publisher = WeightPublisher(world.learner, world.run, world.learner_store, chunk_bytes=1024)
        await world.publisher.start()
        took = []
        for version in (0, 1):
            published = await world.publisher.publish(
                snapshot(version, nbytes), version, world.members, ASSETS
            )
            before = world.swarm.bytes_sent(sender=world.learner.peer_id)
            fetched = await asyncio.gather(*(each.fetch(published.record) for each in world.subscribers))
            sent = world.swarm.bytes_sent(sender=world.learner.peer_id) - before
            chunks = sum(world.publisher.bytes_sent[version].values())
            took.append(((sent - chunks) / published.record.manifest_bytes, max(e.fetch_s for e in fetched)))
        return took

    return run_capped(fetch, peers)


def test_a_large_manifest_leaves_the_learner_for_a_few_members_not_for_all():
    (first, _), (second, _) = manifest_bytes_of_learner(2**18)
    # Nobody knows the members of the first version. The rest are the messages around the chunks.
    assert 20 < first < 24
    assert second < 8


def test_members_that_are_gone_do_not_keep_a_manifest_from_the_others():
    async def fetch(world):
        world.publisher = WeightPublisher(world.learner, world.run, world.learner_store, chunk_bytes=1024)
        await world.publisher.start()
        for version in (0, 1):
            published = await world.publisher.publish(
                snapshot(version, 2**18), version, world.members, ASSETS
            )
            fetched = await asyncio.gather(*(each.fetch(published.record) for each in world.subscribers))
            for _ in range(6 * (1 - version)):
                world.swarm.kill(world.peers.pop())
                world.subscribers.pop()
        assert max(each.fetch_s for each in fetched) < 8

    run_capped(fetch, 16)


# --- holders outside the members ------------------------------------------------------------------------------


def test_the_last_copy_is_found_outside_the_members():
    async def fetch(world):
        published = await world.publish()
        outsider, latecomer = world.join(), world.join()
        for each in (outsider, latecomer):
            await each.start()
        await outsider.fetch(published.record)
        for node in (world.learner, *world.peers[:3]):
            world.swarm.kill(node)
        fetched = await latecomer.fetch(published.record, peers=[world.peers[3].peer_id])
        assert fetched.snapshot.data == snapshot().data
        assert fetched.bytes_from_learner == 0

    run_capped(fetch, 3)


def test_members_are_asked_before_outsiders():
    async def fetch(world):
        published = await world.publish()
        await world.fetch(published)
        outsider, latecomer = world.join(), world.join()
        for each in (outsider, latecomer):
            await each.start()
        await outsider.fetch(published.record)
        fetched = await latecomer.fetch(published.record, peers=[world.peers[3].peer_id])
        assert fetched.timeline.by_source[world.peers[3].peer_id] == 0

    run_capped(fetch, 3)
