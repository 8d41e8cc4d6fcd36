"""The worker's side: from an announcement to a verified snapshot, relaying chunks to the others on the way.

Guarantees:

* What is returned is what the learner signed: every chunk and the whole were verified. Nothing partial is
  ever visible, also when a fetch is cancelled because a newer version supersedes it.
* Versions never go back: the newest one seen is on the disk before anything of it is used.
"""

from __future__ import annotations

import mmap
import threading
from collections.abc import Iterable
from dataclasses import dataclass

from echo2p2p.errors import ManifestError, OutOfDisk, PeerUnreachable
from echo2p2p.swarm.identity import PeerId
from echo2p2p.swarm.network import Network
from echo2p2p.swarm.records import Keys, ManifestRecord
from echo2p2p.weights.arrival import Arrival
from echo2p2p.weights.exchange import DEFAULT_SERVER_LIMITS, ChunkServer, ServerLimits
from echo2p2p.weights.finding import find, order
from echo2p2p.weights.holding import Holding, restore
from echo2p2p.weights.lane import DEFAULT_FETCH_LIMITS, FetchLimits, get_manifest
from echo2p2p.weights.manifest import (
    DEFAULT_LIMITS,
    Manifest,
    ManifestLimits,
    ManifestVerifier,
    Member,
    digest,
)
from echo2p2p.weights.path import Way, cheapest_way
from echo2p2p.weights.rate import TokenBucket
from echo2p2p.weights.rebuild import is_whole
from echo2p2p.weights.snapshot import Snapshot
from echo2p2p.weights.standing import Standing
from echo2p2p.weights.store import ChunkStore
from echo2p2p.weights.supersede import Arriving
from echo2p2p.weights.timeline import Timeline

_PATIENCE_S = 60.0
"""How long the version before is kept on a disk that has no room for the next one."""


@dataclass(frozen=True)
class Fetched:
    """One version, whole and verified.

    ``bytes_from_*`` count chunk bytes over the network, ``timeline`` says when they came and from whom;
    ``fetch_s`` runs from the call to the verified whole. ``patches``: how many it was made with; 0 if it came whole.
    """

    manifest: Manifest
    snapshot: Snapshot
    assets: dict[str, bytes]
    bytes_from_learner: int
    bytes_from_peers: int
    fetch_s: float
    patches: int
    timeline: Timeline


