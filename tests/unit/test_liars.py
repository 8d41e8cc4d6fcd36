"""Peers that serve other bytes than the learner signed for, in every way, up to all but one."""

from __future__ import annotations

import random

from blake3 import blake3

from echo2p2p.swarm.memory import MemorySwarm
from echo2p2p.swarm.virtual_time import run_virtual
from echo2p2p.weights.lane import FetchLimits
from echo2p2p.weights.manifest import Member
from echo2p2p.weights.publisher import WeightPublisher
from echo2p2p.weights.snapshot import Layout, Snapshot, TensorSpec
from echo2p2p.weights.store import MemoryStore
from echo2p2p.weights.subscriber import WeightSubscriber

CHUNK_BYTES = 1024
N_CHUNKS = 12
NBYTES = CHUNK_BYTES * N_CHUNKS
LIES = ("flip", "truncate", "zeros", "other", "longer")
WINDOW = 4
CASES = 500
LAYOUT = Layout((TensorSpec("w", "uint8", (NBYTES,), 0, NBYTES),), {})


class LyingStore(MemoryStore):
    """Gives out what its chunks are not."""

    def __init__(self, lie: str, rng: random.Random) -> None:
        super().__init__()
        self.lie = lie
        self.told = 0
        self._rng = rng

    def get(self, digest: bytes) -> bytes | None:
        data = super().get(digest)
        if data is None or not self.lie:
            return data
        self.told += 1
        at = self._rng.randrange(len(data))
        match self.lie:
            case "flip":
                return data[:at] + bytes([data[at] ^ 1 << self._rng.randrange(8)]) + data[at + 1 :]
            case "truncate":
                return data[:at]
            case "zeros":
                return bytes(len(data))
            case "other":
                return next(other for name, other in self._chunks.items() if name != digest)
            case _:
                return data + data


async def one_case(rng: random.Random) -> None:
    n_liars = rng.randint(0, 4)
    lies = [rng.choice(LIES) for _ in range(n_liars)] + [""] * (5 - n_liars)
    rng.shuffle(lies)
    snapshot = Snapshot(LAYOUT, rng.randbytes(NBYTES))
    async with MemorySwarm(seed=rng.randrange(2**32)) as swarm:
        learner, peers, victim = swarm.add_peer(), [swarm.add_peer() for _ in lies], swarm.add_peer()
        run = f"run@{learner.peer_id}"
        origin = MemoryStore()
        publisher = WeightPublisher(learner, run, origin, chunk_bytes=CHUNK_BYTES)
        members = [Member(peer.peer_id, 50.0) for peer in peers]
        published = await publisher.publish(snapshot, 0, members, {})
        stores = [LyingStore(lie, rng) for lie in lies]
        for peer, store in zip(peers, stores, strict=True):
            store._chunks, store._pins = dict(origin._chunks), dict(origin._pins)
            await WeightSubscriber(peer, run, store).start()
        swarm.kill(learner)
        kept = MemoryStore()
        limits = FetchLimits(window_bytes=WINDOW * CHUNK_BYTES, stall_s=2)
        subscriber = WeightSubscriber(victim, run, kept, fetch_limits=limits)
        await subscriber.start()
        fetched = await subscriber.fetch(published.record, peers=[peer.peer_id for peer in peers])
        assert fetched.snapshot.data == snapshot.data
        assert all(blake3(data).digest() == name for name, data in kept._chunks.items())
        for peer, store in zip(peers, stores, strict=True):
            if store.lie in ("flip", "zeros", "other"):
                # What it was asked for before the first lie was found out, and nothing after.
                assert store.told <= 2 * WINDOW
                assert peer.peer_id in subscriber.banned or not store.told
            elif not store.lie:
                assert peer.peer_id not in subscriber.banned


def test_no_lie_of_four_peers_in_five_ends_in_the_store() -> None:
    rng = random.Random(0)
    for _ in range(CASES):
        run_virtual(lambda: one_case(rng))
