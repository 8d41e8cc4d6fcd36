import resource
import struct
import time
from itertools import pairwise, product

import numpy as np
import pytest
import torch
import zstandard
from blake3 import blake3
from hypothesis import given, settings
from hypothesis import strategies as st

from echo2p2p.errors import FingerprintMismatch, ManifestError, PatchError
from echo2p2p.weights.patch import (
    PatchLimits,
    apply,
    apply_chain_in_place,
    apply_in_place,
    encode,
    read_head,
)
from echo2p2p.weights.patch_words import Kind
from echo2p2p.weights.snapshot import DTYPE_BYTES, Layout, Snapshot, TensorSpec, from_state_dict

FLOATS = {"float8_e4m3fn": 3, "float16": 10, "bfloat16": 7, "float32": 23, "float64": 52}
HEAD_BYTES = 8 + 3 * 32


def tensors(shapes: dict[str, tuple[str, int]]) -> Layout:
    specs, end = [], 0
    for name in sorted(shapes):
        dtype, size = shapes[name]
        offset = -(-end // 64) * 64
        specs.append(TensorSpec(name, dtype, (size,), offset, size * DTYPE_BYTES[dtype]))
        end = offset + size * DTYPE_BYTES[dtype]
    return Layout(tuple(specs), {})


def bf16(words: np.ndarray) -> Snapshot:
    return Snapshot(tensors({"w": ("bfloat16", words.size)}), words.astype("<u2").tobytes())


def policy(size: int = 100_000, seed: int = 0) -> np.ndarray:
    """bf16 words of normal weights."""
    weights = np.random.default_rng(seed).normal(0, 0.02, size).astype(np.float32)
    return (weights.view(np.uint32) >> 16).astype(np.uint16)


def step(words: np.ndarray, share: float = 0.01, seed: int = 1) -> np.ndarray:
    """``share`` of the words moved by one unit in the last place."""
    rng = np.random.default_rng(seed)
    moved = words.copy()
    at = np.flatnonzero(rng.random(words.size) < share)
    moved[at] += rng.choice(np.array([1, 65535], np.uint16), at.size)
    return moved


def resealed(patch: bytes, sections: bytes) -> bytes:
    """A patch of the same name with other sections and the right digest, as a lying maker would seal it."""
    named = patch[40:HEAD_BYTES]
    return patch[:8] + blake3(patch[:8] + named + sections).digest() + named + sections


@st.composite
def pairs(draw: st.DrawFn) -> tuple[Snapshot, Snapshot]:
    """Two snapshots that share some tensors, at every density of changes."""
    rng = np.random.default_rng(draw(st.integers(0, 2**32)))
    sides: list[dict[str, tuple[str, int]]] = [{}, {}]
    for name in draw(st.lists(st.sampled_from("abcdefgh"), unique=True, max_size=6)):
        dtype = draw(st.sampled_from(sorted(DTYPE_BYTES)))
        size = draw(st.sampled_from([0, 1, 3, 64, 1000, 20_011]))
        where = draw(st.sampled_from(["both", "both", "both", "base", "new", "resized", "cast"]))
        if where != "new":
            sides[0][name] = (dtype, size)
        if where != "base":
            sides[1][name] = {"resized": (dtype, size + 1), "cast": ("uint8", size)}.get(where, (dtype, size))
    base, new = map(tensors, sides)
    buffers = [bytearray(base.nbytes), bytearray(new.nbytes)]
    held = {spec.name: spec for spec in base.tensors}
    for layout, buffer in zip((base, new), buffers, strict=True):
        for spec in layout.tensors:
            width = DTYPE_BYTES[spec.dtype]
            words = rng.integers(0, 256, (spec.nbytes // width, width), np.uint8)
            if layout is new and held.get(spec.name, spec).nbytes == spec.nbytes and spec.name in held:
                old = held[spec.name]
                share = draw(st.sampled_from([0.0, 0.001, 0.02, 0.1, 0.5, 1.0]))
                kept = rng.random(len(words)) >= share
                before = np.frombuffer(buffers[0], np.uint8)[old.offset :][: old.nbytes].reshape(-1, width)
                words[kept] = before[kept]
            buffer[spec.offset : spec.offset + spec.nbytes] = words.tobytes()
    return Snapshot(base, buffers[0]), Snapshot(new, buffers[1])


@settings(max_examples=150, deadline=None)
@given(pairs())
def test_any_two_snapshots_come_back_bit_for_bit(pair: tuple[Snapshot, Snapshot]) -> None:
    base, new = pair
    patch = encode(base, new)
    before = bytes(base.data)
    assert bytes(apply(base, patch, layout=new.layout).data) == bytes(new.data)
    assert bytes(base.data) == before
    assert len(patch) <= HEAD_BYTES + len(new.data) + 64 * (1 + len(new.layout.tensors))
    if base.layout == new.layout:
        buffer = bytearray(base.data)
        assert apply_in_place(buffer, patch, layout=new.layout).fingerprint() == new.fingerprint()
        assert buffer == new.data


@settings(max_examples=60, deadline=None)
@given(
    st.sampled_from(sorted(FLOATS)), st.integers(0, 2**32), st.sampled_from([0.0001, 0.003, 0.05, 0.2, 0.9])
)
def test_weights_after_a_small_step_come_back_bit_for_bit(dtype: str, seed: int, rate: float) -> None:
    rng = np.random.default_rng(seed)
    weights = torch.from_numpy(rng.normal(0, 0.02, 30_000))
    update = torch.from_numpy(rng.normal(0, 1e-3, 30_000) * (rng.random(30_000) < rate))
    base, new = (
        from_state_dict({"w": each.to(getattr(torch, dtype))}) for each in (weights, weights + update)
    )
    assert bytes(apply(base, encode(base, new), layout=new.layout).data) == bytes(new.data)


@given(st.sampled_from([1, 2, 4, 8]), st.data())
def test_words_in_order_are_the_numbers_in_order(width: int, data: st.DataObject) -> None:
    kind = Kind(width, 3)
    words = np.array(data.draw(st.lists(st.integers(0, 2 ** (8 * width) - 1), min_size=1)), kind.dtype)
    assert np.array_equal(kind.unorder(kind.order(words)), words)
    number = [-int(w ^ kind.top) - 1 if w & kind.top else int(w) for w in words.tolist()]
    assert [int(o) - kind.top for o in kind.order(words).tolist()] == number


def test_one_percent_of_bf16_words_cost_near_their_entropy() -> None:
    words = policy(2_000_000)
    base, new = bf16(words), bf16(step(words))
    entropy_bytes = words.size * (0.0808 + 0.01) / 8
    assert len(encode(base, new)) < 1.04 * entropy_bytes


def test_words_that_move_by_their_size_cost_less_than_their_entropy_says() -> None:
    rng = np.random.default_rng(0)
    master = rng.normal(0, 0.02, 2_000_000).astype(np.float32)
    after = master + np.float32(2e-7) * rng.choice(np.array([-1, 1], np.float32), master.size)
    base, new = ((each.view(np.uint32) + 0x8000 >> 16).astype(np.uint16) for each in (master, after))
    share = float((base != new).mean())
    entropy = -share * np.log2(share) - (1 - share) * np.log2(1 - share) + share
    assert len(encode(bf16(base), bf16(new))) * 8 < 0.95 * entropy * base.size


def test_equal_snapshots_give_a_tiny_patch_and_always_the_same() -> None:
    base = bf16(policy())
    patch = encode(base, base)
    assert patch == encode(base, base)
    assert len(patch) < 150


def test_tied_tensors_stay_tied() -> None:
    embed = torch.randn(50, 8).bfloat16()
    base = from_state_dict({"embed": embed, "head": embed})
    moved = embed + 0.1
    new = from_state_dict({"embed": moved, "head": moved})
    result = apply(base, encode(base, new), layout=new.layout).state_dict()
    assert result["head"].data_ptr() == result["embed"].data_ptr()
    assert torch.equal(result["head"], moved)


def test_a_tensor_longer_than_a_section_comes_back() -> None:
    words = policy(9 * 2**20)
    base, new = bf16(words), bf16(step(words, 0.0005))
    assert apply(base, encode(base, new), layout=new.layout).data == new.data


def test_a_patch_names_its_base_and_its_result() -> None:
    base, new = bf16(policy()), bf16(step(policy()))
    assert read_head(encode(base, new)) == (base.fingerprint(), new.fingerprint())


def test_the_wrong_base_is_refused() -> None:
    base, new, other = bf16(policy()), bf16(step(policy())), bf16(policy(seed=7))
    with pytest.raises(PatchError, match="starts from"):
        apply(other, encode(base, new), layout=new.layout)


def test_a_patch_is_not_applied_twice() -> None:
    base, new = bf16(policy()), bf16(step(policy()))
    patch = encode(base, new)
    buffer = bytearray(base.data)
    held = apply_in_place(buffer, patch, layout=new.layout).fingerprint()
    for known in (None, held):
        with pytest.raises(PatchError, match="starts from"):
            apply_in_place(buffer, patch, layout=new.layout, base_fingerprint=known)
    assert buffer == new.data


def test_a_caller_who_is_wrong_about_its_base_is_told() -> None:
    base, new = bf16(policy()), bf16(step(policy()))
    other = bf16(policy(seed=7))
    with pytest.raises((FingerprintMismatch, PatchError)):
        apply(other, encode(base, new), layout=new.layout, base_fingerprint=base.fingerprint())


def test_a_result_other_than_the_manifests_is_refused() -> None:
    base, new = bf16(policy()), bf16(step(policy()))
    with pytest.raises(PatchError, match="makes"):
        apply(base, encode(base, new), layout=new.layout, fingerprint=base.fingerprint())


def test_every_flipped_bit_and_every_truncation_is_refused_before_a_byte_is_written() -> None:
    base, new = bf16(policy(3000)), bf16(step(policy(3000)))
    patch = encode(base, new)
    buffer = bytearray(base.data)
    flipped = (
        patch[:at] + bytes([patch[at] ^ 1 << bit]) + patch[at + 1 :]
        for at, bit in product(range(len(patch)), range(8))
    )
    for bad in (*flipped, *(patch[:end] for end in range(len(patch))), patch + b"\0"):
        with pytest.raises(PatchError):
            apply_in_place(buffer, bad, layout=new.layout)
    assert buffer == base.data


@settings(max_examples=400, deadline=None)
@given(st.integers(0, 2**32), st.sampled_from([0.001, 0.02, 0.12, 0.6]))
def test_a_lying_maker_of_patches_only_ever_gets_a_typed_error(seed: int, share: float) -> None:
    rng = np.random.default_rng(seed)
    base, new = bf16(policy(5000)), bf16(step(policy(5000), share))
    patch = encode(base, new)
    sections = bytearray(patch[HEAD_BYTES:])
    for _ in range(int(rng.integers(1, 4))):
        at = int(rng.integers(len(sections)))
        sections[at] = int(rng.integers(256))
    bad = resealed(patch, bytes(sections[: int(rng.integers(len(sections) // 2, len(sections) + 1))]))
    buffer = bytearray(base.data)
    try:
        result = apply_in_place(buffer, bad, layout=new.layout)
    except PatchError:
        assert buffer == base.data
    except FingerprintMismatch:
        pass
    else:
        assert result.data == new.data


def frame_without_size(data: bytes) -> bytes:
    compressor = zstandard.ZstdCompressor(write_content_size=False).compressobj()
    return compressor.compress(data) + compressor.flush()


def bomb(kind: str) -> bytes:
    zeros = bytes(2**20)
    if kind == "1 GiB":
        compressor = zstandard.ZstdCompressor(level=1).compressobj(size=2**30)
        return b"".join([*(compressor.compress(zeros) for _ in range(1024)), compressor.flush()])
    if kind == "unknown size":
        return frame_without_size(zeros)
    if kind == "many frames":
        return zstandard.compress(zeros[: 2**19]) * 2
    if kind == "empty frame, then more":
        return zstandard.compress(zeros) + zstandard.compress(zeros) * 8
    # Magic, a descriptor with an 8-byte size, a window of 2^31, the right size.
    return bytes.fromhex("28b52ffd") + bytes([0xC0, 21 << 3]) + struct.pack("<Q", 2**20) + bytes(64)


@pytest.mark.parametrize(
    "kind", ["1 GiB", "unknown size", "many frames", "empty frame, then more", "window 2^31"]
)
def test_a_bomb_is_refused_at_once_and_takes_no_memory(kind: str) -> None:
    layout = tensors({"w": ("uint8", 2**20)})
    base = Snapshot(layout, bytes(2**20))
    frame = bomb(kind)
    body = len(frame).to_bytes(4, "little") + frame
    bad = resealed(encode(base, base), struct.pack("<BHI", 2, 1, len(body)) + body)
    fingerprint = base.fingerprint()
    # Peak, so that what was taken and given back counts too.
    before_kib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    started = time.process_time()
    with pytest.raises(PatchError):
        apply(base, bad, layout=layout, base_fingerprint=fingerprint)
    assert time.process_time() - started < 0.05
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before_kib < 16 * 1024


def test_sizes_over_the_limits_are_refused_before_anything_is_allocated() -> None:
    base = bf16(policy(1000))
    patch = encode(base, base)
    with pytest.raises(PatchError, match="allowed"):
        apply(base, patch, layout=tensors({"w": ("uint8", 2**45)}))
    with pytest.raises(PatchError, match="allowed"):
        apply(base, patch, layout=base.layout, limits=PatchLimits(max_patch_bytes=100))
    with pytest.raises(ManifestError):
        apply(base, patch, layout=Layout((TensorSpec("w", "uint8", (2**49,), 0, 7),), {}))


def test_a_patch_between_layouts_is_not_applied_in_place() -> None:
    base, new = bf16(policy(1000)), bf16(policy(1001))
    with pytest.raises(ManifestError):
        apply_in_place(bytearray(base.data), encode(base, new), layout=new.layout)


# --- chains -----------------------------------------------------------------------------------------------


def chain(links: int, size: int = 3000, share: float = 0.05) -> tuple[list[Snapshot], list[bytes]]:
    """Consecutive snapshots and the patches between them, oldest first."""
    words = [policy(size)]
    for seed in range(links):
        words.append(step(words[-1], share, seed))
    snapshots = [bf16(each) for each in words]
    return snapshots, [encode(*pair) for pair in pairwise(snapshots)]


@settings(max_examples=30, deadline=None)
@given(st.integers(1, 8), st.sampled_from([0.0, 0.01, 0.3, 1.0]), st.data())
def test_any_part_of_a_chain_ends_where_its_last_patch_says(
    links: int, share: float, data: st.DataObject
) -> None:
    snapshots, patches = chain(links, share=share)
    first = data.draw(st.integers(0, links - 1))
    last = data.draw(st.integers(first + 1, links))
    buffer = bytearray(snapshots[first].data)
    made = apply_chain_in_place(buffer, patches[first:last], layout=snapshots[0].layout)
    assert made.fingerprint() == snapshots[last].fingerprint()
    assert buffer == snapshots[last].data


def test_one_flipped_bit_anywhere_in_a_chain_is_refused_before_anything_is_written() -> None:
    snapshots, patches = chain(3, size=300)
    layout = snapshots[0].layout
    buffer = bytearray(snapshots[0].data)
    fingerprint = snapshots[0].fingerprint()
    for at, patch in enumerate(patches):
        for bit in range(8 * len(patch)):
            damaged = bytearray(patch)
            damaged[bit // 8] ^= 1 << bit % 8
            with pytest.raises(PatchError):
                apply_chain_in_place(
                    buffer,
                    [*patches[:at], damaged, *patches[at + 1 :]],
                    layout=layout,
                    base_fingerprint=fingerprint,
                    fingerprint=snapshots[3].fingerprint(),
                )
    assert buffer == snapshots[0].data


def test_a_chain_out_of_order_cut_short_or_on_another_base_is_refused_before_anything_is_written() -> None:
    snapshots, (first, second, third) = chain(3)
    other = bytearray(snapshots[1].data)
    wrong: list[tuple[bytearray, list[bytes]]] = [
        (other, [first, second, third]),
        *(
            (bytearray(snapshots[0].data), patches)
            for patches in (
                [second, third],
                [first, third],
                [first, third, second],
                [first, first, second, third],
                [first, second, second, third],
                [first, second, third, third],
                [first, second],
                [first, second[:-1], third],
                [first, second, third[:100]],
                [first, b"", third],
            )
        ),
    ]
    for buffer, patches in wrong:
        before = bytes(buffer)
        with pytest.raises(PatchError):
            apply_chain_in_place(
                buffer, patches, layout=snapshots[0].layout, fingerprint=snapshots[3].fingerprint()
            )
        assert buffer == before


def test_a_chain_with_a_patch_that_lies_does_not_pass() -> None:
    snapshots, (first, second, third) = chain(3)
    liar = resealed(second, encode(snapshots[1], snapshots[3])[HEAD_BYTES:])
    with pytest.raises(FingerprintMismatch):
        apply_chain_in_place(bytearray(snapshots[0].data), [first, liar, third], layout=snapshots[0].layout)
