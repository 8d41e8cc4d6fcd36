"""Chunks in fewer bytes, for one hop: words in byte planes, each plane under zstd where that is shorter.

Signs and exponents of weights take few values: a snapshot in bfloat16 comes down to two thirds, one in float32 to
five sixths. What is hashed, stored and passed on is the chunk itself, so two peers need not agree on more than how
to decode, and nobody's choice of a compressor shows in a manifest.
"""

from __future__ import annotations

import math
from collections import Counter

import numpy as np

from echo2p2p.errors import ChunkError, PatchError
from echo2p2p.swarm.clock import Clock
from echo2p2p.weights.patch_words import Kind, Reader, decode_whole, encode_whole
from echo2p2p.weights.snapshot import DTYPE_BYTES, Layout

_WIDTHS = (2, 4, 8)
_FAST_BYTES_PER_S = 64e6
"""A wire that takes more than this is not worth a core's work: it codes a few hundred million bytes a second."""
_RECENT_S = 0.5
_VAIN = 8
_TRY_ONE_IN = 32
"""After ``_VAIN`` chunks that did not shrink, one in so many is tried."""


def word_bytes(layout: Layout) -> int:
    """The size of one word of most of a snapshot, in bytes."""
    found: Counter[int] = Counter()
    for spec in layout.tensors:
        found[DTYPE_BYTES[spec.dtype]] += spec.nbytes
    return found.most_common(1)[0][0] if found else 1


def encode(chunk: bytes | memoryview, width: int) -> bytes | None:
    """``chunk`` as words of ``width`` bytes in less than its own length; None if it does not come to less."""
    if width not in _WIDTHS or len(chunk) % width or not len(chunk):
        return None
    coded = bytes([width]) + encode_whole(np.frombuffer(chunk, Kind(width, None).dtype))
    return coded if len(coded) < len(chunk) else None


def decode(coded: bytes | memoryview, nbytes: int) -> bytes:
    """The chunk of ``nbytes`` that :func:`encode` made ``coded`` of.

    No more than ``nbytes`` are ever made, whatever ``coded`` says.

    Raises:
        ChunkError: it was not made by :func:`encode`, or of a chunk of another length.
    """
    width = coded[0] if coded else 0
    if width not in _WIDTHS or nbytes % width:
        raise ChunkError(f"a chunk of {nbytes} bytes is coded in words of {width}")
    reader = Reader(memoryview(coded)[1:])
    try:
        words = decode_whole(Kind(width, None), nbytes // width, reader)
    except PatchError as error:
        raise ChunkError(f"a coded chunk of {nbytes} bytes does not decode: {error.message}") from None
    if not reader.at_end:
        raise ChunkError(f"a coded chunk of {nbytes} bytes goes on after its end")
    return words.tobytes()


class Coder:
    """Codes the chunks that one peer sends, unless they leave it so fast that it would be the coder they wait for."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._recent_bytes = 0.0
        self._at_s = clock.monotonic()
        self._n_vain = 0

    async def coded(self, chunk: bytes | memoryview, width: int) -> bytes | None:
        """What to send in place of ``chunk``, words of ``width`` bytes; None if that is the chunk itself."""
        self._forget()
        if width not in _WIDTHS or self._recent_bytes > _FAST_BYTES_PER_S * _RECENT_S:
            return None
        if self._n_vain >= _VAIN and self._n_vain % _TRY_ONE_IN:
            self._n_vain += 1
            return None
        coded = await self._clock.offload(lambda: encode(chunk, width))
        self._n_vain = 0 if coded is not None else self._n_vain + 1
        return coded

    def wrote(self, nbytes: int) -> None:
        """Take note that ``nbytes`` left."""
        self._forget()
        self._recent_bytes += nbytes

    def _forget(self) -> None:
        now = self._clock.monotonic()
        self._recent_bytes *= math.exp((self._at_s - now) / _RECENT_S)
        self._at_s = now
