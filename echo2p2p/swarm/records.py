"""Signed records for the distributed table: what they say, how they are sealed, which ones are believed.

The table is for discovery only. A record is small, names the run and key it was made for, carries its own
expiry and its own sequence number, and is signed by the peer it speaks of. The order of two records of one
owner follows from the sequence number inside the signed value, never from a time outside it.

:func:`check` is the whole admission rule, pure and without a clock of its own: every node applies it to
what it is asked to store and to what it is handed when it asks.
"""

from __future__ import annotations

import functools
import re
from typing import Annotated, ClassVar

import msgspec
from msgspec import Meta

from echo2p2p.errors import ProtocolError, RecordError, VerificationError
from echo2p2p.swarm.identity import Identity, PeerId, public_key_of, split_signed, verify
from echo2p2p.swarm.messages import PROTOCOL_VERSION, decode, encode

MAX_RECORD_BYTES = 4096
MAX_RECORD_LIFETIME_S = 3600.0
"""A record that claims to live longer is refused, so nothing stays in the table for good."""
CLOCK_MARGIN_S = 30.0
"""How far the clocks of two honest peers may lie apart before a record is refused for its expiry."""
WORDS_MISSED = 3
"""A record stays fresh for so many of the periods within which its owner promised the next one."""
WORKER_SHARDS = 16
"""Keys over which the adverts of one run are spread, so that no node holds or answers for all of them."""

_DOMAIN = b"echo2p2p/1/record"

