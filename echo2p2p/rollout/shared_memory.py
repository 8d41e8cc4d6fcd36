"""Memory that other processes of this machine and user can map, without a name that could be left behind."""

from __future__ import annotations

import mmap
import os

import psutil

from echo2p2p.errors import OutOfMemory


class SharedMemory:
    """``nbytes`` of memory, freed with this object, or with this process.

    Attributes:
        path: where another process of the same user opens it while this object lives.
        view: the bytes.

    Raises:
        OutOfMemory: there is no room.
    """

    def __init__(self, nbytes: int) -> None:
        # The kernel gives out more than there is and then kills somebody, so it is asked beforehand.
        if nbytes > psutil.virtual_memory().available:
            raise OutOfMemory(f"there is no room for {nbytes / 1e6:.0f} MB of shared memory")
        self.nbytes = nbytes
        self._file = os.memfd_create("echo2p2p")
        self.path = f"/proc/{os.getpid()}/fd/{self._file}"
        os.ftruncate(self._file, nbytes)
        self.view = memoryview(mmap.mmap(self._file, nbytes) if nbytes else b"")

    def __del__(self) -> None:
        if hasattr(self, "_file"):
            os.close(self._file)
