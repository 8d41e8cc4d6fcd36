"""Memory that one other process of this machine and user maps, without a name that could be left behind.

Guarantees: nothing is mapped but the very memory that was named. Not what has taken its number since, no memory of
another user or process, nothing of another size, no file of a disk; and once mapped, its size stays.
"""

from __future__ import annotations

import fcntl
import mmap
import os

import msgspec
import psutil

from echo2p2p.errors import EngineError, OutOfMemory

_SEALS = fcntl.F_SEAL_SEAL | fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW
"""The size of our memory is fixed when it is made: a mapping that shrinks kills whoever looks into it."""


class Segment(msgspec.Struct, frozen=True, array_like=True):
    """Which memory is meant.

    Attributes:
        owner: the process that holds it, and ``file``, the number under which it does.
        inode: tells it from what may have that number later; the kernel gives it to no other.
        nbytes: its size.
    """

    owner: int
    file: int
    inode: int
    nbytes: int


class SharedMemory:
    """``nbytes`` of memory, freed with this object, or with this process.

    Attributes:
        segment: what another process of the same user gives to :func:`map_segment` while this object lives.
        view: the bytes.

    Raises:
        OutOfMemory: there is no room.
    """

    def __init__(self, nbytes: int) -> None:
        # The kernel gives out more than there is and then kills somebody, so it is asked beforehand.
        if nbytes > psutil.virtual_memory().available:
            raise OutOfMemory(f"there is no room for {nbytes / 1e6:.0f} MB of shared memory")
        self._file = os.memfd_create("echo2p2p", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        os.ftruncate(self._file, nbytes)
        fcntl.fcntl(self._file, fcntl.F_ADD_SEALS, _SEALS)
        self.segment = Segment(os.getpid(), self._file, os.fstat(self._file).st_ino, nbytes)
        self.view = memoryview(mmap.mmap(self._file, nbytes) if nbytes else b"")

    def __del__(self) -> None:
        if hasattr(self, "_file"):
            os.close(self._file)


def map_segment(segment: Segment, *, owner: int) -> mmap.mmap | bytes:
    """The bytes of ``segment``, to be read and written; ``b""`` if it has none.

    Args:
        owner: the process whose memory it must be.

    Raises:
        EngineError: it is gone, or something else is there.
    """
    if segment.owner != owner:
        raise _refusal(segment, f"the engine's process is {owner}")
    if segment.nbytes == 0:
        return b""
    try:
        # A path alone first, which opens nothing: to open the wrong device or pipe would do something.
        found = os.open(f"/proc/{owner}/fd/{segment.file}", os.O_PATH | os.O_CLOEXEC)
    except OSError as error:
        raise _refusal(segment, "it is gone" if error.errno == 2 else str(error.strerror).lower()) from error
    try:
        what = os.fstat(found)
        if what.st_ino != segment.inode:
            raise _refusal(segment, "something else is there")
        if what.st_uid != os.geteuid():
            raise _refusal(segment, f"it belongs to user {what.st_uid}")
        if what.st_size != segment.nbytes:
            raise _refusal(segment, f"it has {what.st_size} bytes, not {segment.nbytes}")
        file = os.open(f"/proc/self/fd/{found}", os.O_RDWR | os.O_CLOEXEC)
    finally:
        os.close(found)
    try:
        if not _is_sealed(file):
            raise _refusal(segment, "its size is not fixed")
        return mmap.mmap(file, segment.nbytes)
    finally:
        os.close(file)


def _is_sealed(file: int) -> bool:
    """Whether the size is fixed. Only memory can have seals, so this is also what tells it from a file of a disk."""
    try:
        return fcntl.fcntl(file, fcntl.F_GET_SEALS) & _SEALS == _SEALS
    except OSError:
        return False


def _refusal(segment: Segment, why: str) -> EngineError:
    return EngineError(f"shared memory {segment.file} of process {segment.owner} is refused: {why}")
