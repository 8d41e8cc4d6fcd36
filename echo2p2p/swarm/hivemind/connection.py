"""One connection to p2pd, as bytes: what arrives goes straight into the buffer of whoever waits for it.

asyncio's own reader copies every byte twice and wakes its caller for every packet; of a stream of weights that
would be a good part of all processor time.

Guarantees: at most ``AHEAD_BYTES`` are taken in before somebody asks for them; one task reads and one writes at a
time; a read that is cancelled has taken nothing, except :meth:`Connection.read_into`.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import cast

AHEAD_BYTES = 2**16


class Connection(asyncio.BufferedProtocol):
    """Both directions of one connection.

    Args:
        on_made: called when the connection stands, at the side that accepts it.
    """

    def __init__(self, on_made: Callable[[Connection], None] = lambda _: None) -> None:
        self._on_made = on_made
        self._ahead = memoryview(bytearray(AHEAD_BYTES))
        self._start = self._end = 0
        self._target: memoryview | None = None
        self._paused = False
        self._eof = False
        self._lost: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._error: Exception | None = None
        self._reader: asyncio.Future[None] | None = None
        self._may_write = asyncio.Event()
        self._may_write.set()
        self.transport: asyncio.Transport

    # What the loop calls

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast("asyncio.Transport", transport)  # uvloop's is none by its class
        self._on_made(self)

    def get_buffer(self, sizehint: int) -> memoryview:  # noqa: ARG002 - the loop's signature
        return self._ahead[self._end :] if self._target is None else self._target

    def buffer_updated(self, nbytes: int) -> None:
        if self._target is not None:
            self._target = self._target[nbytes:]
            if not self._target:
                self._target = None
                self._wake_reader()
            return
        self._end += nbytes
        if self._end == len(self._ahead):
            self._pause()
        self._wake_reader()

    def eof_received(self) -> bool:
        self._eof = True
        self._wake_reader()
        return True  # what we still have to send can go

    def connection_lost(self, exc: Exception | None) -> None:
        self._eof = True
        self._error = exc
        if not self._lost.done():
            self._lost.set_result(None)
        self._may_write.set()
        self._wake_reader()

    def pause_writing(self) -> None:
        self._may_write.clear()

    def resume_writing(self) -> None:
        self._may_write.set()

    # What the owner calls

    async def read(self, max_bytes: int) -> bytes:
        """Between 1 and ``max_bytes`` bytes as soon as any are there; ``b""`` at the end. Raises OSError."""
        while self._start == self._end:
            if not await self._more():
                return b""
        return self._take(min(max_bytes, self._end - self._start))

    async def readexactly(self, n: int) -> bytes:
        """Exactly ``n`` bytes. The name is that of asyncio's readers, so that hivemind can read from this.

        Raises:
            asyncio.IncompleteReadError: the other end ended before.
            OSError: the connection broke.
        """
        if n > len(self._ahead):
            data = bytearray(n)
            await self.read_into(memoryview(data))
            return bytes(data)
        while self._end - self._start < n:
            if not await self._more():
                raise asyncio.IncompleteReadError(self._take(self._end - self._start), n)
        return self._take(n)

    async def read_into(self, target: memoryview) -> None:
        """Fill ``target``, as bytes come. Cancelled half-way, it leaves a connection that is good for closing only.

        Raises:
            asyncio.IncompleteReadError, OSError: as :meth:`readexactly`.
        """
        n = min(len(target), self._end - self._start)
        target[:n] = self._ahead[self._start : self._start + n]
        self._skip(n)
        if n == len(target):
            return
        self._target = target[n:]
        try:
            while self._target is not None:
                if not await self._more():
                    got = len(target) - len(self._target)
                    raise asyncio.IncompleteReadError(bytes(target[:got]), len(target))
        finally:
            self._target = None

    def write(self, *parts: bytes | memoryview) -> None:
        """Send ``parts``, one after another; they must not change afterwards."""
        if len(parts) == 1:
            self.transport.write(parts[0])
        else:
            self.transport.writelines(parts)

    @property
    def must_drain(self) -> bool:
        """Whether more is written than the buffer's high mark, so that a writer should wait."""
        return not self._may_write.is_set()

    async def drain(self) -> None:
        """Return once what was written is on its way, but for a buffer's worth. Raises OSError."""
        await self._may_write.wait()
        if self._lost.done():
            raise self._error or ConnectionResetError("the connection is lost")

    async def wait_closed(self) -> None:
        await asyncio.shield(self._lost)

    def _take(self, n: int) -> bytes:
        data = bytes(self._ahead[self._start : self._start + n])
        self._skip(n)
        return data

    def _skip(self, n: int) -> None:
        self._start += n
        if self._start == self._end:
            self._start = self._end = 0

    async def _more(self) -> bool:
        """Wait until something came; False if nothing will."""
        if self._eof:
            if self._error is not None:
                raise self._error
            return False
        if self._start and self._target is None:
            rest = self._end - self._start
            self._ahead[:rest] = bytes(self._ahead[self._start : self._end])
            self._start, self._end = 0, rest
        if self._paused:
            self._paused = False
            self.transport.resume_reading()
        if self._reader is not None:
            raise RuntimeError("two tasks read from one connection")
        self._reader = asyncio.get_running_loop().create_future()
        try:
            await self._reader
        finally:
            self._reader = None
        return True

    def _pause(self) -> None:
        if not self._paused and not self.transport.is_closing():
            self._paused = True
            self.transport.pause_reading()

    def _wake_reader(self) -> None:
        if self._reader is not None and not self._reader.done():
            self._reader.set_result(None)


async def connect(path: Path) -> Connection:
    """Connect to a Unix socket. Raises OSError."""
    _, connection = await asyncio.get_running_loop().create_unix_connection(Connection, str(path))
    return connection
