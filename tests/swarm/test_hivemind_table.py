"""One node's part of the table: what stands, what is refused, and that its accounts are right."""

from __future__ import annotations

import random

import pytest

from echo2p2p.errors import RecordError
from echo2p2p.swarm.hivemind.table import Admission, Entry, RecordTable, TableLimits, key_id
from echo2p2p.swarm.identity import Identity
from echo2p2p.swarm.records import Keys, Record, RunRecord, check, seal

OWNERS = [Identity.from_seed(bytes([i]) * 32).peer_id for i in range(6)]


def entry(owner: str, sequence: int, expires: float, size: int = 100) -> Entry:
    record = Record(1, "key", owner, sequence, expires, RunRecord("run", "task"))
    return Entry(record, f"{owner} {sequence} {expires}".encode().ljust(size)[-size:])


def test_the_highest_sequence_stands_whatever_comes_after_and_however_long_it_lives() -> None:
    table = RecordTable(TableLimits())
    newer = entry(OWNERS[0], 2, 100)
    assert table.put(b"k", newer, now_unix=0)
    assert table.put(b"k", newer, now_unix=0), "it is held"
    assert not table.put(b"k", entry(OWNERS[0], 1, 1000), now_unix=0)
    assert not table.put(b"k", entry(OWNERS[0], 1, 5), now_unix=0)
    assert not table.put(b"k", entry(OWNERS[0], 2, 1000, size=99), now_unix=0)
    assert table.get(b"k", now_unix=99) == {OWNERS[0]: newer}
    assert table.get(b"k", now_unix=100) == {}


@pytest.mark.parametrize(
    "limits",
    [
        TableLimits(max_bytes=2000),
        TableLimits(max_bytes_per_key=2000),
        TableLimits(max_records_per_owner=3),
    ],
)
def test_a_limit_refuses_the_new_and_keeps_the_old_until_it_expires(limits: TableLimits) -> None:
    table = RecordTable(limits)
    one_owner = limits.max_records_per_owner == 3
    places = [(bytes([i]), OWNERS[0]) if one_owner else (b"k", OWNERS[i]) for i in range(6)]
    held = [table.put(key, entry(owner, 1, 100), now_unix=0) for key, owner in places]
    assert held == [True] * 3 + [False] * 3
    assert all(owner in table.get(key, now_unix=1) for key, owner in places[:3])
    assert table.put(places[0][0], entry(places[0][1], 2, 200), now_unix=50), "an update takes no more room"
    assert table.put(places[5][0], entry(places[5][1], 1, 200), now_unix=101)
    assert len(table) == 2


def test_the_accounts_are_right_after_any_sequence_of_stores() -> None:
    rng = random.Random(3)
    table = RecordTable(TableLimits(max_bytes=8000, max_bytes_per_key=4000, max_records_per_owner=4))
    keys, now = [bytes([i]) for i in range(5)], 0.0
    for step in range(3000):
        now += rng.random() * 2 if step % 500 else -300  # the clock is set back now and then
        new = entry(
            rng.choice(OWNERS), rng.randrange(50), now + rng.uniform(-5, 60), size=rng.randrange(1, 900)
        )
        table.put(rng.choice(keys), new, now_unix=now)
        assert table.total_bytes <= 8000
    held = [held for key in keys for held in table.get(key, now_unix=-1e9).values()]
    assert table.total_bytes == sum(one.cost_bytes for one in held)
    assert len(table) == len(held) > 0
    table.put(b"x", entry(OWNERS[0], 1, now + 2000), now_unix=now + 1000)
    assert len(table) == 1


def test_what_was_verified_once_is_not_verified_again_but_still_has_to_fit_its_place() -> None:
    owner = Identity.generate()
    run = f"r@{owner.peer_id}"
    value = seal(owner, Keys.RUNS, RunRecord(run, "task"), sequence=1, expires_unix=100)
    assert check(value, owner=owner.peer_id, now_unix=0).owner == owner.peer_id
    admission = Admission(max_cached=1)
    subkey = b"\xd9" + bytes([len(owner.peer_id)]) + owner.peer_id.encode()
    key = key_id(Keys.RUNS)
    first = admission.admit(key, subkey, value, 100, now_unix=0)
    assert admission.admit(key, subkey, value, 100, now_unix=1) is first
    for wrong in ((key, subkey, value, 101.0), (key_id("x"), subkey, value, 100.0), (key, b"", value, 100.0)):
        with pytest.raises(RecordError):
            admission.admit(*wrong, now_unix=1)
    with pytest.raises(RecordError, match="expired"):
        admission.admit(key, subkey, value, 100, now_unix=100)
