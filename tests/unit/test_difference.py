"""What differs between two snapshots, and that writing it over the old one gives the new one."""

from __future__ import annotations

import numpy as np
import pytest

from echo2p2p.errors import ManifestError
from echo2p2p.weights.difference import BLOCK_WORDS, LISTED_ONE_IN, difference
from echo2p2p.weights.snapshot import DTYPE_BYTES, Layout, Snapshot, TensorSpec

DTYPES = ["uint8", "bfloat16", "float32", "int64"]


def laid_out(*tensors: tuple[str, str, tuple[int, ...]]) -> Layout:
    specs, end = [], 0
    for name, dtype, shape in tensors:
        nbytes = DTYPE_BYTES[dtype] * int(np.prod(shape, dtype=np.int64))
        specs.append(TensorSpec(name, dtype, shape, -(-end // 64) * 64, nbytes))
        end = specs[-1].offset + nbytes
    layout = Layout(tuple(specs), {})
    layout.validate()
    return layout


def random_snapshot(layout: Layout, rng: np.random.Generator) -> Snapshot:
    buffer = np.zeros(layout.nbytes, np.uint8)
    for spec in layout.tensors:
        buffer[spec.offset : spec.offset + spec.nbytes] = rng.integers(0, 256, spec.nbytes)
    return Snapshot(layout, buffer.tobytes())


def with_changes(base: Snapshot, share: float, rng: np.random.Generator) -> Snapshot:
    buffer = bytearray(base.data)
    for spec in base.layout.tensors:
        words = words_of(buffer, spec)
        words[rng.random(words.size) < share] ^= 1
    return Snapshot(base.layout, bytes(buffer))


def words_of(buffer: bytearray | memoryview, spec: TensorSpec) -> np.ndarray:
    raw = np.frombuffer(buffer, np.uint8)[spec.offset : spec.offset + spec.nbytes]
    return raw.view(f"<u{DTYPE_BYTES[spec.dtype]}")


def written_over(held: Snapshot, new: Snapshot) -> bytes:
    buffer = bytearray(held.data)
    specs = {spec.name: spec for spec in held.layout.tensors}
    for each in difference(held, new):
        words = words_of(buffer, specs[each.name])
        words[each.at] = each.words
        for start, stop in each.runs:
            words[start:stop] = words_of(new.data, specs[each.name])[start:stop]
    return bytes(buffer)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("share", [0.0, 0.001, 1 / LISTED_ONE_IN, 0.2, 1.0])
def test_writing_the_difference_over_the_old_snapshot_gives_the_new_one(dtype: str, share: float) -> None:
    rng = np.random.default_rng(3)
    layout = laid_out(
        ("a", dtype, (3 * BLOCK_WORDS + 5,)), ("b", dtype, ()), ("c", dtype, (0, 4)), ("d", "bool", (7, 9))
    )
    held = random_snapshot(layout, rng)
    new = with_changes(held, share, rng)
    assert written_over(held, new) == bytes(new.data)


def test_what_did_not_change_is_not_mentioned() -> None:
    rng = np.random.default_rng(0)
    layout = laid_out(*((name, "bfloat16", (10, 10)) for name in "abc"))
    held = random_snapshot(layout, rng)
    assert difference(held, held) == ()
    buffer = bytearray(held.data)
    buffer[layout.tensors[1].offset + 2 * 37 + 1] ^= 0x80
    [only] = difference(held, Snapshot(layout, buffer))
    assert (only.name, only.at.tolist(), only.runs, only.n_words) == ("b", [37], (), 1)


def test_few_words_are_listed_and_many_are_copied_in_runs_block_by_block() -> None:
    layout = laid_out(("a", "bfloat16", (4 * BLOCK_WORDS,)))
    held = Snapshot(layout, bytes(layout.nbytes))
    words = np.zeros(4 * BLOCK_WORDS, np.uint16)
    words[: BLOCK_WORDS // LISTED_ONE_IN] = 1
    words[BLOCK_WORDS : 3 * BLOCK_WORDS] = 2
    words[-1] = 3
    [only] = difference(held, Snapshot(layout, words.tobytes()))
    assert only.at.tolist() == [*range(BLOCK_WORDS // LISTED_ONE_IN), 4 * BLOCK_WORDS - 1]
    assert only.runs == ((BLOCK_WORDS, 3 * BLOCK_WORDS),)
    assert only.words.tolist() == words[only.at].tolist()


def test_bits_are_compared_and_not_numbers() -> None:
    layout = laid_out(("a", "float32", (64,)))
    numbers = np.array([0.0, np.nan] * 32, np.float32)
    held = Snapshot(layout, numbers.tobytes())
    numbers[0] = -0.0
    new = Snapshot(layout, numbers.tobytes())
    [only] = difference(held, new)
    assert only.at.tolist() == [0]


def test_snapshots_with_different_layouts_have_no_difference() -> None:
    rng = np.random.default_rng(0)
    one = random_snapshot(laid_out(("a", "bfloat16", (4, 2))), rng)
    other = random_snapshot(laid_out(("a", "bfloat16", (2, 4))), rng)
    with pytest.raises(ManifestError):
        difference(one, other)
