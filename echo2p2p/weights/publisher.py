"""The learner's side: cuts a snapshot into chunks, signs the manifest, and serves the first copy of each.

Where it is small enough to pay, a patch on the version before is cut into chunks of its own behind them, and the
patches before that one are listed again, so that who missed a few versions catches up by patches too.

Guarantees:

* One version has one manifest, across restarts too: what the store has of a version is what is announced.
* Comparing, hashing and writing happen off the loop.
"""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import msgspec
from blake3 import blake3

from echo2p2p.errors import ManifestError, OutOfDisk, VerificationError
from echo2p2p.swarm.identity import PeerId
from echo2p2p.swarm.messages import PROTOCOL_VERSION
from echo2p2p.swarm.network import Network
from echo2p2p.swarm.records import Keys, ManifestRecord
from echo2p2p.weights.exchange import DEFAULT_SERVER_LIMITS, ChunkServer, ServerLimits
from echo2p2p.weights.holding import Holding, restore
from echo2p2p.weights.manifest import (
    DEFAULT_LIMITS,
    DIGEST_BYTES,
    MAX_PATCHES,
    Asset,
    Manifest,
    ManifestLimits,
    Member,
    Patch,
    digest,
    sign,
)
from echo2p2p.weights.patch import encode
from echo2p2p.weights.plan import best_tree_count
from echo2p2p.weights.rebuild import rebuild
from echo2p2p.weights.reports import tell
from echo2p2p.weights.snapshot import Snapshot
from echo2p2p.weights.store import ChunkStore
from echo2p2p.weights.suspicion import Suspicion
from echo2p2p.weights.wire import MAX_WANTS, Report, Suspects

log = logging.getLogger("echo2p2p.weights")

DEFAULT_CHUNK_BYTES = 64 * 1024
"""Small enough that forwarding is nearly cut-through, large enough that requests and hashes cost little."""
_ENOUGH_CHUNKS = 4096
"""More of them only cost: with so many, the time of one chunk is lost in that of all, however deep the trees."""
_LARGE_CHUNK_BYTES = 2**20
DEFAULT_MAX_PATCH_SHARE = 0.5
"""A patch that saves less than half of the bytes is not worth the time of making and applying it."""
DEFAULT_PATCH_CHAIN = 16
"""Enough for a worker that was away for some minutes; every further one makes all manifests and stores larger."""
_TOLD_AT_ONCE = 32
_REST_VERSIONS = 7
_PATCH_CHUNKS = 64
_MIN_PATCH_CHUNK_BYTES = 8 * 1024
"""A patch is cut into so many chunks or more, none smaller than this, so that all members relay a part of it."""


@dataclass(frozen=True)
class Published:
    """A version that can be announced: ``record`` is what goes into the table, ``digest`` its manifest's.

    ``suspects``: members that shall forward nothing of it, for what was reported of them.
    """

    record: ManifestRecord
    manifest: Manifest
    digest: str
    seconds: float
    suspects: tuple[PeerId, ...] = ()


