"""The network in one process: the seam of the real one, with link rates, delay and every failure at hand.

A :class:`MemorySwarm` holds the peers, the paths between them, the table of records and the nemesis verbs
(cut, stall, kill, corrupt, set_rate); :class:`MemoryNetwork` is one peer's view of it. On a
:class:`~echo2p2p.swarm.virtual_time.VirtualLoop` a swarm with a given seed repeats itself exactly. With no
rates and no delay it also serves tests on an ordinary loop.

The table is one for all peers and admits what :func:`echo2p2p.swarm.records.check` admits. Whoever is alive
reaches it: cuts and stalls concern streams alone.

A handler that raises anything but an Echo2p2pError has a bug: the error is kept in ``MemorySwarm.errors``,
and :meth:`MemorySwarm.close` raises it.
"""

from __future__ import annotations

import asyncio
import hashlib
import math
import random
from collections.abc import Callable
from types import TracebackType

from echo2p2p.errors import RecordError
from echo2p2p.swarm.clock import Clock, SystemClock
from echo2p2p.swarm.identity import Identity, PeerId
from echo2p2p.swarm.links import Block, Corruption, LinkLimits, Pipe
from echo2p2p.swarm.memory_peer import MemoryNetwork, MemoryStream
from echo2p2p.swarm.records import Record, check
from echo2p2p.swarm.virtual_time import VirtualClock, VirtualLoop

__all__ = ["MemoryNetwork", "MemoryStream", "MemorySwarm", "MemoryTable"]


