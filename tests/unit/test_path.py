"""Which way is taken to a version, and that it ends on the right bits."""

from __future__ import annotations

import numpy as np
from blake3 import blake3
from hypothesis import given
from hypothesis import strategies as st

from echo2p2p.swarm.identity import Identity
from echo2p2p.weights.manifest import (
    DEFAULT_LIMITS,
    MAX_PATCHES,
    Asset,
    Manifest,
    ManifestVerifier,
    Patch,
    sign,
)
from echo2p2p.weights.patch import apply_chain_in_place, encode
from echo2p2p.weights.path import cheapest_way
from echo2p2p.weights.snapshot import Layout, Snapshot, TensorSpec

LEARNER = Identity.from_seed(b"l" * 32)
RUN = f"run@{LEARNER.peer_id}"
NEWEST = 6
WORDS = 20_000
LAYOUT = Layout((TensorSpec("w", "bfloat16", (WORDS,), 0, 2 * WORDS),), {})
ASSET = b"{}" * 700


def cut(data: bytes | memoryview, chunk_bytes: int) -> bytes:
    return b"".join(blake3(data[at : at + chunk_bytes]).digest() for at in range(0, len(data), chunk_bytes))


def history() -> tuple[list[Snapshot], list[bytes], list[Manifest]]:
    """All versions, the patch that makes each (none the first), and their manifests."""
    rng = np.random.default_rng(0)
    words = rng.integers(0, 2**14, WORDS).astype(np.uint16)
    snapshots, made, manifests = [Snapshot(LAYOUT, words.tobytes())], [b""], []
    for version in range(1, NEWEST + 1):
        # Later patches are smaller, so that a few of them may cost less than one.
        words = words + (rng.random(WORDS) < 0.2 / version).astype(np.uint16)
        snapshots.append(Snapshot(LAYOUT, words.tobytes()))
        made.append(encode(*snapshots[-2:]))
    for version, snapshot in enumerate(snapshots):
        patches = tuple(
            Patch(at - 1, snapshots[at - 1].fingerprint(), len(made[at]), 1024, cut(made[at], 1024))
            for at in range(version, 0, -1)
        )
        manifests.append(
            Manifest(
                protocol=1,
                run=RUN,
                version=version,
                hash="blake3",
                fingerprint=snapshot.fingerprint(),
                layout=LAYOUT,
                chunk_bytes=2048,
                chunks=cut(snapshot.data, 2048),
                members=(),
                assets=(Asset("config.json", blake3(ASSET).digest(), len(ASSET)),),
                patches=patches if sum(map(len, made[1 : version + 1])) < snapshot.layout.nbytes else (),
            )
        )
    return snapshots, made, manifests


SNAPSHOTS, MADE, MANIFESTS = history()
MANIFEST = MANIFESTS[-1]
DIGESTS = [MANIFEST.chunk_digest(index) for index in range(MANIFEST.n_chunks)]


def missing_bytes(wanted: range, here: set[bytes]) -> int:
    return sum(
        MANIFEST.chunk_span(at)[1] - MANIFEST.chunk_span(at)[0] for at in wanted if DIGESTS[at] not in here
    )


def test_the_history_is_one_that_every_verifier_believes() -> None:
    assert len(MANIFEST.patches) == NEWEST
    verifier = ManifestVerifier(RUN)
    for manifest in MANIFESTS:
        assert verifier.accept(sign(LEARNER, manifest)) == manifest


@given(st.sets(st.integers(0, NEWEST)), st.sets(st.sampled_from(DIGESTS)), st.booleans())
def test_the_way_is_the_cheapest_and_ends_on_the_right_bits(
    held: set[int], here: set[bytes], with_assets: bool
) -> None:
    if with_assets:
        here.add(MANIFEST.assets[0].digest)
    way = cheapest_way(MANIFEST, [MANIFESTS[at] for at in held], here.__contains__)

    ways = [MANIFEST.whole]
    ways += [MANIFEST.by_patches(NEWEST - at) for at in held if at < NEWEST]
    assert way.wanted in ways
    assert way.missing_bytes == missing_bytes(way.wanted, here)
    assert way.missing_bytes == min(missing_bytes(wanted, here) for wanted in ways)
    if way.missing_bytes == missing_bytes(MANIFEST.whole, here):
        assert (way.base, way.patches) == (None, 0)

    if way.base is None:
        assert way.wanted == MANIFEST.whole
        return
    assert way.base.version in held
    # What the wanted chunks hold, put together as their spans say.
    behind = b"".join([ASSET, *reversed(MADE[1:])])
    buffer = bytearray(SNAPSHOTS[way.base.version].data)
    spans = [MANIFEST.patch_span(at) for at in reversed(range(way.patches))]
    chain = [behind[start - MANIFEST.nbytes : end - MANIFEST.nbytes] for start, end in spans]
    fetched = [DIGESTS[at] for at in way.wanted[1:]]
    assert [cut(patch, 1024) for patch in reversed(chain)] == [
        MANIFEST.patches[at].chunks for at in range(way.patches)
    ]
    assert b"".join(fetched) == b"".join(cut(patch, 1024) for patch in reversed(chain))
    apply_chain_in_place(buffer, chain, layout=LAYOUT, fingerprint=MANIFEST.fingerprint)
    assert buffer == SNAPSHOTS[-1].data


def test_a_base_of_the_right_version_with_other_weights_is_no_base() -> None:
    other = Manifest(
        **{name: getattr(MANIFESTS[5], name) for name in MANIFEST.__struct_fields__}
        | {"fingerprint": "0" * 64}
    )
    assert cheapest_way(MANIFEST, [other], lambda _: False).base is None


def test_a_base_of_another_layout_is_no_base() -> None:
    layout = Layout((TensorSpec("v", "bfloat16", (WORDS,), 0, 2 * WORDS),), {})
    other = Manifest(
        **{name: getattr(MANIFESTS[5], name) for name in MANIFEST.__struct_fields__} | {"layout": layout}
    )
    assert cheapest_way(MANIFEST, [other], lambda _: False).base is None


def test_with_nothing_at_hand_the_whole_is_taken_whatever_the_patches_cost() -> None:
    way = cheapest_way(MANIFEST, [], lambda _: False)
    assert (way.base, way.wanted, way.missing_bytes) == (None, MANIFEST.whole, 2 * WORDS + len(ASSET))


def test_a_manifest_of_the_largest_snapshot_with_the_longest_chain_stays_within_the_limits() -> None:
    n_chunks, chunk_bytes = 2**16, 2**24
    size = n_chunks * chunk_bytes
    layout = Layout((TensorSpec("w", "uint8", (size,), 0, size),), {})
    share = size // 2 // MAX_PATCHES
    per_patch = -(-share // chunk_bytes)
    manifest = Manifest(
        protocol=1,
        run=RUN,
        version=1000,
        hash="blake3",
        fingerprint="ab" * 32,
        layout=layout,
        chunk_bytes=chunk_bytes,
        chunks=bytes(32 * n_chunks),
        members=(),
        assets=(),
        patches=tuple(
            Patch(999 - at, "cd" * 32, share, chunk_bytes, bytes(32 * per_patch)) for at in range(MAX_PATCHES)
        ),
    )
    assert size == DEFAULT_LIMITS.max_snapshot_bytes
    body = sign(LEARNER, manifest)
    assert len(body) < DEFAULT_LIMITS.max_manifest_bytes
    assert ManifestVerifier(RUN).accept(body) == manifest
    assert manifest.chunk_span(manifest.n_chunks - 1)[1] == manifest.patch_span(MAX_PATCHES - 1)[1]
