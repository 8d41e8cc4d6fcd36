"""Brings one version into its buffer: by its patch where the base is here and that costs less, whole otherwise.

Guarantees:

* Both ways end on the same bytes, which have the fingerprint that the learner signed.
* A patch that fails, for whatever reason, costs its own bytes and time; then the whole is fetched.
* Chunks of a patched snapshot are passed on as if they had come over the network: verified, each by its digest.
"""

from __future__ import annotations

import logging
from functools import partial

from echo2p2p.errors import FingerprintMismatch, SwarmError, VerificationError
from echo2p2p.swarm.identity import PeerId
from echo2p2p.swarm.network import Network
from echo2p2p.weights.fetch import Fetch
from echo2p2p.weights.holding import Holding
from echo2p2p.weights.lane import FetchLimits
from echo2p2p.weights.manifest import Manifest
from echo2p2p.weights.patch import apply_in_place
from echo2p2p.weights.snapshot import Snapshot
from echo2p2p.weights.standing import Standing
from echo2p2p.weights.store import ChunkStore
from echo2p2p.weights.timeline import Timeline

log = logging.getLogger("echo2p2p.weights")

_BATCH = 32
"""Chunks of a patched snapshot that are stored in one go off the loop."""


def usable_base(manifest: Manifest, held: Snapshot, held_as: Manifest, store: ChunkStore) -> Snapshot | None:
    """``held`` if the patch of ``manifest`` starts from exactly that and misses fewer bytes than the whole.

    Blocks briefly. ``held_as`` is the manifest of ``held``.
    """
    patch = manifest.patch
    if patch is None or (patch.base_version, patch.base_fingerprint, manifest.layout) != (
        held_as.version,
        held_as.fingerprint,
        held_as.layout,
    ):
        return None

    def missing_bytes(indices: range) -> int:
        spans = (manifest.chunk_span(at) for at in indices if not store.has(manifest.chunk_digest(at)))
        return sum(end - start for start, end in spans)

    return held if missing_bytes(manifest.by_patch) < missing_bytes(manifest.whole) else None


class Arrival:
    """One version on its way into ``buffer``, which is the buffer of ``holding`` too.

    Args:
        version: the digest of its signed manifest.
        base: what the patch starts from; None to fetch the whole.

    Attributes:
        bytes_from_learner, bytes_from_peers: chunk bytes that came over the network, on both ways together.
    """

    def __init__(
        self,
        network: Network,
        store: ChunkStore,
        learner: PeerId,
        version: str,
        holding: Holding,
        buffer: bytearray,
        base: Snapshot | None,
        standing: Standing,
        limits: FetchLimits,
        timeline: Timeline,
    ) -> None:
        self._clock = network.clock
        self._store = store
        self._holding = holding
        self._manifest = holding.manifest
        self._view = memoryview(buffer)
        self._base = base
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
            timeline=timeline,
        )
        self.bytes_from_learner = 0
        self.bytes_from_peers = 0

    async def run(self) -> Snapshot:
        """The snapshot. Every chunk of the whole is in the buffer and in the store afterwards.

        Raises:
            FingerprintMismatch: the learner signed for a snapshot that its chunks do not make.
            PeerUnreachable, DeadlineExceeded, OutOfDisk, ResourceError: as :meth:`Fetch.run`.
        """
        if self._base is not None:
            # Others may wait here for the whole as well: it follows from the patch, or is fetched if that fails.
            # They can wait without a circle, for nobody gets a chunk of a patch from someone who wants the whole.
            self._holding.expect(range(self._manifest.n_chunks))
            try:
                return await self._patched(self._base)
            except (SwarmError, VerificationError) as error:
                log.warning(
                    "version %d is fetched whole, for its patch failed: %s", self._manifest.version, error
                )
        self._holding.expect(self._manifest.whole)
        await self._fetch(self._manifest.whole)
        snapshot = Snapshot(self._manifest.layout, self._view[: self._manifest.nbytes])
        fingerprint = await self._clock.offload(snapshot.fingerprint)
        if fingerprint != self._manifest.fingerprint:
            raise FingerprintMismatch(
                f"version {self._manifest.version} has fingerprint {fingerprint}, its manifest says "
                f"{self._manifest.fingerprint}"
            )
        return snapshot

    async def _fetch(self, wanted: range) -> None:
        fetch = self._new_fetch(wanted=wanted)
        try:
            await fetch.run()
        finally:
            self.bytes_from_learner += fetch.bytes_from_learner
            self.bytes_from_peers += fetch.bytes_from_peers

    async def _patched(self, base: Snapshot) -> Snapshot:
        """Raises ChunkError too, if the fingerprint is right but the signed chunks are of something else."""
        await self._fetch(self._manifest.by_patch)
        snapshot = await self._clock.offload(partial(self._apply, base))
        n_chunks = self._manifest.by_patch.start
        for start in range(0, n_chunks, _BATCH):
            batch = range(start, min(start + _BATCH, n_chunks))
            await self._clock.offload(partial(self._store_chunks, batch))
            for index in batch:
                self._holding.add(index)
        return snapshot

    def _apply(self, base: Snapshot) -> Snapshot:
        """In the buffer of the version, whose part for the snapshot nobody reads before its chunks are added."""
        manifest = self._manifest
        target = self._view[: manifest.nbytes]
        target[:] = base.data
        return apply_in_place(
            target,
            self._view[manifest.chunk_span(manifest.whole.stop)[0] :],
            layout=manifest.layout,
            base_fingerprint=manifest.patch.base_fingerprint if manifest.patch else None,
            fingerprint=manifest.fingerprint,
        )

    def _store_chunks(self, indices: range) -> None:
        for index in indices:
            start, end = self._manifest.chunk_span(index)
            self._store.put(self._manifest.chunk_digest(index), self._view[start:end])