class WeightSubscriber:
    """Follows the versions of one run and relays them.

    The newest snapshot stays in memory, for the patches of the next version to start from. After a restart they
    start from the store.

    Args:
        store: where chunks are kept; they survive a restart, as does the memory of the newest version seen.
        keep_versions: how many whole versions stay in the store and are served to others, apart from one more that
            others are still fetching from here, and what has come of one that is not whole.
    """

    def __init__(
        self,
        network: Network,
        run: str,
        store: ChunkStore,
        *,
        keep_versions: int = 2,
        limits: ManifestLimits = DEFAULT_LIMITS,
        fetch_limits: FetchLimits = DEFAULT_FETCH_LIMITS,
        server_limits: ServerLimits = DEFAULT_SERVER_LIMITS,
    ) -> None:
        self._network = network
        self._clock = network.clock
        self._run = run
        self._learner = Keys(run).learner_id
        self._store = store
        self._keep_versions = max(1, keep_versions)
        self._limits = limits
        self._fetch_limits = fetch_limits
        self._verifier = ManifestVerifier(run, limits)
        self._server = ChunkServer(network, self._learner, server_limits)
        self._standing = Standing(self._learner)
        self._cap = TokenBucket(fetch_limits.download_mbit, self._clock.monotonic())
        self._members: tuple[Member, ...] = ()
        self._arrival: Arrival | None = None
        self._noting = threading.Lock()
        self._newest: Fetched | None = None
        self._newest_holding: Holding | None = None
        self._stored: dict[int, Manifest] = {}
        self._begun: set[int] = set()
        self._full_since: float | None = None

    async def start(self) -> None:
        """Take up what an earlier life left in the store, and serve it.

        Raises:
            ResourceError: the store cannot be read.
        """
        trusted = await self._clock.offload(self._store.trusted)
        self._verifier = ManifestVerifier(self._run, self._limits, trusted)
        held = await self._clock.offload(lambda: restore(self._run, self._store, self._clock, self._limits))
        for name, holding in held.items():
            self._server.serve(name, holding)
            self._stored[holding.manifest.version] = holding.manifest
        if self._stored:
            self._members = self._stored[max(self._stored)].members
        await self._server.start()

    @property
    def newest_seen(self) -> int:
        """The newest version whose manifest was believed; −1 if none was."""
        return self._verifier.trusted.version

    @property
    def arriving(self) -> Arriving | None:
        """How far the version is that is being fetched; None while there is none, or its manifest is not here."""
        return self._arrival.progress if self._arrival is not None else None

    @property
    def banned(self) -> dict[PeerId, str]:
        """Peers that were caught lying, each with what it did."""
        return self._standing.banned

    @property
    def bytes_sent(self) -> dict[int, dict[PeerId, int]]:
        """Chunk bytes relayed, by version and peer, of the versions that are still served."""
        return {version: dict(peers) for version, peers in self._server.bytes_sent.items()}

    async def fetch(
        self, record: ManifestRecord, *, peers: Iterable[PeerId] = (), announced: float | None = None
    ) -> Fetched:
        """Bring the version that ``record`` announces here, and serve it to others meanwhile and afterwards.

        To follow a newer version instead, cancel the call; its chunks stay in the store for another try.

        Args:
            record: the learner's, checked (:func:`echo2p2p.swarm.records.check`).
            peers: who else may have the version if neither the learner nor its members are to be reached.
            announced: when the version was announced here (monotonic seconds), if that was not just now.

        Raises:
            ManifestError: the manifest is not one to believe.
            FingerprintMismatch: the learner signed for a snapshot that its chunks do not make.
            PeerUnreachable, DeadlineExceeded: it names what is missing and who was asked.
            OutOfDisk, ResourceError: the store has no room, or fails.
        """
        started = self._clock.monotonic()
        timeline = Timeline(self._clock, self._learner, started if announced is None else announced)
        self._standing.forgive()
        peers = tuple(peers)
        body = await self._manifest_body(record, peers)
        manifest = self._verifier.accept(body, record.manifest_digest)
        self._members = manifest.members
        for member in manifest.members:
            self._network.know(member.peer, member.addresses)

        version = record.manifest_digest
        way, here = await self._clock.offload(lambda: self._take_note(manifest, body))
        in_patches = sum(patch.nbytes for patch in manifest.patches[: way.patches])
        buffer = _new_buffer(manifest.whole_bytes + in_patches)
        holding = Holding(manifest, body, self._store, self._clock, here=here, buffer=buffer)
        self._server.serve(version, holding)
        arrival = Arrival(
            self._network,
            self._store,
            self._learner,
            version,
            holding,
            buffer,
            way,
            self._held(way),
            self._standing,
            self._fetch_limits,
            self._cap,
            timeline,
            peers,
        )
        self._arrival = arrival
        try:
            snapshot = await arrival.run()
        except BaseException as error:
            self._arrival = None
            self._server.drop(version)
            if isinstance(error, OutOfDisk):
                await self._clock.offload(self._drop_old)
            raise
        fetch_s = self._clock.monotonic() - started
        self._full_since = None
        holding.complete()
        if self._newest_holding is not None:
            self._newest_holding.leave_buffer()
        self._newest_holding = holding
        served = self._server.keep_newest(self._keep_versions)
        await self._clock.offload(lambda: self._store.prune(served))
        self._newest = Fetched(
            manifest,
            snapshot,
            _assets(manifest, buffer),
            arrival.bytes_from_learner,
            arrival.bytes_from_peers,
            fetch_s,
            arrival.patches,
            timeline,
        )
        self._stored[manifest.version] = manifest
        self._begun.clear()
        self._stored = {number: each for number, each in self._stored.items() if number in served}
        self._arrival = None
        return self._newest

    def _way(self, manifest: Manifest) -> tuple[Way, list[int]]:
        """The way to take, and the chunks of further patches that are in the store for others."""
        named = {patch.base_version for patch in manifest.patches}
        held = [
            each for each in self._stored.values() if each.version in named and is_whole(each, self._store)
        ]
        if self._newest is not None:
            held.append(self._newest.manifest)
        way = cheapest_way(manifest, held, self._store.has)
        further = range(max(way.wanted.stop, manifest.whole.stop), manifest.n_chunks)
        return way, [index for index in further if self._store.has(manifest.chunk_digest(index))]

    def _held(self, way: Way) -> Snapshot | None:
        """The base of ``way``, if it is in memory."""
        newest = self._newest
        return newest.snapshot if newest is not None and newest.manifest == way.base else None

    def _take_note(self, manifest: Manifest, body: bytes) -> tuple[Way, list[int]]:
        """Remember and pin a version, choose the way to it, and see to room before a byte of it is asked for."""
        # A fetch that is given up may leave this running: what it writes must not come after what the next one does.
        with self._noting:
            try:
                self._store.remember(self._verifier.trusted)
                self._store.pin(manifest.version, body, manifest.digests())
                if self._begun - {manifest.version}:
                    # Of those that never came here whole, only what this one lists too is of use.
                    self._store.prune({manifest.version, *self._stored})
                self._begun = {manifest.version}
            except OutOfDisk:
                self._drop_old()
                raise
            way, here = self._way(manifest)
            store, whole = self._store, manifest.whole
            spans = (manifest.chunk_span(at) for at in whole if not store.has(manifest.chunk_digest(at)))
            needed = sum(end - start for start, end in spans)
            if way.base is not None:
                # What the patches make of the base is kept as well, in the chunks of the whole.
                needed += way.missing_bytes
            if needed > store.room():
                self._drop_old()
            if needed > store.room():
                raise OutOfDisk(
                    f"version {manifest.version} needs {needed} bytes more than are here, there is room for "
                    f"{max(0, store.room())}",
                    hint="free some disk space, or raise weights.max_store_gib",
                )
            return way, here

    def _drop_old(self) -> None:
        """Make room: all but the arriving version and the one before go, and after a while that one too.

        The engine holds what it serves in memory. On the disk, the version before is worth a wait, for a
        restart and for latecomers, but not falling behind the run for good.
        """
        now = self._clock.monotonic()
        if self._full_since is None:
            self._full_since = now
        keep = {self.newest_seen}
        if self._stored and (
            now - self._full_since < _PATIENCE_S or self.newest_seen not in self._store.manifests()
        ):
            keep.add(max(self._stored))
        self._store.prune(keep)

    async def _manifest_body(self, record: ManifestRecord, peers: Iterable[PeerId]) -> bytes:
        """The signed manifest that ``record`` pins: from the store, the learner, or another peer."""
        stored = (await self._clock.offload(self._store.manifests)).get(record.version)
        if stored is not None and digest(stored) == record.manifest_digest:
            return stored
        if record.manifest_bytes > self._limits.max_manifest_bytes:
            raise ManifestError(
                f"version {record.version} has a manifest of {record.manifest_bytes} bytes, "
                f"{self._limits.max_manifest_bytes} are allowed"
            )

        async def ask(source: PeerId) -> bytes:
            try:
                return await get_manifest(
                    self._network,
                    source,
                    record.manifest_digest,
                    record.version,
                    max_bytes=record.manifest_bytes,
                    limits=self._fetch_limits,
                )
            except ManifestError as error:
                self._standing.lied(source, error.message)
                raise

        asks = order(self._members, self._network.peer_id, self._learner, record.manifest_bytes, peers)
        asks = [each for each in asks if each.source not in self._standing.banned]
        try:
            return await find(ask, asks, self._clock)
        except PeerUnreachable as error:
            raise PeerUnreachable(
                f"the manifest of version {record.version} was not to be had: {error.message}"
            ) from None


def _assets(manifest: Manifest, buffer: memoryview) -> dict[str, bytes]:
    first = manifest.whole.stop - len(manifest.assets)
    spans = [manifest.chunk_span(first + at) for at in range(len(manifest.assets))]
    return {
        asset.name: bytes(buffer[start:end])
        for asset, (start, end) in zip(manifest.assets, spans, strict=True)
    }


def _new_buffer(nbytes: int) -> memoryview:
    """Zeros, which the kernel provides when they are written to, and takes back with the last view."""
    if not nbytes:
        return memoryview(bytearray())
    return memoryview(mmap.mmap(-1, nbytes, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS))
