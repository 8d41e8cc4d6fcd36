"""Publisher and subscribers on the memory network: rates, lies, kills, cuts, latecomers."""

from __future__ import annotations

import asyncio
import gc
import random
from collections.abc import Callable, Coroutine, Sequence
from functools import wraps
from typing import Any

import pytest

from echo2p2p.errors import (
    DeadlineExceeded,
    Echo2p2pError,
    FingerprintMismatch,
    ManifestError,
    PeerUnreachable,
)
from echo2p2p.swarm.memory import MemoryNetwork, MemorySwarm
from echo2p2p.swarm.messages import protocol_id, receive, send
from echo2p2p.swarm.network import Stream
from echo2p2p.swarm.virtual_time import run_virtual
from echo2p2p.weights.exchange import ServerLimits
from echo2p2p.weights.fetch import Fetch
from echo2p2p.weights.manifest import Member
from echo2p2p.weights.plan import fluid_bound_s
from echo2p2p.weights.publisher import Published, WeightPublisher
from echo2p2p.weights.snapshot import Layout, Snapshot, TensorSpec
from echo2p2p.weights.store import MemoryStore
from echo2p2p.weights.subscriber import Fetched, WeightSubscriber
from echo2p2p.weights.wire import CHUNK_PROTOCOL, Missing, OpenLane, Refused, Waiting, Want

CHUNKS = protocol_id(CHUNK_PROTOCOL)
CHUNK_BYTES = 32 * 1024
NBYTES = 4 * 2**20 + 1234
UP_MBIT = 50.0
ASSETS = {"config.json": b"{}" * 40, "empty": b"", "tokenizer.json": bytes(100_000)}
TOTAL_BYTES = NBYTES + sum(map(len, ASSETS.values()))


def snapshot(seed: int = 0, nbytes: int = NBYTES) -> Snapshot:
    layout = Layout((TensorSpec("w", "uint8", (nbytes,), 0, nbytes),), {})
    return Snapshot(layout, random.Random(seed).randbytes(nbytes))


class World:
    """A learner and its workers."""

    def __init__(self, swarm: MemorySwarm, uplinks: Sequence[float], learner_mbit: float = UP_MBIT) -> None:
        self.swarm = swarm
        self.learner = swarm.add_peer(upload_mbit=learner_mbit, delay_s=0.01)
        self.run = f"run@{self.learner.peer_id}"
        self.learner_store = MemoryStore()
        self.publisher = self.new_publisher()
        self.peers: list[MemoryNetwork] = []
        self.stores: list[MemoryStore] = []
        self.subscribers: list[WeightSubscriber] = []
        for up in uplinks:
            self.join(up)
        self.members = [Member(peer.peer_id, up) for peer, up in zip(self.peers, uplinks, strict=True)]

    def new_publisher(self) -> WeightPublisher:
        return WeightPublisher(self.learner, self.run, self.learner_store, chunk_bytes=CHUNK_BYTES)

    def join(self, up_mbit: float = UP_MBIT) -> WeightSubscriber:
        peer = self.swarm.add_peer(upload_mbit=up_mbit, download_mbit=UP_MBIT, delay_s=0.01)
        self.peers.append(peer)
        self.stores.append(MemoryStore())
        self.subscribers.append(WeightSubscriber(peer, self.run, self.stores[-1]))
        return self.subscribers[-1]

    async def start(self) -> World:
        await self.publisher.start()
        for subscriber in self.subscribers:
            await subscriber.start()
        return self

    async def publish(self, version: int = 0, what: Snapshot | None = None) -> Published:
        return await self.publisher.publish(what or snapshot(version), version, self.members, ASSETS)

    async def fetch(self, published: Published, *without: int) -> list[Fetched]:
        """Everybody fetches, but for the peers at ``without``; what they get is checked."""
        chosen = [each for at, each in enumerate(self.subscribers) if at not in without]
        fetched = await asyncio.gather(*(each.fetch(published.record) for each in chosen))
        for each in fetched:
            assert each.snapshot.data == snapshot(published.manifest.version).data
            assert each.assets == ASSETS
        return fetched

    def learner_copies(self, version: int = 0) -> float:
        return sum(self.publisher.bytes_sent[version].values()) / TOTAL_BYTES

    def corrupt_all_from(self, liar: MemoryNetwork) -> None:
        for peer in self.peers:
            if peer is not liar:
                self.swarm.corrupt(liar, peer, every=1, min_bytes=1024)


