"""A patch: what changed from one snapshot to the next, without loss, in a hundredth of the bytes. Pure: no I/O.

After a step at a learning rate of reinforcement learning most words of a policy keep their bits (PULSE, arXiv
2602.03839). A patch holds, for every run of words, one of

* *sparse*: the gaps between changed words, and how far each moved, counted in units in the last place. Small
  floats move more often and farther than large ones, so the words are coded in classes by their magnitude in
  the base, which both sides hold; within a class the changes are about independent, and gaps in bytes under
  zstd's Huffman coder come within a few percent of the entropy;
* *dense*: how far every word moved;
* *whole*: the words themselves, as for every tensor that is new or has another shape or dtype;

whichever is smallest. Words are compared and moved as bit patterns, so no dtype is rounded.

Guarantees:

* A patch names its base and its result. What :func:`apply` returns has the result's fingerprint.
* A damaged patch is refused before anything is written: its digest covers every byte.
* Sizes follow from the two layouts and are checked before memory is taken: a hostile patch costs no more than
  the snapshot that its layout announces and a few sections.
"""

from __future__ import annotations

import struct
from collections import deque
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import msgspec
import numpy as np
from blake3 import blake3

from echo2p2p.errors import FingerprintMismatch, PatchError
from echo2p2p.weights.patch_words import (
    SECTION_BYTES,
    SPARSE_ONE_IN,
    Bytes,
    Indices,
    Kind,
    Reader,
    Words,
    changed,
    decode_dense,
    decode_sparse,
    decode_whole,
    encode_dense,
    encode_sparse,
    encode_whole,
)
from echo2p2p.weights.snapshot import DTYPE_BYTES, Layout, Snapshot

_MAGIC = b"e2patch1"
_DIGEST_BYTES = 32
_HEAD_BYTES = len(_MAGIC) + 3 * _DIGEST_BYTES
_SECTION = struct.Struct("<BHI")
"""Mode, number of units, bytes of the body."""
_SPARSE, _DENSE, _WHOLE = range(3)

_MANTISSA_BITS = {
    "float8_e4m3fn": 3,
    "float8_e4m3fnuz": 3,
    "float8_e5m2": 2,
    "float8_e5m2fnuz": 2,
    "float16": 10,
    "bfloat16": 7,
    "float32": 23,
    "float64": 52,
}
"""The dtypes that are a sign and a magnitude; all others are ordered as integers."""
_ALONE_FROM = 16
"""Above a changed word in so many, a tensor is a section of its own, and its encodings are measured."""
_GOOD_ENOUGH = 4
"""A sparse encoding in so small a part of the words is not measured against others: weights compress less."""
_KEEP_ONE_IN = 16
"""In place, what is decoded for the check is kept for the writing, up to this part of the snapshot."""

_Moved = list[tuple[Indices | slice, Words]]
"""Which words of a section get which bits."""


class PatchHead(NamedTuple):
    """The fingerprints that a patch names, in hex."""

    base: str
    result: str


class PatchLimits(msgspec.Struct, frozen=True):
    """What is put up with, in bytes, before anything is allocated."""

    max_snapshot_bytes: int = 2**40
    max_patch_bytes: int = 2**40


DEFAULT_LIMITS = PatchLimits()


def encode(
    base: Snapshot, new: Snapshot, *, base_fingerprint: str | None = None, fingerprint: str | None = None
) -> bytes:
    """The patch that makes ``new`` out of ``base``; the same two snapshots always give the same bytes.

    Args:
        base_fingerprint: of ``base``, if it is known already; computed otherwise.
        fingerprint: likewise of ``new``.
    """
    sections = b"".join(_encoded(base, new))
    named = bytes.fromhex(base_fingerprint or base.fingerprint()) + bytes.fromhex(
        fingerprint or new.fingerprint()
    )
    return b"".join((_MAGIC, _digest(named, sections), named, sections))


def read_head(patch: bytes | memoryview) -> PatchHead:
    """Which snapshot ``patch`` starts from and which one it makes.

    Raises:
        PatchError: it is not a patch, or it is damaged.
    """
    view = memoryview(patch)
    if len(view) < _HEAD_BYTES or view[: len(_MAGIC)] != _MAGIC:
        raise PatchError(f"{len(view)} bytes that are not a patch")
    digest, base, result = (
        bytes(view[start : start + _DIGEST_BYTES]) for start in range(len(_MAGIC), _HEAD_BYTES, _DIGEST_BYTES)
    )
    if digest != _digest(base + result, view[_HEAD_BYTES:]):
        raise PatchError("the patch is damaged: its bytes do not have the digest that it names")
    return PatchHead(base.hex(), result.hex())


