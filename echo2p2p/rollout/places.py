"""Where the words of a snapshot lie in an engine that keeps them in an order of its own: fused, sharded, padded.

A place is a rectangle of one tensor of a snapshot, and the rectangle of an engine's parameter with the same words.
Engines say which places they have by running their own weight loaders once, without data; this module does the rest:
what to write for a version, and the fingerprint of what is read back. Pure: no I/O, no torch.

Guarantees:

* Places that leave a word of the snapshot out are refused, so what has been read back is the whole of it.
* A word that an engine holds twice (replicated on two ranks, or tied) must be the same in all places.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from echo2p2p.errors import EngineError
from echo2p2p.weights.difference import compared
from echo2p2p.weights.patch_words import Words
from echo2p2p.weights.snapshot import DTYPE_BYTES, Layout, Snapshot, TensorSpec, fingerprint_hasher

BUCKET_BYTES = 64 * 2**20
"""So many bytes, or one tensor, are written or read back at a time: the engine generates between two of them."""


class Place(msgspec.Struct, frozen=True, array_like=True):
    """Words of a snapshot and of an engine that are the same; all counted in elements of one dtype.

    Attributes:
        tensor: index into ``layout.tensors``.
        start, strides: where the rectangle of ``shape`` lies in that tensor's words.
        parameter: the engine's number for the parameter.
        at, steps: where the rectangle lies in the words of the parameter's storage.
    """

    tensor: int
    shape: tuple[int, ...]
    start: int
    strides: tuple[int, ...]
    parameter: int
    at: int
    steps: tuple[int, ...]

    @property
    def n_words(self) -> int:
        return math.prod(self.shape)

    @property
    def lies_in_order(self) -> bool:
        """Whether the engine holds the rectangle without gaps, in row-major order."""
        return self.steps == row_major(self.shape)


class Piece(msgspec.Struct, frozen=True, array_like=True):
    """What is written into one place: listed words, and runs. Bytes are counted from the start of shared memory.

    Attributes:
        place: index among the rank's places.
        count: of the listed words; their int64 indices into the place lie at byte ``at``, their bits at ``words``.
        runs: (first word of the place, words, byte).
    """

    place: int
    count: int
    at: int
    words: int
    runs: tuple[tuple[int, int, int], ...]


def row_major(shape: Sequence[int]) -> tuple[int, ...]:
    """The strides of an array of ``shape`` without gaps; a dimension of one word gets the stride it would have."""
    strides, step = [], 1
    for size in reversed(shape):
        strides.append(step)
        step *= size
    return tuple(reversed(strides))


def check_cover(layout: Layout, ranks: Sequence[Sequence[Place]]) -> None:
    """Raises EngineError: words of the snapshot have no place on any rank, so nothing could be proven of them."""
    for index, spec in enumerate(layout.tensors):
        seen = np.zeros(spec.nbytes // DTYPE_BYTES[spec.dtype], bool)
        for place in (place for places in ranks for place in places if place.tensor == index):
            _rectangle(seen, place)[...] = True
        if not seen.all():
            raise EngineError(
                f"the engine has no place for {int((~seen).sum())} words of {spec.name}",
                hint="this architecture works with worker.engine = transformers",
            )


def buckets(layout: Layout) -> Iterator[tuple[int, int]]:
    """Tensors ``first`` … ``last - 1``, as many as fit into ``BUCKET_BYTES``, one at least; all of them in order."""
    first = 0
    for last in range(1, len(layout.tensors) + 1):
        full = last == len(layout.tensors) or (
            layout.tensors[last].offset + layout.tensors[last].nbytes - layout.tensors[first].offset
            > BUCKET_BYTES
        )
        if full:
            yield first, last
            first = last


class Writes:
    """Bytes for shared memory, one after the other, and the pieces that are made of them."""

    def __init__(self) -> None:
        self.arrays: list[NDArray[Any]] = []
        self.nbytes = 0

    def add(self, array: NDArray[Any]) -> int:
        """Take ``array``; returns its first byte, a multiple of 8."""
        start = self.nbytes
        self.arrays.append(array)
        self.nbytes += -(-array.nbytes // 8) * 8
        return start

    def fill(self, memory: memoryview) -> None:
        """Copy everything into ``memory``."""
        target, start = np.frombuffer(memory, np.uint8), 0
        for array in self.arrays:
            flat = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
            target[start : start + flat.size] = flat
            start += -(-flat.size // 8) * 8


def differing(base: Snapshot, new: Snapshot, places: Sequence[Place], writes: Writes) -> list[Piece]:
    """What turns the words of ``base`` in ``places`` into those of ``new``."""
    pieces = []
    for number, place in enumerate(places):
        old_words, new_words = (
            _rectangle(_words(snapshot, place.tensor), place).reshape(-1) for snapshot in (base, new)
        )
        change = compared(str(number), old_words, new_words)
        if not change.n_words:
            continue
        if not place.lies_in_order:
            pieces.append(_whole(number, new_words, writes))
            continue
        at, words = writes.add(change.at), writes.add(change.words)
        runs = tuple((start, stop - start, writes.add(new_words[start:stop])) for start, stop in change.runs)
        pieces.append(Piece(number, change.at.size, at, words, runs))
    return pieces


def whole(new: Snapshot, places: Sequence[Place], tensors: range, writes: Writes) -> list[Piece]:
    """All words of ``tensors`` (indices into the layout) in ``places``."""
    return [
        _whole(number, _rectangle(_words(new, place.tensor), place).reshape(-1), writes)
        for number, place in enumerate(places)
        if place.tensor in tensors
    ]


class ReadBack:
    """Puts a snapshot's bytes together from what an engine's places hold, and fingerprints them.

    Args:
        layout: of the snapshot that the engine should hold.
    """

    def __init__(self, layout: Layout) -> None:
        self._layout = layout
        self._hasher = fingerprint_hasher(layout)
        self._end = 0
        self._agree = True

    def take(self, tensors: range, held: Iterable[tuple[Place, memoryview]]) -> None:
        """Add ``tensors``, which come in order; ``held`` are all their places on all ranks, each with its words.

        The words lie in row-major order of the place.
        """
        raw = {index: np.zeros(self._layout.tensors[index].nbytes, np.uint8) for index in tensors}
        seen = {index: np.zeros(array.size // self._size(index), bool) for index, array in raw.items()}
        for place, words in held:
            kind = f"<u{self._size(place.tensor)}"
            found = np.frombuffer(words, kind, place.n_words).reshape(place.shape)
            target = _rectangle(raw[place.tensor].view(kind), place)
            mask = _rectangle(seen[place.tensor], place)
            if mask.any():
                self._agree &= bool(np.array_equal(target[mask], found[mask]))
            target[...] = found
            mask[...] = True
        for index in tensors:
            spec = self._layout.tensors[index]
            self._agree &= bool(seen[index].all())
            self._hasher.update(bytes(spec.offset - self._end))
            self._hasher.update(raw[index].data)
            self._end = spec.offset + spec.nbytes

    def fingerprint(self) -> str:
        """Of everything taken; not one that any snapshot has if places contradict each other."""
        return self._hasher.hexdigest() if self._agree else "contradictory"

    def _size(self, tensor: int) -> int:
        return DTYPE_BYTES[self._layout.tensors[tensor].dtype]


def _whole(number: int, words: Words, writes: Writes) -> Piece:
    return Piece(number, 0, 0, 0, ((0, words.size, writes.add(words)),))


def _words(snapshot: Snapshot, tensor: int) -> Words:
    spec: TensorSpec = snapshot.layout.tensors[tensor]
    raw = np.frombuffer(snapshot.data, np.uint8)[spec.offset : spec.offset + spec.nbytes]
    return raw.view(f"<u{DTYPE_BYTES[spec.dtype]}")


def _rectangle(words: NDArray[Any], place: Place) -> NDArray[Any]:
    """The view of ``place`` into a tensor's words; EngineError if it reaches past them."""
    last = place.start + sum((size - 1) * step for size, step in zip(place.shape, place.strides, strict=True))
    if place.start < 0 or min(place.strides, default=0) < 0 or last >= max(words.size, 1):
        raise EngineError("a place of the engine lies outside its tensor")
    return np.lib.stride_tricks.as_strided(
        words[place.start :], place.shape, [step * words.itemsize for step in place.strides]
    )
