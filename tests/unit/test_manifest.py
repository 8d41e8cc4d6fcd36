import contextlib
import random
from typing import Any

import msgspec
import pytest

from echo2p2p.errors import ManifestError
from echo2p2p.swarm.identity import Identity
from echo2p2p.weights.manifest import (
    Asset,
    Manifest,
    ManifestLimits,
    ManifestVerifier,
    Member,
    Patch,
    Trusted,
    digest,
    sign,
)
from echo2p2p.weights.snapshot import Layout, TensorSpec

LEARNER = Identity.from_seed(b"l" * 32)
STRANGER = Identity.from_seed(b"s" * 32)
RUN = f"run@{LEARNER.peer_id}"
DOMAIN = b"echo2p2p/1/manifest"


def manifest(version: int = 3, **changes: Any) -> Manifest:
    layout = Layout((TensorSpec("w", "uint8", (5000,), 0, 5000),), {"tied": "w"})
    fields: dict[str, Any] = {
        "protocol": 1,
        "run": RUN,
        "version": version,
        "hash": "blake3",
        "fingerprint": "ab" * 32,
        "layout": layout,
        "chunk_bytes": 2048,
        "chunks": bytes(96),
        "members": (Member(STRANGER.peer_id, 50.0),),
        "assets": (Asset("config.json", b"c" * 32, 10),),
        "patches": (),
    }
    return Manifest(**(fields | changes))


def patch(**changes: Any) -> Patch:
    fields: dict[str, Any] = {
        "base_version": 2,
        "base_fingerprint": "cd" * 32,
        "nbytes": 1500,
        "chunk_bytes": 1024,
        "chunks": b"p" * 64,
    }
    return Patch(**(fields | changes))


def sealed(value: Any, identity: Identity = LEARNER, domain: bytes = DOMAIN) -> bytes:
    """As sign, but of anything: what a learner gone bad could sign."""
    payload = value if isinstance(value, bytes) else msgspec.msgpack.encode(value)
    return identity.sign(domain, payload) + payload


def test_what_the_learner_signed_is_accepted() -> None:
    data = sign(LEARNER, manifest())
    assert ManifestVerifier(RUN).accept(data, digest(data)) == manifest()


def test_no_mutation_of_a_signed_manifest_is_accepted() -> None:
    data = sign(LEARNER, manifest())
    rng = random.Random(0)
    for trial in range(2000):
        forged = bytearray(data)
        match trial % 5:
            case 0:
                forged[rng.randrange(len(forged))] ^= 1 << rng.randrange(8)
            case 1:
                forged[rng.randrange(len(forged))] = rng.choice([0, 0x7F, 0x80, 0x91, 0xC1, 0xDD, 0xFF])
                if forged == data:
                    continue
            case 2:
                del forged[rng.randrange(len(forged)) :]
            case 3:
                forged.insert(rng.randrange(len(forged) + 1), rng.randrange(256))
            case 4:
                at = rng.randrange(len(forged))
                forged[at : at + 8] = rng.randbytes(8)
        verifier = ManifestVerifier(RUN)
        with pytest.raises(ManifestError):
            verifier.accept(bytes(forged))
        assert verifier.trusted == Trusted()


def test_no_mutation_that_a_bad_learner_signs_raises_anything_but_manifest_error() -> None:
    payload = sign(LEARNER, manifest())[64:]
    rng = random.Random(1)
    for _ in range(2000):
        forged = bytearray(payload)
        for _ in range(rng.randint(1, 3)):
            forged[rng.randrange(len(forged))] = rng.randrange(256)
        with contextlib.suppress(ManifestError):
            ManifestVerifier(RUN).accept(sealed(bytes(forged)))


@pytest.mark.parametrize("payload", [b"", b"\x91" * 10_000, b"\xdf\xff\xff\xff\xff", b"\xc1", b"\x80"])
def test_signed_nonsense_is_refused(payload: bytes) -> None:
    with pytest.raises(ManifestError):
        ManifestVerifier(RUN).accept(sealed(payload))


def test_a_manifest_signed_by_another_key_is_refused() -> None:
    with pytest.raises(ManifestError, match="signature"):
        ManifestVerifier(RUN).accept(sealed(manifest(), STRANGER))


def test_a_signature_made_for_another_purpose_is_refused() -> None:
    with pytest.raises(ManifestError, match="signature"):
        ManifestVerifier(RUN).accept(sealed(manifest(), domain=b"echo2p2p/1/record"))


def test_nothing_is_parsed_before_the_signature_is_checked(monkeypatch: pytest.MonkeyPatch) -> None:
    def explode(*_: Any) -> None:
        raise AssertionError("parsed")

    monkeypatch.setattr("echo2p2p.weights.manifest.decode", explode)
    with pytest.raises(ManifestError, match="signature"):
        ManifestVerifier(RUN).accept(sealed(manifest(), STRANGER))


