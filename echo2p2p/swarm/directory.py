"""The directory of a run: what its peers publish of themselves, and how the others find it.

A record lives for a short time and its owner renews it, so what has left vanishes by itself. Guarantees:

* Of what a peer has published, the record with the highest sequence number counts; a copy of an older one,
  handed out by whatever node, never replaces a newer one that this directory has seen.
* Sequence numbers grow across restarts without any state on disk: each is at least the time in ms.
* A worker counts as present until it says that it leaves or its last advert expires. A look that misses a
  record, or a shard that does not answer, makes nobody disappear.
* A watch of any number of workers reads at most ``REFRESH_BYTES`` a look, after the first: of a large run it looks
  at some shards at a time, in turn.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Callable, Iterable
from dataclasses import dataclass
from typing import NoReturn

import msgspec

from echo2p2p.errors import DeadlineExceeded, RecordError, SwarmError
from echo2p2p.swarm.identity import PeerId
from echo2p2p.swarm.network import Network
from echo2p2p.swarm.records import (
    WORKER_SHARDS,
    Body,
    Keys,
    LearnerRecord,
    ManifestRecord,
    Record,
    RunRecord,
    WorkerAdvert,
    check,
    newest,
    seal,
)

log = logging.getLogger(__name__)

DEFAULT_TTL_S = 90.0
_RENEWALS = 3
"""Times that a record is renewed within its life."""
_LEAVING = "leaving"
REFRESH_BYTES = 1_800_000
"""What one look of a watch may read; with the addresses and framing around it, 2 MB."""


@dataclass(frozen=True)
class WorkersSeen:
    """One look at the workers of a run: all that are present, and the difference to the look before."""

    workers: dict[PeerId, WorkerAdvert]
    joined: tuple[PeerId, ...]
    left: tuple[PeerId, ...]
    changed: tuple[PeerId, ...]


class Directory:
    """Publishes records of this node and finds those of others, within one run.

    Args:
        network: this node's.
        run: the run's name, ``<name>@<learner peer id>``.
        ttl_s: how long a record lives that is not renewed.
        store_timeout_s: for one store.

    Raises:
        RecordError: ``run`` is not the name of a run.
    """

    def __init__(
        self, network: Network, run: str, *, ttl_s: float = DEFAULT_TTL_S, store_timeout_s: float = 10.0
    ) -> None:
        self.keys = Keys(run)
        self._network = network
        self._ttl_s = ttl_s
        self._store_timeout_s = store_timeout_s
        self._sequence = 0
        self._seen: dict[str, dict[PeerId, Record]] = {}
        self._nbytes: dict[str, int] = {}
        self._next_shard = 0

    # --- publishing

    async def publish(self, body: Body, *, ttl_s: float | None = None) -> bytes:
        """Publish what this node says of itself or its run, once, and return it sealed.

        Args:
            ttl_s: how long it lives; as the directory's records do if None.

        Raises:
            SwarmError: no node of the table took it.
            RecordError: it is not a valid record, or longer than allowed, or not this node's to publish.
        """
        value, record = self._seal(body, ttl_s)
        if await self._store(value, record):
            return value
        key, me = record.key, self._network.peer_id
        found = await self._network.find_records(key, timeout_s=self._store_timeout_s)
        there = _believed(found, self._network.clock.unix()).get(me)
        if there is not None and (there.sequence > self._sequence or there.sequence == record.sequence):
            # Not made by this directory: from before a restart, say, when this machine's date was ahead.
            self._sequence = there.sequence
            value, record = self._seal(body, ttl_s)
            if await self._store(value, record):
                return value
        elif there is not None and there.sequence > record.sequence:
            return value  # a later call of this directory was faster; its word counts
        raise SwarmError(f"no node of the table took the record under {key}")

    def seal(self, body: Body) -> bytes:
        """The sealed record of ``body``, newer than every one before, without publishing it.

        Raises:
            RecordError: nobody would believe it.
        """
        return self._seal(body, None)[0]

    async def keep(self, make_body: Callable[[], Body], *, changed: asyncio.Event | None = None) -> NoReturn:
        """Publish what ``make_body`` returns, and renew it at a third of its life, until cancelled.

        Args:
            make_body: asked before every store.
            changed: set by the caller when the body has changed: it is published at once, though never more
                often than once in a hundredth of the record's life.

        A store that fails, or a body that nobody would believe, is logged and tried again soon.
        """
        pause_s = self._ttl_s / 100
        changed = changed or asyncio.Event()
        while True:
            changed.clear()
            wait_s = self._ttl_s / _RENEWALS - pause_s
            try:
                await self.publish(make_body())
            except (SwarmError, RecordError) as error:
                log.warning("a record of this node is not in the table: %s", error)
                wait_s = self._ttl_s / 15
            await asyncio.sleep(pause_s)
            try:
                async with asyncio.timeout(wait_s):
                    await changed.wait()
            except TimeoutError:
                pass

    async def retire(self, advert: WorkerAdvert) -> None:
        """Tell the run that this worker leaves. Never raises a SwarmError: the advert expires anyway."""
        try:
            await self.publish(msgspec.structs.replace(advert, state=_LEAVING))
        except SwarmError as error:
            log.info("left without a word: %s", error)

    def _seal(self, body: Body, ttl_s: float | None) -> tuple[bytes, Record]:
        now = self._network.clock.unix()
        ttl_s = self._ttl_s if ttl_s is None else ttl_s
        self._sequence = max(self._sequence + 1, int(now * 1000))
        value = seal(
            self._network.identity,
            self._key_of(body),
            body,
            sequence=self._sequence,
            expires_unix=now + ttl_s,
            next_s=ttl_s / _RENEWALS,
        )
        return value, check(value, owner=self._network.peer_id, now_unix=now)

    async def _store(self, value: bytes, record: Record) -> bool:
        return await self._network.store_record(
            record.key, value, expires_unix=record.expires_unix, timeout_s=self._store_timeout_s
        )

    def _key_of(self, body: Body) -> str:
        if isinstance(body, WorkerAdvert):
            return self.keys.worker(self._network.peer_id)
        if isinstance(body, LearnerRecord):
            return self.keys.learner
        if isinstance(body, ManifestRecord):
            return self.keys.manifest
        return Keys.RUNS

    # --- finding

    async def workers(self, timeout_s: float) -> dict[PeerId, WorkerAdvert]:
        """The workers of the run that are present, by peer id.

        Raises:
            DeadlineExceeded: not one shard answered within ``timeout_s``.
        """
        return await self._look_at(range(WORKER_SHARDS), timeout_s)

    async def _look_at(self, shards: Iterable[int], timeout_s: float) -> dict[PeerId, WorkerAdvert]:
        """Everybody that is present, as these shards say now and the others said last."""
        answered: list[bool] = []

        async def look(key: str) -> None:
            try:
                await self._find(key, timeout_s)
                answered.append(True)
            except SwarmError as error:
                log.debug("no answer for %s: %s", key, error)

        async with asyncio.TaskGroup() as group:
            for shard in shards:
                group.create_task(look(self.keys.worker_shard(shard)))
        if not answered:
            raise DeadlineExceeded(f"no shard of {self.keys.run} answered within {timeout_s:g} s")
        return {
            owner: record.body
            for shard in range(WORKER_SHARDS)
            for owner, record in self._live(self.keys.worker_shard(shard)).items()
            if isinstance(record.body, WorkerAdvert) and record.body.state != _LEAVING
        }

    def _next_shards(self) -> list[int]:
        """The shards whose turn it is: as many as :data:`REFRESH_BYTES` allow, at least one."""
        shards: list[int] = []
        nbytes = 0
        while len(shards) < WORKER_SHARDS:
            nbytes += self._nbytes.get(self.keys.worker_shard(self._next_shard), 0)
            if shards and nbytes > REFRESH_BYTES:
                break
            shards.append(self._next_shard)
            self._next_shard = (self._next_shard + 1) % WORKER_SHARDS
        return shards

    async def learner(self, timeout_s: float) -> LearnerRecord | None:
        """What the run's learner says of the run; None if it has said nothing lately.

        Raises:
            DeadlineExceeded: the table did not answer.
        """
        await self._find(self.keys.learner, timeout_s)
        record = self._live(self.keys.learner).get(self.keys.learner_id)
        if record is None or not isinstance(record.body, LearnerRecord):
            return None
        self._network.know(record.owner, record.body.addresses)
        return record.body

    async def manifest(self, timeout_s: float) -> Record | None:
        """The learner's record of the newest version (its body is a ManifestRecord); None if there is none.

        Raises:
            DeadlineExceeded: the table did not answer.
        """
        await self._find(self.keys.manifest, timeout_s)
        return self._live(self.keys.manifest).get(self.keys.learner_id)

    @staticmethod
    async def runs(network: Network, timeout_s: float) -> list[str]:
        """The names of all runs that are announced in the swarm, sorted.

        Raises:
            DeadlineExceeded: the table did not answer.
        """
        found = await network.find_records(Keys.RUNS, timeout_s=timeout_s)
        bodies = [record.body for record in _believed(found, network.clock.unix()).values()]
        return sorted(body.run for body in bodies if isinstance(body, RunRecord))

    async def watch_workers(self, period_s: float) -> AsyncIterator[WorkersSeen]:
        """Look every ``period_s`` and yield what is there and what is new; the first look joins everybody.

        Of a run so large that a look would read more than :data:`REFRESH_BYTES`, a look after the first sees some of
        the shards, so a worker is heard of a few periods later. A look that nobody answers is logged and skipped.
        """
        before: dict[PeerId, WorkerAdvert] = {}
        while True:
            try:
                now = await self._look_at(self._next_shards(), timeout_s=period_s)
            except SwarmError as error:
                log.warning("no look at the workers of %s: %s", self.keys.run, error)
            else:
                yield WorkersSeen(
                    workers=now,
                    joined=tuple(peer for peer in now if peer not in before),
                    left=tuple(peer for peer in before if peer not in now),
                    changed=tuple(peer for peer in now if before.get(peer, now[peer]) != now[peer]),
                )
                before = now
            await asyncio.sleep(period_s)

    async def _find(self, key: str, timeout_s: float) -> None:
        """Merge what the table holds under ``key`` into what has been seen."""
        found = await self._network.find_records(key, timeout_s=timeout_s)
        self._nbytes[key] = sum(len(owner) + len(value) for owner, value in found.items())
        seen = self._seen.setdefault(key, {})
        for owner, record in _believed(found, self._network.clock.unix()).items():
            seen[owner] = newest([record, seen[owner]]) if owner in seen else record

    def _live(self, key: str) -> dict[PeerId, Record]:
        """What has been seen under ``key`` and has not expired; forgets the rest."""
        now = self._network.clock.unix()
        live = {owner: r for owner, r in self._seen.get(key, {}).items() if r.expires_unix > now}
        self._seen[key] = live
        return live


def _believed(found: dict[PeerId, bytes], now_unix: float) -> dict[PeerId, Record]:
    """Parse what the network has verified, without what expired on its way here."""
    records = {}
    for owner, value in found.items():
        try:
            records[owner] = check(value, owner=owner, now_unix=now_unix)
        except RecordError as error:
            log.debug("not believed: %s", error)
    return records
