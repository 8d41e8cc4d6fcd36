"""The public face of the real network: streams, handlers and records on a supervised :class:`Node`."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import logging
from collections.abc import Sequence
from pathlib import Path

import msgspec

from echo2p2p.errors import (
    DeadlineExceeded,
    JoinError,
    NotSpoken,
    PeerUnreachable,
    SettingsError,
    SwarmError,
    VerificationError,
)
from echo2p2p.swarm.clock import Clock, SystemClock
from echo2p2p.swarm.hivemind.connection import Connection
from echo2p2p.swarm.hivemind.control import (
    by_peer,
    checked_maddr,
    checked_peer,
    read_stream_info,
    with_port,
)
from echo2p2p.swarm.hivemind.daemon import NodeFolder
from echo2p2p.swarm.hivemind.node import Answer, Node, NodeLimits, NodeSettings
from echo2p2p.swarm.hivemind.streams import IncomingStreams, SocketStream
from echo2p2p.swarm.hivemind.table import Admission, Entry, RecordTable, key_id
from echo2p2p.swarm.hivemind.validation import keep_newest
from echo2p2p.swarm.identity import Identity, PeerId, public_key_of
from echo2p2p.swarm.network import PeerInfo, Stream, StreamHandler

logger = logging.getLogger("echo2p2p.swarm")

_NOT_SPOKEN = "protocols not supported"
"""What libp2p says of a peer that it has reached and that does not speak the protocol."""


class HivemindNetwork:
    """A :class:`~echo2p2p.swarm.network.Network` of real peers; made by :meth:`join`."""

    restarts: int
    """How often p2pd has been replaced since the node joined."""

    def __init__(self, identity: Identity, settings: NodeSettings, folder: NodeFolder) -> None:
        self.restarts = 0
        self._identity = identity
        self._settings = settings
        self._clock = settings.clock
        self._limits = settings.limits
        self._folder = folder
        self._admission = Admission(settings.limits.table.max_verified_cache)
        self._table = RecordTable(settings.limits.table)
        self._incoming = IncomingStreams(settings.limits.streams)
        self._opened: set[SocketStream] = set()
        self._accepting: set[asyncio.Task[None]] = set()
        self._known = by_peer(settings.initial_peers)
        self._said: dict[PeerId, tuple[str, ...]] = {}
        self._node: Node | None = None
        self._visible: tuple[str, ...] = ()
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
            initial_peers: multiaddrs of bootstrap peers, ending in ``/p2p/<peer id>``.
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
        if use_auto_relay and not use_relay:
            raise SettingsError("use_auto_relay needs use_relay")
        checked = [checked_peer(address) for address in initial_peers]
        identity = Identity.load_or_create(identity_path)
        settings = NodeSettings(
            identity_path=identity_path,
            # A bootstrap peer may be given the same list as everybody else, with itself on it.
            initial_peers=tuple(peer for peer in checked if not peer.endswith(f"/{identity.peer_id}")),
            host_maddrs=tuple(checked_maddr(address, "host") for address in host_maddrs),
            announce_maddrs=tuple(checked_maddr(address, "announce") for address in announce_maddrs),
            use_relay=use_relay,
            use_auto_relay=use_auto_relay,
            client_mode=client_mode,
            clock=clock or SystemClock(),
            limits=limits or NodeLimits(),
        )
        network = cls(identity, settings, NodeFolder(identity.peer_id))
        progress = ["p2pd is still starting"]
        try:
            async with asyncio.timeout(startup_timeout_s):
                network._node = await network._launch(settings, startup_timeout_s)
                await network._node.enter(progress)
        except TimeoutError:
            await network.close()
            raise JoinError(
                f"could not join within {startup_timeout_s:g} s: {progress[-1]}",
                hint="check the addresses, and that their ports are open" if settings.initial_peers else "",
            ) from None
        except PeerUnreachable as error:
            await network.close()
            raise JoinError(f"p2pd fails while it starts: {error.message}") from error
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

    # Streams

    async def open_stream(self, peer: PeerId, protocol: str, *, timeout_s: float) -> Stream:
        node = self._up()
        try:
            public_key_of(peer)
            async with asyncio.timeout(timeout_s):
                connection = await self._open(node, peer, protocol)
        except TimeoutError:
            raise DeadlineExceeded(f"{peer} did not open {protocol} within {timeout_s:g} s") from None
        except (PeerUnreachable, VerificationError) as error:
            if _NOT_SPOKEN in error.message:
                raise NotSpoken(f"{peer} does not speak {protocol}") from None
            raise PeerUnreachable(f"{peer} cannot be reached for {protocol}: {error.message}") from None
        stream = SocketStream(peer, connection, self._limits.streams, self._opened.discard, dialled=True)
        self._opened.add(stream)
        return stream

    def know(self, peer: PeerId, addresses: Sequence[str]) -> None:
        usable = by_peer([address for address in addresses if _names_a_peer(address)]).get(peer)
        if usable:
            self._said.pop(peer, None)
            self._said[peer] = usable
            while len(self._said) > self._limits.max_said_addresses:
                del self._said[next(iter(self._said))]

    async def _open(self, node: Node, peer: PeerId, protocol: str) -> Connection:
        """Open a stream; where libp2p's routing does not find the peer, dial where it said that it is.

        Routing gives no address of a peer that its neighbours see under another kind of address (private,
        public) than it announces, though that address may be a good one.
        """
        try:
            return await node.control.open(peer, protocol)
        except PeerUnreachable:
            if peer not in self._said:
                raise
        await node.control.connect(peer, self._said[peer])
        return await node.control.open(peer, protocol)

    async def handle(self, protocol: str, handler: StreamHandler) -> None:
        node = self._up()
        handlers = self._incoming.handlers
        known = protocol in handlers
        handlers[protocol] = handler
        if known:  # p2pd passes its streams on already
            return
        try:
            await node.register(protocol)
        except BaseException:
            del handlers[protocol]
            raise

    def _accept(self, connection: Connection) -> None:
        """Serve one connection from p2pd that stands for an incoming stream, in a task of its own."""
        task = asyncio.get_running_loop().create_task(self._accept_one(connection))
        self._accepting.add(task)
        task.add_done_callback(self._accepted)

    def _accepted(self, task: asyncio.Task[None]) -> None:
        self._accepting.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            logger.error("serving an incoming stream failed", exc_info=error)

    async def _accept_one(self, connection: Connection) -> None:
        try:
            async with asyncio.timeout(self._limits.health_timeout_s):
                remote, protocol = await read_stream_info(connection)
            public_key_of(remote)
        except (OSError, EOFError, VerificationError) as error:  # TimeoutError is an OSError
            logger.info("refused a stream: %s", error)
            connection.transport.abort()
            return
        await self._incoming.serve(
            protocol, SocketStream(remote, connection, self._limits.streams, dialled=False)
        )

    # Records

    async def store_record(self, key: str, value: bytes, *, expires_unix: float, timeout_s: float) -> bool:
        node = self._up()
        key_bytes, subkey = key_id(key), msgspec.msgpack.encode(self.peer_id)
        now = self._clock.unix()
        entry = self._admission.admit(key_bytes, subkey, value, expires_unix, now_unix=now)
        kept = not self._settings.client_mode and self._table.put(key_bytes, entry, now_unix=now)
        # Who joined through others needs one of them to hold it: a node cut off must not report success.
        if node.lonely and not self._settings.initial_peers:
            return kept
        try:
            async with asyncio.timeout(timeout_s):
                return await node.replicate(key_bytes, entry)
        except TimeoutError:
            return False

    async def find_records(self, key: str, *, timeout_s: float) -> dict[PeerId, bytes]:
        node = self._up()
        key_bytes = key_id(key)
        found: dict[PeerId, Entry] = {}
        try:
            async with asyncio.timeout(timeout_s):
                if node.lonely and self._settings.initial_peers:
                    await self._tend(node)
                await node.search(key_bytes, found)
        except TimeoutError:
            if not found:
                raise DeadlineExceeded(f"the table did not answer for {key} within {timeout_s:g} s") from None
        if node.lonely and self._settings.initial_peers:
            raise PeerUnreachable("no other node of the table can be reached", hint="check the connection")
        now = self._clock.unix()
        for entry in self._table.get(key_bytes, now_unix=now).values():
            keep_newest(found, entry)
        return {owner: entry.value for owner, entry in found.items() if entry.record.expires_unix > now}

    # Membership

    async def peers(self) -> list[PeerInfo]:
        return await self._up().control.peers()

    async def ping(self, addresses: Sequence[str], *, timeout_s: float) -> Answer:
        """Connect to one peer of the table and ask it for its clock; for those who look for faults.

        The round trip is that of the first request after the connection stands. Unless this node is in client mode,
        the peer sees meanwhile whether it can reach this node.

        Args:
            addresses: all of one peer, each ending in ``/p2p/<peer id>``.

        Raises:
            SettingsError: an address is malformed.
            PeerUnreachable: it does not answer within ``timeout_s``, or is no node of the table.
        """
        node, grouped = self._up(), by_peer([checked_peer(address) for address in addresses])
        try:
            async with asyncio.timeout(timeout_s):
                answers, failures = await node.reach(grouped)
        except TimeoutError:
            raise PeerUnreachable(f"no answer within {timeout_s:g} s") from None
        if not answers:
            raise PeerUnreachable("; ".join(failures.values()))
        return answers[0]

    def addresses(self) -> list[str]:
        return [f"{address}/p2p/{self.peer_id}" for address in self._visible]

    async def wait_failed(self) -> None:
        """Wait for as long as the node works; for the TaskGroup of the role. Returns when the node is closed.

        Raises:
            SwarmError: p2pd is gone and could not be replaced within ``restart_within_s``.
        """
        await asyncio.shield(self._failure)

    async def close(self) -> None:
        if self._closed:
            return
        self._closed = True
        try:
            if self._watchdog is not None:
                self._watchdog.cancel()
                await asyncio.wait([self._watchdog], timeout=self._limits.close_timeout_s)
        finally:
            node, self._node = self._node, None
            if node is not None:
                await self._end(node)
            self._folder.release()
            if not self._failure.done():
                self._failure.set_result(None)

    async def _tend(self, node: Node) -> None:
        """Remember who is connected, and reach for those who should be; a split swarm heals by this."""
        initial = by_peer(self._settings.initial_peers)
        for info in await node.control.peers():
            if info.peer not in initial:
                self._known.pop(info.peer, None)
                self._known[info.peer] = info.addresses
        for peer in [peer for peer in self._known if peer not in initial][: -self._limits.max_known_peers]:
            del self._known[peer]
        was_lonely = node.lonely
        if wanted := self._known if was_lonely else initial:
            await node.reach(wanted)
        if was_lonely and not node.lonely:
            await node.meet_neighbours()

    # Supervision

    def _up(self) -> Node:
        if self._closed:
            raise PeerUnreachable("this node has left the swarm")
        if self._node is None:
            raise PeerUnreachable("p2pd is being restarted", hint="try again in a few seconds")
        return self._node

    async def _launch(self, settings: NodeSettings, timeout_s: float) -> Node:
        node = await Node.start(
            self.peer_id,
            settings,
            self._folder,
            self._accept,
            self._admission,
            self._table,
            timeout_s=timeout_s,
        )
        try:
            for protocol in self._incoming.handlers:
                await node.register(protocol)
        except BaseException:
            await node.end()
            raise
        self._visible = node.visible
        return node

    async def _end(self, node: Node) -> None:
        """End a node, the handlers that run on it and the streams that were opened over it."""
        try:
            await self._incoming.close(self._limits.close_timeout_s)
            for stream in tuple(self._opened):
                stream.abort()
        finally:
            await node.end()

    async def _watch(self) -> None:
        """Notice that p2pd died or hangs, and replace it; ends with the network, or when that fails."""
        tended = self._clock.monotonic()
        while True:
            node = self._up()
            ended = await node.daemon.wait_ended(self._limits.watch_period_s)
            # Asked twice: the first deadline also passes when it was our own loop that stood still.
            if not ended and (await node.healthy() or await node.healthy()):
                self._visible = node.visible
                now = self._clock.monotonic()
                if (node.lonely and self._known) or now - tended > self._limits.tend_period_s:
                    tended = now
                    with contextlib.suppress(PeerUnreachable):
                        await self._tend(node)
                continue
            logger.warning(
                "p2pd (pid %d) %s; starting another", node.daemon.pid, "died" if ended else "hangs"
            )
            self._node = None
            await self._end(node)
            node = await self._relaunch(with_port(self._settings.host_maddrs, self._visible))
            self._node = node
            self.restarts += 1
            with contextlib.suppress(PeerUnreachable):
                await self._tend(node)

    async def _relaunch(self, host_maddrs: tuple[str, ...]) -> Node:
        """Start p2pd again, as often as it takes; first at its old port, where others look for it.

        Raises:
            SwarmError: it did not work within ``restart_within_s``.
        """
        settings = dataclasses.replace(self._settings, host_maddrs=host_maddrs)
        start, allowed = self._clock.monotonic(), self._limits.restart_within_s
        while True:
            try:
                return await self._launch(settings, allowed / 3)
            except (SwarmError, OSError, EOFError) as error:
                waited = self._clock.monotonic() - start
                if waited > allowed:
                    raise SwarmError(f"p2pd could not be restarted within {allowed:g} s: {error}") from error
                if waited > allowed / 2:
                    settings = self._settings
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


def _names_a_peer(address: str) -> bool:
    """Whether what a peer said of itself is a multiaddr that ends in a peer id."""
    try:
        checked_peer(address)
    except SettingsError:
        return False
    return True
