"""Chunks by their digest: verified before they are kept, found again after a crash, bounded in bytes.

Guarantees of both stores:

* Nothing is stored under a digest that is not its own, and nothing comes out that does not hash to it.
* A process killed at any moment leaves whole files, or none: each is written under a temporary name and
  renamed. Pins and the verifier's memory are flushed to the disk before that. Chunks are not: two flushes
  a chunk cost more than fetching again the few that a power failure may tear, which :meth:`get` finds out.
* A version's chunks go only when :meth:`prune` no longer keeps that version.

All methods block (briefly); roles call them through ``clock.offload``, from several threads if they like.
"""

from __future__ import annotations

import errno
import os
import threading
from collections.abc import Iterable
from pathlib import Path
from typing import Protocol

from blake3 import blake3

from echo2p2p.errors import ChunkError, OutOfDisk, ProtocolError, ResourceError
from echo2p2p.swarm.messages import decode, encode
from echo2p2p.weights.manifest import DIGEST_BYTES, NOTHING_SEEN, Trusted

Data = bytes | bytearray | memoryview


class ChunkStore(Protocol):
    """Where a peer keeps chunks and assets (by digest) and signed manifests (by version)."""

    def put(self, digest: bytes, data: Data) -> None:
        """Keep ``data``, which must hash to ``digest``.

        Raises:
            ChunkError: it does not.
            OutOfDisk: there is no room for it.
        """
        ...

    def get(self, digest: bytes) -> bytes | None:
        """What hashes to ``digest``, or None if it is not here (or is here no longer intact)."""
        ...

    def has(self, digest: bytes) -> bool: ...

    def pin(self, version: int, manifest: bytes, digests: Iterable[bytes]) -> None:
        """Keep a signed manifest, and note which chunks its version needs. Raises OutOfDisk."""
        ...

    def manifests(self) -> dict[int, bytes]:
        """The signed manifests of all pinned versions, complete or not, oldest first."""
        ...

    def prune(self, keep_versions: int) -> None:
        """Forget all but the newest ``keep_versions`` (≥ 1) versions, and chunks that none of them needs."""
        ...

    def trusted(self) -> Trusted:
        """The verifier's memory as last remembered."""
        ...

    def remember(self, trusted: Trusted) -> None:
        """Keep the verifier's memory; it is on the disk when this returns. Raises OutOfDisk."""
        ...


class MemoryStore:
    """A store that lives and dies with its process; for simulations and tests."""

    def __init__(self) -> None:
        self._chunks: dict[bytes, bytes] = {}
        self._pins: dict[int, tuple[bytes, frozenset[bytes]]] = {}
        self._trusted = NOTHING_SEEN

    def put(self, digest: bytes, data: Data) -> None:
        _check(digest, data)
        self._chunks[digest] = bytes(data)

    def get(self, digest: bytes) -> bytes | None:
        return self._chunks.get(digest)

    def has(self, digest: bytes) -> bool:
        return digest in self._chunks

    def pin(self, version: int, manifest: bytes, digests: Iterable[bytes]) -> None:
        self._pins[version] = (manifest, frozenset(digests))

    def manifests(self) -> dict[int, bytes]:
        return {version: self._pins[version][0] for version in sorted(self._pins)}

    def prune(self, keep_versions: int) -> None:
        for version in sorted(self._pins)[:-keep_versions]:
            del self._pins[version]
        needed: set[bytes] = set().union(*(digests for _, digests in self._pins.values()))
        self._chunks = {digest: data for digest, data in self._chunks.items() if digest in needed}

    def trusted(self) -> Trusted:
        return self._trusted

    def remember(self, trusted: Trusted) -> None:
        self._trusted = trusted


