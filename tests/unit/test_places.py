"""Where the words of a snapshot lie in an engine, without an engine: two ranks, fused, sharded and replicated."""

from __future__ import annotations

import numpy as np
import pytest

from echo2p2p.errors import EngineError
from echo2p2p.rollout.places import Place, ReadBack, Writes, buckets, check_cover, differing, row_major, whole
from echo2p2p.weights.snapshot import Layout, Snapshot, TensorSpec

LAYOUT = Layout(
    (
        TensorSpec("a.norm", "float32", (6,), 0, 24),
        TensorSpec("b.rows", "float32", (8, 6), 64, 192),
        TensorSpec("c.columns", "bfloat16", (5, 8), 256, 80),
    ),
    {},
)


def snapshot(seed: int) -> Snapshot:
    data = np.zeros(LAYOUT.nbytes, np.uint8)
    rng = np.random.default_rng(seed)
    for spec in LAYOUT.tensors:
        data[spec.offset : spec.offset + spec.nbytes] = rng.integers(0, 256, spec.nbytes)
    return Snapshot(LAYOUT, data.tobytes())


def ranks() -> list[list[Place]]:
    """Each rank has the norm, half of the rows behind it in one parameter, and half of the columns, transposed."""
    return [
        [
            Place(0, (6,), 0, (1,), 0, 0, (1,)),
            Place(1, (4, 6), 24 * rank, (6, 1), 0, 6, (6, 1)),
            Place(2, (5, 4), 4 * rank, (8, 1), 1, 0, (1, 5)),
        ]
        for rank in range(2)
    ]


class Rank:
    """What an engine does with pieces, in numpy."""

    def __init__(self, places: list[Place]) -> None:
        self.places = places
        self.parameters = [np.zeros(30, "<u4"), np.zeros(20, "<u2")]

    def view(self, place: Place) -> np.ndarray:
        flat = self.parameters[place.parameter]
        return np.lib.stride_tricks.as_strided(
            flat[place.at :], place.shape, [step * flat.itemsize for step in place.steps]
        )

    def write(self, memory: bytes, pieces) -> None:
        for piece in pieces:
            place = self.places[piece.place]
            view = self.view(place)
            held = view.reshape(-1).copy()
            at = np.frombuffer(memory, np.int64, piece.count, piece.at)
            held[at] = np.frombuffer(memory, held.dtype, piece.count, piece.words)
            for start, count, byte in piece.runs:
                held[start : start + count] = np.frombuffer(memory, held.dtype, count, byte)
            view[...] = held.reshape(place.shape)


def written(engine: list[Rank], make) -> None:
    writes = Writes()
    pieces = [make(rank.places, writes) for rank in engine]
    memory = bytearray(writes.nbytes)
    writes.fill(memoryview(memory))
    for rank, each in zip(engine, pieces, strict=True):
        rank.write(bytes(memory), each)


def read_back(engine: list[Rank]) -> str:
    found = ReadBack(LAYOUT)
    for first, last in [(0, 1), (1, 3)]:
        held = [
            (place, memoryview(np.ascontiguousarray(rank.view(place)).tobytes()))
            for rank in engine
            for place in rank.places
            if first <= place.tensor < last
        ]
        found.take(range(first, last), held)
    return found.fingerprint()


def test_a_version_is_written_over_another_and_read_back():
    engine = [Rank(places) for places in ranks()]
    one, two = snapshot(1), snapshot(2)
    written(engine, lambda places, writes: whole(one, places, range(3), writes))
    assert read_back(engine) == one.fingerprint()
    written(engine, lambda places, writes: differing(one, two, places, writes))
    assert read_back(engine) == two.fingerprint()


def test_only_what_differs_is_written():
    one = snapshot(1)
    data = bytearray(one.data)
    data[64 + 4 * 30] ^= 1  # a word of the second rank's rows
    writes = Writes()
    pieces = [differing(one, Snapshot(LAYOUT, bytes(data)), places, writes) for places in ranks()]
    assert pieces[0] == []
    assert [piece.place for piece in pieces[1]] == [1]
    assert writes.nbytes <= 24 * 4


@pytest.mark.parametrize(("rank", "parameter", "word"), [(0, 0, 2), (1, 0, 3), (1, 0, 20), (0, 1, 7)])
def test_one_wrong_word_on_one_rank_is_found(rank, parameter, word):
    engine = [Rank(places) for places in ranks()]
    one = snapshot(1)
    written(engine, lambda places, writes: whole(one, places, range(3), writes))
    engine[rank].parameters[parameter][word] ^= 1
    assert read_back(engine) != one.fingerprint()


def test_places_that_leave_words_out_are_refused():
    check_cover(LAYOUT, ranks())
    with pytest.raises(EngineError, match=r"24 words of b\.rows"):
        check_cover(LAYOUT, ranks()[:1])


def test_a_place_outside_its_tensor_is_refused():
    with pytest.raises(EngineError, match="outside"):
        check_cover(LAYOUT, [[Place(0, (7,), 0, (1,), 0, 0, (1,))]])


def test_buckets_hold_every_tensor_once_in_order():
    assert [index for first, last in buckets(LAYOUT) for index in range(first, last)] == [0, 1, 2]
    assert row_major((2, 3, 4)) == (12, 4, 1)
