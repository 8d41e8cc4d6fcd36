"""Attacks on the records of the table: nothing gets past ``check``, and only RecordError comes out of it."""

from __future__ import annotations

import random

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from echo2p2p.errors import Echo2p2pError, RecordError
from echo2p2p.swarm.identity import Identity
from echo2p2p.swarm.messages import encode
from echo2p2p.swarm.records import (
    CLOCK_MARGIN_S,
    MAX_RECORD_BYTES,
    MAX_RECORD_LIFETIME_S,
    WORKER_SHARDS,
    Body,
    Keys,
    LearnerRecord,
    ManifestRecord,
    Record,
    RunRecord,
    WorkerAdvert,
    check,
    newest,
    seal,
)

NOW = 1_900_000_000.0
LEARNER, WORKER, STRANGER = (Identity.from_seed(bytes([n]) * 32) for n in (1, 2, 3))
RUN = f"quick@{LEARNER.peer_id}"
KEYS = Keys(RUN)
ADVERT = WorkerAdvert("RTX 4090", 1, 24.0, 40.0, 200.0, 0.35, 1500.0, -1, "vllm", "standby", "0.1.0")
STATE = LearnerRecord("strings", "async", 3, 2, 7, 100, 6, "running", 4, 900.0, 800.0, 1.4, "0.1.0")
MANIFEST = ManifestRecord(6, "ab" * 32, 4000, 10**9)
ANNOUNCED = RunRecord(RUN, "strings")
EVERY_KIND: list[tuple[Identity, str, Body]] = [
    (WORKER, KEYS.worker(WORKER.peer_id), ADVERT),
    (LEARNER, KEYS.learner, STATE),
    (LEARNER, KEYS.manifest, MANIFEST),
    (LEARNER, Keys.RUNS, ANNOUNCED),
    (LEARNER, KEYS.learner, msgspec.structs.replace(STATE, task="my_tasks.parity:Parity")),
    (LEARNER, Keys.RUNS, RunRecord(RUN, "my_tasks.parity:Parity")),
]


def sealed(identity: Identity, key: str, body: Body, expires: float = NOW + 90) -> bytes:
    return seal(identity, key, body, sequence=5, expires_unix=expires)


def refused(value: bytes, owner: str, match: str | None = None) -> None:
    with pytest.raises(RecordError, match=match):
        check(value, owner=owner, now_unix=NOW)


def signed_as_is(identity: Identity, payload: bytes) -> bytes:
    """A genuine signature over anything at all: what a peer with a key of its own can send."""
    return identity.sign(b"echo2p2p/1/record", payload) + payload


@pytest.mark.parametrize(("identity", "key", "body"), EVERY_KIND)
def test_an_honest_record_is_believed(identity: Identity, key: str, body: Body) -> None:
    record = check(sealed(identity, key, body), owner=identity.peer_id, now_unix=NOW)
    assert record == Record(1, key, identity.peer_id, 5, NOW + 90, body)


def test_a_record_signed_by_another_key_is_refused() -> None:
    key = KEYS.worker(WORKER.peer_id)
    payload = encode(Record(1, key, WORKER.peer_id, 5, NOW + 90, ADVERT))
    refused(signed_as_is(STRANGER, payload), WORKER.peer_id, "signature")
    refused(bytes(64) + payload, WORKER.peer_id, "signature")


def test_a_record_under_another_owner_is_refused() -> None:
    honest = sealed(WORKER, KEYS.worker(WORKER.peer_id), ADVERT)
    refused(honest, STRANGER.peer_id, "signature")
    # Signed by the stranger, but speaking of the worker.
    payload = encode(Record(1, KEYS.worker(STRANGER.peer_id), WORKER.peer_id, 5, NOW + 90, ADVERT))
    refused(signed_as_is(STRANGER, payload), STRANGER.peer_id, "stands under")


def test_a_signature_from_another_domain_is_refused() -> None:
    payload = encode(Record(1, KEYS.worker(WORKER.peer_id), WORKER.peer_id, 5, NOW + 90, ADVERT))
    refused(WORKER.sign(b"echo2p2p/1/manifest", payload) + payload, WORKER.peer_id, "signature")