def virtual(
    uplinks: Sequence[float] = (UP_MBIT,) * 4, **options: Any
) -> Callable[[Callable[[World], Coroutine[Any, Any, None]]], Callable[[], None]]:
    def decorate(test: Callable[[World], Coroutine[Any, Any, None]]) -> Callable[[], None]:
        async def main() -> None:
            async with MemorySwarm(seed=1) as swarm:
                await test(await World(swarm, uplinks, **options).start())

        @wraps(test)
        def run() -> None:
            run_virtual(main)

        del run.__wrapped__  # type: ignore[attr-defined]
        return run

    return decorate


def now() -> float:
    return asyncio.get_running_loop().time()


async def after(delay_s: float, action: Callable[[], None]) -> None:
    await asyncio.sleep(delay_s)
    action()


# --- rates ------------------------------------------------------------------------------------------------


@virtual([UP_MBIT] * 8)
async def test_equal_peers_come_near_the_bound_and_each_chunk_leaves_the_learner_once(world: World) -> None:
    published = await world.publish()
    fetched = await world.fetch(published)
    bound_s = fluid_bound_s(TOTAL_BYTES, UP_MBIT, [UP_MBIT] * 8, [UP_MBIT] * 8)
    # Five round trips of 40 ms come before the first chunk.
    assert max(each.fetch_s for each in fetched) < 1.15 * bound_s + 0.2
    assert world.learner_copies() == 1.0
    assert all(each.bytes_from_learner + each.bytes_from_peers == TOTAL_BYTES for each in fetched)


UNEVEN = [40.0, 40.0, 20.0, 20.0, 8.0, 8.0, 8.0, 8.0]


@virtual(UNEVEN, learner_mbit=20.0)
async def test_uneven_uplinks_come_near_the_bound(world: World) -> None:
    fetched = await world.fetch(await world.publish())
    bound_s = fluid_bound_s(NBYTES, 20.0, UNEVEN, [UP_MBIT] * 8)
    assert max(each.fetch_s for each in fetched) < 1.4 * bound_s
    assert world.learner_copies() < 1.05


@virtual()
async def test_a_member_with_a_tenth_of_its_announced_uplink_is_relieved(world: World) -> None:
    bound_s = fluid_bound_s(NBYTES, UP_MBIT, [UP_MBIT] * 4, [UP_MBIT] * 4)
    world.swarm.set_rate(world.peers[1], upload_mbit=UP_MBIT / 20)
    fetched = await world.fetch(await world.publish())
    # Alone, its stripe of a quarter to three peers would take 15 times the bound.
    assert max(each.fetch_s for each in fetched) < 6 * bound_s
    assert world.learner_copies() < 1.3


@virtual([UP_MBIT] * 8)
async def test_two_members_with_slow_downlinks_do_not_hold_up_the_others(world: World) -> None:
    slow = (0, 3)
    for at in slow:
        world.swarm.set_rate(world.peers[at], download_mbit=UP_MBIT / 10)
    published = await world.publish(0, snapshot(nbytes=4 * NBYTES))
    fetched = await asyncio.gather(*(each.fetch(published.record) for each in world.subscribers))
    bound_s = fluid_bound_s(4 * NBYTES, UP_MBIT, [UP_MBIT] * 8, [UP_MBIT] * 8)
    # What each of them should forward, the other may be the first to stand in for.
    assert max(each.fetch_s for at, each in enumerate(fetched) if at not in slow) < 2 * bound_s
    assert max(fetched[at].fetch_s for at in slow) < 12 * bound_s
    assert sum(world.publisher.bytes_sent[0].values()) < 1.5 * 4 * NBYTES


@virtual()
async def test_a_fetch_that_has_ended_holds_no_buffer_until_the_garbage_collector_comes(world: World) -> None:
    await world.fetch(await world.publish(0))
    assert not any(each._buffer for each in gc.get_objects() if type(each) is Fetch)


