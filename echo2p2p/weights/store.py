"""Chunks by their digest: verified before they are kept, found again after a crash, bounded in bytes.

Guarantees of both stores:

* Nothing is stored under a digest that is not its own (by the caller's word: :meth:`ChunkStore.put_verified`), and
  nothing comes out of files that does not hash to it.
* A process killed at any moment leaves whole chunks and pins, or none. Pins and the verifier's memory are written
  under a temporary name, flushed to the disk and renamed. Chunks are not flushed: that would cost more than fetching
  again the few that a power failure may tear, which :meth:`get` finds out.
* A version's chunks go only when :meth:`prune` no longer keeps that version.

All methods block (briefly); roles call them through ``clock.offload``, from several threads if they like.
"""

from __future__ import annotations

import errno
import os
import shutil
import threading
from collections.abc import Collection, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Protocol

import msgspec
from blake3 import blake3

from echo2p2p.errors import ChunkError, OutOfDisk, ProtocolError, ResourceError, StoreFull
from echo2p2p.swarm.messages import decode, encode
from echo2p2p.weights.manifest import DIGEST_BYTES, NOTHING_SEEN, Trusted
from echo2p2p.weights.segments import Segments

Data = bytes | bytearray | memoryview

_UNBOUNDED = 2**63


class ChunkStore(Protocol):
    """Where a peer keeps chunks and assets (by digest) and signed manifests (by version)."""

    def put(self, digest: bytes, data: Data) -> None:
        """Keep ``data``, which must hash to ``digest``.

        Raises:
            ChunkError: it does not.
            OutOfDisk: there is no room for it.
        """
        ...

    def put_verified(self, digest: bytes, data: Data) -> None:
        """Keep ``data`` as :meth:`put` does, for a caller who has just seen it hash to ``digest``.

        Raises:
            OutOfDisk: there is no room for it.
        """
        ...

    def get(self, digest: bytes) -> bytes | None:
        """What hashes to ``digest``, or None if it is not here (or is here no longer intact)."""
        ...

    def has(self, digest: bytes) -> bool: ...

    def room(self) -> int:
        """How many bytes of chunks can still be put, as far as can be told."""
        ...

    def pin(self, version: int, manifest: bytes, digests: Iterable[bytes]) -> None:
        """Keep a signed manifest, and note which chunks its version needs. Raises OutOfDisk."""
        ...

    def manifests(self) -> dict[int, bytes]:
        """The signed manifests of all pinned versions, complete or not, oldest first."""
        ...

    def prune(self, keep: Collection[int]) -> None:
        """Forget all versions but those of ``keep``, and chunks that none of them needs."""
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
        self.put_verified(digest, data)

    def put_verified(self, digest: bytes, data: Data) -> None:
        self._chunks[digest] = bytes(data)

    def get(self, digest: bytes) -> bytes | None:
        return self._chunks.get(digest)

    def has(self, digest: bytes) -> bool:
        return digest in self._chunks

    def room(self) -> int:
        return _UNBOUNDED

    def pin(self, version: int, manifest: bytes, digests: Iterable[bytes]) -> None:
        self._pins[version] = (manifest, frozenset(digests))

    def manifests(self) -> dict[int, bytes]:
        return {version: self._pins[version][0] for version in sorted(self._pins)}

    def prune(self, keep: Collection[int]) -> None:
        self._pins = {version: pin for version, pin in self._pins.items() if version in keep}
        needed: set[bytes] = set().union(*(digests for _, digests in self._pins.values()))
        self._chunks = {digest: data for digest, data in self._chunks.items() if digest in needed}

    def trusted(self) -> Trusted:
        return self._trusted

    def remember(self, trusted: Trusted) -> None:
        self._trusted = trusted


class _Pin(msgspec.Struct, frozen=True, array_like=True):
    """One file for both, so that a manifest never stands with the digests of another."""

    manifest: bytes
    digests: bytes


