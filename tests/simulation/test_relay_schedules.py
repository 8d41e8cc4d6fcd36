"""The relay under two hundred schedules of faults, each drawn from its seed, which is the number in the test's name.

A schedule draws a learner and 2 to 12 members with uneven links, one to three versions, and up to ten faults:
joins (also of peers that no manifest names), leaves, kills and restarts of workers and of the learner, cuts,
stalls of one direction, lies, links that turn slow, announcements that come late. Then everything is healed.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable

import pytest
from blake3 import blake3

from echo2p2p.errors import Echo2p2pError
from echo2p2p.swarm.identity import Identity
from echo2p2p.swarm.memory import MemoryNetwork, MemorySwarm
from echo2p2p.swarm.messages import protocol_id
from echo2p2p.swarm.records import ManifestRecord
from echo2p2p.swarm.virtual_time import run_virtual
from echo2p2p.weights.manifest import Member
from echo2p2p.weights.publisher import WeightPublisher
from echo2p2p.weights.snapshot import Layout, Snapshot, TensorSpec
from echo2p2p.weights.store import MemoryStore
from echo2p2p.weights.subscriber import WeightSubscriber
from echo2p2p.weights.wire import CHUNK_PROTOCOL

SCHEDULES = 200
CHUNK_BYTES = 32 * 1024
ASSETS = {"config.json": b"{}" * 40, "empty": b"", "tokenizer.json": bytes(30_000)}
TROUBLE_S = 12.0
"""Faults begin within this time; none lasts longer than ``LONGEST_S``."""
LONGEST_S = 20.0
FETCH_S = 300.0
"""No fetch may take longer, whatever happens: it ends with the version or with an error of ours."""
SETTLE_S = 150.0
"""After the last fault is healed, everybody who lives holds the newest version within this."""
RETRY_S = 2.0
MESSAGES_BYTES = 8 * 1024
"""What the learner may send to one worker of one version that is not chunks: the manifest, what frames chunks."""


class Worker:
    """A worker that follows the versions, as the rollout worker does; its identity and store outlive its process."""

    def __init__(self, world: World, number: int) -> None:
        rng = world.rng
        self.world = world
        self.identity = Identity.from_seed(f"{world.seed} {number}".encode().ljust(32)[:32])
        self.upload_mbit = rng.choice([5.0, 20.0, 50.0, 100.0]) * rng.uniform(0.7, 1.3)
        self.download_mbit = rng.choice([20.0, 50.0, 200.0])
        self.delay_s = rng.uniform(0.001, 0.15)
        self.store = MemoryStore()
        self.lives = False
        self.held = -1
        self.errors: list[Echo2p2pError] = []
        self._head: ManifestRecord | None = None
        self._news = asyncio.Event()
        self._life: asyncio.Task[None] | None = None

    @property
    def as_member(self) -> Member:
        # A zero, now and then: it relays nothing.
        claimed = 0.0 if self.upload_mbit < 4 else float(round(self.upload_mbit))
        return Member(self.identity.peer_id, claimed)

    async def start(self) -> None:
        self.network = self.world.swarm.add_peer(
            self.identity,
            upload_mbit=self.upload_mbit,
            download_mbit=self.download_mbit,
            delay_s=self.delay_s,
        )
        self.subscriber = WeightSubscriber(self.network, self.world.run, self.store)
        await self.subscriber.start()
        self.lives, self.held, self._head = True, -1, None
        self._news.clear()
        self._life = asyncio.create_task(self._follow())

    async def end(self, *, politely: bool) -> None:
        self.lives = False
        if politely:
            await self.network.close()
        else:
            self.world.swarm.kill(self.network)
        await self.rest()

    async def rest(self) -> None:
        """Stop following. Raises what the life of this worker broke on."""
        assert self._life is not None
        self._life.cancel()
        result = (await asyncio.gather(self._life, return_exceptions=True))[0]
        if not isinstance(result, asyncio.CancelledError):
            raise AssertionError("a worker died") from result

    def hear(self, record: ManifestRecord) -> None:
        if self.lives and (self._head is None or record.version > self._head.version):
            self._head = record
            self._news.set()

    async def _follow(self) -> None:
        while True:
            await self._news.wait()
            self._news.clear()
            record = self._head
            assert record is not None
            fetching = asyncio.create_task(self._fetch(record))
            superseded = asyncio.create_task(self._news.wait())
            try:
                await asyncio.wait(
                    {fetching, superseded} if self.world.supersedes else {fetching},
                    return_when=asyncio.FIRST_COMPLETED,
                )
                if fetching.done() and not fetching.result():
                    await asyncio.sleep(RETRY_S)
                    self._news.set()
            finally:
                fetching.cancel()
                superseded.cancel()
                await asyncio.gather(fetching, superseded, return_exceptions=True)

    async def _fetch(self, record: ManifestRecord) -> bool:
        others = [each.identity.peer_id for each in self.world.workers if each.lives and each is not self]
        try:
            async with asyncio.timeout(FETCH_S):
                fetched = await self.subscriber.fetch(record, peers=others)
        except Echo2p2pError as error:
            self.errors.append(error)
            return False
        assert fetched.manifest.version == record.version > self.held
        assert fetched.snapshot.data == self.world.snapshots[record.version].data
        assert fetched.assets == ASSETS
        self.held = record.version
        return True


class World:
    """One schedule: who is there, what is published, what goes wrong and when."""

    def __init__(self, swarm: MemorySwarm, seed: int) -> None:
        self.swarm = swarm
        self.seed = seed
        self.rng = random.Random(seed)
        self.nbytes = int(2 ** self.rng.uniform(16.7, 22))
        self.supersedes = self.rng.random() < 0.7
        self.orphans = self.rng.random() < 0.15
        """The learner dies in the middle and does not come back."""
        self.identity = Identity.from_seed(f"learner {seed}".encode().ljust(32)[:32])
        self.run = f"run@{self.identity.peer_id}"
        self.learner_store = MemoryStore()
        self.learner_mbit = self.rng.choice([20.0, 50.0, 100.0])
        self.learner: MemoryNetwork | None = None
        self.snapshots: dict[int, Snapshot] = {}
        self.record: ManifestRecord | None = None
        self.liars: list[Worker] = []
        self.workers = [Worker(self, number) for number in range(self.rng.randint(2, 12))]
        self.faults = 0
        self.undone: list[asyncio.Task[None]] = []

    @property
    def living(self) -> list[Worker]:
        return [worker for worker in self.workers if worker.lives]

    async def start_learner(self) -> None:
        self.learner = self.swarm.add_peer(self.identity, upload_mbit=self.learner_mbit, delay_s=0.02)
        self.publisher = WeightPublisher(
            self.learner, self.run, self.learner_store, chunk_bytes=CHUNK_BYTES, keep_versions=2
        )
        await self.publisher.start()

    async def publish(self) -> None:
        if self.learner is None:
            return
        version = len(self.snapshots)
        content = bytearray(self.rng.randbytes(self.nbytes))
        if version and self.rng.random() < 0.5:  # little changes: a patch travels too
            content[:] = self.snapshots[version - 1].data
            at = self.rng.randrange(self.nbytes - 1000)
            content[at : at + 1000] = self.rng.randbytes(1000)
        layout = Layout((TensorSpec("w", "uint8", (self.nbytes,), 0, self.nbytes),), {})
        self.snapshots[version] = Snapshot(layout, bytes(content))
        members = [worker.as_member for worker in self.living]
        if len(members) > 2 and self.rng.random() < 0.3:
            members.pop(self.rng.randrange(len(members)))
        published = await self.publisher.publish(self.snapshots[version], version, members, ASSETS)
        self.record = published.record
        for worker in self.living:
            self.announce(worker, late_s=self.rng.choice([0.0, 0.1, self.rng.uniform(0, 12)]))

    def announce(self, worker: Worker, *, late_s: float) -> None:
        if self.record is not None:
            asyncio.get_running_loop().call_later(late_s, worker.hear, self.record)

    # --- faults

    def later(self, undo: Callable[[], object]) -> None:
        async def wait() -> None:
            await asyncio.sleep(lasts_s)
            result = undo()
            if asyncio.iscoroutine(result):
                await result

        lasts_s = self.rng.uniform(0.3, LONGEST_S)
        self.undone.append(asyncio.create_task(wait()))

    def some(self) -> Worker | None:
        return self.rng.choice(self.living) if self.living else None

    def pair(self) -> tuple[MemoryNetwork, MemoryNetwork] | None:
        networks = [worker.network for worker in self.living] + ([self.learner] if self.learner else [])
        if len(networks) < 2:
            return None
        a, b = self.rng.sample(networks, 2)
        return a, b

    async def cut(self) -> None:
        if pair := self.pair():
            self.swarm.cut(*pair)
            self.later(lambda: self.swarm.heal(*pair))

    async def stall(self) -> None:
        if pair := self.pair():
            self.swarm.stall(*pair)
            self.later(lambda: self.swarm.unstall(*pair))

    async def lie(self) -> None:
        if (liar := self.some()) and liar not in self.liars and len(self.liars) < len(self.living) - 1:
            self.liars.append(liar)
            self.spread_lies()

    def spread_lies(self) -> None:
        for liar in self.liars:
            for other in self.workers:
                if liar.lives and other.lives and other is not liar:
                    self.swarm.corrupt(liar.network, other.network, every=1, min_bytes=1024)

    async def slow_down(self) -> None:
        if worker := self.some():
            self.swarm.set_rate(worker.network, upload_mbit=self.rng.uniform(0.3, 3))
            self.later(lambda: self.swarm.set_rate(worker.network, upload_mbit=worker.upload_mbit))

    async def kill(self) -> None:
        if worker := self.some():
            await worker.end(politely=self.rng.random() < 0.3)
            if self.rng.random() < 0.6:
                self.later(lambda: self.bring_back(worker))

    async def bring_back(self, worker: Worker) -> None:
        await worker.start()
        self.spread_lies()
        self.announce(worker, late_s=self.rng.uniform(0, 3))

    async def join(self) -> None:
        worker = Worker(self, len(self.workers))
        self.workers.append(worker)
        await self.bring_back(worker)

    async def restart_learner(self) -> None:
        if self.learner is not None:
            self.swarm.kill(self.learner)
            self.learner = None
            self.later(self.start_learner)

    async def end_learner(self) -> None:
        if self.learner is not None:
            self.swarm.kill(self.learner)
            self.learner = None
            self.faults += 1

    # --- the play

    async def play(self) -> None:
        await self.start_learner()
        for worker in self.workers:
            await worker.start()
        happenings = [
            self.cut,
            self.stall,
            self.lie,
            self.slow_down,
            self.kill,
            self.join,
            self.restart_learner,
        ]
        timed = [
            (self.rng.uniform(0, TROUBLE_S), self.rng.choice(happenings))
            for _ in range(self.rng.randint(0, 10))
        ]
        self.faults = len(timed)
        timed += [(self.rng.uniform(0, TROUBLE_S), self.publish) for _ in range(self.rng.randint(0, 2))]
        await self.publish()
        if self.orphans:
            timed.append((self.rng.uniform(0, TROUBLE_S), self.end_learner))
        started = now()
        for at_s, happen in sorted(timed, key=lambda each: each[0]):
            await asyncio.sleep(max(0.0, started + at_s - now()))
            await happen()
        await asyncio.gather(*self.undone)
        for worker in self.living:
            self.announce(worker, late_s=0.0)
        await self.settle()
        self.check_stores()
        self.check_learner_bytes()
        for worker in self.living:
            await worker.rest()

    async def settle(self) -> None:
        assert self.record is not None
        started = now()
        while behind := [worker for worker in self.living if worker.held < self.record.version]:
            if self.learner is None and not self.is_obtainable() and all(worker.errors for worker in behind):
                break
            assert now() - started < SETTLE_S, self.describe()
            await asyncio.sleep(0.25)
        self.settled_s = now() - started

    def is_obtainable(self) -> bool:
        """Without its learner, a version can be had as long as one honest worker that lives has all of it."""
        honest = [worker for worker in self.living if worker not in self.liars]
        return any(worker.held == self.record.version for worker in honest)

    def check_stores(self) -> None:
        for store in [self.learner_store, *(worker.store for worker in self.workers)]:
            assert all(blake3(data).digest() == digest for digest, data in store._chunks.items())

    def check_learner_bytes(self) -> None:
        """One copy of every version, and less than one for every fault: a stripe, which is half with two members."""
        sent = self.swarm.bytes_sent(sender=self.identity.peer_id, protocol=protocol_id(CHUNK_PROTOCOL))
        copies = len(self.snapshots) + 0.75 * self.faults
        whole = self.nbytes + sum(map(len, ASSETS.values()))
        assert sent <= copies * whole + len(self.workers) * len(self.snapshots) * MESSAGES_BYTES

    def describe(self) -> str:
        behind = [w for w in self.living if w.held < self.record.version]
        return "; ".join(
            f"{w.identity.peer_id} holds {w.held}: {[e.message for e in w.errors][-1:]}" for w in behind
        )


def now() -> float:
    return asyncio.get_running_loop().time()


@pytest.mark.parametrize("seed", range(SCHEDULES))
def test_whatever_happens_all_that_live_hold_the_newest_version_in_the_end(seed: int) -> None:
    async def main() -> World:
        async with MemorySwarm(seed=seed) as swarm:
            world = World(swarm, seed)
            await world.play()
            return world

    run_virtual(main, limit_s=3600)