@virtual()
async def test_chunks_that_did_not_change_are_not_fetched_again(world: World) -> None:
    world.publisher = WeightPublisher(
        world.learner, world.run, world.learner_store, chunk_bytes=CHUNK_BYTES, max_patch_share=0
    )
    await world.publisher.start()
    await world.fetch(await world.publish(0))
    changed = bytearray(snapshot(0).data)
    changed[:10] = bytes(10)
    second = await world.publish(1, Snapshot(snapshot().layout, changed))
    fetched = await world.subscribers[0].fetch(second.record)
    assert fetched.snapshot.data == changed
    assert fetched.bytes_from_learner + fetched.bytes_from_peers == CHUNK_BYTES


# --- lies -------------------------------------------------------------------------------------------------


@virtual()
async def test_a_corrupted_chunk_is_refused_and_its_sender_banned_for_the_run(world: World) -> None:
    world.corrupt_all_from(world.peers[2])
    await world.fetch(await world.publish(0))
    liar = world.peers[2].peer_id
    assert all(liar in each.banned for at, each in enumerate(world.subscribers) if at != 2)
    before = world.swarm.bytes_sent(sender=liar)
    await world.fetch(await world.publish(1))
    assert world.swarm.bytes_sent(sender=liar) - before < 1000 + len(ASSETS) * 1000


@virtual([UP_MBIT] * 6)
async def test_one_honest_member_among_liars_is_enough(world: World) -> None:
    for liar in world.peers[1:]:
        world.corrupt_all_from(liar)
    await world.fetch(await world.publish())


@virtual()
async def test_a_source_that_says_waiting_for_ever_is_routed_around(world: World) -> None:
    async def wait_for_ever(stream: Stream) -> None:
        while True:
            await send(stream, Waiting())
            await asyncio.sleep(1)

    published = await world.publish()
    await world.peers[0].handle(CHUNKS, wait_for_ever)
    await world.fetch(published, 0)
    assert world.learner_copies() < 1.3


@virtual()
async def test_a_source_that_talks_nonsense_is_routed_around(world: World) -> None:
    async def talk(stream: Stream) -> None:
        await stream.write(b"\xff" * 1000)

    published = await world.publish()
    await world.peers[0].handle(CHUNKS, talk)
    await world.fetch(published, 0)


@virtual()
async def test_a_forged_manifest_leads_to_no_chunk_request(world: World) -> None:
    published = await world.publish()
    world.swarm.corrupt(world.learner, world.peers[0], every=1, min_bytes=100)
    with pytest.raises(PeerUnreachable, match="manifest"):
        await world.subscribers[0].fetch(published.record)
    assert world.learner_copies() == 0
    assert world.subscribers[0].newest_seen == -1


@virtual()
async def test_a_snapshot_that_is_not_what_the_learner_signed_for_is_refused(world: World) -> None:
    other = snapshot(1)
    other.fingerprint = snapshot(0).fingerprint  # type: ignore[method-assign]
    published = await world.publish(0, other)
    with pytest.raises(FingerprintMismatch):
        await world.subscribers[0].fetch(published.record)


@virtual()
async def test_an_older_version_is_refused_also_after_a_restart(world: World) -> None:
    old = await world.publish(0)
    await world.fetch(await world.publish(1))
    again = WeightSubscriber(world.peers[0], world.run, world.stores[0])
    await again.start()
    for subscriber in (world.subscribers[0], again):
        with pytest.raises(ManifestError, match="older"):
            await subscriber.fetch(old.record)


# --- faults -----------------------------------------------------------------------------------------------

FAULTS: dict[str, Callable[[World], None]] = {
    "kill": lambda world: world.swarm.kill(world.peers[1]),
    "stall": lambda world: (
        [world.swarm.stall(world.peers[1], each) for each in world.peers if each != world.peers[1]] and None
    ),
    "cut": lambda world: (
        [world.swarm.cut(world.peers[1], each) for each in world.peers if each != world.peers[1]] and None
    ),
}


