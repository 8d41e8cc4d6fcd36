"""How a version leaves the learner: gate, checkpoint, manifest, record, and a word to every active worker.

The order is the guarantee: weights that are not finite, or blown up, get no further than the gate, not even to
the disk; and a version that anybody can hear of is on the learner's disk, so no crash can make one version
number name two policies. Where the disk is full, it waits for room. T_bcast is measured here, as the papers
define it.
"""

from __future__ import annotations

import asyncio
import logging
import math
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from statistics import median
from typing import TypeVar

import msgspec

from echo2p2p.data.work import Head, Ready
from echo2p2p.errors import OutOfDisk, RecordError, StoreFull
from echo2p2p.learning.dispatcher import Dispatcher
from echo2p2p.learning.provisioner import Provisioner
from echo2p2p.learning.sessions import Session
from echo2p2p.learning.state import Capture, Trainer
from echo2p2p.swarm.clock import Clock
from echo2p2p.swarm.directory import Directory
from echo2p2p.swarm.records import ManifestRecord
from echo2p2p.telemetry.events import EventLog
from echo2p2p.weights.gate import GateLimits, Passed, check
from echo2p2p.weights.holding import set_within
from echo2p2p.weights.manifest import Member
from echo2p2p.weights.publisher import WeightPublisher
from echo2p2p.weights.snapshot import Snapshot

log = logging.getLogger("echo2p2p.learner")
T = TypeVar("T")

MAX_UPLINK_SHARE = 8
"""No announced uplink counts for more than so many times the median."""
DISK_RETRY_S = 5.0
"""How long after another try there is room on a disk that was full."""

VERSIONS_FOLLOWED = 64
"""Versions whose spread is still being counted."""


@dataclass
class Broadcast:
    """How far one version has come; it is done when a fraction 1/γ of its active workers is ready.

    ``members`` in the order of the manifest; ``sent`` counts chunk bytes by member that sent them, as the
    receivers ``reported``; ``from_learner`` those that left the learner, as it counted; ``logged``: reports.
    """

    published_at: float
    active: set[str]
    members: list[str]
    reported: set[str] = field(default_factory=set)
    sent: Counter[str] = field(default_factory=Counter)
    from_learner: int = 0
    logged: int = 0
    ready: set[str] = field(default_factory=set)
    done: bool = False