class DiskStore:
    """A store in a folder of its own: ``chunks/ab/<digest>``, ``pins/<version>.{manifest,digests}``.

    Args:
        root: made if missing; no other process may use it at the same time.
        max_bytes: chunks and assets together never take more than this.

    Raises:
        ResourceError: the folder cannot be used.
    """

    def __init__(self, root: Path, max_bytes: int = 2**40) -> None:
        self._chunks_dir = root / "chunks"
        self._pins_dir = root / "pins"
        self._tmp_dir = root / "tmp"
        self._trusted_path = root / "trusted"
        self._max_bytes = max_bytes
        self._lock = threading.Lock()
        self._temporary = 0
        try:
            for folder in (self._chunks_dir, self._pins_dir, self._tmp_dir):
                folder.mkdir(parents=True, exist_ok=True)
            for leftover in self._tmp_dir.iterdir():
                leftover.unlink()
            self._sizes = {
                bytes.fromhex(path.name): path.stat().st_size
                for path in self._chunks_dir.glob("??/" + "?" * 64)
            }
        except (OSError, ValueError) as error:
            raise ResourceError(f"the chunk store {root} cannot be used: {error}") from error
        self._used = sum(self._sizes.values())

    def put(self, digest: bytes, data: Data) -> None:
        _check(digest, data)
        with self._lock:
            if digest in self._sizes:
                return
            if self._used + len(data) > self._max_bytes:
                raise OutOfDisk(
                    f"the chunk store is full: {self._used} of {self._max_bytes} bytes are in use",
                    hint="allow it more bytes, or keep fewer versions",
                )
            # Reserved before it is written, so that two threads cannot both take the last bytes.
            self._sizes[digest] = len(data)
            self._used += len(data)
        try:
            self._write(self._path(digest), data, flush=False)
        except BaseException:
            self._forget(digest)
            raise

    def get(self, digest: bytes) -> bytes | None:
        if not self.has(digest):
            return None
        path = self._path(digest)
        try:
            data = path.read_bytes()
        except FileNotFoundError:
            # Reserved by a put that is still writing, or lost.
            return None
        except OSError as error:
            raise ResourceError(f"chunk {path} cannot be read: {error.strerror}") from error
        if blake3(data).digest() != digest:
            path.unlink(missing_ok=True)
            self._forget(digest)
            return None
        return data

    def has(self, digest: bytes) -> bool:
        return digest in self._sizes

    def pin(self, version: int, manifest: bytes, digests: Iterable[bytes]) -> None:
        # The manifest comes last: a pin counts from the moment that it is there.
        self._write(self._pins_dir / f"{version}.digests", b"".join(sorted(digests)))
        self._write(self._pins_dir / f"{version}.manifest", manifest)

    def manifests(self) -> dict[int, bytes]:
        return {
            version: (self._pins_dir / f"{version}.manifest").read_bytes()
            for version in self._pinned_versions()
        }

    def prune(self, keep_versions: int) -> None:
        versions = self._pinned_versions()
        for version in versions[:-keep_versions]:
            (self._pins_dir / f"{version}.manifest").unlink(missing_ok=True)
            (self._pins_dir / f"{version}.digests").unlink(missing_ok=True)
        needed: set[bytes] = set()
        for version in versions[-keep_versions:]:
            listed = (self._pins_dir / f"{version}.digests").read_bytes()
            needed.update(listed[at : at + DIGEST_BYTES] for at in range(0, len(listed), DIGEST_BYTES))
        for digest in [digest for digest in list(self._sizes) if digest not in needed]:
            self._path(digest).unlink(missing_ok=True)
            self._forget(digest)

    def trusted(self) -> Trusted:
        try:
            trusted: Trusted = decode(self._trusted_path.read_bytes(), Trusted)
        except FileNotFoundError:
            return NOTHING_SEEN
        except (OSError, ProtocolError) as error:
            raise ResourceError(
                f"{self._trusted_path} cannot be read: {error}",
                hint="it guards against old versions; delete it only if the run is a new one",
            ) from error
        return trusted

    def remember(self, trusted: Trusted) -> None:
        self._write(self._trusted_path, encode(trusted))

    def _pinned_versions(self) -> list[int]:
        return sorted(int(path.stem) for path in self._pins_dir.glob("*.manifest") if path.stem.isdecimal())

    def _path(self, digest: bytes) -> Path:
        name = digest.hex()
        return self._chunks_dir / name[:2] / name

    def _forget(self, digest: bytes) -> None:
        with self._lock:
            self._used -= self._sizes.pop(digest, 0)

    def _write(self, path: Path, data: Data, *, flush: bool = True) -> None:
        """Bring ``data`` to ``path`` whole or not at all; with ``flush``, it is on the disk then."""
        with self._lock:
            self._temporary += 1
            temporary = self._tmp_dir / str(self._temporary)
        try:
            with temporary.open("wb") as file:
                file.write(data)
                if flush:
                    file.flush()
                    os.fsync(file.fileno())
            path.parent.mkdir(exist_ok=True)
            temporary.replace(path)
            if flush:
                _flush_folder(path.parent)
        except OSError as error:
            temporary.unlink(missing_ok=True)
            if error.errno in (errno.ENOSPC, errno.EDQUOT):
                raise OutOfDisk(
                    f"no space left for {path}", hint="free some, or keep fewer versions"
                ) from error
            raise ResourceError(f"{path} cannot be written: {error.strerror}") from error


def _flush_folder(path: Path) -> None:
    folder = os.open(path, os.O_RDONLY)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)


def _check(digest: bytes, data: Data) -> None:
    if len(digest) != DIGEST_BYTES or blake3(data).digest() != digest:
        raise ChunkError(f"{len(data)} bytes do not hash to {digest.hex()[:64]}")
