"""How the words of one section of a patch become bytes and come back. Pure; every size is checked first.

Words are unsigned integers as wide as the dtype. For floats they are put into the order of the numbers that
they stand for, so that one unit in the last place is a difference of 1 across zero and across exponents; the
map is one to one, whatever the bits. All arithmetic is modulo the word, so nothing can be lost.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from itertools import pairwise
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import zstandard

from echo2p2p.errors import PatchError

Words = npt.NDArray[np.unsignedinteger]
Bytes = npt.NDArray[np.uint8]
Indices = npt.NDArray[np.int64]

SECTION_BYTES = 8 * 2**20
"""No section is longer; what decoding takes beside the snapshot is a few times this."""
SPARSE_ONE_IN = 2
"""A section with more changed words than one in so many is never sparse."""

_MAX_CLASSES = 4
_MAX_SMALL = 1 / 64
"""All classes of small words together are at most this part of a section: they are looked for on both sides."""
_CLASS_COST_BITS = 1200.0
"""What one more class costs: its counts, and the Huffman table of its gaps."""
_SAMPLE_EVERY = 61
_SCAN_BYTES = 2**18
"""Scanned at once, so that what is compared stays in the cache."""
_BITMAP_FROM = 4
"""Above a changed word in so many, a gap has less than the whole bit or two that Huffman's code gives it."""
_MORE = 255
"""The byte of a gap that goes on: 255 unchanged words, and the rest follows."""


class _Compressors(threading.local):
    """One a thread: zstandard's must not be shared."""

    def __init__(self) -> None:
        self.mine = zstandard.ZstdCompressor(level=1, write_checksum=False)


_compressors = _Compressors()


class Kind(NamedTuple):
    """What the bits of a word mean. ``mantissa_bits`` is None for integers, which have no sign and magnitude."""

    width: int
    mantissa_bits: int | None

    @property
    def dtype(self) -> np.dtype[np.unsignedinteger]:
        return np.dtype(f"<u{self.width}")

    @property
    def top(self) -> int:
        """The sign bit of a float."""
        return 1 << (8 * self.width - 1)

    def order(self, words: Words) -> Words:
        """Words → integers in the order of the numbers."""
        if self.mantissa_bits is None:
            return words
        return words ^ (_filled(words) | words.dtype.type(self.top))

    def unorder(self, ordered: Words) -> Words:
        """The inverse of :meth:`order`."""
        if self.mantissa_bits is None:
            return ordered
        return ordered ^ (~_filled(ordered) | ordered.dtype.type(self.top))

    def magnitude(self, words: Words) -> Words:
        """Floats without their sign."""
        return words & words.dtype.type(self.top - 1)


