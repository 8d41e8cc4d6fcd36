"""How bytes move between the peers of the memory network: pipes between links with rates.

A pipe is one direction of one stream. Its bytes wait at the sender's uplink, travel for the delay of the
path, pass the receiver's downlink and lie in the inbox until they are read. Both links serve the pipes that
wait for them in turn, one block each, so streams share a link evenly and a short message never waits for
the whole of a long one. A block passes both links while it flows (a downlink faster than the uplink adds
nothing), which is how small packets behave. A pipe holds at most a window of bytes between the wire and its
reader; a reader that does not read stops its sender.

Where a link has no rate and a path no delay, bytes go from ``write`` to the inbox without a loop event.
"""

from __future__ import annotations

import asyncio
import math
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

from echo2p2p.errors import PeerUnreachable

# Far below any duration that a scenario means, far above the rounding of a float of many virtual days.
_INSTANT_S = 1e-9

Block = bytes | memoryview


@dataclass(frozen=True)
class LinkLimits:
    """Sizes in bytes.

    Attributes:
        block: what a link carries at once for one stream.
        high_water: a write returns once its stream has no more than this waiting for the uplink.
        window: what a stream may have between the wire and its reader.
    """

    block: int = 64 * 1024
    high_water: int = 256 * 1024
    window: int = 1024 * 1024


@dataclass
class Corruption:
    """A byte is flipped in every ``every``-th block of at least ``min_bytes``."""

    every: int
    min_bytes: int
    choose: Callable[[int], int]
    seen: int = 0

    def apply(self, block: Block) -> Block:
        if len(block) < self.min_bytes:
            return block
        self.seen += 1
        if self.seen % self.every:
            return block
        damaged = bytearray(block)
        damaged[self.choose(len(damaged))] ^= 0x01
        return bytes(damaged)


