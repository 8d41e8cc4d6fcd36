"""Records in the real table, honest ones and those of a raw hivemind node that keeps no rules."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from typing import Any

import pytest
from hivemind.dht.node import DHTNode
from hivemind.dht.routing import DHTID
from hivemind.dht.storage import DictionaryDHTValue
from hivemind.p2p import PeerID
from hivemind_helpers import Join, run_of, sealed_advert

from echo2p2p.errors import RecordError
from echo2p2p.swarm.hivemind import HivemindNetwork, NodeLimits, TableLimits
from echo2p2p.swarm.hivemind.table import key_id
from echo2p2p.swarm.identity import Identity

Attacker = Any


@pytest.fixture
async def victim(join: Join) -> HivemindNetwork:
    return await join("victim")


@pytest.fixture
async def attacker(victim: HivemindNetwork) -> AsyncIterator[Attacker]:
    """A node of plain hivemind, in the victim's swarm, without our rules."""
    node = await DHTNode.create(initial_peers=victim.addresses())
    yield node
    await node.shutdown()


async def push(
    attacker: Attacker, victim: HivemindNetwork, key: str, subkey: Any, value: Any, expires: float
) -> Any:
    answer = await attacker.protocol.call_store(
        PeerID.from_base58(victim.peer_id), [DHTID.generate(key)], [value], [expires], [subkey]
    )
    return answer and answer[0]


async def test_what_one_node_stores_the_others_find(join: Join) -> None:
    first = await join("first")
    second = await join("second", through=first)
    third = await join("third", through=first)
    keys = run_of(first)
    key, value, expires = sealed_advert(second.identity, keys)
    assert await second.store_record(key, value, expires_unix=expires, timeout_s=5)
    for node in (first, second, third):
        assert await node.find_records(key, timeout_s=5) == {second.peer_id: value}
    key, newer, expires = sealed_advert(second.identity, keys, sequence=2)
    assert await second.store_record(key, newer, expires_unix=expires, timeout_s=5)
    for node in (first, second, third):
        assert await node.find_records(key, timeout_s=5) == {second.peer_id: newer}
    assert await third.find_records("echo2p2p/1/runs", timeout_s=5) == {}


async def test_a_lone_node_keeps_its_own_records(join: Join) -> None:
    first = await join("first")
    key, value, expires = sealed_advert(first.identity, run_of(first))
    assert await first.store_record(key, value, expires_unix=expires, timeout_s=5)
    assert await first.find_records(key, timeout_s=5) == {first.peer_id: value}


async def test_a_record_of_someone_else_cannot_be_stored_as_ones_own(join: Join) -> None:
    first = await join("first")
    key, value, expires = sealed_advert(Identity.generate(), run_of(first))
    with pytest.raises(RecordError):
        await first.store_record(key, value, expires_unix=expires, timeout_s=5)


async def test_a_node_cut_off_does_not_report_a_record_as_stored(join: Join) -> None:
    first = await join("first")
    second = await join("second", through=first)
    await first.close()
    for sequence in (1, 2):
        key, value, expires = sealed_advert(second.identity, run_of(second), sequence=sequence)
        assert not await second.store_record(key, value, expires_unix=expires, timeout_s=5)


async def test_records_survive_the_node_that_stored_them(join: Join) -> None:
    first = await join("first")
    second = await join("second", through=first)
    key, value, expires = sealed_advert(second.identity, run_of(first))
    assert await second.store_record(key, value, expires_unix=expires, timeout_s=5)
    await second.close()
    late = await join("late", through=first)
    assert await late.find_records(key, timeout_s=10) == {second.peer_id: value}


async def test_an_expired_record_is_gone(join: Join) -> None:
    first = await join("first")
    second = await join("second", through=first)
    key, value, expires = sealed_advert(second.identity, run_of(first), lifetime_s=1)
    assert await second.store_record(key, value, expires_unix=expires, timeout_s=5)
    await asyncio.sleep(1.1)
    assert await first.find_records(key, timeout_s=5) == {}


FORGERIES = [
    "other signer",
    "other key",
    "other expiry",
    "too large",
    "flipped bit",
    "no subkey",
    "junk subkey",
]


def forge(kind: str, victim: HivemindNetwork) -> tuple[str, Any, bytes, float]:
    """Key, subkey, value and expiry of a record that must be refused."""
    keys = run_of(victim)
    owner, liar = Identity.generate(), Identity.generate()
    key, value, expires = sealed_advert(owner, keys)
    subkey: Any = owner.peer_id
    match kind:
        case "other signer":
            value = sealed_advert(liar, keys)[1]
        case "other key":
            key = keys.learner
        case "other expiry":
            expires += 1000
        case "too large":
            value = value + bytes(8192)
        case "flipped bit":
            value = value[:-5] + bytes([value[-5] ^ 1]) + value[-4:]
        case "no subkey":
            subkey = None
        case "junk subkey":
            subkey = 7
    return key, subkey, value, expires


