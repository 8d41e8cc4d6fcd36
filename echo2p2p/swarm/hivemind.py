"""The real network: one p2pd and one DHT node of hivemind on the running asyncio loop, supervised.

Guarantees, beyond those of :mod:`echo2p2p.swarm.network`:

* Joining succeeds or raises :class:`~echo2p2p.errors.JoinError` within its deadline, with the cause.
* p2pd does not outlive this process. Its lifetime is tied to the *thread* that runs the loop
  (:mod:`echo2p2p.swarm.daemon`), so that thread must last as long as the node.
* When p2pd dies or hangs it is noticed within 10 s and replaced by one with the same identity, port and
  handlers. Meanwhile every call raises :class:`~echo2p2p.errors.PeerUnreachable`.
* Only records that :func:`echo2p2p.swarm.records.check` admits are held, passed on or returned, and the
  sequence number inside the signed value decides between two of them. What the table held survives a restart.

``hivemind.DHT`` is not used: it forks, switches the fork to uvloop, and passes values through a pipe that
loses large ones. Nothing used here changes the caller's loop, loop policy or signal handlers.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Collection, Sequence
from contextvars import ContextVar
from dataclasses import dataclass, field
from importlib.resources import as_file, files
from pathlib import Path
from statistics import median
from typing import Any

import msgspec
from hivemind.dht.crypto import DHTRecord, RecordValidatorBase
from hivemind.dht.node import DHTNode
from hivemind.dht.routing import DHTID
from hivemind.dht.storage import DictionaryDHTValue
from hivemind.p2p import P2P, P2PDaemonError, P2PHandlerError, PeerID
from hivemind.p2p.p2p_daemon_bindings.utils import read_pbmsg_safe, write_pbmsg
from hivemind.proto import dht_pb2, p2pd_pb2
from hivemind.utils.logging import use_hivemind_log_handler
from hivemind.utils.multiaddr import Multiaddr
from hivemind.utils.timed_storage import ValueWithExpiration

from echo2p2p.errors import (
    DeadlineExceeded,
    JoinError,
    PeerUnreachable,
    RecordError,
    SettingsError,
    SwarmError,
    VerificationError,
)
from echo2p2p.swarm.clock import Clock, SystemClock
from echo2p2p.swarm.daemon import Daemon, NodeFolder, p2pd_arguments
from echo2p2p.swarm.identity import Identity, PeerId, public_key_of
from echo2p2p.swarm.network import PeerInfo, Stream, StreamHandler
from echo2p2p.swarm.streams import IncomingStreams, SocketStream, StreamLimits
from echo2p2p.swarm.table import Admission, Entry, RecordTable, TableLimits, key_id

logger = logging.getLogger("echo2p2p.swarm")

# hivemind writes to stderr by a handler of its own and renames the level WARNING.
use_hivemind_log_handler("nowhere")
logging.getLogger("hivemind").setLevel(logging.WARNING)
logging.addLevelName(logging.WARNING, "WARNING")


@dataclass(frozen=True)
class NodeLimits:
    """The deadlines and sizes of one node, in seconds where not said otherwise.

    ``max_clock_offset_s`` is hivemind's own bound. A dead p2pd is noticed at once, a hanging one after at most
    ``watch_period_s + health_timeout_s``. ``replicas`` is on how many other nodes a record is stored.
    """

    max_clock_offset_s: float = 3.0
    dial_timeout_s: float = 5.0
    retry_period_s: float = 1.0
    rpc_timeout_s: float = 3.0
    watch_period_s: float = 2.0
    health_timeout_s: float = 5.0
    tend_period_s: float = 30.0
    restart_within_s: float = 60.0
    close_timeout_s: float = 1.0
    replicas: int = 5
    max_known_peers: int = 50
    streams: StreamLimits = field(default_factory=StreamLimits)
    table: TableLimits = field(default_factory=TableLimits)


_sightings: ContextVar[dict[PeerId, Entry] | None] = ContextVar("_sightings", default=None)
"""Where the search of the current task collects the verified records that peers show it."""


class _Validator(RecordValidatorBase):  # type: ignore[misc]
    """hivemind's hook for each record that others ask us to store, or show us when we search."""

    def __init__(self, admission: Admission, clock: Clock) -> None:
        self._admission = admission
        self._clock = clock

    def validate(self, record: DHTRecord) -> bool:
        try:
            entry = self._admission.admit(
                record.key, record.subkey, record.value, record.expiration_time, now_unix=self._clock.unix()
            )
        except RecordError as error:
            logger.info("refused a record: %s", error)
            return False
        found = _sightings.get()
        if found is not None:
            _keep_newest(found, entry)
        return True


