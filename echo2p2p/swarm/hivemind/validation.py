"""What hivemind's DHT protocol takes for its validator and its storage: our admission rule and our table."""

from __future__ import annotations

import logging
from contextvars import ContextVar
from typing import Any

import msgspec
from hivemind.dht.crypto import DHTRecord, RecordValidatorBase
from hivemind.dht.routing import DHTID
from hivemind.dht.storage import DictionaryDHTValue
from hivemind.utils.timed_storage import ValueWithExpiration

from echo2p2p.errors import RecordError
from echo2p2p.swarm.clock import Clock
from echo2p2p.swarm.hivemind.table import Admission, Entry, RecordTable
from echo2p2p.swarm.identity import PeerId

logger = logging.getLogger("echo2p2p.swarm")

sightings: ContextVar[dict[PeerId, Entry] | None] = ContextVar("sightings", default=None)
"""Where the search of the current task collects the verified records that peers show it."""


class Validator(RecordValidatorBase):  # type: ignore[misc]
    """hivemind's hook for each record that others ask us to store, or show us when we search."""

    def __init__(self, admission: Admission, clock: Clock) -> None:
        self._admission = admission
        self._clock = clock

    def validate(self, record: DHTRecord) -> bool:
        """Whether to go on with a record; hivemind drops the whole dictionary that one refused record is in.

        In a search nothing but ``sightings`` is used, so a bad record there is passed over and what stands
        beside it is not lost.
        """
        found = sightings.get()
        try:
            entry = self._admission.admit(
                record.key, record.subkey, record.value, record.expiration_time, now_unix=self._clock.unix()
            )
        except RecordError as error:
            logger.debug("refused a record: %s", error)
            return found is not None
        if found is not None:
            keep_newest(found, entry)
        return True


def keep_newest(found: dict[PeerId, Entry], entry: Entry) -> None:
    """Add a record to those found, unless one of its owner with a higher sequence number is there."""
    held = found.get(entry.record.owner)
    if held is None or entry.record.sequence > held.record.sequence:
        found[entry.record.owner] = entry


class TableStorage:
    """What hivemind's protocol takes for its storage and its cache: a face of our :class:`RecordTable`."""

    def __init__(self, table: RecordTable, admission: Admission, clock: Clock) -> None:
        self._table = table
        self._admission = admission
        self._clock = clock

    def store(self, key_id: Any, value: Any, expiration_time: float, subkey: Any = None) -> bool:
        return subkey is not None and self.store_subkey(key_id, subkey, value, expiration_time)

    def store_subkey(self, key_id: Any, subkey: Any, value: Any, expiration_time: float) -> bool:
        if not isinstance(subkey, str):
            return False
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