class WeightPublisher:
    """Publishes the versions of one run.

    Args:
        network: its identity must be the run's learner.
        store: holds the last ``keep_versions`` versions, which are served again after a restart, and at most one more
            that is still being fetched from here.
        chunk_bytes: of the smallest chunks; larger ones are used where there would be too many.
        max_patch_share: a patch travels only if it is smaller than this share of its snapshot; 0 for never. All
            that a manifest lists are smaller than that together.
        patch_chain: a manifest lists the patches of at most so many versions; 1 for its own alone.

    Raises:
        ManifestError: ``network`` is not the learner of ``run``.
    """

    def __init__(
        self,
        network: Network,
        run: str,
        store: ChunkStore,
        *,
        chunk_bytes: int = DEFAULT_CHUNK_BYTES,
        keep_versions: int = 2,
        max_patch_share: float = DEFAULT_MAX_PATCH_SHARE,
        upload_mbit: float = math.inf,
        patch_chain: int = DEFAULT_PATCH_CHAIN,
        limits: ManifestLimits = DEFAULT_LIMITS,
        server_limits: ServerLimits = DEFAULT_SERVER_LIMITS,
    ) -> None:
        if Keys(run).learner_id != network.peer_id:
            raise ManifestError(f"{network.peer_id} is not the learner of run {run}")
        self._network = network
        self._clock = network.clock
        self._run = run
        self._store = store
        self._chunk_bytes = chunk_bytes
        self._keep_versions = max(1, keep_versions)
        self._max_patch_share = max_patch_share
        self._upload_mbit = upload_mbit
        self._patch_chain = min(max(1, patch_chain), MAX_PATCHES)
        self._limits = limits
        self._server = ChunkServer(network, network.peer_id, server_limits, on_report=self._on_report)
        self._suspicion = Suspicion()
        # After a restart its words are newer than those before.
        self._serial = int(network.clock.unix() * 1000)
        self._telling = asyncio.Semaphore(_TOLD_AT_ONCE)
        self._published: dict[int, Published] = {}
        self._newest_snapshot: Snapshot | None = None
        self._newest_holding: Holding | None = None
        self._versions_without = 0

    async def start(self) -> None:
        """Serve, beginning with the versions that an earlier life left in the store."""
        for name, holding in (
            await self._clock.offload(lambda: restore(self._run, self._store, self._clock, self._limits))
        ).items():
            self._announceable(name, holding, 0.0)
        self._server.keep_newest(self._keep_versions)
        await self._server.start()

    @property
    def newest(self) -> Published | None:
        """The newest version that is served; None before the first."""
        return self._published[max(self._published)] if self._published else None

    @property
    def bytes_sent(self) -> dict[int, dict[PeerId, int]]:
        """Chunk bytes sent, by version and peer, of the versions that are still served."""
        return {version: dict(peers) for version, peers in self._server.bytes_sent.items()}

    def told(self, peer: PeerId) -> None:
        """``peer`` is told of the newest version: until the next it is served as its members are."""
        self._server.told(peer)

    @property
    def suspects(self) -> list[PeerId]:
        """Members of the newest version that should not relay, for others reported that they sent wrong bytes."""
        members = self.newest.manifest.members if self.newest is not None else ()
        return self._suspicion.suspects([member.peer for member in members])

    async def publish(
        self,
        snapshot: Snapshot,
        version: int,
        members: Sequence[Member],
        assets: Mapping[str, bytes],
    ) -> Published:
        """Cut, hash, sign and serve ``snapshot``; the result is to be announced.

        A version that is served already is returned as it was published, with the members of then.

        Args:
            members: the workers that relay it; the others fetch from them.
            assets: the pinned small files by name; the same for every version of a run.

        Raises:
            ManifestError: ``version`` was published with other weights, is older than the newest, or holds
                something that peers would refuse.
            OutOfDisk: the store has no room for it.
        """
        started = self._clock.monotonic()
        fingerprint = await self._clock.offload(snapshot.fingerprint)
        if version in self._published:
            published = self._published[version]
            if published.manifest.fingerprint != fingerprint:
                raise ManifestError(f"version {version} was published before, with other weights")
            if published is self.newest:
                self._newest_snapshot = snapshot
            return published
        if self.newest is not None and version < self.newest.manifest.version:
            raise ManifestError(f"version {version} is older than what is published")

        suspects = tuple(self._suspicion.leaves([member.peer for member in members], version))
        relaying = tuple(
            msgspec.structs.replace(member, upload_mbit=0.0) if member.peer in suspects else member
            for member in members
        )

        def cut() -> tuple[Manifest, bytes]:
            return self._cut(snapshot, fingerprint, version, relaying, assets)

        try:
            manifest, body = await self._clock.offload(cut)
        except OutOfDisk:
            # The newest version is enough to serve while this one needs the room of the others.
            newest = set() if self.newest is None else {self.newest.manifest.version}
            await self._clock.offload(lambda: self._store.prune(newest))
            manifest, body = await self._clock.offload(cut)
        holding = Holding(
            manifest,
            body,
            self._store,
            self._clock,
            here=range(manifest.n_chunks),
            buffer=snapshot.data,
            in_buffer=manifest.snapshot_chunks,
        )
        published = self._announceable(digest(body), holding, self._clock.monotonic() - started, suspects)
        self._newest_snapshot = snapshot
        served = self._server.keep_newest(self._keep_versions)
        if self._newest_holding is not None:
            self._newest_holding.leave_buffer()
        self._newest_holding = holding
        await self._clock.offload(lambda: self._store.prune(served))
        return published

    async def _on_report(self, accuser: PeerId, report: Report) -> None:
        """Believe ``accuser`` as far as it goes; tell the newest version's members if that changes anything."""
        newest = self.newest
        about = next((each for each in self._published.values() if each.digest == report.version), None)
        if newest is None or about is None:
            return
        members = [member.peer for member in newest.manifest.members]
        named = about.manifest.members
        if accuser not in members:
            return
        self._suspicion.slow(
            accuser, [named[at].peer for at in report.slow if at < len(named)], about.manifest.version
        )
        lied = [named[at].peer for at in report.lied if at < len(named)]
        if not self._suspicion.lied(accuser, lied, members):
            return
        suspects = self.suspects
        holding = self._server.holding(newest.digest)
        changed = holding is not None and holding.suspects != frozenset(suspects)
        log.log(
            logging.WARNING if changed else logging.INFO,
            "worker %s says that it was sent wrong bytes by %s; suspects: %s",
            accuser,
            ", ".join(lied),
            ", ".join(suspects) or "none",
        )
        if not suspects and not changed:
            return
        left_out = set(suspects)
        places = tuple(at for at, peer in enumerate(members) if peer in left_out)[:MAX_WANTS]
        self._serial += 1
        others = [member for member in newest.manifest.members if member.peer not in left_out]
        serial = self._serial
        trees, patch_trees = await self._clock.offload(lambda: self._tree_counts(newest.manifest, others))
        told = Suspects(newest.digest, serial, places, trees, patch_trees)
        if holding is not None:
            holding.suspect(told)

        async def say(member: Member) -> None:
            self._network.know(member.peer, member.addresses)
            async with self._telling:
                await tell(self._network, member.peer, told)

        async with asyncio.TaskGroup() as tasks:
            for member in newest.manifest.members:
                if changed or member.peer == accuser:
                    tasks.create_task(say(member))

    def _announceable(
        self, name: str, holding: Holding, seconds: float, suspects: tuple[PeerId, ...] = ()
    ) -> Published:
        self._server.serve(name, holding)
        manifest = holding.manifest
        record = ManifestRecord(manifest.version, name, len(holding.body), manifest.nbytes)
        published = Published(record, manifest, name, seconds, suspects)
        self._published[manifest.version] = published
        for version in sorted(self._published)[: -self._keep_versions]:
            del self._published[version]
        return published

    def _cut(
        self,
        snapshot: Snapshot,
        fingerprint: str,
        version: int,
        members: tuple[Member, ...],
        assets: Mapping[str, bytes],
    ) -> tuple[Manifest, bytes]:
        """Store every chunk and asset and the signed manifest; blocks."""
        chunk_bytes = self._chunk_bytes
        while len(snapshot.data) > chunk_bytes * _ENOUGH_CHUNKS and chunk_bytes < _LARGE_CHUNK_BYTES:
            chunk_bytes *= 2
        while len(snapshot.data) * (1 + self._max_patch_share) > chunk_bytes * self._limits.max_chunks:
            chunk_bytes *= 2
        chunks = self._store_chunks(snapshot.data, chunk_bytes)
        listed = []
        for name, content in sorted(assets.items()):
            listed.append(Asset(name, blake3(content).digest(), len(content)))
            self._store.put_verified(listed[-1].digest, content)
        patches = self._patches(snapshot, fingerprint, chunk_bytes, len(chunks) // DIGEST_BYTES)
        manifest = Manifest(
            protocol=PROTOCOL_VERSION,
            run=self._run,
            version=version,
            hash="blake3",
            fingerprint=fingerprint,
            layout=snapshot.layout,
            chunk_bytes=chunk_bytes,
            chunks=chunks,
            members=members,
            assets=tuple(listed),
            patches=patches,
        )
        trees, patch_trees = self._tree_counts(manifest, members)
        manifest = msgspec.structs.replace(manifest, trees=trees, patch_trees=patch_trees)
        body = sign(self._network.identity, manifest)
        while len(body) > self._limits.max_manifest_bytes and manifest.patches:
            manifest = msgspec.structs.replace(manifest, patches=manifest.patches[:-1])
            body = sign(self._network.identity, manifest)
        self._store.pin(version, body, manifest.digests())
        return manifest, body

    def _tree_counts(self, manifest: Manifest, members: Sequence[Member]) -> tuple[int, int]:
        """Over how many trees the whole and the patches are best relayed among ``members``."""
        patches = manifest.patches
        return self._tree_count(manifest, members), self._tree_count(patches[0], members) if patches else 1

    def _tree_count(self, what: Manifest | Patch, members: Sequence[Member]) -> int:
        """Over how many trees a snapshot or a patch reaches ``members`` soonest."""
        return best_tree_count(what.nbytes, what.chunk_bytes, self._upload_mbit, members)

    def _patches(
        self, snapshot: Snapshot, fingerprint: str, chunk_bytes: int, n_chunks: int
    ) -> tuple[Patch, ...]:
        """A new patch, if it pays, and behind it those that lead to its base, as far as they can pay; blocks."""
        base = self._base(snapshot)
        if base is None:
            return ()
        newest = self._patch(*base, snapshot, fingerprint, chunk_bytes)
        if newest is None:
            return ()
        chain: list[Patch] = []
        nbytes = 0
        for patch in (newest, *base[0].patches)[: self._patch_chain]:
            nbytes += patch.nbytes
            n_chunks += patch.n_chunks
            if nbytes >= self._max_patch_share * snapshot.layout.nbytes or n_chunks > self._limits.max_chunks:
                break
            if not all(self._store.has(patch.chunk_digest(at)) for at in range(patch.n_chunks)):
                break
            chain.append(patch)
        return tuple(chain)

    def _base(self, snapshot: Snapshot) -> tuple[Manifest, Snapshot] | None:
        """What was published last, from the store after a restart; None where no patch on it is to be made."""
        if self.newest is None or self._max_patch_share <= 0:
            return None
        if self._versions_without > 0:
            self._versions_without -= 1
            return None
        manifest = self.newest.manifest
        if manifest.layout != snapshot.layout:
            return None
        if self._newest_snapshot is not None:
            return manifest, self._newest_snapshot
        try:
            return manifest, rebuild(manifest, self._store)
        except VerificationError as error:
            log.warning("no patch on version %d: %s", manifest.version, error)
            return None

    def _patch(
        self, base: Manifest, base_snapshot: Snapshot, snapshot: Snapshot, fingerprint: str, chunk_bytes: int
    ) -> Patch | None:
        """Store the patch on ``base``, if it pays."""
        data = encode(base_snapshot, snapshot, base_fingerprint=base.fingerprint, fingerprint=fingerprint)
        if len(data) >= self._max_patch_share * snapshot.layout.nbytes:
            # Where everything changes, it does so for a while: making patches for nothing is given a rest.
            self._versions_without = _REST_VERSIONS
            return None
        chunk_bytes = max(_MIN_PATCH_CHUNK_BYTES, min(chunk_bytes, len(data) // _PATCH_CHUNKS))
        chunks = self._store_chunks(memoryview(data), chunk_bytes)
        return Patch(base.version, base.fingerprint, len(data), chunk_bytes, chunks)

    def _store_chunks(self, data: memoryview, chunk_bytes: int) -> bytes:
        """Store ``data`` in chunks; their digests, one after another."""
        digests = []
        for start in range(0, len(data), chunk_bytes):
            chunk = data[start : start + chunk_bytes]
            digests.append(blake3(chunk).digest())
            self._store.put_verified(digests[-1], chunk)
        return b"".join(digests)