def _keep_newest(found: dict[PeerId, Entry], entry: Entry) -> None:
    held = found.get(entry.record.owner)
    if held is None or entry.record.sequence > held.record.sequence:
        found[entry.record.owner] = entry


class _TableStorage:
    """What hivemind's protocol takes for its storage and its cache: a face of our :class:`RecordTable`."""

    def __init__(self, table: RecordTable, admission: Admission, clock: Clock) -> None:
        self._table = table
        self._admission = admission
        self._clock = clock

    def store(self, key_id: Any, value: Any, expiration_time: float, subkey: Any = None) -> bool:
        return subkey is not None and self.store_subkey(key_id, subkey, value, expiration_time)

    def store_subkey(self, key_id: Any, subkey: Any, value: Any, expiration_time: float) -> bool:
        now, key, owner = self._clock.unix(), key_id.to_bytes(), msgspec.msgpack.encode(subkey)
        try:
            entry = self._admission.admit(key, owner, value, expiration_time, now_unix=now)
        except RecordError:
            return False
        return self._table.put(key, entry, now_unix=now)

    def get(self, key_id: Any) -> Any:
        entries = self._table.get(key_id.to_bytes(), now_unix=self._clock.unix())
        if not entries:
            return None
        # A fresh dictionary each time: hivemind changes the one it gets. Frozen: it must not drop entries by
        # the machine's clock while it is being packed.
        dictionary = DictionaryDHTValue()
        dictionary.frozen = True
        for owner, entry in entries.items():
            dictionary.store(owner, entry.value, entry.record.expires_unix)
        return ValueWithExpiration(dictionary, dictionary.latest_expiration_time)

    def items(self) -> list[tuple[Any, Any]]:
        found = ((key_id, self.get(key_id)) for key_id in map(DHTID.from_bytes, self._table.keys()))
        return [(key_id, item) for key_id, item in found if item is not None]

    def __contains__(self, key_id: Any) -> bool:
        return self.get(key_id) is not None


@dataclass(frozen=True)
class _Settings:
    identity_path: Path
    initial_peers: tuple[str, ...]
    host_maddrs: tuple[str, ...]
    announce_maddrs: tuple[str, ...]
    use_relay: bool
    use_auto_relay: bool
    client_mode: bool


@dataclass
class _Link:
    """One life of p2pd and everything that hangs on it."""

    daemon: Daemon
    p2p: Any = None
    server: asyncio.Server | None = None
    node: Any = None