def apply(
    base: Snapshot,
    patch: bytes | memoryview,
    *,
    layout: Layout,
    base_fingerprint: str | None = None,
    fingerprint: str | None = None,
    limits: PatchLimits = DEFAULT_LIMITS,
) -> Snapshot:
    """The snapshot that ``patch`` makes out of ``base``, in a buffer of its own; ``base`` stays as it is.

    Args:
        layout: of the result, from its manifest.
        base_fingerprint: of ``base``, if the caller has verified it already; computed otherwise.
        fingerprint: what the result must have by its manifest; None believes the patch.

    Raises:
        PatchError: the patch is damaged, malformed, too large, or starts from another snapshot.
        FingerprintMismatch: what it makes is not what it names.
        ManifestError: ``layout`` is not valid.
    """
    head = _admit(patch, layout, fingerprint, limits)
    _check_base(head, base_fingerprint or base.fingerprint())
    # From numpy, which asks for huge pages: touching the pages of a bytearray costs more than the copy.
    target = np.zeros(layout.nbytes, np.uint8)
    source = _bytes_of(base.data)
    for section in _sections(patch, base.layout, layout):
        words = section.unit.words(target)
        if section.mode != _WHOLE:
            words[:] = section.unit.base_words(source)
        _write(_decoded(section, words), words)
    return _verified(Snapshot(layout, target.data), head)


def apply_in_place(
    buffer: bytearray | memoryview,
    patch: bytes | memoryview,
    *,
    layout: Layout,
    base_fingerprint: str | None = None,
    fingerprint: str | None = None,
    limits: PatchLimits = DEFAULT_LIMITS,
) -> Snapshot:
    """Turn ``buffer``, which holds a snapshot with the same ``layout``, into the one that ``patch`` makes.

    Everything is decoded once before the first byte is written, so whatever can be wrong with the patch
    leaves the buffer alone. Takes a few sections of memory beside it.

    Args:
        base_fingerprint: of what the buffer holds, if the caller has verified it; computed otherwise.

    Raises:
        PatchError: as :func:`apply`; the buffer is unchanged.
        FingerprintMismatch: the buffer is spoiled, because the patch lies or ``base_fingerprint`` was wrong.
        ManifestError: ``layout`` is not valid, or does not fit ``buffer``.
    """
    return apply_chain_in_place(
        buffer,
        (patch,),
        layout=layout,
        base_fingerprint=base_fingerprint,
        fingerprint=fingerprint,
        limits=limits,
    )


def apply_chain_in_place(
    buffer: bytearray | memoryview,
    patches: Sequence[bytes | memoryview],
    *,
    layout: Layout,
    base_fingerprint: str | None = None,
    fingerprint: str | None = None,
    limits: PatchLimits = DEFAULT_LIMITS,
) -> Snapshot:
    """As :func:`apply_in_place`, of one patch after another, each starting from what the one before made.

    That all are undamaged and in the right order is known before the first byte is written. What they make on the
    way is not hashed, for the names link the patches and the end is hashed.

    Args:
        patches: at least one; the oldest first.
        fingerprint: what the last one must make by its manifest; None believes it.

    Raises:
        PatchError: as :func:`apply`; the buffer is unchanged, unless a patch behind the first lies.
        FingerprintMismatch: the buffer is spoiled, because a patch lies or ``base_fingerprint`` was wrong.
        ManifestError: ``layout`` is not valid, or does not fit ``buffer``.
    """
    heads = [_admit(patch, layout, None, limits) for patch in patches]
    if fingerprint is not None:
        _check_result(heads[-1], fingerprint)
    held = Snapshot(layout, buffer)
    made = base_fingerprint or held.fingerprint()
    for head in heads:
        _check_base(head, made)
        made = head.result
    for patch in patches:
        _apply_sections(patch, layout, _bytes_of(buffer))
    return _verified(held, heads[-1])


