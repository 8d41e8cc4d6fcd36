"""A version's snapshot, put together again from the chunk store."""

from __future__ import annotations

from echo2p2p.errors import ChunkError, FingerprintMismatch
from echo2p2p.weights.manifest import Manifest
from echo2p2p.weights.snapshot import Snapshot
from echo2p2p.weights.store import ChunkStore


def is_whole(manifest: Manifest, store: ChunkStore) -> bool:
    """Whether the store has all of the version, its patches aside."""
    return all(store.has(manifest.chunk_digest(index)) for index in manifest.whole)


def read_snapshot(manifest: Manifest, store: ChunkStore, target: memoryview) -> None:
    """Copy the snapshot into ``target`` (``manifest.nbytes``), which is verified by its chunks only. Blocks.

    Raises:
        ChunkError: the store has lost a part of it.
        ResourceError: the store cannot be read.
    """
    for index in manifest.snapshot_chunks:
        start, end = manifest.chunk_span(index)
        data = store.get(manifest.chunk_digest(index))
        if data is None or len(data) != end - start:
            raise ChunkError(
                f"chunk {index} of version {manifest.version} is not in the store",
                hint="a node that holds the whole version has it",
            )
        target[start:end] = data


def rebuild(manifest: Manifest, store: ChunkStore) -> Snapshot:
    """The snapshot, verified, in a buffer of its own. Blocks: it reads and hashes every byte.

    Raises:
        ChunkError, ResourceError: as :func:`read_snapshot`.
        FingerprintMismatch: the learner signed for a snapshot that its chunks do not make.
    """
    buffer = bytearray(manifest.nbytes)
    read_snapshot(manifest, store, memoryview(buffer))
    snapshot = Snapshot(manifest.layout, buffer)
    if snapshot.fingerprint() != manifest.fingerprint:
        raise FingerprintMismatch(f"version {manifest.version} does not have the fingerprint that was signed")
    return snapshot
