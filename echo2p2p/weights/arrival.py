"""Brings one version into its buffer: by patches where a base is here and that costs less, whole otherwise.

Guarantees:

* Both ways end on the same bytes, which have the fingerprint that the learner signed.
* Patches that fail, for whatever reason, cost their own bytes and time; then the whole is fetched.
* Chunks of a patched snapshot are passed on as if they had come over the network: verified, each by its digest.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection
from functools import partial

from echo2p2p.errors import FingerprintMismatch, SwarmError, VerificationError
from echo2p2p.swarm.identity import PeerId
from echo2p2p.swarm.network import Network
from echo2p2p.weights.fetch import Fetch
from echo2p2p.weights.holding import Holding
from echo2p2p.weights.lane import FetchLimits
from echo2p2p.weights.manifest import Manifest
from echo2p2p.weights.patch import apply_chain_in_place
from echo2p2p.weights.path import Way
from echo2p2p.weights.rate import TokenBucket
from echo2p2p.weights.rebuild import read_snapshot
from echo2p2p.weights.snapshot import Snapshot, fingerprint_hasher
from echo2p2p.weights.standing import Standing
from echo2p2p.weights.store import ChunkStore
from echo2p2p.weights.supersede import Arriving
from echo2p2p.weights.timeline import Timeline

log = logging.getLogger("echo2p2p.weights")

_BATCH = 32
"""Chunks of a patched snapshot that are stored in one go off the loop."""


class Arrival:
    """One version on its way into ``buffer``, which is the buffer of ``holding`` too.

    Args:
        version: the digest of its signed manifest.
        buffer: long enough for all that ``way`` wants, and for the whole.
        way: from a base, if it has one, that is read from the store unless ``held`` is its snapshot.
        cap: on what is asked for.
        others: peers that are not members and may have the version.

    Attributes:
        patches: how many the version was made with; 0 if it came whole.
        bytes_from_learner, bytes_from_peers: chunk bytes that came over the network, on both ways together.
    """

    def __init__(
        self,
        network: Network,
        store: ChunkStore,
        learner: PeerId,
        version: str,
        holding: Holding,
        buffer: memoryview,
        way: Way,
        held: Snapshot | None,
        standing: Standing,
        limits: FetchLimits,
        cap: TokenBucket,
        timeline: Timeline,
        others: Collection[PeerId] = (),
    ) -> None:
        self._clock = network.clock
        self._store = store
        self._holding = holding
        self._manifest = holding.manifest
        self._view = buffer
        self._way = way
        self._held = held
        self._new_fetch = partial(
            Fetch,
            network,
            store,
            learner,
            version,
            holding,
            buffer,
            standing=standing,
            limits=limits,
            cap=cap,
            timeline=timeline,
            others=others,
        )
        self._fetching: Fetch | None = None
        self._by_patches = way.base is not None
        self.patches = 0
        self.bytes_from_learner = 0
        self.bytes_from_peers = 0

    async def run(self) -> Snapshot:
        """The snapshot. Every chunk of the whole is in the buffer and in the store afterwards.

        Raises:
            FingerprintMismatch: the learner signed for a snapshot that its chunks do not make.
            PeerUnreachable, DeadlineExceeded, OutOfDisk, ResourceError: as :meth:`Fetch.run`.
        """
        base = self._way.base
        if base is not None:
            # Others may wait here for the whole as well: it follows from the patches, or is fetched if they fail.
            # They can wait without a circle, for nobody waits for a chunk of a patch at someone who wants the whole.
            self._holding.expect(range(self._way.wanted.stop))
            try:
                snapshot = await self._patched(base)
            except (SwarmError, VerificationError) as error:
                log.warning(
                    "version %d is fetched whole, for its patches on version %d failed: %s",
                    self._manifest.version,
                    base.version,
                    error,
                )
            else:
                self.patches = self._way.patches
                return snapshot
        self._by_patches = False
        self._holding.expect(self._manifest.whole)
        hashed = _Hashed(self._holding, self._view)
        await self._fetch(self._manifest.whole, stored=hashed.advance)
        snapshot = Snapshot(self._manifest.layout, self._view[: self._manifest.nbytes])
        fingerprint = await self._clock.offload(hashed.fingerprint)
        if fingerprint != self._manifest.fingerprint:
            raise FingerprintMismatch(
                f"version {self._manifest.version} has fingerprint {fingerprint}, its manifest says "
                f"{self._manifest.fingerprint}"
            )
        return snapshot

    @property
    def progress(self) -> Arriving:
        """What has come and what has not."""
        manifest = self._manifest
        fetch = self._fetching
        return Arriving(
            self._way.missing_bytes if fetch is None else fetch.missing_bytes,
            manifest.whole_bytes,
            manifest.patches[0].nbytes if manifest.patches else None,
            by_patches=self._by_patches,
        )

    async def _fetch(self, wanted: range, stored: Callable[[], None] = lambda: None) -> None:
        fetch = self._fetching = self._new_fetch(wanted=wanted, stored=stored)
        try:
            await fetch.run()
        finally:
            self.bytes_from_learner += fetch.bytes_from_learner
            self.bytes_from_peers += fetch.bytes_from_peers

    async def _patched(self, base: Manifest) -> Snapshot:
        """Raises ChunkError too, if the fingerprint is right but the signed chunks are of something else."""
        await self._fetch(self._way.wanted)
        snapshot = await self._clock.offload(partial(self._apply, base))
        n_chunks = self._manifest.snapshot_chunks.stop
        for start in range(0, n_chunks, _BATCH):
            batch = range(start, min(start + _BATCH, n_chunks))
            await self._clock.offload(partial(self._store_chunks, batch))
            for index in batch:
                self._holding.add(index)
        return snapshot

    def _apply(self, base: Manifest) -> Snapshot:
        """In the buffer of the version, whose part for the snapshot nobody reads before its chunks are added."""
        manifest = self._manifest
        target = self._view[: manifest.nbytes]
        if self._held is not None:
            target[:] = self._held.data
        else:
            read_snapshot(base, self._store, target)
        spans = [manifest.patch_span(at) for at in reversed(range(self._way.patches))]
        return apply_chain_in_place(
            target,
            [self._view[start:end] for start, end in spans],
            layout=manifest.layout,
            # What comes from the store may be from an earlier life that did not live to verify the whole of it.
            base_fingerprint=None if self._held is None else base.fingerprint,
            fingerprint=manifest.fingerprint,
        )

    def _store_chunks(self, indices: range) -> None:
        for index in indices:
            start, end = self._manifest.chunk_span(index)
            self._store.put(self._manifest.chunk_digest(index), self._view[start:end])


class _Hashed:
    """The fingerprint of a snapshot that arrives, as far as it has arrived from its beginning on."""

    def __init__(self, holding: Holding, view: memoryview) -> None:
        self._holding = holding
        self._view = view
        self._hasher = fingerprint_hasher(holding.manifest.layout)
        self._next_chunk = 0
        self._nbytes = 0

    def advance(self) -> None:
        """Hash on up to the first chunk that is not here. Blocks."""
        n_chunks = self._holding.manifest.snapshot_chunks.stop
        end = self._nbytes
        while self._next_chunk < n_chunks and self._holding.holds(self._next_chunk):
            _, end = self._holding.manifest.chunk_span(self._next_chunk)
            self._next_chunk += 1
        if end > self._nbytes:
            self._hasher.update(self._view[self._nbytes : end])
            self._nbytes = end

    def fingerprint(self) -> str:
        """Of the whole, once it is here. Blocks."""
        self.advance()
        return self._hasher.hexdigest()
