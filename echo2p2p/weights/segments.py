"""Chunks in a few append-only files: one write a chunk, found again after a crash, reclaimed file by file.

A segment is a row of records, each its chunk's digest (32 bytes), length (8 bytes, big-endian) and bytes. A file a
chunk would cost several times the processor time, most of it in the file system.

Guarantees:

* A process killed at any moment leaves whole records and at most one torn one, at the end of the newest segment,
  which is passed over: every life begins a segment of its own. A power failure may tear what had not reached the
  disk: a torn header ends its segment, torn bytes are for the caller to find out, who knows the digest.
* Opening changes nothing on the disk, so that one process may read while another one writes.
* What is overwritten is never what is read: a record stays where it is until its whole segment goes.

Blocks, briefly. Safe to use from several threads.
"""

from __future__ import annotations

import contextlib
import errno
import os
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

_DIGEST_BYTES = 32
_LENGTH_BYTES = 8
_HEADER_BYTES = _DIGEST_BYTES + _LENGTH_BYTES
_SUFFIX = ".chunks"
MAX_SEGMENTS = 64
"""Each is an open file. Where versions change little, many would stay for the few chunks of each."""


@dataclass
class _Segment:
    path: Path
    fd: int
    nbytes: int = 0
    live: int = 0
    """Records that can still be found here."""
    live_bytes: int = 0


@dataclass(frozen=True)
class _Place:
    segment: _Segment
    offset: int
    nbytes: int


class Segments:
    """The chunks in ``folder``, by digest.

    Raises:
        OSError: the folder cannot be used; also from every method.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._lock = threading.RLock()
        self._places: dict[bytes, _Place] = {}
        self._segments: list[_Segment] = []
        folder.mkdir(parents=True, exist_ok=True)
        numbered = [path for path in folder.glob(f"*{_SUFFIX}") if path.stem.isdecimal()]
        for path in sorted(numbered, key=lambda path: int(path.stem)):
            self._open(path)
        self._next_number = int(self._segments[-1].path.stem) + 1 if self._segments else 0
        self._newest: _Segment | None = None

    @property
    def used_bytes(self) -> int:
        """What the segments take on the disk, dead records and headers included."""
        return sum(segment.nbytes for segment in self._segments)

    def __contains__(self, digest: bytes) -> bool:
        return digest in self._places

    def __iter__(self) -> Iterator[bytes]:
        return iter(list(self._places))

    def add(self, digest: bytes, data: bytes | bytearray | memoryview) -> None:
        """Append one record. If that fails, nothing of it stays."""
        with self._lock:
            if digest not in self._places:
                self._append(digest, data)

    def read(self, digest: bytes) -> bytes | None:
        """The bytes recorded for ``digest``, not verified; None if there is no whole record of it."""
        with self._lock:
            place = self._places.get(digest)
            if place is None:
                return None
            data = os.pread(place.segment.fd, place.nbytes, place.offset)
        return data if len(data) == place.nbytes else None

    def forget(self, digest: bytes) -> None:
        """No longer find ``digest``; its bytes go with its segment."""
        with self._lock:
            place = self._places.pop(digest, None)
            if place is not None:
                place.segment.live -= 1
                place.segment.live_bytes -= place.nbytes

    def begin(self) -> None:
        """What comes now goes into a new segment, so that it can stay without what came before."""
        self._newest = None

    def retain(self, needed: Callable[[bytes], bool]) -> None:
        """Forget every chunk that is not ``needed``, and give back segments that hold little else.

        A segment goes if at most half of it is needed; the needed part is appended to the newest first. So do the
        smallest, where there are more than ``MAX_SEGMENTS``.
        """
        with self._lock:
            for digest in [digest for digest in self._places if not needed(digest)]:
                self.forget(digest)
            for segment in [segment for segment in self._segments if not segment.live]:
                self._remove(segment)
            for segment in [
                segment for segment in self._segments if 2 * segment.live_bytes <= segment.nbytes
            ]:
                if segment is not self._newest:
                    self._move_out(segment)
            if len(self._segments) > MAX_SEGMENTS:
                by_size = sorted(self._segments, key=lambda segment: segment.live_bytes)
                for segment in by_size[: len(by_size) - MAX_SEGMENTS // 2]:
                    if segment is not self._newest:
                        self._move_out(segment)

    def close(self) -> None:
        with self._lock:
            for segment in self._segments:
                os.close(segment.fd)
            self._segments.clear()
            self._places.clear()

    def _append(self, digest: bytes, data: bytes | bytearray | memoryview) -> None:
        if self._newest is None:
            path = self._folder / f"{self._next_number}{_SUFFIX}"
            self._newest = _Segment(
                path, os.open(path, os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o644)
            )
            self._segments.append(self._newest)
            self._next_number += 1
        segment = self._newest
        start = at = segment.nbytes
        parts = [memoryview(digest + len(data).to_bytes(_LENGTH_BYTES, "big")), memoryview(data).cast("B")]
        end = start + sum(map(len, parts))
        try:
            while at < end:
                # Short writes come before a full disk is told.
                written = os.pwritev(segment.fd, parts, at)
                at += written
                parts = [parts[0][written:], parts[1][max(0, written - len(parts[0])) :]]
        except BaseException:
            with contextlib.suppress(OSError):
                os.ftruncate(segment.fd, start)
            raise
        segment.nbytes = end
        self._found(digest, _Place(segment, end - len(data), len(data)))

    def _move_out(self, segment: _Segment) -> None:
        """Append what is live in ``segment`` elsewhere and remove it; where there is no room, leave it for later."""
        try:
            for digest in [digest for digest, place in self._places.items() if place.segment is segment]:
                data = self.read(digest)
                if data is not None:
                    self._append(digest, data)
                else:
                    self.forget(digest)
        except OSError as error:
            if error.errno not in (errno.ENOSPC, errno.EDQUOT):
                raise
        else:
            self._remove(segment)

    def _remove(self, segment: _Segment) -> None:
        if segment is self._newest:
            self._newest = None
        self._segments.remove(segment)
        os.close(segment.fd)
        segment.path.unlink(missing_ok=True)

    def _open(self, path: Path) -> None:
        segment = _Segment(path, os.open(path, os.O_RDWR | os.O_CLOEXEC))
        self._segments.append(segment)
        segment.nbytes = os.fstat(segment.fd).st_size
        for digest, offset, nbytes in _records(segment.fd, segment.nbytes):
            self._found(digest, _Place(segment, offset, nbytes))

    def _found(self, digest: bytes, place: _Place) -> None:
        self.forget(digest)
        self._places[digest] = place
        place.segment.live += 1
        place.segment.live_bytes += place.nbytes


def _records(fd: int, size: int) -> Iterator[tuple[bytes, int, int]]:
    """Digest, offset and length of every whole record."""
    at = 0
    while at + _HEADER_BYTES <= size:
        header = os.pread(fd, _HEADER_BYTES, at)
        nbytes = int.from_bytes(header[_DIGEST_BYTES:], "big")
        at += _HEADER_BYTES
        if nbytes > size - at or not any(header):
            return
        yield header[:_DIGEST_BYTES], at, nbytes
        at += nbytes