@pytest.mark.parametrize("kind", FORGERIES)
async def test_a_forged_record_is_neither_stored_nor_found(
    victim: HivemindNetwork, attacker: Attacker, kind: str
) -> None:
    key, subkey, value, expires = forge(kind, victim)
    assert not await push(attacker, victim, key, subkey, value, expires)
    dictionary = DictionaryDHTValue()
    dictionary.store(subkey or "x", value, expires)
    assert not await push(attacker, victim, key, None, dictionary, expires)
    attacker.protocol.storage.store(DHTID.generate(key), value, expires, subkey=subkey)
    assert await victim.find_records(key, timeout_s=5) == {}


async def test_a_genuine_record_by_way_of_a_stranger_is_believed(
    victim: HivemindNetwork, attacker: Attacker
) -> None:
    owner = Identity.generate()
    key, value, expires = sealed_advert(owner, run_of(victim))
    attacker.protocol.storage.store(DHTID.generate(key), value, expires, subkey=owner.peer_id)
    assert await victim.find_records(key, timeout_s=5) == {owner.peer_id: value}
    key, value, expires = sealed_advert(owner, run_of(victim), sequence=2)
    assert await push(attacker, victim, key, owner.peer_id, value, expires)
    assert await victim.find_records(key, timeout_s=5) == {owner.peer_id: value}


async def test_junk_beside_a_genuine_record_does_not_hide_it(
    victim: HivemindNetwork, attacker: Attacker
) -> None:
    owner, expired = Identity.generate(), Identity.from_seed(b"e" * 32)
    keys = run_of(victim)
    key, value, expires = sealed_advert(owner, keys)
    _, old, _ = sealed_advert(expired, keys, lifetime_s=-5, key=key)
    for subkey, junk in (("a", b"junk"), (expired.peer_id, old), (owner.peer_id, value)):
        attacker.protocol.storage.store(DHTID.generate(key), junk, expires, subkey=subkey)
    assert await victim.find_records(key, timeout_s=5) == {owner.peer_id: value}


async def test_replaying_an_older_record_does_not_evict_the_newer(
    victim: HivemindNetwork, attacker: Attacker
) -> None:
    owner, keys = Identity.generate(), run_of(victim)
    key, old, old_expires = sealed_advert(owner, keys, sequence=1, lifetime_s=2)
    _, new, new_expires = sealed_advert(owner, keys, sequence=2, lifetime_s=60)
    assert await push(attacker, victim, key, owner.peer_id, new, new_expires)
    deadline = time.monotonic() + 4
    while time.monotonic() < deadline:
        assert not await push(attacker, victim, key, owner.peer_id, old, old_expires)
        assert await victim.find_records(key, timeout_s=5) == {owner.peer_id: new}
        await asyncio.sleep(0.1)


async def test_a_later_expiry_does_not_make_an_older_record_win(
    victim: HivemindNetwork, attacker: Attacker
) -> None:
    owner, keys = Identity.generate(), run_of(victim)
    key, old, old_expires = sealed_advert(owner, keys, sequence=1, lifetime_s=600)
    _, new, new_expires = sealed_advert(owner, keys, sequence=2, lifetime_s=60)
    assert await push(attacker, victim, key, owner.peer_id, new, new_expires)
    assert not await push(attacker, victim, key, owner.peer_id, old, old_expires)
    attacker.protocol.storage.store(DHTID.generate(key), old, old_expires, subkey=owner.peer_id)
    assert await victim.find_records(key, timeout_s=5) == {owner.peer_id: new}


async def test_a_full_table_refuses_and_keeps_what_it_has(join: Join) -> None:
    victim = await join("victim", limits=NodeLimits(table=TableLimits(max_bytes=4000)))
    attacker = await DHTNode.create(initial_peers=victim.addresses())
    kept = []
    for _ in range(10):
        owner = Identity.generate()
        key, value, expires = sealed_advert(owner, run_of(victim))
        if await push(attacker, victim, key, owner.peer_id, value, expires):
            kept.append((key, owner.peer_id, value))
    assert 2 <= len(kept) < 10
    await attacker.shutdown()
    for key, owner_id, value in kept:
        assert (await victim.find_records(key, timeout_s=8))[owner_id] == value


def test_our_key_ids_are_those_of_hivemind() -> None:
    for key in ("echo2p2p/1/runs", "x" * 200, "γ", ""):
        assert key_id(key) == DHTID.generate(key).to_bytes()