def test_a_manifest_of_another_run_of_the_same_learner_is_refused() -> None:
    with pytest.raises(ManifestError, match="belongs to run"):
        ManifestVerifier(f"other@{LEARNER.peer_id}").accept(sign(LEARNER, manifest()))


def test_a_manifest_other_than_the_announced_one_is_refused() -> None:
    with pytest.raises(ManifestError, match="announced"):
        ManifestVerifier(RUN).accept(sign(LEARNER, manifest()), "00" * 32)


def test_rollback_is_refused_also_after_a_restart() -> None:
    verifier = ManifestVerifier(RUN)
    verifier.accept(sign(LEARNER, manifest(7)))
    for each in (verifier, ManifestVerifier(RUN, trusted=verifier.trusted)):
        with pytest.raises(ManifestError, match="older"):
            each.accept(sign(LEARNER, manifest(6)))
    assert verifier.trusted.version == 7


def test_versions_never_go_back_in_ten_thousand_steps_with_restarts() -> None:
    signed = {v: sign(LEARNER, manifest(v)) for v in range(40)}
    rng = random.Random(2)
    verifier, stored, newest = ManifestVerifier(RUN), Trusted(), -1
    for step in range(10_000):
        if rng.random() < 0.1:
            verifier = ManifestVerifier(RUN, trusted=stored)
        if step % 500 == 499:
            verifier, stored, newest = ManifestVerifier(RUN), Trusted(), -1
        version = rng.randrange(max(0, newest - 5), min(40, newest + 3))
        with contextlib.suppress(ManifestError):
            assert verifier.accept(signed[version]).version >= newest
            stored = verifier.trusted
        assert stored.version == verifier.trusted.version >= newest
        newest = stored.version


def test_the_same_manifest_is_accepted_again() -> None:
    verifier = ManifestVerifier(RUN)
    for _ in range(2):
        verifier.accept(sign(LEARNER, manifest()))


def test_two_manifests_of_one_version_are_equivocation() -> None:
    verifier = ManifestVerifier(RUN)
    verifier.accept(sign(LEARNER, manifest()))
    with pytest.raises(ManifestError, match="equivocation"):
        verifier.accept(sign(LEARNER, manifest(members=())))


def test_a_jump_past_the_limit_is_refused_but_a_newcomer_may_start_anywhere() -> None:
    verifier = ManifestVerifier(RUN)
    verifier.accept(sign(LEARNER, manifest(50_000)))
    with pytest.raises(ManifestError, match="too far"):
        verifier.accept(sign(LEARNER, manifest(60_001)))
    verifier.accept(sign(LEARNER, manifest(60_000)))


@pytest.mark.parametrize("version", [2**53 + 1, 2**63 - 1])
def test_a_version_number_past_all_that_a_run_can_reach_is_refused_by_a_newcomer_too(version: int) -> None:
    with pytest.raises(ManifestError, match="version"):
        ManifestVerifier(RUN).accept(sealed(manifest(version)))


def test_a_manifest_that_every_verifier_would_refuse_for_its_encoding_is_not_signed() -> None:
    with pytest.raises(ManifestError, match="canonical"):
        sign(LEARNER, manifest(members=(Member(STRANGER.peer_id, 50),)))


@pytest.mark.parametrize(
    "assets",
    [
        (),
        (Asset("config.json", b"d" * 32, 10),),
        (Asset("config.json", b"c" * 32, 10), Asset("x", b"x" * 32, 1)),
    ],
)
def test_changed_assets_are_refused_within_a_run(assets: tuple[Asset, ...]) -> None:
    verifier = ManifestVerifier(RUN)
    verifier.accept(sign(LEARNER, manifest(1)))
    with pytest.raises(ManifestError, match="assets"):
        verifier.accept(sign(LEARNER, manifest(2, assets=assets)))


