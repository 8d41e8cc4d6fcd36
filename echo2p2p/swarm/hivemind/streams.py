"""Streams over the local sockets that p2pd hands out, and the supervision of those that peers open to us.

Guarantees: what a handler wrote before it returned reaches a peer that reads on; a handler's failure ends its own
stream and nothing else; a peer holds at most ``max_incoming_per_peer`` streams to us at a time.

p2pd passes on bytes and the end of a stream, but no half-close (closing one direction ends both) and no
reset: a connection that breaks can look like an end of stream. Now and then it even resets a stream instead of
ending it (its two directions race), and then drops what the other end has not read yet. So:

* Whoever reads knows from the protocol how many bytes are to come, as :mod:`echo2p2p.swarm.messages` does.
* The side that dialled ends a stream, once it has what it wants; the side that was dialled waits for that end, and
  ends the stream itself only if it does not come within ``yield_s``.
* Whoever dialled and must know that its own bytes arrived waits for an answer before it closes. So does whoever
  closes the whole node: the end of p2pd takes along what lies in the kernel's buffers.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass

from echo2p2p.errors import Echo2p2pError, PeerUnreachable
from echo2p2p.swarm.hivemind.connection import Connection
from echo2p2p.swarm.identity import PeerId
from echo2p2p.swarm.network import StreamHandler

logger = logging.getLogger("echo2p2p.swarm")

_SLICE_BYTES = 2**20


@dataclass(frozen=True)
class StreamLimits:
    """What one node spends on streams.

    ``buffer_bytes`` is the write buffer's high mark of each stream; asyncio's own 64 KiB costs throughput.
    ``stall_s`` is how long a write may make no progress; ``yield_s`` how long the side that was dialled leaves it to
    the other to end a stream; ``linger_s`` how long a close may take after that to hand over what was written.
    """

    buffer_bytes: int = 2**18
    max_incoming: int = 1024
    max_incoming_per_peer: int = 64
    stall_s: float = 60.0
    yield_s: float = 5.0
    linger_s: float = 30.0


class SocketStream:
    """A :class:`~echo2p2p.swarm.network.Stream` over one connection to p2pd."""

    def __init__(
        self,
        remote: PeerId,
        connection: Connection,
        limits: StreamLimits,
        on_end: Callable[[SocketStream], None] = lambda _: None,
        *,
        dialled: bool,
    ) -> None:
        """``on_end`` is called once the connection is given up, closed or aborted; ``dialled``: by us."""
        self._remote = remote
        self._dialled = dialled
        self._connection = connection
        self._limits = limits
        self._on_end = on_end
        self._closing = False
        connection.transport.set_write_buffer_limits(high=limits.buffer_bytes)

    @property
    def remote(self) -> PeerId:
        return self._remote

    async def read(self, max_bytes: int) -> bytes:
        try:
            return await self._connection.read(max_bytes)
        except OSError as error:
            raise self._broken(error) from error

    async def read_exactly(self, n_bytes: int) -> bytes:
        try:
            return await self._connection.readexactly(n_bytes)
        except asyncio.IncompleteReadError as error:
            raise self._ended(error) from None
        except OSError as error:
            raise self._broken(error) from error

    async def read_into(self, target: memoryview) -> None:
        try:
            await self._connection.read_into(target)
        except asyncio.IncompleteReadError as error:
            raise self._ended(error) from None
        except OSError as error:
            raise self._broken(error) from error

    async def write(self, *parts: bytes | bytearray | memoryview) -> None:
        views = [memoryview(part).cast("B") for part in parts]
        if sum(map(len, views)) <= _SLICE_BYTES:
            await self._write(views)
            return
        for view in views:
            for start in range(0, len(view), _SLICE_BYTES):
                await self._write([view[start : start + _SLICE_BYTES]])

    async def _write(self, views: list[memoryview]) -> None:
        if self._closing or self._connection.transport.is_closing():
            raise self._broken("it is closed")
        try:
            self._connection.write(*views)
            if self._connection.must_drain:
                async with asyncio.timeout(self._limits.stall_s):
                    await self._connection.drain()
        except TimeoutError:
            self.abort()
            raise self._broken(f"nothing was taken for {self._limits.stall_s:g} s") from None
        except OSError as error:
            raise self._broken(error) from error

    async def close(self) -> None:
        await self._end(yield_s=0.0 if self._dialled else self._limits.yield_s)

    async def end(self) -> None:
        """As :meth:`close`, but without leaving it to the other side."""
        await self._end(yield_s=0.0)

    async def _end(self, yield_s: float) -> None:
        if self._closing:
            return
        self._closing = True
        try:
            if yield_s > 0:
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(yield_s):
                        await self._read_to_the_end()
            async with asyncio.timeout(self._limits.linger_s):
                # Closing a socket that holds unread bytes resets it, and p2pd would drop what we wrote.
                # So say that no more comes, and read until p2pd, having sent everything on, closes its end.
                if not self._connection.transport.is_closing():
                    self._connection.transport.write_eof()
                await self._read_to_the_end()
                self._connection.transport.close()
                await self._connection.wait_closed()
        except (OSError, RuntimeError):  # TimeoutError is an OSError; RuntimeError: uvloop, already closed
            pass
        finally:
            self.abort()

    def abort(self) -> None:
        """End the stream at once, whatever is still under way."""
        self._closing = True
        self._connection.transport.abort()
        self._on_end(self)

    async def _read_to_the_end(self) -> None:
        while await self._connection.read(_SLICE_BYTES):
            pass

    def _ended(self, error: asyncio.IncompleteReadError) -> PeerUnreachable:
        got = f" after {len(error.partial)} of {error.expected} bytes" if error.partial else ""
        return PeerUnreachable(f"{self._remote} ended the stream{got}")

    def _broken(self, reason: object) -> PeerUnreachable:
        return PeerUnreachable(f"the stream with {self._remote} broke: {reason}")


class IncomingStreams:
    """The handlers of one node, and one supervised task for each stream that a peer opened."""

    def __init__(self, limits: StreamLimits) -> None:
        self._limits = limits
        self._per_peer: Counter[PeerId] = Counter()
        self._tasks: set[asyncio.Task[None]] = set()
        self.handlers: dict[str, StreamHandler] = {}

    async def serve(self, protocol: str, stream: SocketStream) -> None:
        """Run the handler of ``protocol`` on ``stream`` in the current task; never raises its errors."""
        peer = stream.remote
        handler = self.handlers.get(protocol)
        full = len(self._tasks) >= self._limits.max_incoming
        if handler is None or full or self._per_peer[peer] >= self._limits.max_incoming_per_peer:
            logger.info("refused a stream of %s: %s", peer, "no handler" if handler is None else "too many")
            stream.abort()
            return
        task = asyncio.current_task()
        if task is None:
            raise RuntimeError("serve runs in a task")
        self._tasks.add(task)
        self._per_peer[peer] += 1
        end = stream.end
        try:
            await handler(stream)
            end = stream.close
        except asyncio.CancelledError:
            stream.abort()
            raise
        except PeerUnreachable as error:
            logger.debug("stream %s of %s: %s", protocol, peer, error)
        except Echo2p2pError as error:
            logger.info("stream %s of %s ended: %s", protocol, peer, error)
        except Exception:
            logger.exception("the handler of %s failed on a stream of %s", protocol, peer)
        finally:
            try:
                await end()
            finally:
                self._tasks.discard(task)
                self._per_peer[peer] -= 1
                if not self._per_peer[peer]:
                    del self._per_peer[peer]

    def __len__(self) -> int:
        """How many streams are being served."""
        return len(self._tasks)

    async def close(self, timeout_s: float) -> None:
        """Cancel every handler and wait until they have ended, but no longer than ``timeout_s``."""
        tasks = self._tasks - {asyncio.current_task()}
        for task in tasks:
            task.cancel()
        if tasks:
            with contextlib.suppress(TimeoutError):
                _, late = await asyncio.wait(tasks, timeout=timeout_s)
                for task in late:
                    logger.error("handler task %s ignores its cancellation", task.get_name())
