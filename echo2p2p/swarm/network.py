"""The seam between the roles and whatever carries their bytes.

Two implementations: :mod:`echo2p2p.swarm.hivemind` (real peers) and :mod:`echo2p2p.swarm.memory` (one
process, virtual time). A role sees streams to peers, handlers for streams from peers, and small signed
records in a distributed table. Nothing else of the network reaches it.

Guarantees of both implementations:

* ``Stream.remote`` is authenticated: it is the peer's public key, whatever the bytes on the stream say.
* A record is stored only under its owner's peer id and only with its owner's signature; one that was found
  has been verified (:mod:`echo2p2p.swarm.records`).
* Every call has a deadline. A broken stream raises :class:`~echo2p2p.errors.PeerUnreachable`, never hangs.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol

from echo2p2p.swarm.clock import Clock
from echo2p2p.swarm.identity import Identity, PeerId


class Stream(Protocol):
    """A duplex byte stream to one peer."""

    @property
    def remote(self) -> PeerId:
        """Who is at the other end, as proven by the transport."""
        ...

    async def read(self, max_bytes: int) -> bytes:
        """Return between 1 and ``max_bytes`` bytes as soon as any are there; ``b""`` at the end of stream.

        Raises:
            PeerUnreachable: the connection broke.
        """
        ...

    async def read_exactly(self, n_bytes: int) -> bytes:
        """Return exactly ``n_bytes`` bytes.

        Raises:
            PeerUnreachable: the stream ended or broke before that.
        """
        ...

    async def read_into(self, target: memoryview) -> None:
        """Fill ``target`` (writable bytes) with what comes, without a copy where that can be.

        Cancelled or failed, it leaves a stream that is good for closing only.

        Raises:
            PeerUnreachable: the stream ended or broke before that.
        """
        ...

    async def write(self, *parts: bytes | bytearray | memoryview) -> None:
        """Send ``parts``, one after another; returns once what is not yet on the wire is below a high-water mark.

        The buffers must not change afterwards. Raises :class:`~echo2p2p.errors.PeerUnreachable`.
        """
        ...

    async def close(self) -> None:
        """Send what is buffered, then end the stream. Safe to call twice; never raises."""
        ...


StreamHandler = Callable[[Stream], Awaitable[None]]
"""Serves one incoming stream; the network closes the stream when the handler returns or raises."""


@dataclass(frozen=True)
class PeerInfo:
    """A peer that this node is connected to, and where."""

    peer: PeerId
    addresses: tuple[str, ...]


def each_once(infos: Iterable[PeerInfo]) -> list[PeerInfo]:
    """One entry a peer, with the addresses of all its connections, each once, in the order in which they came."""
    addresses: dict[PeerId, dict[str, None]] = {}
    for info in infos:
        addresses.setdefault(info.peer, {}).update(dict.fromkeys(info.addresses))
    return [PeerInfo(peer, tuple(known)) for peer, known in addresses.items()]


class Network(Protocol):
    """One node's view of the swarm."""

    @property
    def identity(self) -> Identity: ...

    @property
    def peer_id(self) -> PeerId: ...

    @property
    def clock(self) -> Clock: ...

    async def open_stream(self, peer: PeerId, protocol: str, *, timeout_s: float) -> Stream:
        """Dial ``peer`` and ask for ``protocol`` (such as ``/echo2p2p/1/chunks``).

        Raises:
            PeerUnreachable: nobody there, or it does not speak the protocol.
            DeadlineExceeded: no answer within ``timeout_s``.
        """
        ...

    def know(self, peer: PeerId, addresses: Sequence[str]) -> None:
        """Where ``peer`` says that it can be dialled; used when the network itself does not find it.

        Args:
            addresses: multiaddrs that end in ``/p2p/<peer id>``; others are passed over.
        """
        ...

    async def handle(self, protocol: str, handler: StreamHandler) -> None:
        """Serve ``protocol`` with ``handler``, one task a stream. Replaces an earlier handler.

        A handler that raises an :class:`~echo2p2p.errors.Echo2p2pError` ends its stream only.
        """
        ...

    async def store_record(self, key: str, value: bytes, *, expires_unix: float, timeout_s: float) -> bool:
        """Store a signed record of our own under ``key``, subkey = our peer id.

        Args:
            key: a key of :mod:`echo2p2p.swarm.records`.
            value: the sealed record, at most ``MAX_RECORD_BYTES``.
            expires_unix: must equal the expiry inside the sealed record.

        Returns:
            Whether at least one replica holds it (on hivemind: a replica other than this node, if any
            other node is known).
        """
        ...

    async def find_records(self, key: str, *, timeout_s: float) -> dict[PeerId, bytes]:
        """All live, verified records under ``key``, by owner. Empty if there are none.

        Raises:
            DeadlineExceeded: the table did not answer within ``timeout_s``.
        """
        ...

    async def peers(self) -> list[PeerInfo]:
        """The peers that this node is connected to now."""
        ...

    def addresses(self) -> list[str]:
        """Multiaddrs, ending in ``/p2p/<peer id>``, under which others can reach this node."""
        ...

    async def close(self) -> None:
        """Leave the swarm and end everything that was started for it. Safe to call twice."""
        ...
