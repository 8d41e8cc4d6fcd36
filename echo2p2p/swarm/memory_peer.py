"""One peer of the memory swarm: its streams, its handlers, its calls. The swarm makes and ends it.

What the network seam promises, this keeps: a call on a peer that is gone raises, a stream breaks and never
hangs, a handler's task is looked after until it ends.
"""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from echo2p2p.errors import DeadlineExceeded, Echo2p2pError, NotSpoken, PeerUnreachable
from echo2p2p.swarm.clock import Clock
from echo2p2p.swarm.identity import Identity, PeerId
from echo2p2p.swarm.links import Block, Downlink, Pipe, Uplink
from echo2p2p.swarm.network import PeerInfo, Stream, StreamHandler

if TYPE_CHECKING:
    from echo2p2p.swarm.memory import MemorySwarm

log = logging.getLogger(__name__)

_FIRST_BYTES = 4096
"""As much of the first write decides on the weight of a stream."""
_LINGER_S = 10.0
"""How long closing a stream waits for what it still has to send."""


class MemoryStream:
    """One end of a stream between two peers of a :class:`MemorySwarm`."""

    def __init__(self, remote: PeerId, protocol: str) -> None:
        self.protocol = protocol
        self._remote = remote
        self._closed = False
        self.weigh: Callable[[str, Block], float] | None = None
        """Asked once, with the first bytes that are written here, for the weight of those that come back."""
        self.outgoing: Pipe
        self.incoming: Pipe

    @property
    def remote(self) -> PeerId:
        return self._remote

    async def read(self, max_bytes: int) -> bytes:
        self._raise_if_closed()
        return await self.incoming.read(max_bytes)

    async def read_exactly(self, n_bytes: int) -> bytes:
        self._raise_if_closed()
        return await self.incoming.read_exactly(n_bytes)

    async def read_into(self, target: memoryview) -> None:
        self._raise_if_closed()
        await self.incoming.read_into(target)

    async def write(self, *parts: bytes | bytearray | memoryview) -> None:
        for data in parts:
            self._raise_if_closed()
            if self.weigh is not None:
                weight = self.weigh(self.protocol, bytes(data[:_FIRST_BYTES]))
                self.incoming.weight, self.weigh = weight, None
            await self.outgoing.write(data if isinstance(data, bytes) else memoryview(data).cast("B"))

    async def close(self) -> None:
        if self._closed:
            return
        self._closed = True
        self.incoming.break_("the other side closed the stream")
        self.outgoing.end()
        try:
            async with asyncio.timeout(_LINGER_S):
                await self.outgoing.drain()
        except TimeoutError:
            self.break_("closed with bytes that could not be sent")

    def break_(self, reason: str) -> None:
        """Break both directions at both ends."""
        self.outgoing.break_(reason)
        self.incoming.break_(reason)

    def _raise_if_closed(self) -> None:
        if self._closed:
            raise PeerUnreachable(f"the stream to {self._remote} is closed")