def changed(base: Words, new: Words) -> Indices:
    """Which words differ, in order."""
    lanes = 8 // base.itemsize
    found: list[Indices] = []
    step = _SCAN_BYTES // base.itemsize
    for start in range(0, base.size, step):
        one, other = base[start : start + step], new[start : start + step]
        even = one.size // lanes * lanes
        # Eight bytes at once; then the words of the few that differ.
        wide, wide_other = one[:even].view("<u8"), other[:even].view("<u8")
        at = np.flatnonzero(wide != wide_other)
        lane = np.flatnonzero((wide[at] ^ wide_other[at]).view(base.dtype))
        found.append(at[lane // lanes] * lanes + lane % lanes + start)
        if even < one.size:
            found.append(np.flatnonzero(one[even:] != other[even:]) + (start + even))
    return np.concatenate(found) if found else np.empty(0, np.int64)


class Changes(NamedTuple):
    """Some words of a section, and how far each moves."""

    at: Indices
    steps: Words


# Sparse ----------------------------------------------------------------------------------------------------


def encode_sparse(kind: Kind, base: Words, new: Words, at: Indices) -> bytes:
    """The words at ``at`` moved from ``base`` to ``new``: a list of classes, small magnitudes first.

    A class is the words below a bound that no earlier class has; the last one has no bound, and counts its
    gaps over all words.
    """
    held, moved = base[at], new[at]
    bounds = _choose_bounds(kind, base, held)
    classes = _classes(kind, base, bounds)
    if classes is None:
        # The bounds come from a sample, which can miss where the small words are.
        bounds, classes = [], [_Class(None, 0, None)]
    steps = kind.order(moved) - kind.order(held)
    magnitudes = kind.magnitude(held)
    parts = [bytes([len(bounds)]), b"".join(bound.to_bytes(kind.width, "little") for bound in bounds)]
    for members, start, end in classes:
        here = (magnitudes >= start) & (magnitudes < end) if end is not None else magnitudes >= start
        ranks = at[here] if members is None else np.searchsorted(members, at[here])
        parts.append(len(ranks).to_bytes(4, "little"))
        if len(ranks):
            size = base.size if members is None else members.size
            parts += [_encode_ranks(ranks, size), _encode_steps(steps[here])]
    return b"".join(parts)


def decode_sparse(kind: Kind, base: Words, reader: Reader) -> Iterator[Changes]:
    """What :func:`encode_sparse` wrote, class by class.

    Raises:
        PatchError: counts or gaps that do not fit the section.
    """
    bounds = [int.from_bytes(reader.take(kind.width), "little") for _ in range(reader.take(1)[0])]
    if len(bounds) >= _MAX_CLASSES or bounds != sorted(set(bounds)):
        raise PatchError(f"a section with the bounds {bounds[:_MAX_CLASSES]} on its classes")
    classes = _classes(kind, base, bounds)
    if classes is None:
        raise PatchError("a section whose classes of small words are not small")
    left = base.size // SPARSE_ONE_IN
    for members, _, _ in classes:
        count = reader.number()
        left -= count
        if left < 0:
            raise PatchError(f"more than one word in {SPARSE_ONE_IN} changed in a sparse section")
        if not count:
            continue
        size = base.size if members is None else members.size
        ranks = _decode_ranks(reader, count, size)
        yield Changes(ranks if members is None else members[ranks], _decode_steps(reader, count, kind))


class _Class(NamedTuple):
    """Words whose magnitude lies from ``start`` up to ``end``. The last has no end and lists no members."""

    members: Indices | None
    start: int
    end: int | None


def _classes(kind: Kind, base: Words, bounds: list[int]) -> list[_Class] | None:
    """The classes between ``bounds``, or None where the small words are too many to be listed."""
    if not bounds:
        return [_Class(None, 0, None)]
    room = base.size * _MAX_SMALL * 2
    limit = base.dtype.type(bounds[-1])
    step = _SCAN_BYTES // base.itemsize
    found = []
    for start in range(0, base.size, step):
        found.append(np.flatnonzero(kind.magnitude(base[start : start + step]) < limit) + start)
        room -= found[-1].size
        if room < 0:
            return None
    small = np.concatenate(found)
    magnitudes = kind.magnitude(base[small])
    classes = [
        _Class(small[(magnitudes >= start) & (magnitudes < end)], start, end)
        for start, end in pairwise([0, *bounds])
    ]
    return [*classes, _Class(None, bounds[-1], None)]


def _choose_bounds(kind: Kind, base: Words, moved: Words) -> list[int]:
    """The bounds, on powers of two, that leave the fewest bits by the entropy of each class; [] for one class."""
    if kind.mantissa_bits is None or moved.size < 256:
        return []
    sample = base[::_SAMPLE_EVERY]
    words = np.bincount(_exponents(kind, sample)).astype(np.float64) * (base.size / sample.size)
    hits = np.bincount(_exponents(kind, moved), minlength=words.size).astype(np.float64)
    words = np.maximum(np.pad(words, (0, hits.size - words.size)), hits)
    # Only exponents that a class of small words may reach can be bounds.
    candidates = np.flatnonzero((np.cumsum(words) <= base.size * _MAX_SMALL) & (words > 0)) + 1
    if not candidates.size:
        return []
    edges = np.concatenate(([0], candidates[-24:]))
    return [
        int(exponent) << kind.mantissa_bits for exponent in _cheapest_edges(edges, words, hits, base.size)
    ]


def _cheapest_edges(
    edges: Indices, words: npt.NDArray[np.float64], hits: npt.NDArray[np.float64], size: int
) -> list[int]:
    """Which of ``edges`` (the first is 0) to cut at: shortest path over at most ``_MAX_CLASSES`` classes."""
    below_words = np.concatenate(([0.0], np.cumsum(words)))[edges]
    below_hits = np.concatenate(([0.0], np.cumsum(hits)))[edges]
    between = _entropy_bits(
        below_words[None, :] - below_words[:, None], below_hits[None, :] - below_hits[:, None]
    )
    between[np.tril_indices(len(edges))] = np.inf
    last = _entropy_bits(np.full(len(edges), float(size)), hits.sum() - below_hits)
    cost, best, path = np.full(len(edges), np.inf), float(last[0]), [0]
    cost[0] = 0.0
    paths = {0: [0]}
    for _ in range(_MAX_CLASSES - 1):
        through = cost[:, None] + between + _CLASS_COST_BITS
        origin = np.argmin(through, axis=0)
        cost = through[origin, np.arange(len(edges))]
        paths = {to: [*paths[int(origin[to])], to] for to in range(1, len(edges)) if int(origin[to]) in paths}
        end = int(np.argmin(cost + last))
        if cost[end] + last[end] < best:
            best, path = float(cost[end] + last[end]), paths[end]
    return [int(edges[at]) for at in path[1:]]


def _entropy_bits(words: npt.NDArray[np.float64], hits: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    """Bits that say which ``hits`` of ``words`` independent words changed."""
    words = np.maximum(words, 1e-9)
    rate = np.clip(hits / words, 1e-12, 1 - 1e-12)
    bits: npt.NDArray[np.float64] = -words * (rate * np.log2(rate) + (1 - rate) * np.log2(1 - rate))
    return bits


def _exponents(kind: Kind, words: Words) -> Indices:
    assert kind.mantissa_bits is not None
    return (kind.magnitude(words) >> words.dtype.type(kind.mantissa_bits)).astype(np.int64)


def _low_bits(count: int, size: int) -> int:
    """How many low bits of a gap are as good as random: the rest has a mean of about eight, a small alphabet."""
    return max(0, (size // count).bit_length() - 4)


def _encode_ranks(ranks: Indices, size: int) -> bytes:
    """Which of ``size`` words changed: a bit a word where many did, else the gaps between ``ranks``.

    Gaps have their low bits as they are, the rest in bytes of base 255; zstd's Huffman coder does the rest.
    """
    if len(ranks) * _BITMAP_FROM > size:
        flags = np.zeros(size, np.bool_)
        flags[ranks] = True
        return pack(np.packbits(flags))
    low = _low_bits(len(ranks), size)
    gaps = np.diff(ranks, prepend=-1) - 1
    rest = gaps >> low
    more = rest // _MORE
    ends = np.cumsum(more + 1)
    high = np.full(int(ends[-1]), _MORE, np.uint8)
    high[ends - 1] = rest - more * _MORE
    bits = np.packbits((gaps[:, None] >> np.arange(low)) & 1 != 0)
    return len(high).to_bytes(4, "little") + pack(high) + pack(bits)


def _decode_ranks(reader: Reader, count: int, size: int) -> Indices:
    if count * _BITMAP_FROM > size:
        ranks = np.flatnonzero(np.unpackbits(reader.block(-(-size // 8)), count=size))
        if ranks.size != count:
            raise PatchError(f"{ranks.size} changed words are marked, not {count}")
        return ranks
    low = _low_bits(count, size)
    length = reader.number()
    if not count <= length <= count + (size >> low) // _MORE:
        raise PatchError(f"{length} bytes of gaps for {count} of {size} words")
    high = reader.block(length)
    ends = np.flatnonzero(high != _MORE)
    if ends.size != count or ends[-1] != length - 1:
        raise PatchError(f"{ends.size} gaps for {count} changed words")
    rest = np.diff(np.cumsum(high, dtype=np.int64)[ends], prepend=0)
    bits = np.unpackbits(reader.block(-(-count * low // 8)), count=count * low).reshape(count, low)
    gaps = (rest << low) + (bits @ (1 << np.arange(low)) if low else 0)
    ranks = np.cumsum(gaps + 1) - 1
    if ranks[-1] >= size:
        raise PatchError(f"changed word {ranks[-1]} of {size}")
    return ranks


def _encode_steps(steps: Words) -> bytes:
    """The signs, a bit each, and the byte planes of what the magnitudes are above 1."""
    negative = _filled(steps)
    excess = ((steps ^ negative) - negative) - steps.dtype.type(1)
    planes = _split(excess)
    while planes and not planes[-1].any():
        planes.pop()
    signs = np.packbits(negative.astype(bool))
    return b"".join((bytes([len(planes)]), pack(signs), *map(pack, planes)))


def _decode_steps(reader: Reader, count: int, kind: Kind) -> Words:
    n_planes = reader.take(1)[0]
    if n_planes > kind.width:
        raise PatchError(f"{n_planes} planes of words of {kind.width} bytes")
    negative = np.unpackbits(reader.block(-(-count // 8)), count=count).astype(kind.dtype)
    excess = _join([reader.block(count) for _ in range(n_planes)], count, kind)
    # (x ^ -1) + 1 is -x: negation under a mask.
    steps: Words = ((excess + kind.dtype.type(1)) ^ (kind.dtype.type(0) - negative)) + negative
    return steps


# Dense and whole -------------------------------------------------------------------------------------------


def encode_dense(kind: Kind, base: Words, new: Words) -> bytes:
    """How far every word moves, zigzag, in byte planes."""
    steps = kind.order(new) - kind.order(base)
    return b"".join(map(pack, _split((steps << steps.dtype.type(1)) ^ _filled(steps))))


def decode_dense(kind: Kind, size: int, reader: Reader) -> Words:
    zigzag = _join([reader.block(size) for _ in range(kind.width)], size, kind)
    one = kind.dtype.type(1)
    steps: Words = (zigzag >> one) ^ (kind.dtype.type(0) - (zigzag & one))
    return steps


def encode_whole(new: Words) -> bytes:
    """The words themselves, in byte planes: of floats the one with sign and exponent compresses."""
    return b"".join(map(pack, _split(new)))


def decode_whole(kind: Kind, size: int, reader: Reader) -> Words:
    return _join([reader.block(size) for _ in range(kind.width)], size, kind)


def _filled(words: Words) -> Words:
    """All ones where the top bit is set, else zero."""
    signed = words.view(words.dtype.str.replace("u", "i"))
    filled: Words = (signed >> (8 * words.itemsize - 1)).view(words.dtype)
    return filled


def _split(words: Words) -> list[Bytes]:
    planes = np.ascontiguousarray(words).view(np.uint8).reshape(-1, words.itemsize)
    return [np.ascontiguousarray(planes[:, at]) for at in range(words.itemsize)]


def _join(planes: list[Bytes], size: int, kind: Kind) -> Words:
    """The words that have these low byte planes, and zeros above."""
    words = np.zeros((size, kind.width), np.uint8)
    for at, plane in enumerate(planes):
        words[:, at] = plane
    return words.reshape(-1).view(kind.dtype)


# Blocks ----------------------------------------------------------------------------------------------------


def pack(raw: Bytes) -> bytes:
    """Bytes with their stored length in front: one zstd frame, or as they are where that is no longer."""
    frame = _compressors.mine.compress(raw.data) if raw.size else b""
    stored = frame if len(frame) < raw.size else raw.tobytes()
    return len(stored).to_bytes(4, "little") + stored


class Reader:
    """Takes apart what :func:`pack` and its neighbours put together.

    No byte is decompressed whose number the caller does not know: zstandard trusts the size in a frame's
    header over ``max_output_size``, so that size must be the one expected.

    Raises:
        PatchError: from every method, where the bytes end early or are not what they must be.
    """

    def __init__(self, data: memoryview) -> None:
        self._data = data
        self._at = 0
        self._decompressor = zstandard.ZstdDecompressor(max_window_size=2 * SECTION_BYTES)

    @property
    def at_end(self) -> bool:
        return self._at == len(self._data)

    def take(self, count: int) -> memoryview:
        """The next ``count`` bytes."""
        taken = self._data[self._at : self._at + count]
        if len(taken) < count:
            raise PatchError(f"the patch ends {count - len(taken)} bytes early")
        self._at += count
        return taken

    def number(self) -> int:
        """The next 32 bits."""
        return int.from_bytes(self.take(4), "little")

    def block(self, size: int) -> Bytes:
        """The next block, which must hold exactly ``size`` bytes."""
        stored = self.take(self.number())
        if len(stored) == size:
            return np.frombuffer(stored, np.uint8)
        if len(stored) > size or size > SECTION_BYTES:
            raise PatchError(f"a block of {len(stored)} bytes for {size}")
        try:
            frame = zstandard.get_frame_parameters(stored)
            if frame.content_size != size or frame.dict_id or frame.window_size > 2 * SECTION_BYTES:
                raise PatchError(
                    f"a block for {size} bytes announces {frame.content_size}, window {frame.window_size}"
                )
            raw = self._decompressor.decompress(stored, max_output_size=size, allow_extra_data=False)
        except zstandard.ZstdError as error:
            raise PatchError(f"a block of {len(stored)} bytes is not a zstd frame: {error}") from error
        if len(raw) != size:
            raise PatchError(f"a block for {size} bytes holds {len(raw)}")
        return np.frombuffer(raw, np.uint8)