HOSTILE: list[dict[str, Any]] = [
    {"protocol": 2},
    {"version": 2**63 - 1},
    {"version": -1},
    {"hash": "md5"},
    {"fingerprint": "AB" * 32},
    {"chunk_bytes": 0},
    {"chunk_bytes": 2**40},
    {"chunks": bytes(64)},
    {"chunks": bytes(97)},
    {"chunks": bytes(128)},
    {"layout": Layout((TensorSpec("w", "uint8", (2**60,), 0, 2**60),), {})},
    *(
        {"layout": Layout((TensorSpec(name, "uint8", (5000,), 0, 5000),), {})}
        for name in ["", "/w", "w\0", "a/b", "ｗ", "w\u202e", "w\n", "w" * 257]
    ),
    {"layout": Layout((TensorSpec("w", "pickle", (5000,), 0, 5000),), {})},
    {"layout": Layout((TensorSpec("w", "uint8", (5000,), 0, 5000),), {"../tied": "w"})},
    {"layout": Layout(tuple(TensorSpec(f"w{at:05}", "uint8", (0,), 0, 0) for at in range(10_001)), {})},
    {"layout": Layout((TensorSpec("../w", "uint8", (5000,), 0, 5000),), {})},
    {"layout": Layout((TensorSpec("w", "uint8", (5000,), 64, 5000),), {})},
    {"members": (Member("x" * 52, 1.0),)},
    {"members": (Member(STRANGER.peer_id, float("nan")),)},
    {"members": (Member(STRANGER.peer_id, -1.0),)},
    {"members": (Member(STRANGER.peer_id, 1.0), Member(STRANGER.peer_id, 1.0))},
    {"members": (Member(LEARNER.peer_id, 1.0),)},
    {"patches": (patch(base_version=3),)},
    {"patches": (patch(base_version=4),)},
    {"patches": (patch(base_version=-1),)},
    {"patches": (patch(base_fingerprint="x"),)},
    {"patches": (patch(nbytes=0, chunks=b""),)},
    {"patches": (patch(nbytes=5001, chunk_bytes=8192, chunks=bytes(32)),)},
    {"patches": (patch(nbytes=2**60),)},
    {"patches": (patch(chunk_bytes=0),)},
    {"patches": (patch(chunk_bytes=512, chunks=bytes(96)),)},
    {"patches": (patch(chunks=bytes(32)),)},
    {"patches": (patch(chunks=bytes(65)),)},
    {"patches": (patch(chunks=bytes(96)),)},
    *(
        {"assets": (Asset(name, b"c" * 32, 1),)}
        for name in ["", "../x", "/x", "a/b", "x\0", ".x", "ｘ", "x" * 200]
    ),
    {"assets": (Asset("x", b"c" * 31, 1),)},
    {"assets": (Asset("x", b"c" * 32, 2**40),)},
    {"assets": (Asset("x", b"c" * 32, 2**29),)},
    {"assets": (Asset("x", b"c" * 32, 1), Asset("x", b"d" * 32, 1))},
    {"assets": (Asset("y", b"c" * 32, 1), Asset("x", b"d" * 32, 1))},
]


@pytest.mark.parametrize("changes", HOSTILE, ids=str)
def test_hostile_contents_are_refused_though_signed(changes: dict[str, Any]) -> None:
    verifier = ManifestVerifier(RUN)
    with pytest.raises(ManifestError):
        verifier.accept(sealed(manifest(**changes)))
    assert verifier.trusted == Trusted()


def test_a_second_encoding_of_one_manifest_is_refused() -> None:
    payload = sign(LEARNER, manifest())[64:]
    fields = msgspec.msgpack.decode(payload)
    reordered = msgspec.msgpack.encode(dict(reversed(fields.items())))
    extended = msgspec.msgpack.encode(fields | {"more": 1})
    for other in (reordered, extended, payload + b"\0"):
        with pytest.raises(ManifestError):
            ManifestVerifier(RUN).accept(sealed(other))


def test_the_limits_hold() -> None:
    data = sign(LEARNER, manifest())
    for limits in (
        ManifestLimits(max_manifest_bytes=len(data) - 1),
        ManifestLimits(max_snapshot_bytes=4999),
        ManifestLimits(max_chunks=2),
        ManifestLimits(max_asset_bytes=9),
    ):
        with pytest.raises(ManifestError, match="allowed"):
            ManifestVerifier(RUN, limits).accept(data)


def test_a_manifest_that_every_verifier_would_refuse_is_not_signed() -> None:
    with pytest.raises(ManifestError):
        sign(LEARNER, manifest(chunks=b""))


def test_chunks_cover_the_snapshot_and_then_the_assets_once() -> None:
    it = manifest()
    spans = [it.chunk_span(index) for index in range(it.n_chunks)]
    assert spans == [(0, 2048), (2048, 4096), (4096, 5000), (5000, 5010)]
    assert it.chunk_digest(3) == b"c" * 32


def test_the_chunks_of_a_patch_come_behind_the_assets() -> None:
    it = manifest(patches=(patch(),))
    data = sign(LEARNER, it)
    assert ManifestVerifier(RUN).accept(data) == it
    spans = [it.chunk_span(index) for index in range(it.n_chunks)]
    assert spans == [(0, 2048), (2048, 4096), (4096, 5000), (5000, 5010), (5010, 6034), (6034, 6510)]
    assert it.patch_span(0) == (5010, 6510)
    assert (it.whole, it.by_patches(1)) == (range(4), range(3, 6))
    assert [it.chunk_digest(index)[:1] for index in range(6)] == [b"\0"] * 3 + [b"c", b"p", b"p"]


def test_the_chunks_of_snapshot_and_patch_are_limited_together() -> None:
    data = sign(LEARNER, manifest(patches=(patch(),)))
    ManifestVerifier(RUN, ManifestLimits(max_chunks=5)).accept(data)
    with pytest.raises(ManifestError, match="allowed"):
        ManifestVerifier(RUN, ManifestLimits(max_chunks=4)).accept(data)