# Patterns end in \Z, not $: that one lets a line break at the end through.
Name = Annotated[str, Meta(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,63}\Z")]
"""A name that people chose; nothing in it needs escaping anywhere."""
TaskName = Annotated[str, Meta(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,127}(:[A-Za-z_][A-Za-z0-9_]{0,63})?\Z")]
"""A registered task, or ``module:Factory``."""
GpuName = Annotated[str, Meta(pattern=r"^[A-Za-z0-9][A-Za-z0-9 ._+()/-]{0,63}\Z")]
NonNegative = Annotated[float, Meta(ge=0, le=1e9)]
Version = Annotated[int, Meta(ge=-1, le=2**53)]
"""A policy version; −1 where none is held yet. Version 0 is the policy that the run starts from."""
Address = Annotated[str, Meta(max_length=256, pattern=r"^/[A-Za-z0-9/._:%-]{1,255}\Z")]
"""A multiaddr that ends in /p2p/ and the peer id."""
MAX_ADDRESSES = 8
Addresses = Annotated[tuple[Address, ...], Meta(max_length=MAX_ADDRESSES)]
PeerIdText = Annotated[str, Meta(min_length=46, max_length=64, pattern=r"^[1-9A-HJ-NP-Za-km-z]+\Z")]

_RUN = re.compile(r"^[A-Za-z0-9][A-Za-z0-9._-]{0,63}@[1-9A-HJ-NP-Za-km-z]{46,64}\Z")


class WorkerAdvert(msgspec.Struct, frozen=True, tag="worker"):
    """What a worker says of itself. Claims, not facts: the learner measures what it pays for.

    Bandwidths in Mbit/s, ``price_per_hour`` in $, ``tokens_per_s`` as the worker's own estimate over a full
    batch (0: it has none). ``state`` is one of standby, active, stale, leaving; stale is a worker that has had no
    fresh word of its learner. ``addresses`` are where it can be dialled, as far as it knows.
    """

    gpu: GpuName
    gpu_count: Annotated[int, Meta(ge=0, le=1024)]
    gpu_memory_gib: NonNegative
    upload_mbit: NonNegative
    download_mbit: NonNegative
    price_per_hour: NonNegative
    tokens_per_s: NonNegative
    version: Version
    engine: Name
    state: Annotated[str, Meta(pattern=r"^(standby|active|stale|leaving)\Z")]
    software: Name
    addresses: Addresses = ()


class LearnerRecord(msgspec.Struct, frozen=True, tag="learner"):
    """What a learner says of its run. ``step`` counts finished training steps.

    ``mode`` is async or sequential.
    """

    task: TaskName
    mode: Annotated[str, Meta(pattern=r"^(async|sequential)\Z")]
    staleness: Annotated[int, Meta(ge=0, le=10_000)]
    kappa: Annotated[int, Meta(ge=1, le=10_000)]
    step: Annotated[int, Meta(ge=0, le=2**53)]
    max_steps: Annotated[int, Meta(ge=0, le=2**53)]
    published_version: Version
    state: Annotated[str, Meta(pattern=r"^(running|stopped|finished)\Z")]
    active_workers: Annotated[int, Meta(ge=0, le=10**6)]
    mu_pool: NonNegative
    mu_target: NonNegative
    spend_per_hour: NonNegative
    software: Name
    addresses: Addresses = ()


class ManifestRecord(msgspec.Struct, frozen=True, tag="manifest"):
    """Where the newest published version begins: its number, and the digest of its manifest (BLAKE3, hex).

    The manifest itself travels on a stream; its digest here pins it.
    """

    version: Version
    manifest_digest: Annotated[str, Meta(pattern=r"^[0-9a-f]{64}\Z")]
    manifest_bytes: Annotated[int, Meta(ge=1, le=16 * 2**20)]
    snapshot_bytes: Annotated[int, Meta(ge=0, le=2**50)]


class RunRecord(msgspec.Struct, frozen=True, tag="run"):
    """That a run exists; stored under one key for the whole swarm, so that a person can find it."""

    run: Annotated[str, Meta(max_length=130)]
    task: TaskName


Body = WorkerAdvert | LearnerRecord | ManifestRecord | RunRecord


class Record(msgspec.Struct, frozen=True):
    """The signed value.

    ``sequence`` grows with every record of one owner under one key. ``expires_unix`` equals the expiry under
    which the table holds the record. ``next_s``: the owner promises another one, of a higher sequence, within so
    many seconds; 0 promises nothing.
    """

    protocol: int
    key: Annotated[str, Meta(max_length=256)]
    owner: PeerIdText
    sequence: Annotated[int, Meta(ge=0, le=2**63 - 1)]
    expires_unix: Annotated[float, Meta(ge=0, le=1e12)]
    body: Body
    next_s: Annotated[float, Meta(ge=0, le=MAX_RECORD_LIFETIME_S)] = 0.0

    def fresh_for_s(self, now_unix: float) -> float:
        """How long the owner may stay silent after this, from now on, before something keeps its word away.

        Three of the periods that it promised, and never beyond the record's own expiry, so that a copy that was
        held back for a while buys nothing.
        """
        return max(0.0, min(WORDS_MISSED * self.next_s, self.expires_unix - now_unix))


class Keys:
    """The keys of one run. A run is named ``<name>@<learner peer id>``: its name says whose word counts."""

    RUNS: ClassVar[str] = f"echo2p2p/{PROTOCOL_VERSION}/runs"

    def __init__(self, run: str) -> None:
        """Raises :class:`~echo2p2p.errors.RecordError` if ``run`` is not a run's name."""
        if not _RUN.match(run):
            raise RecordError(
                f"{run[:140]!r} is not the name of a run",
                hint="a run is named NAME@LEARNER_PEER_ID, as the learner prints it",
            )
        self.run = run
        self.learner_id: PeerId = run.rpartition("@")[2]
        public_key_of(self.learner_id)
        self._prefix = f"echo2p2p/{PROTOCOL_VERSION}/{run}"

    @property
    def learner(self) -> str:
        return f"{self._prefix}/learner"

    @property
    def manifest(self) -> str:
        return f"{self._prefix}/manifest"

    def worker(self, peer: PeerId) -> str:
        """The key that the advert of ``peer`` stands under: one of ``WORKER_SHARDS``, by its public key."""
        return self.worker_shard(public_key_of(peer)[0] % WORKER_SHARDS)

    def worker_shard(self, shard: int) -> str:
        return f"{self._prefix}/workers/{shard}"


def seal(
    identity: Identity, key: str, body: Body, *, sequence: int, expires_unix: float, next_s: float = 0.0
) -> bytes:
    """Make the signed value of a record: 64 bytes of signature, then the encoded :class:`Record`.

    Raises:
        RecordError: it would be longer than ``MAX_RECORD_BYTES``.
    """
    payload = encode(Record(PROTOCOL_VERSION, key, identity.peer_id, sequence, expires_unix, body, next_s))
    value = identity.sign(_DOMAIN, payload) + payload
    if len(value) > MAX_RECORD_BYTES:
        raise RecordError(f"record under {key} has {len(value)} bytes, {MAX_RECORD_BYTES} are allowed")
    return value


def check(value: bytes, *, owner: PeerId, now_unix: float) -> Record:
    """Take a sealed value apart and believe it, or say why not.

    Args:
        value: as it came from the network.
        owner: the subkey under which it stands.
        now_unix: this node's clock.

    Returns:
        The record. Its key, owner and signature agree, its lifetime is within bounds, and its kind may stand
        under that key: the learner's records only for the run's own learner, an advert only in its shard.

    Raises:
        RecordError: anything else.
    """
    record = _opened(bytes(value), owner)
    if not now_unix - CLOCK_MARGIN_S <= record.expires_unix:
        raise RecordError(f"record of {owner} expired {now_unix - record.expires_unix:.0f} s ago")
    if record.expires_unix > now_unix + MAX_RECORD_LIFETIME_S + CLOCK_MARGIN_S:
        raise RecordError(f"record of {owner} wants to live longer than {MAX_RECORD_LIFETIME_S:.0f} s")
    return record


def check_live(value: bytes, *, owner: PeerId) -> Record:
    """As :func:`check`, for a record that its owner hands over on its own authenticated stream.

    What the owner says now cannot be too old, so the two clocks need not agree.
    """
    return _opened(bytes(value), owner)


# The same bytes are looked at again and again: at every look into the table, by every layer that gets them.
# A signature check costs a hundred times what finding the bytes here does; at most 32 MiB are held.
@functools.lru_cache(maxsize=4096)
def _opened(value: bytes, owner: PeerId) -> Record:
    """All of :func:`check` that does not depend on the time."""
    if len(value) > MAX_RECORD_BYTES:
        raise RecordError(f"record of {len(value)} bytes, {MAX_RECORD_BYTES} are allowed")
    try:
        signature, payload = split_signed(value)
        verify(owner, _DOMAIN, payload, signature)
        record: Record = decode(payload, Record)
    except (VerificationError, ProtocolError) as error:
        raise RecordError(f"record of {owner[:64]}: {error.message}") from error
    if record.protocol != PROTOCOL_VERSION:
        raise RecordError(f"record of {owner} speaks protocol {record.protocol}, not {PROTOCOL_VERSION}")
    if record.owner != owner:
        raise RecordError(f"record of {record.owner} stands under {owner}")
    if record.key != _expected_key(record):
        raise RecordError(f"a record of this kind by {owner} may not stand under {record.key!r}")
    return record


def newest(records: list[Record]) -> Record:
    """The record that counts among several of one owner under one key: the highest sequence number."""
    return max(records, key=lambda record: record.sequence)


def _expected_key(record: Record) -> str | None:
    """The one key under which this record may stand, or None if there is none."""
    if isinstance(record.body, RunRecord):
        return Keys.RUNS if record.body.run.endswith("@" + record.owner) else None
    run = record.key.split("/")[2] if record.key.count("/") >= 3 else ""
    try:
        keys = Keys(run)
    except VerificationError:
        return None
    if isinstance(record.body, WorkerAdvert):
        return keys.worker(record.owner)
    if record.owner != keys.learner_id:
        return None
    return keys.learner if isinstance(record.body, LearnerRecord) else keys.manifest