@pytest.mark.parametrize(
    ("key", "body"), [(KEYS.learner, STATE), (KEYS.manifest, MANIFEST), (Keys.RUNS, ANNOUNCED)]
)
def test_nobody_but_its_learner_speaks_for_a_run(key: str, body: Body) -> None:
    for identity in (WORKER, STRANGER):
        refused(sealed(identity, key, body), identity.peer_id, "may not stand")


def test_an_advert_stands_in_its_own_shard_only() -> None:
    own = KEYS.worker(WORKER.peer_id)
    others = [KEYS.worker_shard(shard) for shard in range(WORKER_SHARDS + 1)]
    assert others.count(own) == 1
    for key in others:
        if key != own:
            refused(sealed(WORKER, key, ADVERT), WORKER.peer_id, "may not stand")


@pytest.mark.parametrize(
    "key",
    [
        "",
        "/",
        "////",
        "anything",
        Keys.RUNS,
        KEYS.learner,
        f"echo2p2p/1/quick@{'1' * 52}/workers/0",
        f"echo2p2p/2/{RUN}/workers/{2}",
        "echo2p2p/1/../../etc/passwd",
    ],
)
def test_an_advert_under_any_other_key_is_refused(key: str) -> None:
    refused(sealed(WORKER, key, ADVERT), WORKER.peer_id, "may not stand")


def test_a_kind_under_the_key_of_another_kind_is_refused() -> None:
    for _, key, _ in EVERY_KIND:
        for _, own_key, body in EVERY_KIND[1:]:
            if key != own_key:
                refused(sealed(LEARNER, key, body), LEARNER.peer_id)


def test_an_expired_record_is_refused_after_the_margin() -> None:
    key = KEYS.worker(WORKER.peer_id)
    check(sealed(WORKER, key, ADVERT, NOW - CLOCK_MARGIN_S), owner=WORKER.peer_id, now_unix=NOW)
    refused(sealed(WORKER, key, ADVERT, NOW - CLOCK_MARGIN_S - 1), WORKER.peer_id, "expired")
    refused(sealed(WORKER, key, ADVERT, 0.0), WORKER.peer_id, "expired")


def test_a_record_that_was_believed_expires_all_the_same() -> None:
    value = sealed(WORKER, KEYS.worker(WORKER.peer_id), ADVERT)
    check(value, owner=WORKER.peer_id, now_unix=NOW)
    with pytest.raises(RecordError, match="expired"):
        check(value, owner=WORKER.peer_id, now_unix=NOW + 1000)
    with pytest.raises(RecordError, match="signature"):
        check(value, owner=STRANGER.peer_id, now_unix=NOW)


@pytest.mark.parametrize(
    "expires",
    [
        NOW + MAX_RECORD_LIFETIME_S + CLOCK_MARGIN_S + 1,
        NOW + 10 * 365 * 86400,
        1e300,
        float("inf"),
        float("nan"),
    ],
)
def test_a_record_that_wants_to_live_too_long_is_refused(expires: float) -> None:
    refused(sealed(WORKER, KEYS.worker(WORKER.peer_id), ADVERT, expires), WORKER.peer_id)


def test_an_oversized_record_is_neither_made_nor_believed() -> None:
    key = KEYS.worker(WORKER.peer_id)
    huge = msgspec.structs.replace(ADVERT, gpu="x" * MAX_RECORD_BYTES)
    with pytest.raises(RecordError, match="allowed"):
        sealed(WORKER, key, huge)
    payload = encode(Record(1, key, WORKER.peer_id, 5, NOW + 90, huge))
    refused(signed_as_is(WORKER, payload), WORKER.peer_id, "allowed")
    refused(bytes(10_000_000), WORKER.peer_id, "allowed")