class Publication:
    """Publishes the versions of one run and follows their spread.

    Args:
        assets: the policy's small files by name, the same for every version.
        gamma: γ; T_bcast ends at a fraction 1/γ of the active workers.
        gate: what may be published.
        wait_for_disk: whether a full disk is waited for, until ``stop`` is set.

    Attributes:
        saved: the version of the last checkpoint; −1 if this life of the learner has written none.
        reasons: versions by why they were published, in this life of the learner.
        chunk_bytes: what workers reported to have fetched, by source: learner or peers.
    """

    def __init__(
        self,
        *,
        trainer: Trainer,
        publisher: WeightPublisher,
        directory: Directory,
        assets: Mapping[str, bytes],
        dispatcher: Dispatcher,
        provisioner: Provisioner,
        gamma: float,
        gate: GateLimits,
        wait_for_disk: bool,
        stop: asyncio.Event,
        clock: Clock,
        events: EventLog,
    ) -> None:
        self._trainer = trainer
        self._publisher = publisher
        self._directory = directory
        self._assets = assets
        self._dispatcher = dispatcher
        self._provisioner = provisioner
        self._gamma = gamma
        self._clock = clock
        self._events = events
        self._record: ManifestRecord | None = None
        self._newer = asyncio.Event()
        self.saved = -1
        self._gate = gate
        self._wait_for_disk = wait_for_disk
        self._stop = stop
        self._good: Snapshot | None = None
        self._broadcasts: dict[int, Broadcast] = {}
        self._fingerprints: dict[int, str] = {}
        self.chunk_bytes: Counter[str] = Counter()
        self.reasons: Counter[str] = Counter()

    async def check(self, snapshot: Snapshot) -> Passed:
        """Whether these weights may be published after those that were published last.

        Raises:
            UnsoundWeights: they may not; it says why.
        """
        good = self._good
        return await self._clock.offload(lambda: check(snapshot, good, self._gate))

    async def publish(self, capture: Capture, *, why: str) -> None:
        """Make a version known. ``why`` it is published now goes into the log.

        Raises:
            UnsoundWeights: it is not fit for that; nothing of it was written.
            OutOfDisk: there is no room, and no waiting for it.
        """
        started = self._clock.monotonic()
        version = capture.version
        passed = await self.check(capture.snapshot)
        await self._save(capture)
        self.log_relayed()
        active = self._provisioner.active
        # One that announces the uplink of a data centre would become the parent of all others.
        most = MAX_UPLINK_SHARE * median([session.advert.upload_mbit for session in active] or [0.0])
        members = [
            Member(s.peer, min(s.advert.upload_mbit, most), s.advert.addresses, s.advert.download_mbit)
            for s in active
        ]
        published = await self._with_room(
            version, lambda: self._publisher.publish(capture.snapshot, version, members, self._assets)
        )
        self._good = capture.snapshot
        patches = published.manifest.patches
        self._record = published.record
        self._newer.set()
        self._dispatcher.published = version
        # A worker's first version includes building its engine, which says nothing about T_bcast.
        following = {session.peer for session in active if session.version >= 0}
        self._broadcasts[version] = Broadcast(started, following, [member.peer for member in members])
        self._fingerprints[version] = published.manifest.fingerprint
        for followed in (self._broadcasts, self._fingerprints):
            while len(followed) > VERSIONS_FOLLOWED:
                del followed[next(iter(followed))]
        self.reasons[why] += 1
        self._events.emit(
            "published",
            version=version,
            why=why,
            snapshot_bytes=published.manifest.nbytes,
            chunks=published.manifest.n_chunks,
            patch_bytes=patches[0].nbytes if patches else 0,
            patches=len(patches),
            chain_bytes=sum(patch.nbytes for patch in patches),
            members=len(members),
            suspects=list(published.suspects),
            prepare_s=self._clock.monotonic() - started,
            gate={"change": passed.change, "tensor": passed.tensor},
        )
        for session in active:
            self.announce(session)
        self._dispatcher.top_up()

    async def checkpoint(self, capture: Capture) -> None:
        """Write ``capture`` to disk, unless its version is there already. Raises as :meth:`publish`."""
        if self.saved != capture.version:
            await self.check(capture.snapshot)
            await self._save(capture)

    async def _save(self, capture: Capture) -> None:
        if self.saved == capture.version:
            return
        started = self._clock.monotonic()
        await self._with_room(
            capture.version, lambda: self._trainer.save(capture.version, capture.trainer, capture.learner)
        )
        self.saved = capture.version
        self._events.emit("checkpoint", step=capture.version, seconds=self._clock.monotonic() - started)

    async def _with_room(self, version: int, attempt: Callable[[], Awaitable[T]]) -> T:
        """What ``attempt`` returns, which is made again and again while the disk is full."""
        full_since: float | None = None
        while True:
            try:
                result = await attempt()
                break
            except StoreFull:
                raise  # its own limit, which does not change by waiting
            except OutOfDisk as error:
                if self._stop.is_set() or not self._wait_for_disk:
                    raise
                if full_since is None:
                    full_since = self._clock.monotonic()
                    self._events.emit("disk_full", version=version, reason=error.message)
                    log.error("version %d waits for room on the disk: %s", version, error)
            await set_within(self._stop, DISK_RETRY_S)
        if full_since is not None:
            waited_s = self._clock.monotonic() - full_since
            self._events.emit("disk_has_room", version=version, waited_s=waited_s)
            log.warning(
                "there is room on the disk again, after %.0f s: version %d goes on", waited_s, version
            )
        return result

    def announce(self, session: Session) -> None:
        """Tell one worker of the newest version, if there is one."""
        if self._record is not None:
            self._publisher.told(session.peer)
            session.tell(Head(self._directory.seal(self._record)))

    async def keep_record(self) -> None:
        """Keep the newest manifest's record in the table, from the first publication on, until cancelled."""
        await self._newer.wait()
        await self._directory.keep(self._newest_record, changed=self._newer)

    def knows(self, version: int, fingerprint: str) -> bool:
        """Whether weights of this fingerprint were published as ``version`` (lately)."""
        return self._fingerprints.get(version) == fingerprint

    def on_ready(self, session: Session, message: Ready) -> bool:
        """A worker says that it holds a version; False if that is not news, or not true."""
        if not session.version < message.version <= self._dispatcher.published:
            return False
        if not self.knows(message.version, message.fingerprint):
            log.warning(
                "worker %s holds other weights than were published as version %d: %s instead of %s",
                session.peer,
                message.version,
                message.fingerprint,
                self._fingerprints.get(message.version, "one that is forgotten"),
            )
            return False
        session.prove(message.version)
        broadcast = self._broadcasts.get(message.version)
        report = msgspec.structs.asdict(message)
        del report["sources"]  # n of them from each of n workers: summed up in `relayed`
        now = self._clock.monotonic()
        after_s = now - broadcast.published_at if broadcast is not None else None
        self._events.emit("ready", worker=session.peer, after_s=after_s, **report)
        self.chunk_bytes["learner"] += message.bytes_from_learner
        self.chunk_bytes["peers"] += message.bytes_from_peers
        if broadcast is None:
            return True
        self._count(broadcast, session.peer, message)
        if broadcast.done or session.peer not in broadcast.active:
            return True
        broadcast.ready.add(session.peer)
        still_active = broadcast.active & {s.peer for s in self._provisioner.active}
        if len(broadcast.ready & still_active) < math.ceil(len(still_active) / self._gamma):
            return True
        broadcast.done = True
        t_bcast_s = now - broadcast.published_at
        self._provisioner.t_bcast.observe(t_bcast_s)
        self._events.emit(
            "broadcast",
            version=message.version,
            t_bcast_s=t_bcast_s,
            ready=len(broadcast.ready),
            active=len(broadcast.active),
        )
        return True

    def log_relayed(self) -> None:
        """Write down who has sent how much of each version, as far as that is news."""
        for version, broadcast in self._broadcasts.items():
            if len(broadcast.reported) > broadcast.logged:
                broadcast.logged = len(broadcast.reported)
                by_learner = sum(self._publisher.bytes_sent.get(version, {}).values())
                broadcast.from_learner = max(broadcast.from_learner, by_learner)
                self._events.emit(
                    "relayed",
                    version=version,
                    reports=len(broadcast.reported),
                    from_learner=broadcast.from_learner,
                    sent=dict(broadcast.sent),
                )

    def _count(self, broadcast: Broadcast, worker: str, message: Ready) -> None:
        """A report of a worker, which is believed: nothing but a picture depends on it."""
        if worker in broadcast.reported or len(message.sources) != len(broadcast.members):
            return
        broadcast.reported.add(worker)
        for member, nbytes in zip(broadcast.members, message.sources, strict=True):
            broadcast.sent[member] += nbytes

    def _newest_record(self) -> ManifestRecord:
        if self._record is None:
            raise RecordError("no version has been published")
        return self._record