class HivemindNetwork:
    """A :class:`~echo2p2p.swarm.network.Network` of real peers. Made by :meth:`join`."""

    restarts: int
    """How often p2pd has been replaced since the node joined."""

    def __init__(
        self, identity: Identity, settings: _Settings, clock: Clock, limits: NodeLimits, folder: NodeFolder
    ) -> None:
        self.restarts = 0
        self._identity = identity
        self._settings = settings
        self._clock = clock
        self._limits = limits
        self._folder = folder
        self._host_maddrs = settings.host_maddrs
        self._admission = Admission(limits.table.max_verified_cache)
        self._table = RecordTable(limits.table)
        self._storage = _TableStorage(self._table, self._admission, clock)
        self._incoming = IncomingStreams(limits.streams)
        self._opened: set[SocketStream] = set()
        self._link: _Link | None = None
        self._visible: tuple[str, ...] = ()
        self._known: dict[PeerId, tuple[str, ...]] = _by_peer(settings.initial_peers)
        self._watchdog: asyncio.Task[None] | None = None
        self._failure: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._closed = False

    @classmethod
    async def join(
        cls,
        identity_path: Path,
        *,
        initial_peers: Sequence[str] = (),
        host_maddrs: Sequence[str] = ("/ip4/127.0.0.1/tcp/0",),
        announce_maddrs: Sequence[str] = (),
        use_relay: bool = True,
        use_auto_relay: bool = False,
        startup_timeout_s: float = 30,
        clock: Clock | None = None,
        client_mode: bool = False,
        limits: NodeLimits | None = None,
    ) -> HivemindNetwork:
        """Start a node and join the swarm through any of ``initial_peers``; with none, start a swarm.

        Bootstrap peers that don't answer are dialled again until ``startup_timeout_s`` is over.

        Args:
            identity_path: the identity file; made if it does not exist.
            initial_peers: multiaddrs ending in ``/p2p/<peer id>``.
            host_maddrs: where to listen.
            announce_maddrs: what to tell others instead of the addresses listened on.
            use_relay: reach peers behind firewalls through relays.
            use_auto_relay: become reachable through a relay, for a node behind a firewall itself.
            client_mode: hold no part of the table and answer no questions about it.

        Raises:
            SettingsError: the identity file or an address is malformed.
            JoinError: no bootstrap peer answered in time, the clock is off, the identity or the address is
                in use, or p2pd does not start.
        """
        settings = _Settings(
            identity_path=identity_path,
            initial_peers=tuple(_checked_peer(address) for address in initial_peers),
            host_maddrs=tuple(_checked_maddr(address, "host") for address in host_maddrs),
            announce_maddrs=tuple(_checked_maddr(address, "announce") for address in announce_maddrs),
            use_relay=use_relay,
            use_auto_relay=use_auto_relay,
            client_mode=client_mode,
        )
        if use_auto_relay and not use_relay:
            raise SettingsError("use_auto_relay needs use_relay")
        identity = Identity.load_or_create(identity_path)
        limits = limits or NodeLimits()
        folder = NodeFolder(identity.peer_id)
        network = cls(identity, settings, clock or SystemClock(), limits, folder)
        progress = ["p2pd is still starting"]
        try:
            async with asyncio.timeout(startup_timeout_s):
                network._link = await network._launch(startup_timeout_s)
                await network._enter(network._link, progress)
        except TimeoutError:
            await network.close()
            raise JoinError(
                f"could not join within {startup_timeout_s:g} s: {progress[-1]}",
                hint="check the address and that its port is open" if initial_peers else "",
            ) from None
        except BaseException:
            await network.close()
            raise
        network._watchdog = asyncio.create_task(network._watch(), name="p2pd watchdog")
        network._watchdog.add_done_callback(network._report_watchdog)
        return network

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
        self._up()
        try:
            target = PeerID.from_base58(peer).to_bytes()
        except ValueError:
            raise PeerUnreachable(f"{peer[:64]!r} is not a peer id") from None
        request = p2pd_pb2.Request(
            type=p2pd_pb2.Request.STREAM_OPEN,
            streamOpen=p2pd_pb2.StreamOpenRequest(peer=target, proto=[protocol]),
        )
        try:
            async with asyncio.timeout(timeout_s):
                _, reader, writer = await self._request(request)
        except TimeoutError:
            raise DeadlineExceeded(f"{peer} did not open {protocol} within {timeout_s:g} s") from None
        except PeerUnreachable as error:
            raise PeerUnreachable(f"{peer} cannot be reached for {protocol}: {error.message}") from None
        stream = SocketStream(peer, reader, writer, self._limits.streams, self._opened.discard)
        self._opened.add(stream)
        return stream

    async def handle(self, protocol: str, handler: StreamHandler) -> None:
        self._up()
        self._incoming.handlers[protocol] = handler
        await self._register(protocol)

    async def store_record(self, key: str, value: bytes, *, expires_unix: float, timeout_s: float) -> bool:
        link = self._up()
        own = DHTID.from_bytes(key_id(key))
        subkey = msgspec.msgpack.encode(self.peer_id)
        now = self._clock.unix()
        entry = self._admission.admit(own.to_bytes(), subkey, value, expires_unix, now_unix=now)
        alone = not self._settings.initial_peers and not len(link.node.protocol.routing_table)
        kept = not self._settings.client_mode and self._table.put(own.to_bytes(), entry, now_unix=now)
        if alone:
            return kept
        try:
            async with asyncio.timeout(timeout_s):
                return await self._replicate(link, own, entry)
        except TimeoutError:
            return False

    async def find_records(self, key: str, *, timeout_s: float) -> dict[PeerId, bytes]:
        link = self._up()
        wanted = DHTID.from_bytes(key_id(key))
        found: dict[PeerId, Entry] = {}
        try:
            async with asyncio.timeout(timeout_s):
                await self._search(link, wanted, found)
        except TimeoutError:
            if not found:
                raise DeadlineExceeded(f"the table did not answer for {key} within {timeout_s:g} s") from None
        now = self._clock.unix()
        for entry in self._table.get(wanted.to_bytes(), now_unix=now).values():
            _keep_newest(found, entry)
        return {owner: entry.value for owner, entry in found.items() if entry.record.expires_unix > now}

    async def peers(self) -> list[PeerInfo]:
        self._up()
        response = await self._ask(p2pd_pb2.Request(type=p2pd_pb2.Request.LIST_PEERS))
        return [
            PeerInfo(PeerID(peer.id).to_base58(), tuple(str(Multiaddr(address)) for address in peer.addrs))
            for peer in response.peers
        ]

    def addresses(self) -> list[str]:
        return [f"{address}/p2p/{self.peer_id}" for address in self._visible]

    async def wait_failed(self) -> None:
        """Wait for as long as the node works; put it in the role's TaskGroup.

        Returns when the node is closed.

        Raises:
            SwarmError: p2pd is gone and could not be replaced within ``restart_within_s``.
        """
        await asyncio.shield(self._failure)

    async def close(self) -> None:
        if self._closed:
            return
        self._closed = True
        if self._watchdog is not None:
            self._watchdog.cancel()
            await asyncio.wait([self._watchdog], timeout=self._limits.close_timeout_s)
        link, self._link = self._link, None
        if link is not None:
            await self._end(link)
        self._folder.release()
        if not self._failure.done():
            self._failure.set_result(None)

    # The table

    async def _search(self, link: _Link, wanted: Any, found: dict[PeerId, Entry]) -> dict[Any, Any]:
        """Ask the nodes nearest to a key, collecting what they hold; returns them, nearest first.

        hivemind's own ``get`` orders records by expiry and serves its cache; here every node asked on the way
        shows what it has, and the validator keeps what is genuine and newest.
        """
        context = _sightings.set(found)
        try:
            nearest = await link.node.find_nearest_nodes([wanted], exclude_self=True)
        finally:
            _sightings.reset(context)
        return {node: peer for node, peer in nearest[wanted].items() if peer not in link.node.blacklist}

    async def _replicate(self, link: _Link, key: Any, entry: Entry) -> bool:
        """Store a record on the nearest nodes that answer; whether at least one of them holds it now."""
        candidates = list((await self._search(link, key, {})).values())
        holders = 0
        while candidates and holders < self._limits.replicas:
            batch = [candidates.pop(0) for _ in range(min(len(candidates), self._limits.replicas - holders))]
            answers = await asyncio.gather(
                *(
                    link.node.protocol.call_store(
                        peer, [key], [entry.value], [entry.record.expires_unix], [self.peer_id]
                    )
                    for peer in batch
                )
            )
            holders += sum(bool(answer and answer[0]) for answer in answers)
        return holders > 0

    # p2pd

    def _up(self) -> _Link:
        if self._closed:
            raise PeerUnreachable("this node has left the swarm")
        if self._link is None:
            raise PeerUnreachable("p2pd is being restarted", hint="try again in a few seconds")
        return self._link

    async def _request(self, request: Any) -> tuple[Any, asyncio.StreamReader, asyncio.StreamWriter]:
        """Send p2pd a request over a new connection, which stays open.

        Raises:
            PeerUnreachable: p2pd says no, or is not there.
        """
        writer = None
        try:
            reader, writer = await asyncio.open_unix_connection(
                self._folder.control_socket, limit=self._limits.streams.buffer_bytes
            )
            await write_pbmsg(writer, request)
            response = p2pd_pb2.Response()
            await read_pbmsg_safe(reader, response)
            if response.type == p2pd_pb2.Response.ERROR:
                raise PeerUnreachable(response.error.msg)
        except BaseException as error:
            if writer is not None:
                writer.transport.abort()
            if isinstance(error, OSError | EOFError) and not isinstance(error, TimeoutError):
                raise PeerUnreachable(f"p2pd does not answer: {error}") from error
            raise
        return response, reader, writer

    async def _ask(self, request: Any) -> Any:
        """One request to p2pd and its response, within the health deadline."""
        try:
            async with asyncio.timeout(self._limits.health_timeout_s):
                response, _, writer = await self._request(request)
        except TimeoutError:
            raise PeerUnreachable(f"p2pd did not answer within {self._limits.health_timeout_s:g} s") from None
        writer.transport.abort()
        return response

    async def _identify(self) -> PeerId:
        """Ask p2pd who and where it is."""
        response = await self._ask(p2pd_pb2.Request(type=p2pd_pb2.Request.IDENTIFY))
        self._visible = tuple(str(Multiaddr(address)) for address in response.identify.addrs)
        return PeerID(response.identify.id).to_base58()

    async def _register(self, protocol: str) -> None:
        """Tell p2pd to pass streams of ``protocol`` on to us."""
        address = Multiaddr(f"/unix{self._folder.stream_socket}").to_bytes()
        handler = p2pd_pb2.StreamHandlerRequest(addr=address, proto=[protocol], balanced=False)
        await self._ask(p2pd_pb2.Request(type=p2pd_pb2.Request.STREAM_HANDLER, streamHandler=handler))

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Serve one stream that p2pd passes on; runs in a task of its own."""
        info = p2pd_pb2.StreamInfo()
        try:
            async with asyncio.timeout(self._limits.health_timeout_s):
                await read_pbmsg_safe(reader, info)
            remote = PeerID(info.peer).to_base58()
            public_key_of(remote)
        except (OSError, EOFError, VerificationError) as error:
            logger.info("refused a stream: %s", error)
            writer.transport.abort()
            return
        await self._incoming.serve(info.proto, SocketStream(remote, reader, writer, self._limits.streams))

    async def _launch(self, timeout_s: float) -> _Link:
        """Start p2pd and a DHT node on it, without any peer yet."""
        settings = self._settings
        self._folder.remove_sockets()
        with as_file(files("hivemind") / "hivemind_cli" / "p2pd") as binary:
            arguments = p2pd_arguments(
                self._folder,
                settings.identity_path,
                host_maddrs=self._host_maddrs,
                announce_maddrs=settings.announce_maddrs,
                relays=settings.initial_peers,
                use_relay=settings.use_relay,
                use_auto_relay=settings.use_auto_relay,
                client_mode=settings.client_mode,
            )
            link = _Link(await Daemon.start(binary, arguments, timeout_s=timeout_s))
        try:
            if (peer := await self._identify()) != self.peer_id:
                raise JoinError(f"p2pd took {settings.identity_path} for {peer}, it is {self.peer_id}")
            link.server = await asyncio.start_unix_server(
                self._accept, self._folder.stream_socket, limit=self._limits.streams.buffer_bytes
            )
            link.p2p = await P2P.replicate(Multiaddr(f"/unix{self._folder.control_socket}"))
            link.node = await DHTNode.create(
                link.p2p,
                # Following from the peer id, the node keeps its place in the table across restarts.
                node_id=DHTID.from_bytes(key_id(self.peer_id)),
                num_replicas=self._limits.replicas,
                wait_timeout=self._limits.rpc_timeout_s,
                client_mode=settings.client_mode,
                record_validator=_Validator(self._admission, self._clock),
            )
            link.node.protocol.storage = link.node.protocol.cache = self._storage
            for protocol in self._incoming.handlers:
                await self._register(protocol)
        except BaseException:
            await self._end(link)
            raise
        self._host_maddrs = _with_port(self._host_maddrs, self._visible)
        return link

    async def _end(self, link: _Link) -> None:
        """End everything that hangs on one life of p2pd; takes less than two close timeouts."""
        if link.server is not None:
            link.server.close()
        await self._incoming.close(self._limits.close_timeout_s)
        for stream in tuple(self._opened):
            stream.abort()
        if link.node is not None:
            link.node.is_alive = False
        if link.p2p is not None:
            control = link.p2p._client.control
            await link.p2p.shutdown()
            # The connection may have broken before it was closed; that error is no news.
            await asyncio.gather(control._read_task, control._write_task, return_exceptions=True)
        await link.daemon.stop()

    # Membership

    async def _enter(self, link: _Link, progress: list[str]) -> None:
        """Join through the initial peers, trying again until one answers; the caller sets the deadline.

        Raises:
            JoinError: peers answer, but the clock is off or they cannot reach us.
        """
        if not self._settings.initial_peers:
            return
        named = ", ".join(self._settings.initial_peers)
        while True:
            failures = await self._dial(_by_peer(self._settings.initial_peers))
            progress.append(f"no bootstrap peer answered, of {named}: {'; '.join(failures.values())}")
            answers = await self._greet(link, _by_peer(self._settings.initial_peers).keys() - failures.keys())
            if answers:
                break
            logger.warning("%s; trying again", progress[-1])
            await asyncio.sleep(self._limits.retry_period_s)
        offset = median(answer.offset_s for answer in answers)
        if abs(offset) > self._limits.max_clock_offset_s:
            raise JoinError(
                f"this machine's clock is {abs(offset):.1f} s {'ahead of' if offset < 0 else 'behind'} the swarm's,"
                f" {self._limits.max_clock_offset_s:g} s are allowed",
                hint="set the clock, by NTP for example",
            )
        if not any(answer.available for answer in answers):
            raise JoinError(
                "the bootstrap peers cannot reach this node",
                hint="open the port of --host-maddrs and name it in --announce-maddrs, or pass --use-auto-relay",
            )
        progress.append("the search for neighbours takes too long")
        await link.node.find_nearest_nodes([link.node.node_id])

    async def _dial(self, addresses: dict[PeerId, tuple[str, ...]]) -> dict[PeerId, str]:
        """Connect to peers, all at once; returns why not, for those that did not answer."""

        async def dial(peer: PeerId, maddrs: tuple[str, ...]) -> str:
            connect = p2pd_pb2.ConnectRequest(
                peer=PeerID.from_base58(peer).to_bytes(),
                addrs=[Multiaddr(address).to_bytes() for address in maddrs],
            )
            try:
                await self._ask(p2pd_pb2.Request(type=p2pd_pb2.Request.CONNECT, connect=connect))
            except PeerUnreachable as error:
                return error.message
            return ""

        reasons = await asyncio.gather(*(dial(peer, maddrs) for peer, maddrs in addresses.items()))
        return {peer: reason for peer, reason in zip(addresses, reasons, strict=True) if reason}

    async def _greet(self, link: _Link, peers: Collection[PeerId]) -> list[_Answer]:
        """Ping peers of the table, all at once, and take those that answer into the routing table."""

        async def greet(peer: PeerId) -> _Answer | None:
            protocol, target = link.node.protocol, PeerID.from_base58(peer)
            request = dht_pb2.PingRequest(peer=protocol.node_info, validate=not self._settings.client_mode)
            sent = self._clock.unix()
            try:
                response = await protocol.get_stub(target).rpc_ping(
                    request, timeout=self._limits.rpc_timeout_s
                )
            except (OSError, P2PDaemonError, P2PHandlerError):  # TimeoutError is an OSError
                return None
            if not response.peer.node_id:
                return None
            middle = (sent + self._clock.unix()) / 2
            await protocol.update_routing_table(
                DHTID.from_bytes(response.peer.node_id), target, responded=True
            )
            available = response.available or self._settings.client_mode
            return _Answer(offset_s=response.dht_time - middle, available=available)

        return [answer for answer in await asyncio.gather(*map(greet, peers)) if answer is not None]

    async def _tend(self, link: _Link) -> None:
        """Remember who is connected, and dial and greet those who should be: a split swarm heals by this."""
        for info in await self.peers():
            self._known.pop(info.peer, None)
            self._known[info.peer] = tuple(address for address in info.addresses if address)
        initial = _by_peer(self._settings.initial_peers)
        while len(self._known) > self._limits.max_known_peers:
            del self._known[next(peer for peer in self._known if peer not in initial)]
        lonely = not len(link.node.protocol.routing_table)
        wanted = self._known | initial if lonely else initial
        if wanted:
            failures = await self._dial(wanted)
            await self._greet(link, wanted.keys() - failures.keys())
        if lonely and len(link.node.protocol.routing_table):
            await link.node.find_nearest_nodes([link.node.node_id])

    # Supervision

    async def _watch(self) -> None:
        """Notice that p2pd died or hangs, and replace it; ends with the node or when that fails."""
        tended = self._clock.monotonic()
        while True:
            link = self._up()
            if not await link.daemon.wait_ended(self._limits.watch_period_s) and await self._healthy():
                lonely = self._known and not len(link.node.protocol.routing_table)
                if lonely or self._clock.monotonic() - tended > self._limits.tend_period_s:
                    tended = self._clock.monotonic()
                    with contextlib.suppress(PeerUnreachable):
                        await self._tend(link)
                continue
            logger.warning("p2pd (pid %d) died or hangs; starting another", link.daemon.pid)
            self._link = None
            await self._end(link)
            link = await self._relaunch()
            self._link = link
            self.restarts += 1
            with contextlib.suppress(PeerUnreachable):
                await self._tend(link)

    async def _healthy(self) -> bool:
        try:
            return await self._identify() == self.peer_id
        except PeerUnreachable:
            return False

    async def _relaunch(self) -> _Link:
        """Start p2pd again, as often as it takes.

        Raises:
            SwarmError: it did not work within ``restart_within_s``.
        """
        deadline = self._clock.monotonic() + self._limits.restart_within_s
        while True:
            try:
                return await self._launch(self._limits.restart_within_s / 3)
            except (SwarmError, OSError, EOFError) as error:
                if self._clock.monotonic() > deadline:
                    raise SwarmError(
                        f"p2pd could not be restarted within {self._limits.restart_within_s:g} s: {error}"
                    ) from error
                logger.warning("p2pd did not start: %s; trying again", error)
            await asyncio.sleep(self._limits.retry_period_s)

    def _report_watchdog(self, watchdog: asyncio.Task[None]) -> None:
        error = None if watchdog.cancelled() else watchdog.exception()
        if error is None or self._failure.done():
            return
        logger.error("the network failed: %s", error, exc_info=error)
        if not isinstance(error, SwarmError):
            error = SwarmError(f"the supervision of p2pd failed: {error!r}")
        self._failure.set_exception(error)
        self._failure.exception()  # marks it as seen, for nobody may be waiting


@dataclass(frozen=True)
class _Answer:
    """What a bootstrap peer said: how far its clock is ahead of ours, and whether it can reach us."""

    offset_s: float
    available: bool


def _checked_maddr(address: str, kind: str) -> str:
    try:
        names = [protocol.name for protocol in Multiaddr(address).protocols()]
    except ValueError as error:
        raise SettingsError(
            f"{kind} address {address!r} is not a multiaddr: {error}", hint="such as /ip4/0.0.0.0/tcp/31337"
        ) from None
    if not names or (kind == "announce" and any(part in address + "/" for part in ("/tcp/0/", "/udp/0/"))):
        raise SettingsError(f"{kind} address {address!r} names no port")
    return address


def _checked_peer(address: str) -> str:
    _checked_maddr(address, "bootstrap")
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


def _by_peer(addresses: Sequence[str]) -> dict[PeerId, tuple[str, ...]]:
    """Addresses ending in a peer id, by that peer, without it."""
    grouped: dict[PeerId, tuple[str, ...]] = {}
    for address in addresses:
        head, _, peer = address.rpartition("/p2p/")
        grouped[peer] = (*grouped.get(peer, ()), head)
    return grouped


def _with_port(host_maddrs: tuple[str, ...], visible: tuple[str, ...]) -> tuple[str, ...]:
    """``host_maddrs`` with the port that the system chose in place of 0, so that a restart keeps the address."""
    ports = {address.split("/tcp/")[1].split("/")[0] for address in visible if "/tcp/" in address}
    open_ports = [address for address in host_maddrs if address.endswith("/tcp/0")]
    if len(ports) != 1 or len(open_ports) != 1:
        return host_maddrs
    port = ports.pop()
    return tuple(a.removesuffix("0") + port if a in open_ports else a for a in host_maddrs)