@pytest.mark.parametrize("at", [0.05, 0.3, 0.6])
@pytest.mark.parametrize("fault", sorted(FAULTS))
def test_a_member_that_fails_in_mid_transfer_costs_time_only(fault: str, at: float) -> None:
    async def main(world: World) -> None:
        published = await world.publish()
        faulting = asyncio.create_task(after(at, lambda: FAULTS[fault](world)))
        started = now()
        fetching = asyncio.create_task(world.subscribers[1].fetch(published.record))
        await world.fetch(published, 1)
        assert now() - started < 15
        assert world.learner_copies() < 1.5
        await faulting
        fetching.cancel()
        await asyncio.gather(fetching, return_exceptions=True)

    virtual()(main)()


@virtual([UP_MBIT] * 8)
async def test_a_cut_between_two_members_does_not_cost_the_learner_a_stripe(world: World) -> None:
    published = await world.publish()
    world.swarm.cut(world.peers[0], world.peers[1])
    await world.fetch(published)
    assert world.learner_copies() < 1.1


@virtual()
async def test_an_absent_member_costs_its_stripe_once_more_at_most(world: World) -> None:
    published = await world.publish()
    world.swarm.kill(world.peers[3])
    await world.fetch(published, 3)
    assert world.learner_copies() == pytest.approx(1.0, abs=0.05)


@virtual()
async def test_a_member_that_hears_of_a_version_late_costs_its_stripe_once_more_at_most(world: World) -> None:
    published = await world.publish()
    starting = asyncio.create_task(asyncio.sleep(9))
    early = asyncio.create_task(world.fetch(published, 3))
    await starting
    await world.subscribers[3].fetch(published.record)
    await early
    assert now() < 15
    assert world.learner_copies() < 1.3


@virtual()
async def test_a_late_joiner_fetches_from_the_members(world: World) -> None:
    published = await world.publish()
    await world.fetch(published)
    late = world.join()
    await late.start()
    fetched = await late.fetch(published.record)
    assert fetched.snapshot.data == snapshot().data
    assert fetched.bytes_from_learner == 0


@virtual()
async def test_a_version_outlives_its_learner_once_the_members_have_it(world: World) -> None:
    published = await world.publish()
    await world.fetch(published)
    world.swarm.kill(world.learner)
    late = world.join()
    await late.start()
    fetched = await late.fetch(published.record, peers=[world.peers[0].peer_id])
    assert fetched.snapshot.data == snapshot().data


@virtual()
async def test_a_newer_version_supersedes_a_fetch_in_progress(world: World) -> None:
    first = await world.publish(0)
    fetching = [asyncio.create_task(each.fetch(first.record)) for each in world.subscribers]
    await asyncio.sleep(0.3)
    second = await world.publish(1)
    for task in fetching:
        task.cancel()
    assert all(
        isinstance(each, asyncio.CancelledError)
        for each in await asyncio.gather(*fetching, return_exceptions=True)
    )
    await world.fetch(second)
    assert world.learner_copies(1) < 1.05


@virtual()
async def test_a_fetch_goes_on_from_what_the_store_has(world: World) -> None:
    published = await world.publish()
    others = [asyncio.create_task(each.fetch(published.record)) for each in world.subscribers[1:]]
    fetching = asyncio.create_task(world.subscribers[0].fetch(published.record))
    await asyncio.sleep(0.4)
    fetching.cancel()
    await asyncio.gather(*others)
    digests = [published.manifest.chunk_digest(index) for index in range(published.manifest.n_chunks)]
    kept = sum(map(world.stores[0].has, digests))
    assert 0 < kept < len(digests)
    again = WeightSubscriber(world.peers[0], world.run, world.stores[0])
    await again.start()
    fetched = await again.fetch(published.record)
    assert fetched.snapshot.data == snapshot().data
    missing = len(digests) - kept
    assert fetched.bytes_from_learner + fetched.bytes_from_peers <= missing * CHUNK_BYTES


@virtual()
async def test_a_worker_that_comes_back_serves_what_it_had(world: World) -> None:
    published = await world.publish()
    await world.fetch(published)
    for at, peer in enumerate(world.peers):
        await WeightSubscriber(peer, world.run, world.stores[at]).start()
    late = world.join()
    await late.start()
    assert (await late.fetch(published.record)).bytes_from_learner == 0