class DiskStore:
    """A store in a folder of its own: ``chunks/<n>.chunks``, ``pins/<version>``, ``trusted``.

    Args:
        root: made if missing; no other process may use it at the same time.
        max_bytes: chunks and assets together never take more than this.

    Raises:
        ResourceError: the folder cannot be used.
    """

    def __init__(self, root: Path, max_bytes: int = 2**40) -> None:
        self._pins_dir = root / "pins"
        self._tmp_dir = root / "tmp"
        self._trusted_path = root / "trusted"
        self._max_bytes = max_bytes
        self._lock = threading.Lock()
        self._temporary = 0
        try:
            for folder in (self._pins_dir, self._tmp_dir):
                folder.mkdir(parents=True, exist_ok=True)
            self._chunks = Segments(root / "chunks")
        except OSError as error:
            raise ResourceError(f"the chunk store {root} cannot be used: {error}") from error

    def put(self, digest: bytes, data: Data) -> None:
        _check(digest, data)
        self.put_verified(digest, data)

    def put_verified(self, digest: bytes, data: Data) -> None:
        with self._lock:
            if digest in self._chunks:
                return
            used = self._chunks.used_bytes
            if used + len(data) > self._max_bytes:
                raise StoreFull(
                    f"the chunk store is full: {used} of {self._max_bytes} bytes are in use",
                    hint="raise weights.max_store_gib, or keep fewer versions",
                )
            with _worded(f"chunk {digest.hex()}"):
                self._chunks.add(digest, data)

    def get(self, digest: bytes) -> bytes | None:
        try:
            data = self._chunks.read(digest)
        except OSError as error:
            raise ResourceError(f"chunk {digest.hex()} cannot be read: {error.strerror}") from error
        if data is None or blake3(data).digest() != digest:
            self._chunks.forget(digest)
            return None
        return data

    def has(self, digest: bytes) -> bool:
        return digest in self._chunks

    def room(self) -> int:
        try:
            free = shutil.disk_usage(self._pins_dir).free
        except OSError:
            free = _UNBOUNDED  # to be found out by putting
        return min(free, self._max_bytes - self._chunks.used_bytes)

    def pin(self, version: int, manifest: bytes, digests: Iterable[bytes]) -> None:
        self._write(self._pins_dir / str(version), encode(_Pin(manifest, b"".join(sorted(digests)))))

    def manifests(self) -> dict[int, bytes]:
        return {version: pin.manifest for version, pin in self._pins().items()}

    def prune(self, keep: Collection[int]) -> None:
        pins = self._pins()
        for version in pins.keys() - set(keep):
            (self._pins_dir / str(version)).unlink(missing_ok=True)
            del pins[version]
        needed: set[bytes] = set()
        for pin in pins.values():
            listed = pin.digests
            needed.update(listed[at : at + DIGEST_BYTES] for at in range(0, len(listed), DIGEST_BYTES))
        with self._lock, _worded("the chunks of the versions that are kept"):
            self._chunks.retain(needed.__contains__)
            # The next version's chunks can then go without those of this one.
            self._chunks.begin()

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

    def _pins(self) -> dict[int, _Pin]:
        """All pins, oldest version first; one that is damaged counts for nothing, and goes."""
        pins: dict[int, _Pin] = {}
        for path in self._pins_dir.iterdir():
            try:
                pins[int(path.name)] = decode(path.read_bytes(), _Pin)
            except FileNotFoundError:
                continue  # pruned meanwhile
            except (ValueError, ProtocolError):
                path.unlink(missing_ok=True)
            except OSError as error:
                raise ResourceError(f"{path} cannot be read: {error.strerror}") from error
        return dict(sorted(pins.items()))

    def _write(self, path: Path, data: Data) -> None:
        """Bring ``data`` to ``path`` whole or not at all; it is on the disk when this returns."""
        with self._lock:
            if not self._temporary:
                # Not on opening, which may be for reading what another process writes.
                for leftover in self._tmp_dir.iterdir():
                    leftover.unlink()
            self._temporary += 1
            temporary = self._tmp_dir / str(self._temporary)
        try:
            with _worded(str(path)):
                with temporary.open("wb") as file:
                    file.write(data)
                    file.flush()
                    os.fsync(file.fileno())
                temporary.replace(path)
                _flush_folder(path.parent)
        except ResourceError:
            temporary.unlink(missing_ok=True)
            raise


@contextmanager
def _worded(what: str) -> Iterator[None]:
    """Turns errors of the file system into ours. ``what`` was to be written."""
    try:
        yield
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise OutOfDisk(f"no space left for {what}", hint="free some, or keep fewer versions") from error
        raise ResourceError(f"{what} cannot be written: {error.strerror}") from error


def _flush_folder(path: Path) -> None:
    folder = os.open(path, os.O_RDONLY)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)


def _check(digest: bytes, data: Data) -> None:
    if len(digest) != DIGEST_BYTES or blake3(data).digest() != digest:
        raise ChunkError(f"{len(data)} bytes do not hash to {digest.hex()[:64]}")
