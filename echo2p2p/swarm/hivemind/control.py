"""Requests to p2pd over its control socket, and the multiaddrs that they carry.

Every request uses a connection of its own and raises :class:`~echo2p2p.errors.PeerUnreachable` if p2pd
refuses or does not answer in time. hivemind's own client has no deadlines and leaves connections open when
it is cancelled.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from hivemind.p2p import PeerID
from hivemind.p2p.p2p_daemon_bindings.utils import read_pbmsg_safe, write_pbmsg
from hivemind.proto import p2pd_pb2
from hivemind.utils.multiaddr import Multiaddr

from echo2p2p.errors import PeerUnreachable, SettingsError
from echo2p2p.swarm.hivemind.connection import Connection, connect
from echo2p2p.swarm.identity import PeerId
from echo2p2p.swarm.network import PeerInfo, each_once


class Control:
    """What we ask of one p2pd."""

    def __init__(self, socket: Path, *, timeout_s: float) -> None:
        """Args: timeout_s: for each request but ``open``."""
        self._socket = socket
        self._timeout_s = timeout_s

    async def identify(self) -> tuple[PeerId, tuple[str, ...]]:
        """Who p2pd is, and the addresses under which it believes to be reachable."""
        response = await self._ask(p2pd_pb2.Request(type=p2pd_pb2.Request.IDENTIFY))
        peer = PeerID(response.identify.id).to_base58()
        return peer, tuple(str(Multiaddr(address)) for address in response.identify.addrs)

    async def peers(self) -> list[PeerInfo]:
        """The peers that it is connected to, each once; p2pd lists every connection."""
        response = await self._ask(p2pd_pb2.Request(type=p2pd_pb2.Request.LIST_PEERS))
        return each_once(
            PeerInfo(PeerID(peer.id).to_base58(), tuple(str(Multiaddr(address)) for address in peer.addrs))
            for peer in response.peers
        )

    async def connect(self, peer: PeerId, addresses: Sequence[str]) -> None:
        """Connect to a peer; returns at once if that has been done."""
        connect = p2pd_pb2.ConnectRequest(
            peer=PeerID.from_base58(peer).to_bytes(),
            addrs=[Multiaddr(address).to_bytes() for address in addresses],
        )
        await self._ask(p2pd_pb2.Request(type=p2pd_pb2.Request.CONNECT, connect=connect))

    async def register(self, protocol: str, stream_socket: Path) -> None:
        """Have streams of ``protocol`` passed on to ``stream_socket``."""
        address = Multiaddr(f"/unix{stream_socket}").to_bytes()
        handler = p2pd_pb2.StreamHandlerRequest(addr=address, proto=[protocol], balanced=False)
        await self._ask(p2pd_pb2.Request(type=p2pd_pb2.Request.STREAM_HANDLER, streamHandler=handler))

    async def open(self, peer: PeerId, protocol: str) -> Connection:
        """Open a stream to a peer; the caller sets the deadline."""
        target = PeerID.from_base58(peer).to_bytes()
        stream = p2pd_pb2.StreamOpenRequest(peer=target, proto=[protocol])
        request = p2pd_pb2.Request(type=p2pd_pb2.Request.STREAM_OPEN, streamOpen=stream)
        _, connection = await self._request(request)
        return connection

    async def _ask(self, request: Any) -> Any:
        try:
            async with asyncio.timeout(self._timeout_s):
                response, connection = await self._request(request)
        except TimeoutError:
            raise PeerUnreachable(f"no answer within {self._timeout_s:g} s") from None
        connection.transport.abort()
        return response

    async def _request(self, request: Any) -> tuple[Any, Connection]:
        connection = None
        try:
            connection = await connect(self._socket)
            await write_pbmsg(connection, request)
            response = p2pd_pb2.Response()
            await read_pbmsg_safe(connection, response)
            if response.type == p2pd_pb2.Response.ERROR:
                raise PeerUnreachable(" ".join(response.error.msg.split())[:300])
        except BaseException as error:
            if connection is not None:
                connection.transport.abort()
            if isinstance(error, OSError | EOFError) and not isinstance(error, TimeoutError):
                raise PeerUnreachable(f"p2pd does not answer: {error}") from error
            raise
        return response, connection


async def read_stream_info(connection: Connection) -> tuple[PeerId, str]:
    """What p2pd says first of a stream that it passes on: who opened it, and for which protocol."""
    info = p2pd_pb2.StreamInfo()
    await read_pbmsg_safe(connection, info)
    return PeerID(info.peer).to_base58(), str(info.proto)


def checked_maddr(address: str, kind: str) -> str:
    """The address itself, if it is one; ``kind`` is host, announce or bootstrap.

    Raises:
        SettingsError: it is not a multiaddr, or names no port where it must.
    """
    try:
        names = [protocol.name for protocol in Multiaddr(address).protocols()]
    except ValueError as error:
        raise SettingsError(
            f"{kind} address {address!r} is not a multiaddr: {error}", hint="such as /ip4/0.0.0.0/tcp/31337"
        ) from None
    if not names or (kind == "announce" and any(part in address + "/" for part in ("/tcp/0/", "/udp/0/"))):
        raise SettingsError(f"{kind} address {address!r} names no port")
    return address


def checked_peer(address: str) -> str:
    """The address itself, if it is that of a peer.

    Raises:
        SettingsError: it is not a multiaddr that ends in ``/p2p/<peer id>``.
    """
    checked_maddr(address, "bootstrap")
    head, _, peer = address.rpartition("/p2p/")
    try:
        if not head:
            raise ValueError
        PeerID.from_base58(peer)
    except ValueError:
        raise SettingsError(
            f"bootstrap address {address!r} does not end in /p2p/<peer id>",
            hint="copy the whole line that the bootstrap peer printed",
        ) from None
    return address


def by_peer(addresses: Sequence[str]) -> dict[PeerId, tuple[str, ...]]:
    """Addresses ending in a peer id, by that peer, without it."""
    grouped: dict[PeerId, tuple[str, ...]] = {}
    for address in addresses:
        head, _, peer = address.rpartition("/p2p/")
        grouped[peer] = (*grouped.get(peer, ()), head)
    return grouped


def with_port(host_maddrs: tuple[str, ...], visible: tuple[str, ...]) -> tuple[str, ...]:
    """``host_maddrs`` with the port that the system chose for its 0, so that a restart keeps the address."""
    ports = {address.split("/tcp/")[1].split("/")[0] for address in visible if "/tcp/" in address}
    open_ports = [address for address in host_maddrs if address.endswith("/tcp/0")]
    if len(ports) != 1 or len(open_ports) != 1:
        return host_maddrs
    port = ports.pop()
    return tuple(a.removesuffix("0") + port if a in open_ports else a for a in host_maddrs)