class MemoryNetwork:
    """One peer's network; made by :meth:`MemorySwarm.add_peer`."""

    def __init__(
        self, swarm: MemorySwarm, identity: Identity, clock: Clock, *, number: int, delay_s: float
    ) -> None:
        self._swarm = swarm
        self._identity = identity
        self._clock = clock
        self._number = number
        self._handlers: dict[str, StreamHandler] = {}
        self._tasks: dict[asyncio.Task[None], None] = {}
        self.delay_s = delay_s
        self.streams: dict[MemoryStream, None] = {}
        self.uplink = Uplink(math.inf, swarm.limits.block)
        self.downlink = Downlink(math.inf)
        self.dead = False

    @property
    def identity(self) -> Identity:
        return self._identity

    @property
    def peer_id(self) -> PeerId:
        return self._identity.peer_id

    @property
    def clock(self) -> Clock:
        return self._clock

    async def open_stream(self, peer: PeerId, protocol: str, *, timeout_s: float) -> Stream:
        self._raise_if_dead()
        try:
            async with asyncio.timeout(timeout_s):
                other = await self._dial(peer)
        except TimeoutError:
            raise DeadlineExceeded(f"{peer} did not answer within {timeout_s:g} s") from None
        handler = other.handler(protocol)
        if handler is None:
            await asyncio.sleep(0)
            raise NotSpoken(f"{peer} does not speak {protocol}")
        near, far = self._swarm.connect(self, other, protocol)
        other.serve(handler, far)
        return near

    async def _dial(self, peer: PeerId) -> MemoryNetwork:
        other = self._swarm.living(peer)
        round_trip_s = self.delay_s + other.delay_s if other else self.delay_s
        if round_trip_s:
            await asyncio.sleep(round_trip_s)
        while True:
            self._raise_if_dead()
            other = self._swarm.living(peer)
            if other is None or other is self or self._swarm.is_cut(self, other):
                # One turn of the loop, so that a caller who tries again at once is seen to make no headway.
                await asyncio.sleep(0)
                raise PeerUnreachable(f"{peer} cannot be reached")
            if not self._swarm.is_stalled(self, other):
                return other
            await self._swarm.changed()

    async def handle(self, protocol: str, handler: StreamHandler) -> None:
        self._raise_if_dead()
        self._handlers[protocol] = handler

    def handler(self, protocol: str) -> StreamHandler | None:
        return self._handlers.get(protocol)

    def serve(self, handler: StreamHandler, stream: MemoryStream) -> None:
        """Run ``handler`` for one incoming stream in a task that this network looks after."""
        name = f"{stream.protocol} of peer {self._number}"
        task = asyncio.get_running_loop().create_task(self._serve(handler, stream), name=name)
        self._tasks[task] = None
        task.add_done_callback(self._tasks.pop)

    async def _serve(self, handler: StreamHandler, stream: MemoryStream) -> None:
        try:
            await handler(stream)
        except Echo2p2pError:
            pass  # the handler's word for: this stream is over
        except asyncio.CancelledError:
            stream.break_("the other side ended")
            raise
        except Exception as error:  # the boundary of a handler: its bugs surface in MemorySwarm.close()
            log.exception("a handler of %s failed", stream.protocol)
            self._swarm.errors.append(error)
        await stream.close()

    async def store_record(self, key: str, value: bytes, *, expires_unix: float, timeout_s: float) -> bool:
        self._raise_if_dead()
        if not await self._look_up(timeout_s):
            return False
        return self._swarm.table.store(key, self.peer_id, value, expires_unix=expires_unix)

    async def find_records(self, key: str, *, timeout_s: float) -> dict[PeerId, bytes]:
        self._raise_if_dead()
        if not await self._look_up(timeout_s):
            raise DeadlineExceeded(f"the table did not answer for {key} within {timeout_s:g} s")
        return self._swarm.table.find(key, now_unix=self._clock.unix())

    async def _look_up(self, timeout_s: float) -> bool:
        """Wait for the table; whether it answered in time."""
        delay_s = self._swarm.lookup_delay_s
        if delay_s:
            await asyncio.sleep(min(delay_s, timeout_s))
            self._raise_if_dead()
        return delay_s <= timeout_s

    async def peers(self) -> list[PeerInfo]:
        self._raise_if_dead()
        return [
            PeerInfo(peer.peer_id, tuple(peer.addresses()))
            for peer in self._swarm.peers
            if peer is not self and not self._swarm.is_cut(self, peer)
        ]

    def know(self, peer: PeerId, addresses: Sequence[str]) -> None:
        """Nothing to remember: here every peer finds every other."""

    def addresses(self) -> list[str]:
        return [f"/memory/{self._number}/p2p/{self.peer_id}"]

    async def close(self) -> None:
        self._swarm.kill(self)
        own = asyncio.current_task()
        await asyncio.gather(*(task for task in self._tasks if task is not own), return_exceptions=True)

    def die(self) -> None:
        """End everything at once: for :meth:`MemorySwarm.kill`."""
        if self.dead:
            return
        self.dead = True
        self._handlers.clear()
        for stream in list(self.streams):
            stream.break_("the peer is gone")
        own = asyncio.current_task()
        for task in self._tasks:
            if task is not own:
                task.cancel()

    def _raise_if_dead(self) -> None:
        if self.dead:
            raise PeerUnreachable(f"{self.peer_id} has left the swarm")