def _apply_sections(patch: bytes | memoryview, layout: Layout, target: Bytes) -> None:
    """Decode everything once, and only then write."""
    kept: list[_Moved | None] = []
    room = layout.nbytes // _KEEP_ONE_IN
    for section in _sections(patch, layout, layout):
        moved = _decoded(section, section.unit.words(target))
        room -= sum(new.nbytes + (at.nbytes if isinstance(at, np.ndarray) else 0) for at, new in moved)
        kept.append(moved if room >= 0 else None)
    for section, decoded in zip(_sections(patch, layout, layout), kept, strict=True):
        words = section.unit.words(target)
        _write(_decoded(section, words) if decoded is None else decoded, words)


# Sections --------------------------------------------------------------------------------------------------


class _Unit(NamedTuple):
    """One tensor, or a piece of a long one: the least that a section can be. Offsets in bytes.

    ``base_offset`` is where the same tensor lies in the base, or None if there is none of its dtype and shape.
    """

    kind: Kind
    offset: int
    nbytes: int
    base_offset: int | None

    @property
    def shift(self) -> int | None:
        return None if self.base_offset is None else self.base_offset - self.offset

    def words(self, buffer: Bytes) -> Words:
        """This unit's words in the result."""
        return buffer[self.offset : self.offset + self.nbytes].view(self.kind.dtype)

    def base_words(self, buffer: Bytes) -> Words:
        """This unit's words in the base, which must have it."""
        start = self.offset + (self.shift or 0)
        return buffer[start : start + self.nbytes].view(self.kind.dtype)

    def with_next(self, unit: _Unit) -> _Unit | None:
        """Both as one, where they lie alike in base and result, or None.

        The gap between two tensors is zeros on both sides, so it may be part of a section.
        """
        nbytes = unit.offset + unit.nbytes - self.offset
        alike = self.kind == unit.kind and self.shift == unit.shift and self.shift is not None
        return self._replace(nbytes=nbytes) if alike and nbytes <= SECTION_BYTES else None


def _units(base: Layout, layout: Layout) -> list[_Unit]:
    """The tensors of ``layout``, in pieces of a section at most."""
    held = {spec.name: spec for spec in base.tensors}
    units = []
    for spec in layout.tensors:
        kind = Kind(DTYPE_BYTES[spec.dtype], _MANTISSA_BITS.get(spec.dtype))
        same = held.get(spec.name)
        if same is not None and (same.dtype, same.shape) != (spec.dtype, spec.shape):
            same = None
        for start in range(0, spec.nbytes, SECTION_BYTES):
            nbytes = min(SECTION_BYTES, spec.nbytes - start)
            units.append(_Unit(kind, spec.offset + start, nbytes, same.offset + start if same else None))
    return units


class _Section(NamedTuple):
    unit: _Unit
    mode: int
    body: memoryview