class MemoryTable:
    """The distributed table, as if it stood on one node: the same rule of admission, the same order."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._held: dict[str, dict[PeerId, tuple[Record, bytes]]] = {}

    def store(self, key: str, owner: PeerId, value: bytes, *, expires_unix: float) -> bool:
        """Admit ``value`` under ``key`` and the subkey ``owner``, whoever sends it.

        Returns:
            Whether it stands in the table now; not if it has expired or its owner has a newer one there.

        Raises:
            RecordError: it is not a record that may stand there.
        """
        now = self._clock.unix()
        record = check(value, owner=owner, now_unix=now)
        if record.key != key:
            raise RecordError(f"a record made for {record.key} was stored under {key}")
        if record.expires_unix != expires_unix:
            raise RecordError(f"record of {owner}: the expiry outside is not the one inside")
        live = self._live(key, now)
        if record.expires_unix <= now:
            return False
        if owner in live and live[owner][0].sequence >= record.sequence:
            return live[owner][1] == value
        live[owner] = (record, value)
        return True

    def find(self, key: str, *, now_unix: float) -> dict[PeerId, bytes]:
        """The live records under ``key`` that a reader whose date is ``now_unix`` believes."""
        found = {}
        for owner, (_, value) in self._live(key, self._clock.unix()).items():
            try:
                check(value, owner=owner, now_unix=now_unix)
            except RecordError:
                continue
            found[owner] = value
        return found

    def _live(self, key: str, now: float) -> dict[PeerId, tuple[Record, bytes]]:
        """What stands under ``key``, rid of what has expired."""
        held = self._held.setdefault(key, {})
        for owner in [owner for owner, (record, _) in held.items() if record.expires_unix <= now]:
            del held[owner]
        return held


class MemorySwarm:
    """Peers in one process. Make it inside a running loop; leave it with :meth:`close` or ``async with``.

    Args:
        seed: decides the identities of peers that bring none, and which bytes get corrupted.
        default_delay_s: the delay of peers that name none.
        lookup_delay_s: what a store or find in the table takes; may be changed at any time.
        limits: sizes of blocks and windows.
        weigh: what a byte counts on the links. Called with a stream's protocol, and again with what its opener
            writes first: the first answer holds for the opener's bytes, the second for those that come back. Where
            bodies and links are scaled down together, this keeps small messages from becoming slow ones.

    Attributes:
        errors: what handlers raised that is not an Echo2p2pError.
        traffic: bytes sent, by (sender, receiver, protocol).
        table: the records; a test stores forgeries here that no peer's own network would send.
    """

    def __init__(
        self,
        seed: int = 0,
        *,
        default_delay_s: float = 0.0,
        lookup_delay_s: float = 0.0,
        limits: LinkLimits | None = None,
        weigh: Callable[[str, Block], float] | None = None,
    ) -> None:
        self._loop = asyncio.get_running_loop()
        self._seed = seed
        self._random = random.Random(seed)
        self._default_delay_s = default_delay_s
        self._added = 0
        self._peers: dict[PeerId, MemoryNetwork] = {}
        self._cut: set[frozenset[PeerId]] = set()
        self._stalled: set[tuple[PeerId, PeerId]] = set()
        self._corrupt: dict[tuple[PeerId, PeerId], Corruption] = {}
        self._change: asyncio.Future[None] = self._loop.create_future()
        self.limits = limits or LinkLimits()
        self.lookup_delay_s = lookup_delay_s
        self._weigh = weigh
        self.errors: list[Exception] = []
        self.traffic: dict[tuple[PeerId, PeerId, str], int] = {}
        self.table = MemoryTable(self._clock())

    def add_peer(
        self,
        identity: Identity | None = None,
        *,
        upload_mbit: float = math.inf,
        download_mbit: float = math.inf,
        delay_s: float | None = None,
        clock: Clock | None = None,
    ) -> MemoryNetwork:
        """A new living peer, or one that comes back after its end.

        Args:
            identity: one of the swarm's seed if None.
            upload_mbit, download_mbit: rates of its links in Mbit/s (10⁶ bit).
            delay_s: the one-way delay between two peers is the mean of their two values.
            clock: as the loop has it if None; pass a VirtualClock with a skew for a wrong date.
        """
        number = self._added
        self._added += 1
        if identity is None:
            identity = Identity.from_seed(hashlib.blake2s(b"%d/%d" % (self._seed, number)).digest())
        if self.living(identity.peer_id) is not None:
            raise ValueError(f"{identity.peer_id} is in the swarm already")
        peer = MemoryNetwork(
            self,
            identity,
            clock or self._clock(),
            number=number,
            delay_s=self._default_delay_s if delay_s is None else delay_s,
        )
        self._peers[peer.peer_id] = peer
        self.set_rate(peer, upload_mbit=upload_mbit, download_mbit=download_mbit)
        return peer

    @property
    def peers(self) -> list[MemoryNetwork]:
        """The living peers, in the order in which they came."""
        return [peer for peer in self._peers.values() if not peer.dead]

    def living(self, peer: PeerId) -> MemoryNetwork | None:
        found = self._peers.get(peer)
        return None if found is None or found.dead else found

    def bytes_sent(
        self, sender: PeerId | None = None, receiver: PeerId | None = None, protocol: str | None = None
    ) -> int:
        """Bytes that left ``sender``'s uplink for ``receiver`` on ``protocol``; None stands for any."""
        return sum(
            n_bytes
            for (from_, to, spoken), n_bytes in self.traffic.items()
            if sender in (None, from_) and receiver in (None, to) and protocol in (None, spoken)
        )

    async def close(self) -> None:
        """End every peer.

        Raises:
            ExceptionGroup: the bugs of handlers, see ``errors``.
        """
        for peer in list(self._peers.values()):
            await peer.close()
        if self.errors:
            raise ExceptionGroup("stream handlers failed", self.errors)

    async def __aenter__(self) -> MemorySwarm:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    # --- nemesis

    def cut(self, a: MemoryNetwork, b: MemoryNetwork) -> None:
        """Break the streams between two peers; none can be opened until :meth:`heal`."""
        self._cut.add(frozenset((a.peer_id, b.peer_id)))
        for stream in list(a.streams):
            if stream.remote == b.peer_id:
                stream.break_("the connection was cut")
        for stream in list(b.streams):
            if stream.remote == a.peer_id:
                stream.break_("the connection was cut")
        self._tell_change()

    def heal(self, a: MemoryNetwork, b: MemoryNetwork) -> None:
        """Undo :meth:`cut`. What broke stays broken."""
        self._cut.discard(frozenset((a.peer_id, b.peer_id)))
        self._tell_change()

    def stall(self, a: MemoryNetwork, b: MemoryNetwork) -> None:
        """Stop every byte from ``a`` to ``b`` where it is; nothing breaks. Neither can open a new stream."""
        self._stalled.add((a.peer_id, b.peer_id))
        for stream in a.streams:
            if stream.remote == b.peer_id:
                stream.outgoing.stall()

    def unstall(self, a: MemoryNetwork, b: MemoryNetwork) -> None:
        """Undo :meth:`stall`: everything goes on from where it stood."""
        self._stalled.discard((a.peer_id, b.peer_id))
        for stream in list(a.streams):
            if stream.remote == b.peer_id:
                stream.outgoing.unstall()
        self._tell_change()

    def kill(self, peer: MemoryNetwork) -> None:
        """End a peer without a word: streams break, its handlers are cancelled, its calls raise.

        Its records stay until they expire. The same identity may be added again.
        """
        peer.die()
        self._tell_change()

    def set_rate(
        self,
        peer: MemoryNetwork,
        *,
        upload_mbit: float | None = None,
        download_mbit: float | None = None,
    ) -> None:
        """Change the rates of a peer's links, from the next block on; None keeps one as it is."""
        for link, mbit in ((peer.uplink, upload_mbit), (peer.downlink, download_mbit)):
            if mbit is not None:
                if not mbit > 0:
                    raise ValueError(f"a link cannot have {mbit} Mbit/s; stall() stops one")
                link.rate = mbit * 1e6 / 8

    def corrupt(self, a: MemoryNetwork, b: MemoryNetwork, *, every: int, min_bytes: int = 1) -> None:
        """Flip a bit in every ``every``-th block of at least ``min_bytes`` from ``a`` to ``b``; 0 ends it.

        ``min_bytes`` spares short messages, so that what gets damaged is what a test wants damaged.
        """
        pair = (a.peer_id, b.peer_id)
        if every:
            self._corrupt[pair] = Corruption(every, min_bytes, self._random.randrange)
        else:
            self._corrupt.pop(pair, None)
        for stream in a.streams:
            if stream.remote == b.peer_id:
                stream.outgoing.corruption = self._corrupt.get(pair)

    # --- for the peers

    def is_cut(self, a: MemoryNetwork, b: MemoryNetwork) -> bool:
        return bool(self._cut) and frozenset((a.peer_id, b.peer_id)) in self._cut

    def is_stalled(self, a: MemoryNetwork, b: MemoryNetwork) -> bool:
        """Whether either direction is; a dial needs both."""
        return bool(self._stalled) and bool({(a.peer_id, b.peer_id), (b.peer_id, a.peer_id)} & self._stalled)

    async def changed(self) -> None:
        """Return after the next cut, heal, unstall or kill."""
        await asyncio.shield(self._change)

    def connect(self, a: MemoryNetwork, b: MemoryNetwork, protocol: str) -> tuple[MemoryStream, MemoryStream]:
        """A fresh stream between two peers: ``a``'s end and ``b``'s."""
        near = MemoryStream(b.peer_id, protocol)
        far = MemoryStream(a.peer_id, protocol)
        near.outgoing = far.incoming = self._pipe(a, b, near)
        far.outgoing = near.incoming = self._pipe(b, a, far)
        if self._weigh is not None:
            near.weigh = self._weigh
        a.streams[near] = None
        b.streams[far] = None
        return near, far

    def _pipe(self, sender: MemoryNetwork, receiver: MemoryNetwork, source: MemoryStream) -> Pipe:
        account = (sender.peer_id, receiver.peer_id, source.protocol)
        traffic = self.traffic

        def count(n_bytes: int) -> None:
            traffic[account] = traffic.get(account, 0) + n_bytes

        pipe = Pipe(
            sender.uplink,
            receiver.downlink,
            delay_s=(sender.delay_s + receiver.delay_s) / 2,
            limits=self.limits,
            name=f"{sender.peer_id} to {receiver.peer_id} on {source.protocol}",
            count=count,
            on_done=lambda: sender.streams.pop(source, None) and None,
            weight=1.0 if self._weigh is None else self._weigh(source.protocol, b""),
        )
        pipe.corruption = self._corrupt.get(account[:2])
        return pipe

    def _clock(self) -> Clock:
        return VirtualClock(self._loop) if isinstance(self._loop, VirtualLoop) else SystemClock()

    def _tell_change(self) -> None:
        change, self._change = self._change, self._loop.create_future()
        change.set_result(None)