class Pipe:
    """One direction of one stream. Everything in it happens on the loop's thread.

    Args:
        uplink, downlink: the sender's and the receiver's.
        delay_s: one way.
        weight: what one byte counts on both links; see :class:`~echo2p2p.swarm.memory.MemorySwarm`.
        name: for error messages.
        count: told of every byte that leaves the sender.
        on_done: called once, when nothing will move in this pipe any more.
    """

    def __init__(
        self,
        uplink: Uplink,
        downlink: Downlink,
        *,
        delay_s: float,
        limits: LinkLimits,
        name: str,
        count: Callable[[int], None],
        on_done: Callable[[], None],
        weight: float = 1.0,
    ) -> None:
        self._loop = asyncio.get_running_loop()
        self._uplink = uplink
        self._downlink = downlink
        self._delay_s = delay_s
        self._limits = limits
        self._name = name
        self._count = count
        self._on_done = on_done
        self.weight = weight
        self.broken = ""
        """Why nothing moves any more; empty while all is well."""
        self.corruption: Corruption | None = None
        self._stalled = False
        # At the sender.
        self._pending: deque[Block] = deque()
        self._unsent = 0
        self._writers: list[asyncio.Future[None]] = []
        self._ended = False
        self.at_uplink = False
        # Under way. Timers of equal time fire in no certain order, so they carry no block: each takes the
        # oldest of the queue that it belongs to.
        self._wire: deque[tuple[Block, float]] = deque()
        self._held: deque[tuple[Block, float]] = deque()
        self.arrived: deque[tuple[Block, float]] = deque()
        self.at_downlink = False
        self._in_flight = 0
        # At the receiver.
        self.inbox: deque[Block] = deque()
        self._unread = 0
        self._eof = False
        self._reader: asyncio.Future[None] | None = None
        self._want = 0

    # --- the sender's end

    async def write(self, data: Block) -> None:
        self._raise_if_broken()
        if self._ended:
            raise PeerUnreachable(f"{self._name}: the stream is closed")
        if not len(data):
            return
        self._pending.append(data)
        self._unsent += len(data)
        self._uplink.offer(self)
        while self._unsent > self._limits.high_water:
            await self._wait_for_uplink()
            self._raise_if_broken()

    async def drain(self) -> None:
        """Return once nothing waits for the uplink any more, or nothing ever will."""
        while self._unsent and not self.broken:
            await self._wait_for_uplink()

    def end(self) -> None:
        """No more bytes will be written; the reader sees the end after the last one."""
        if not self._ended and not self.broken:
            self._ended = True
            self._end_if_idle()

    async def _wait_for_uplink(self) -> None:
        future = self._loop.create_future()
        self._writers.append(future)
        try:
            await future
        finally:
            if future in self._writers:
                self._writers.remove(future)

    # --- under way

    @property
    def ready(self) -> bool:
        """Whether the uplink may take a block."""
        return bool(self._pending) and not self._stalled and self.room > 0

    @property
    def room(self) -> int:
        return max(self._limits.window, self._want) - self._unread - self._in_flight

    @property
    def writer_waits(self) -> bool:
        return bool(self._writers)

    @property
    def needs_blocks(self) -> bool:
        """Whether anything between the uplink and the inbox looks at single blocks."""
        return self.corruption is not None or self._downlink.rate != math.inf

    def take(self, max_bytes: int) -> Block:
        """Remove the next block from what waits; it counts as unsent until :meth:`sent`."""
        head = self._pending.popleft()
        if len(head) > max_bytes:
            view = memoryview(head)
            head = view[:max_bytes]
            self._pending.appendleft(view[max_bytes:])
        if self.corruption is not None:
            head = self.corruption.apply(head)
        self._in_flight += len(head)
        self._count(len(head))
        return head

    def sent(self, n_bytes: int) -> None:
        """``n_bytes`` have left the uplink."""
        self._unsent -= n_bytes
        if self._writers and self._unsent <= self._limits.high_water:
            self._wake_writers()

    def travel(self, block: Block, *, started: float, finishes: float) -> None:
        """Let a block arrive ``delay_s`` after ``finishes``, when its last bit has left the uplink."""
        arrives = finishes + self._delay_s
        if arrives <= self._loop.time() and not self._wire:
            self._arrive(block, started + self._delay_s)
        else:
            self._wire.append((block, started + self._delay_s))
            self._loop.call_at(arrives, self._arrive_next)

    def _arrive_next(self) -> None:
        if self._wire:
            self._arrive(*self._wire.popleft())

    def _arrive(self, block: Block, started: float) -> None:
        if self._stalled or self._held:
            self._held.append((block, started))
        else:
            self._downlink.accept(self, block, started)

    def deliver(self, block: Block) -> None:
        """Put a block, all of it received, into the inbox."""
        if self.broken:
            return
        self._in_flight -= len(block)
        self._unread += len(block)
        self.inbox.append(block)
        if self._reader is not None and self._unread >= self._want:
            self._wake_reader()
        if self._ended and not self._pending and not self._in_flight:
            self._set_eof()  # the end came with the last block

    def _end_if_idle(self) -> None:
        if self._pending or self._in_flight or self._stalled:
            return
        if self._delay_s:
            self._loop.call_later(self._delay_s, self._set_eof)
        else:
            self._set_eof()

    def _set_eof(self) -> None:
        if self.broken or self._eof or self._stalled:
            return
        self._eof = True
        self._wake_reader()
        self._on_done()

    # --- the receiver's end

    async def read(self, max_bytes: int) -> bytes:
        await self._readable(1)
        if not self.inbox:
            return b""
        head = self.inbox.popleft()
        if len(head) > max_bytes:
            view = memoryview(head)
            head = view[:max_bytes]
            self.inbox.appendleft(view[max_bytes:])
        self._consumed(len(head))
        return bytes(head)

    async def read_exactly(self, n_bytes: int) -> bytes:
        await self._readable(n_bytes)
        if self._unread < n_bytes:
            got = f" after {self._unread} of {n_bytes} bytes" if self._unread else ""
            raise PeerUnreachable(f"{self._name}: the other side ended the stream{got}")
        parts: list[Block] = []
        missing = n_bytes
        while missing:
            head = self.inbox.popleft()
            if len(head) > missing:
                view = memoryview(head)
                head = view[:missing]
                self.inbox.appendleft(view[missing:])
            missing -= len(head)
            parts.append(head)
        self._consumed(n_bytes)
        return bytes(parts[0]) if len(parts) == 1 else b"".join(parts)

    async def read_into(self, target: memoryview) -> None:
        target[:] = await self.read_exactly(len(target))

    async def _readable(self, n_bytes: int) -> None:
        """Wait until ``n_bytes`` are there, or the end of the stream is."""
        if self._reader is not None:
            raise RuntimeError(f"{self._name}: two reads at once")
        while self._unread < n_bytes and not self._eof:
            self._raise_if_broken()
            self._want = n_bytes
            self._reader = self._loop.create_future()
            self._uplink.offer(self)  # a read longer than the window makes room for itself
            try:
                # The offer may have filled the inbox already.
                if self._unread < n_bytes and not self._eof:
                    await self._reader
            finally:
                self._reader = None
                self._want = 0
        self._raise_if_broken()

    def _consumed(self, n_bytes: int) -> None:
        self._unread -= n_bytes
        if self._pending:
            self._uplink.offer(self)

    # --- faults

    def stall(self) -> None:
        self._stalled = True

    def unstall(self) -> None:
        self._stalled = False
        while self._held:
            block, _ = self._held.popleft()
            self._downlink.accept(self, block, self._loop.time())
        self._uplink.offer(self)
        if self._ended:
            self._end_if_idle()

    def break_(self, reason: str) -> None:
        """Nothing moves any more: both ends get :class:`PeerUnreachable`, what was under way is lost."""
        if self.broken:
            return
        self.broken = reason
        self._unsent = self._unread = self._in_flight = 0
        for queue in (self._pending, self._wire, self._held, self.arrived, self.inbox):
            queue.clear()
        self._wake_reader()
        self._wake_writers()
        self._on_done()

    def _raise_if_broken(self) -> None:
        if self.broken:
            raise PeerUnreachable(f"{self._name}: {self.broken}")

    def _wake_reader(self) -> None:
        if self._reader is not None and not self._reader.done():
            self._reader.set_result(None)

    def _wake_writers(self) -> None:
        writers, self._writers = self._writers, []
        for future in writers:
            if not future.done():
                future.set_result(None)