def _encoded(base: Snapshot, new: Snapshot) -> Iterator[bytes]:
    """The sections, one after another."""
    source, target = _bytes_of(base.data), _bytes_of(new.data)
    pending: _Unit | None = None
    count = 0
    found: list[Indices] = []

    def flush() -> Iterator[bytes]:
        if pending is not None:
            at = np.concatenate(found)
            body = encode_sparse(pending.kind, pending.base_words(source), pending.words(target), at)
            yield _SECTION.pack(_SPARSE, count, len(body)) + body

    for unit in _units(base.layout, new.layout):
        at = np.empty(0, np.int64)
        if unit.base_offset is not None:
            at = changed(unit.base_words(source), unit.words(target))
        if unit.base_offset is None or at.size > unit.words(target).size // _ALONE_FROM:
            yield from flush()
            pending = None
            mode, body = _smallest(unit, source, target, at)
            yield _SECTION.pack(mode, 1, len(body)) + body
            continue
        longer = pending.with_next(unit) if pending is not None else None
        if pending is None or longer is None:
            yield from flush()
            pending, count, found = unit, 1, [at]
        else:
            found.append(at + (unit.offset - pending.offset) // unit.kind.width)
            pending, count = longer, count + 1
    yield from flush()


def _smallest(unit: _Unit, source: Bytes, target: Bytes, at: Indices) -> tuple[int, bytes]:
    """The mode and the body of the shortest encoding of one unit; all are made, unless sparse is good enough."""
    new = unit.words(target)
    encodings = []
    if unit.base_offset is not None:
        base = unit.base_words(source)
        if at.size <= new.size // SPARSE_ONE_IN:
            sparse = encode_sparse(unit.kind, base, new, at)
            if len(sparse) <= unit.nbytes // _GOOD_ENOUGH:
                return _SPARSE, sparse
            encodings.append((_SPARSE, sparse))
        encodings.append((_DENSE, encode_dense(unit.kind, base, new)))
    encodings.append((_WHOLE, encode_whole(new)))
    return min(encodings, key=lambda encoding: len(encoding[1]))


def _sections(patch: bytes | memoryview, base: Layout, layout: Layout) -> Iterator[_Section]:
    """The sections of an admitted patch; together they cover every tensor of ``layout`` once.

    Raises:
        PatchError: they do not.
    """
    reader = Reader(memoryview(patch)[_HEAD_BYTES:])
    units = deque(_units(base, layout))
    while units:
        mode, count, length = _SECTION.unpack(reader.take(_SECTION.size))
        if mode not in (_SPARSE, _DENSE, _WHOLE) or not 1 <= count <= len(units):
            raise PatchError(f"a section of mode {mode} over {count} tensors")
        unit = units.popleft()
        for _ in range(count - 1):
            longer = unit.with_next(units.popleft())
            if longer is None:
                raise PatchError("a section over tensors that do not lie together")
            unit = longer
        if unit.base_offset is None and mode != _WHOLE:
            raise PatchError("a section that starts from a tensor that the base does not have")
        yield _Section(unit, mode, reader.take(length))
    if not reader.at_end:
        raise PatchError("the patch goes on after its last section")


def _decoded(section: _Section, words: Words) -> _Moved:
    """Which of ``words``, which hold the base, get which bits. Nothing is written.

    Raises:
        PatchError: the section does not decode.
    """
    kind, reader = section.unit.kind, Reader(section.body)
    everything = slice(None)
    moved: _Moved
    if section.mode == _WHOLE:
        moved = [(everything, decode_whole(kind, words.size, reader))]
    elif section.mode == _DENSE:
        steps = decode_dense(kind, words.size, reader)
        moved = [(everything, kind.unorder(kind.order(words) + steps))]
    else:
        moved = [
            (at, kind.unorder(kind.order(words[at]) + steps))
            for at, steps in decode_sparse(kind, words, reader)
        ]
    if not reader.at_end:
        raise PatchError("a section goes on after its last word")
    return moved


def _write(moved: _Moved, words: Words) -> None:
    for at, new in moved:
        words[at] = new


# Checks ----------------------------------------------------------------------------------------------------


def _admit(
    patch: bytes | memoryview, layout: Layout, fingerprint: str | None, limits: PatchLimits
) -> PatchHead:
    """Everything that can be known before a section is read."""
    if len(patch) > limits.max_patch_bytes:
        raise PatchError(f"patch of {len(patch)} bytes, {limits.max_patch_bytes} are allowed")
    layout.validate()
    if layout.nbytes > limits.max_snapshot_bytes:
        raise PatchError(f"snapshot of {layout.nbytes} bytes, {limits.max_snapshot_bytes} are allowed")
    head = read_head(patch)
    if fingerprint is not None:
        _check_result(head, fingerprint)
    return head


def _check_result(head: PatchHead, fingerprint: str) -> None:
    if head.result != fingerprint:
        raise PatchError(f"the patch makes {head.result}, not {fingerprint}")


def _check_base(head: PatchHead, fingerprint: str) -> None:
    if head.base != fingerprint:
        raise PatchError(f"the patch starts from {head.base}, not from {fingerprint}")


def _verified(snapshot: Snapshot, head: PatchHead) -> Snapshot:
    fingerprint = snapshot.fingerprint()
    if fingerprint != head.result:
        raise FingerprintMismatch(f"the patch makes {fingerprint}, and names {head.result}")
    return snapshot


def _digest(named: bytes, sections: bytes | memoryview) -> bytes:
    hasher = blake3(_MAGIC + named, max_threads=1)
    hasher.update(sections)
    return hasher.digest()


def _bytes_of(buffer: bytearray | memoryview) -> Bytes:
    return np.frombuffer(buffer, np.uint8)