@virtual()
async def test_a_learner_that_comes_back_announces_the_same_manifest(world: World) -> None:
    published = await world.publish(3)
    again = world.new_publisher()
    await again.start()
    assert again.newest is not None
    assert again.newest.record == published.record
    assert (await again.publish(snapshot(3), 3, [], {})).digest == published.digest
    with pytest.raises(ManifestError, match="other weights"):
        await again.publish(snapshot(4), 3, world.members, ASSETS)
    with pytest.raises(ManifestError, match="older"):
        await again.publish(snapshot(2), 2, world.members, ASSETS)
    await world.subscribers[0].fetch(published.record)


@virtual()
async def test_total_failure_names_what_was_missing_and_who_was_asked(world: World) -> None:
    published = await world.publish()
    fetching = asyncio.create_task(world.subscribers[0].fetch(published.record))
    await asyncio.sleep(0.2)
    world.swarm.kill(world.learner)
    with pytest.raises(PeerUnreachable, match=r"version 0 lacks \d+ of \d+ chunks") as caught:
        await fetching
    assert world.learner.peer_id in str(caught.value)


@virtual()
async def test_a_learner_that_sends_nothing_ends_in_an_error(world: World) -> None:
    published = await world.publish()
    fetching = asyncio.create_task(world.subscribers[0].fetch(published.record))
    await asyncio.sleep(0.2)
    world.swarm.stall(world.learner, world.peers[0])
    with pytest.raises((PeerUnreachable, DeadlineExceeded)):
        await fetching
    assert now() < 200


@virtual()
async def test_only_the_newest_versions_are_kept_and_served(world: World) -> None:
    records = [(await world.publish(version)).record for version in range(3)]
    assert sorted(world.publisher.bytes_sent) == [1, 2]
    assert list(world.learner_store.manifests()) == [1, 2]
    with pytest.raises(Echo2p2pError, match="manifest"):
        await world.subscribers[0].fetch(records[0])


# --- abuse of the server ----------------------------------------------------------------------------------


@virtual()
async def test_a_peer_that_opens_too_many_streams_is_refused(world: World) -> None:
    published = await world.publish()
    allowed = ServerLimits().max_streams_per_peer
    streams = [
        await world.peers[0].open_stream(world.learner.peer_id, CHUNKS, timeout_s=1)
        for _ in range(allowed + 1)
    ]
    for stream in streams:
        await send(stream, OpenLane(published.digest))
    reply = await receive(streams[-1], Refused, max_bytes=1000, timeout_s=1)
    assert "too many" in reply.reason
    await world.subscribers[1].fetch(published.record)


@virtual()
async def test_streams_that_ask_for_nothing_are_ended(world: World) -> None:
    published = await world.publish()
    silent = [await world.peers[0].open_stream(world.learner.peer_id, CHUNKS, timeout_s=1) for _ in range(2)]
    await send(silent[1], OpenLane(published.digest))
    await asyncio.sleep(130)
    for stream in silent:
        with pytest.raises(PeerUnreachable):
            await stream.read_exactly(1)


@pytest.mark.parametrize("chunks", [(10**6,), tuple(range(100)) * 11])
def test_wants_past_the_end_or_past_the_limit_end_the_lane(chunks: tuple[int, ...]) -> None:
    async def main(world: World) -> None:
        published = await world.publish()
        stream = await world.peers[0].open_stream(world.learner.peer_id, CHUNKS, timeout_s=1)
        await send(stream, OpenLane(published.digest))
        await send(stream, Want(chunks, True))
        with pytest.raises(PeerUnreachable):
            await stream.read_exactly(1)

    virtual()(main)()


@virtual()
async def test_a_chunk_that_is_not_here_and_will_not_come_is_missing_at_once(world: World) -> None:
    published = await world.publish()
    world.swarm.kill(world.learner)
    world.stores[0].pin(0, world.learner_store.manifests()[0], [])
    fetching = asyncio.create_task(world.subscribers[0].fetch(published.record))
    await asyncio.sleep(0.1)
    stream = await world.peers[1].open_stream(world.peers[0].peer_id, CHUNKS, timeout_s=1)
    await send(stream, OpenLane(published.digest))
    await send(stream, Want((0, 1), False))
    assert await receive(stream, Missing, max_bytes=1000, timeout_s=0.5) == Missing((0, 1))
    fetching.cancel()
    await asyncio.gather(fetching, return_exceptions=True)