@dataclass(eq=False)
class Uplink:
    """A sender's link: one block at a time, the waiting pipes in turn. ``rate`` in bytes/s, may be inf."""

    rate: float
    block_bytes: int
    _busy_until: float = 0.0
    _turn: deque[Pipe] = field(default_factory=deque)
    _timer: bool = False
    _loop: asyncio.AbstractEventLoop = field(default_factory=asyncio.get_running_loop)

    def offer(self, pipe: Pipe) -> None:
        """``pipe`` may have something to send."""
        if pipe.at_uplink or not pipe.ready:
            return
        pipe.at_uplink = True
        self._turn.append(pipe)
        if not self._timer:
            if self._busy_until > self._loop.time():
                self._timer = True
                self._loop.call_at(self._busy_until, self._serve)
            else:
                self._serve()

    def _serve(self) -> None:
        self._timer = False
        now = self._loop.time()
        while self._turn:
            pipe = self._turn.popleft()
            pipe.at_uplink = False
            if not pipe.ready:
                continue
            if self.rate == math.inf:
                self._send_all(pipe, now)
                continue
            block = pipe.take(self.block_bytes)
            self._busy_until = now + len(block) * pipe.weight / self.rate
            if not (self._turn or pipe.ready or pipe.writer_waits):
                pipe.sent(len(block))
                pipe.travel(block, started=now, finishes=self._busy_until)
                return
            self._timer = True
            self._loop.call_at(self._busy_until, self._finish, pipe, block, now)
            return

    def _finish(self, pipe: Pipe, block: Block, started: float) -> None:
        if not pipe.broken:
            pipe.sent(len(block))
            pipe.travel(block, started=started, finishes=self._busy_until)
            if pipe.ready and not pipe.at_uplink:
                pipe.at_uplink = True
                self._turn.append(pipe)
        self._serve()

    def _send_all(self, pipe: Pipe, now: float) -> None:
        # Whole writes where nothing downstream or in between looks at single blocks.
        size = self.block_bytes if pipe.needs_blocks else 2**62
        while pipe.ready:
            block = pipe.take(size)
            pipe.sent(len(block))
            pipe.travel(block, started=now, finishes=now)


@dataclass(eq=False)
class Downlink:
    """A receiver's link. ``rate`` in bytes/s, may be inf."""

    rate: float
    _free_at: float = 0.0
    _turn: deque[Pipe] = field(default_factory=deque)
    _timer: bool = False
    _loop: asyncio.AbstractEventLoop = field(default_factory=asyncio.get_running_loop)

    def accept(self, pipe: Pipe, block: Block, started: float) -> None:
        """A block's last bit is here; its first was at ``started``."""
        if not self._timer:
            # What flowed in while the block was under way: done by now if the link kept up.
            free_at = max(started, self._free_at) + len(block) * pipe.weight / self.rate
            if free_at <= self._loop.time() + _INSTANT_S:
                self._free_at = free_at
                pipe.deliver(block)
                return
        pipe.arrived.append((block, started))
        if not pipe.at_downlink:
            pipe.at_downlink = True
            self._turn.append(pipe)
        if not self._timer:
            self._serve()

    def _serve(self) -> None:
        while self._turn:
            pipe = self._turn.popleft()
            if not pipe.arrived:
                pipe.at_downlink = False
                continue
            block, started = pipe.arrived[0]
            self._free_at = max(started, self._free_at) + len(block) * pipe.weight / self.rate
            self._timer = True
            self._loop.call_at(max(self._loop.time(), self._free_at), self._finish, pipe)
            return

    def _finish(self, pipe: Pipe) -> None:
        self._timer = False
        if pipe.arrived:
            pipe.deliver(pipe.arrived.popleft()[0])
        if pipe.arrived:
            self._turn.append(pipe)
        else:
            pipe.at_downlink = False
        self._serve()