@pytest.mark.parametrize(
    "change",
    [
        {"price_per_hour": float("nan")},
        {"price_per_hour": float("inf")},
        {"tokens_per_s": -1.0},
        {"upload_mbit": 1e308},
        {"gpu": "\x1b[31mred"},
        {"gpu": "<script>"},
        {"gpu": "a\n"},
        {"engine": "../../x"},
        {"engine": "vllm\n"},
        {"software": ""},
        {"state": "asleep"},
        {"state": "active\n"},
        {"version": -2},
        {"version": 2**60},
        {"gpu_count": 10**9},
    ],
)
def test_a_genuinely_signed_claim_out_of_bounds_is_refused(change: dict[str, object]) -> None:
    body = msgspec.structs.replace(ADVERT, **change)
    refused(sealed(WORKER, KEYS.worker(WORKER.peer_id), body), WORKER.peer_id)


@pytest.mark.parametrize("task", ["", "a b", "a:", "a:b:C", "a:b\n", "../x:Y", "x" * 129])
def test_a_task_that_has_no_such_name_is_refused(task: str) -> None:
    refused(sealed(LEARNER, Keys.RUNS, RunRecord(RUN, task)), LEARNER.peer_id)


@pytest.mark.parametrize(
    "payload",
    [
        b"\x80",
        b"\xc0",
        b"\x91" * 3000,
        b"\x81\xa1a" * 1000,
        b"\xdf\xff\xff\xff\xff",
        b"\xc6\xff\xff\xff\xff",
        encode({"protocol": 1}),
        encode(Record(2, KEYS.worker(WORKER.peer_id), WORKER.peer_id, 5, NOW + 90, ADVERT)),
        encode(Record(1, KEYS.worker(WORKER.peer_id), WORKER.peer_id, -1, NOW + 90, ADVERT)),
    ],
)
def test_genuinely_signed_nonsense_is_refused(payload: bytes) -> None:
    refused(signed_as_is(WORKER, payload), WORKER.peer_id)


def test_two_thousand_mutations_none_believed() -> None:
    rng = random.Random(20)
    for n in range(2000):
        identity, key, body = EVERY_KIND[n % len(EVERY_KIND)]
        good = sealed(identity, key, body)
        value = bytearray(good)
        for _ in range(rng.choice((1, 1, 1, 2, 8))):
            at = rng.randrange(len(value))
            match rng.randrange(5):
                case 0:
                    value[at] ^= 1 << rng.randrange(8)
                case 1:
                    del value[at : at + rng.randrange(1, 40)]
                case 2:
                    value[at:at] = rng.randbytes(rng.randrange(1, 40))
                case 3:
                    value[at : at + 8] = rng.randbytes(8)
                case _:
                    other = rng.randrange(len(value))
                    value[at], value[other] = value[other], value[at]
            if not value:
                break
        if bytes(value) != good:
            refused(bytes(value), identity.peer_id)


@settings(max_examples=200, deadline=None)
@given(st.binary(max_size=300), st.text(max_size=70))
def test_arbitrary_bytes_and_owners_raise_record_errors_only(value: bytes, owner: str) -> None:
    refused(value, owner)
    refused(signed_as_is(WORKER, value), WORKER.peer_id)


@settings(max_examples=200, deadline=None)
@given(st.text(max_size=140))
def test_only_the_names_of_runs_make_keys(name: str) -> None:
    with pytest.raises(Echo2p2pError):
        Keys(name)


def test_a_run_name_with_a_line_break_is_refused() -> None:
    with pytest.raises(Echo2p2pError):
        Keys(RUN + "\n")


def test_a_digest_with_a_line_break_is_refused() -> None:
    body = msgspec.structs.replace(MANIFEST, manifest_digest="ab" * 32 + "\n")
    refused(sealed(LEARNER, KEYS.manifest, body), LEARNER.peer_id)


def test_the_highest_sequence_counts_whatever_the_expiry() -> None:
    old = Record(1, KEYS.manifest, LEARNER.peer_id, 5, NOW + 3000, MANIFEST)
    new = Record(1, KEYS.manifest, LEARNER.peer_id, 6, NOW + 30, MANIFEST)
    assert newest([old, new]) == newest([new, old]) == new
