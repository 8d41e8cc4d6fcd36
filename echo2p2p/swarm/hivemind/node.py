"""One life of p2pd with a DHT node on it: its start, its place among the peers, its end."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from importlib.resources import as_file, files
from pathlib import Path
from statistics import median
from typing import Any

from hivemind.dht.node import DHTNode
from hivemind.dht.routing import DHTID
from hivemind.p2p import P2P, P2PDaemonError, P2PHandlerError, PeerID
from hivemind.proto import dht_pb2
from hivemind.utils.multiaddr import Multiaddr

from echo2p2p.errors import JoinError, PeerUnreachable
from echo2p2p.swarm.clock import Clock
from echo2p2p.swarm.hivemind.connection import Connection
from echo2p2p.swarm.hivemind.control import Control, by_peer
from echo2p2p.swarm.hivemind.daemon import Daemon, NodeFolder, check_ports_free, p2pd_arguments
from echo2p2p.swarm.hivemind.streams import StreamLimits
from echo2p2p.swarm.hivemind.table import Admission, Entry, RecordTable, TableLimits, key_id
from echo2p2p.swarm.hivemind.validation import TableStorage, Validator, sightings
from echo2p2p.swarm.identity import PeerId

logger = logging.getLogger("echo2p2p.swarm")

Accept = Callable[[Connection], None]


@dataclass(frozen=True)
class NodeLimits:
    """The deadlines and sizes of one node, in seconds where not said otherwise.

    ``max_clock_offset_s`` is hivemind's own bound. ``grace_s`` is how long a node that one bootstrap peer has
    answered waits for the others. A dead p2pd is noticed at once, a hanging one after at most
    ``watch_period_s + 2 * health_timeout_s``. ``tend_period_s`` is how often bootstrap peers are dialled
    again. ``replicas`` is on how many other nodes a record is stored.
    """

    max_clock_offset_s: float = 3.0
    grace_s: float = 0.5
    retry_period_s: float = 1.0
    rpc_timeout_s: float = 3.0
    watch_period_s: float = 2.0
    health_timeout_s: float = 3.5
    tend_period_s: float = 30.0
    restart_within_s: float = 60.0
    close_timeout_s: float = 1.0
    replicas: int = 5
    max_known_peers: int = 50
    max_said_addresses: int = 4096
    streams: StreamLimits = field(default_factory=StreamLimits)
    table: TableLimits = field(default_factory=TableLimits)


@dataclass(frozen=True)
class NodeSettings:
    """How a node is set up; see :meth:`HivemindNetwork.join`. Addresses have been checked."""

    identity_path: Path
    initial_peers: tuple[str, ...]
    host_maddrs: tuple[str, ...]
    announce_maddrs: tuple[str, ...]
    use_relay: bool
    use_auto_relay: bool
    client_mode: bool
    clock: Clock
    limits: NodeLimits


@dataclass(frozen=True)
class Answer:
    """What a bootstrap peer said: how far its clock is ahead of ours, whether it can reach us, and how soon."""

    offset_s: float
    available: bool
    round_trip_s: float


class Node:
    """p2pd, the server for the streams that it passes on, and hivemind's DHT protocol on top."""

    def __init__(
        self, peer_id: PeerId, settings: NodeSettings, folder: NodeFolder, daemon: Daemon, control: Control
    ) -> None:
        self.daemon = daemon
        self.control = control
        self.visible: tuple[str, ...] = ()
        """The addresses that p2pd listens on or announces, without its peer id."""
        self._peer_id = peer_id
        self._settings = settings
        self._limits = settings.limits
        self._folder = folder
        self._server: asyncio.Server | None = None
        self._p2p: Any = None
        self._dht: Any = None

    @classmethod
    async def start(
        cls,
        peer_id: PeerId,
        settings: NodeSettings,
        folder: NodeFolder,
        accept: Accept,
        admission: Admission,
        table: RecordTable,
        *,
        timeout_s: float,
    ) -> Node:
        """Start p2pd and a DHT node on it, without any peer yet.

        Args:
            accept: serves a connection that stands for an incoming stream.
            admission: the rule for the records that others bring.
            table: where this node keeps its part of the table.

        Raises:
            JoinError: p2pd does not start, or not with this identity.
            PeerUnreachable: it does not answer.
        """
        limits = settings.limits
        folder.remove_sockets()
        check_ports_free(settings.host_maddrs)
        with as_file(files("hivemind") / "hivemind_cli" / "p2pd") as binary:
            arguments = p2pd_arguments(
                folder,
                settings.identity_path,
                host_maddrs=settings.host_maddrs,
                announce_maddrs=settings.announce_maddrs,
                relays=settings.initial_peers,
                use_relay=settings.use_relay,
                use_auto_relay=settings.use_auto_relay,
                client_mode=settings.client_mode,
            )
            daemon = await Daemon.start(binary, arguments, timeout_s=timeout_s)
        control = Control(folder.control_socket, timeout_s=limits.health_timeout_s)
        node = cls(peer_id, settings, folder, daemon, control)
        try:
            if not await node.healthy():
                raise JoinError(f"p2pd did not take the identity {settings.identity_path}")
            node._server = await asyncio.get_running_loop().create_unix_server(
                partial(Connection, accept), str(folder.stream_socket)
            )
            await node._start_dht(admission, table)
        except BaseException:
            await node.end()
            raise
        return node

    async def _start_dht(self, admission: Admission, table: RecordTable) -> None:
        settings = self._settings
        self._p2p = await P2P.replicate(Multiaddr(f"/unix{self._folder.control_socket}"))
        self._dht = await DHTNode.create(
            self._p2p,
            # Following from the peer id, the node keeps its place in the table across restarts.
            node_id=DHTID.from_bytes(key_id(self._peer_id)),
            num_replicas=self._limits.replicas,
            wait_timeout=self._limits.rpc_timeout_s,
            client_mode=settings.client_mode,
            record_validator=Validator(admission, settings.clock),
        )
        storage = TableStorage(table, admission, settings.clock)
        self._dht.protocol.storage = self._dht.protocol.cache = storage

    async def healthy(self) -> bool:
        """Whether p2pd answers and is who it should be; refreshes ``visible``."""
        try:
            peer, self.visible = await self.control.identify()
        except PeerUnreachable:
            return False
        return peer == self._peer_id

    async def register(self, protocol: str) -> None:
        """Have streams of ``protocol`` passed on to ``accept``."""
        await self.control.register(protocol, self._folder.stream_socket)

    @property
    def lonely(self) -> bool:
        """Whether no other node of the table is known."""
        return not self._dht.protocol.routing_table.uid_to_peer_id

    async def end(self) -> None:
        """End p2pd and everything that hangs on it, within about a second."""
        try:
            if self._server is not None:
                self._server.close()
            if self._dht is not None:
                self._dht.is_alive = False
            if self._p2p is not None:
                control = self._p2p._client.control  # noqa: SLF001 - hivemind leaves these tasks unwatched
                await self._p2p.shutdown()
                # Their connection may have broken before it was closed; that error is no news.
                await asyncio.gather(control._read_task, control._write_task, return_exceptions=True)  # noqa: SLF001
        finally:
            await self.daemon.stop()

    # Membership

    async def enter(self, progress: list[str]) -> None:
        """Join through the initial peers, trying again until one answers; the caller sets the deadline.

        Args:
            progress: takes a line on what is being waited for, for the error when the deadline comes.

        Raises:
            JoinError: peers answer, but the clock is off or they cannot reach us.
        """
        initial = by_peer(self._settings.initial_peers)
        if not initial:
            return
        progress.append(f"no answer from the bootstrap peers {', '.join(self._settings.initial_peers)}")
        while True:
            answers, failures = await self.reach(initial)
            if answers:
                break
            if len(progress) < 3:  # afterwards p2pd says no more than that it dialled them a moment ago
                why = "; ".join(f"{peer}: {reason}" for peer, reason in failures.items())
                progress += [f"no bootstrap peer answers: {why}"]
                logger.warning("%s; trying again", progress[-1])
            await asyncio.sleep(self._limits.retry_period_s)
        offset = median(answer.offset_s for answer in answers)
        if abs(offset) > self._limits.max_clock_offset_s:
            side = "behind" if offset > 0 else "ahead of"
            raise JoinError(
                f"this machine's clock is {abs(offset):.1f} s {side} the swarm's,"
                f" {self._limits.max_clock_offset_s:g} s are allowed",
                hint="set the clock, for example by NTP",
            )
        if not any(answer.available for answer in answers):
            raise JoinError(
                "the bootstrap peers cannot reach this node",
                hint="open its port and name it in --announce-maddrs, or use --use-auto-relay",
            )
        progress.append("the search for neighbours in the table takes too long")
        await self.meet_neighbours()

    async def meet_neighbours(self) -> None:
        """Fill the routing table with the nodes nearest to this one."""
        await self._dht.find_nearest_nodes([self._dht.node_id])

    async def reach(self, peers: Mapping[PeerId, tuple[str, ...]]) -> tuple[list[Answer], dict[PeerId, str]]:
        """Connect to peers and ping them, all at once, and take those that answer into the routing table.

        Once one has answered the others have ``grace_s`` left.

        Args:
            peers: addresses by peer.

        Returns:
            The answers, and for the other peers why there is none.
        """
        tasks = {asyncio.create_task(self._reach(peer, addresses)): peer for peer, addresses in peers.items()}
        try:
            pending = set(tasks)
            while pending and not any(task.done() and _answered(task) for task in tasks):
                _, pending = await asyncio.wait(pending, return_when=asyncio.FIRST_COMPLETED)
            if pending:
                await asyncio.wait(pending, timeout=self._limits.grace_s)
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
        answers = [task.result() for task in tasks if _answered(task)]
        failures = {peer: _failure(task) for task, peer in tasks.items() if not _answered(task)}
        return answers, failures

    async def _reach(self, peer: PeerId, addresses: tuple[str, ...]) -> Answer:
        await self.control.connect(peer, addresses)
        settings, protocol, target = self._settings, self._dht.protocol, PeerID.from_base58(peer)
        request = dht_pb2.PingRequest(peer=protocol.node_info, validate=not settings.client_mode)
        sent, started = settings.clock.unix(), settings.clock.monotonic()
        try:
            response = await protocol.get_stub(target).rpc_ping(request, timeout=self._limits.rpc_timeout_s)
        except TimeoutError:
            raise PeerUnreachable(f"no answer to a ping within {self._limits.rpc_timeout_s:g} s") from None
        except (OSError, P2PDaemonError, P2PHandlerError) as error:
            raise PeerUnreachable(f"no node of the table: {error}") from error
        round_trip_s = settings.clock.monotonic() - started
        middle = (sent + settings.clock.unix()) / 2
        if response.peer.node_id:  # a node in client mode holds no part of the table
            node_id = DHTID.from_bytes(response.peer.node_id)
            await protocol.update_routing_table(node_id, target, responded=True)
        available = response.available or settings.client_mode
        return Answer(response.dht_time - middle, available, round_trip_s)

    # The table

    async def search(self, key: bytes, found: dict[PeerId, Entry]) -> list[Any]:
        """Ask the nodes nearest to a key what they hold under it.

        hivemind's own ``get`` orders records by expiry and serves its cache. Here every node asked on the way
        shows what it has, and the validator keeps what is genuine and newest.

        Args:
            found: takes the records while they come in, so that a deadline does not lose them.

        Returns:
            hivemind's ids of the nearest peers that answer, nearest first.
        """
        wanted = DHTID.from_bytes(key)
        context = sightings.set(found)
        try:
            nearest = await self._dht.find_nearest_nodes([wanted], exclude_self=True)
        finally:
            sightings.reset(context)
        return [peer for peer in nearest[wanted].values() if peer not in self._dht.blacklist]

    async def replicate(self, key: bytes, entry: Entry) -> bool:
        """Store a record of our own on the nearest nodes; whether at least one of them holds it now."""
        candidates = await self.search(key, {})
        holders = 0
        while candidates and holders < self._limits.replicas:
            missing = self._limits.replicas - holders
            batch, candidates = candidates[:missing], candidates[missing:]
            answers = await asyncio.gather(*(self._store_at(peer, key, entry) for peer in batch))
            holders += sum(answers)
        return holders > 0

    async def _store_at(self, peer: Any, key: bytes, entry: Entry) -> bool:
        answer = await self._dht.protocol.call_store(
            peer, [DHTID.from_bytes(key)], [entry.value], [entry.record.expires_unix], [self._peer_id]
        )
        return bool(answer and answer[0])


def _answered(task: asyncio.Task[Answer]) -> bool:
    return task.done() and not task.cancelled() and task.exception() is None


def _failure(task: asyncio.Task[Answer]) -> str:
    return "no answer yet" if task.cancelled() else str(task.exception())
