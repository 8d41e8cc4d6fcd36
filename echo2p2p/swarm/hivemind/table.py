"""The part of the distributed table that one node holds: verified records within a byte budget.

No I/O and no clock: every method that needs the time takes ``now_unix``, in seconds since 1970.

Guarantees:

* Of one owner under one key the record with the highest sequence number stands. An older one, however validly
  signed, changes nothing: neither the record nor how long it is kept.
* A full table refuses; it never evicts a live record for a new one. What one owner, and what one key, may
  take is limited too, so that an answer for a key always fits one message of the transport.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass

import msgspec

from echo2p2p.errors import RecordError
from echo2p2p.swarm.identity import PeerId
from echo2p2p.swarm.records import Record, check

_ENTRY_OVERHEAD_BYTES = 512
"""What a record costs in memory beyond its value, roughly; counted so that tiny records are bounded too."""


@dataclass(frozen=True)
class TableLimits:
    """``max_bytes_per_key`` stays below the 4 MiB that hivemind's transport carries in one answer."""

    max_bytes: int = 64 * 2**20
    max_bytes_per_key: int = 2 * 2**20
    max_records_per_owner: int = 64
    max_verified_cache: int = 4096
    sweep_period_s: float = 5.0


@dataclass(frozen=True)
class Entry:
    """A record as it is kept: the parsed form, and the sealed bytes that prove it."""

    record: Record
    value: bytes

    @property
    def cost_bytes(self) -> int:
        return len(self.value) + _ENTRY_OVERHEAD_BYTES


def key_id(key: str) -> bytes:
    """The 20 bytes that stand for ``key`` in hivemind's table: SHA-1 over its msgpack form."""
    return hashlib.sha1(msgspec.msgpack.encode(key), usedforsecurity=False).digest()


class Admission:
    """Checks records against the place where they stand in the table, and remembers what it has verified.

    Replicas show the same records again and again, and a signature takes 0.1 ms to verify.
    """

    def __init__(self, max_cached: int) -> None:
        self._max_cached = max_cached
        self._verified: dict[tuple[PeerId, bytes], Entry] = {}

    def admit(
        self, key: bytes, subkey: bytes, value: bytes, expires_unix: float, *, now_unix: float
    ) -> Entry:
        """Believe a record, or say why not.

        Args:
            key: the key id under which it stands.
            subkey: msgpack of its owner's peer id.
            value: the sealed record.
            expires_unix: the expiry under which the table holds it.

        Raises:
            RecordError: it is not its owner's, not for this key or expiry, expired, or without an owner.
        """
        try:
            owner = msgspec.msgpack.decode(subkey, type=str)
        except (msgspec.MsgspecError, UnicodeDecodeError):
            raise RecordError("a record without an owner as its subkey") from None
        if not isinstance(value, bytes):  # inside a dictionary of hivemind's it can be anything
            raise RecordError(f"record of {owner[:64]} is no bytes")
        entry = self._verified.get((owner, value))
        if entry is None:
            entry = Entry(check(value, owner=owner, now_unix=now_unix), value)
            while len(self._verified) >= self._max_cached:
                del self._verified[next(iter(self._verified))]
            self._verified[owner, value] = entry
        record = entry.record
        if record.expires_unix != expires_unix:
            raise RecordError(f"record of {owner} is offered under an expiry that it does not name")
        if record.expires_unix <= now_unix:
            raise RecordError(f"record of {owner} has expired")
        if key_id(record.key) != key:
            raise RecordError(f"record of {owner} for {record.key!r} is offered under another key")
        return entry


class RecordTable:
    """Records by key id and owner."""

    def __init__(self, limits: TableLimits) -> None:
        self._limits = limits
        self._keys: dict[bytes, dict[PeerId, Entry]] = {}
        self._key_bytes: Counter[bytes] = Counter()
        self._owner_records: Counter[PeerId] = Counter()
        self._next_sweep = 0.0
        self.total_bytes = 0

    def put(self, key: bytes, entry: Entry, *, now_unix: float) -> bool:
        """Keep a record that :func:`~echo2p2p.swarm.records.check` has admitted.

        Returns:
            Whether the table holds this very record now.
        """
        self._sweep(now_unix)
        owner = entry.record.owner
        if entry.record.expires_unix <= now_unix:
            return False
        held = self._keys.get(key, {}).get(owner)
        if held is not None and held.record.sequence >= entry.record.sequence:
            return held.value == entry.value
        growth = entry.cost_bytes - (held.cost_bytes if held is not None else 0)
        if (
            self.total_bytes + growth > self._limits.max_bytes
            or self._key_bytes[key] + growth > self._limits.max_bytes_per_key
            or (held is None and self._owner_records[owner] >= self._limits.max_records_per_owner)
        ):
            return False
        self._keys.setdefault(key, {})[owner] = entry
        self._key_bytes[key] += growth
        self._owner_records[owner] += held is None
        self.total_bytes += growth
        return True

    def get(self, key: bytes, *, now_unix: float) -> dict[PeerId, Entry]:
        """The live records under ``key``, by owner."""
        entries = self._keys.get(key, {})
        return {owner: entry for owner, entry in entries.items() if entry.record.expires_unix > now_unix}

    def keys(self) -> Iterator[bytes]:
        """All keys under which there is a record."""
        return iter(tuple(self._keys))

    def __len__(self) -> int:
        return sum(self._owner_records.values())

    def _sweep(self, now_unix: float) -> None:
        # A clock that was set back must not stop the sweeping until it has caught up.
        if self._next_sweep - self._limits.sweep_period_s <= now_unix < self._next_sweep:
            return
        self._next_sweep = now_unix + self._limits.sweep_period_s
        for key in self.keys():
            entries = self._keys[key]
            for owner in [o for o, entry in entries.items() if entry.record.expires_unix <= now_unix]:
                cost = entries.pop(owner).cost_bytes
                self.total_bytes -= cost
                self._key_bytes[key] -= cost
                self._owner_records[owner] -= 1
                if not self._owner_records[owner]:
                    del self._owner_records[owner]
            if not entries:
                del self._keys[key], self._key_bytes[key]
