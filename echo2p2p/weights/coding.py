"""Chunks in fewer bytes, for one hop: words in byte planes, each plane under zstd where that is shorter.

Signs and exponents of weights take few values: a snapshot in bfloat16 comes down to two thirds, one in float32 to
five sixths. What is hashed, stored and passed on is the chunk itself, so two peers need not agree on more than how
to decode, and nobody's choice of a compressor shows in a manifest.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

import numpy as np

from echo2p2p.errors import ChunkError, PatchError
from echo2p2p.swarm.clock import Clock
from echo2p2p.weights.patch_words import Reader, pack
from echo2p2p.weights.snapshot import DTYPE_BYTES, Layout

_WIDTHS = (2, 4, 8)
_MEMORY = 1 / 4
"""How much the latest chunk counts in what is expected of the next one."""
_FIRST_WIRE_S = 8 / 100e6
"""Seconds a byte on a stream that has not shown what it takes; the first chunks fill buffers, whatever the link."""
_TRY_ONE_IN = 32
"""So many chunks are tried although those before did not shrink."""


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
    planes = np.frombuffer(chunk, np.uint8).reshape(-1, width)
    packed = (pack(np.ascontiguousarray(planes[:, at])) for at in range(width))
    coded = b"".join([bytes([width]), *packed])
    return coded if len(coded) < len(chunk) else None


def decode(coded: bytes, nbytes: int) -> bytes:
    """The chunk of ``nbytes`` that :func:`encode` made ``coded`` of.

    No more than ``nbytes`` are ever made, whatever ``coded`` says.

    Raises:
        ChunkError: it was not made by :func:`encode`, or of a chunk of another length.
    """
    width = coded[0] if coded else 0
    if width not in _WIDTHS or nbytes % width:
        raise ChunkError(f"a chunk of {nbytes} bytes is coded in words of {width}")
    reader = Reader(memoryview(coded)[1:])
    words = np.empty((nbytes // width, width), np.uint8)
    try:
        for at in range(width):
            words[:, at] = reader.block(len(words))
    except PatchError as error:
        raise ChunkError(f"a coded chunk of {nbytes} bytes does not decode: {error.message}") from None
    if not reader.at_end:
        raise ChunkError(f"a coded chunk of {nbytes} bytes goes on after its end")
    return words.tobytes()


class Coder:
    """Codes the chunks that go down one stream, as long as that takes less time than it saves on the wire.

    Args:
        width: bytes of a word (:func:`word_bytes`).
    """

    def __init__(self, clock: Clock, width: int) -> None:
        self._clock = clock
        self._width = width
        self._saved = 1.0
        self._coding_s = 0.0
        self._wire_s = _FIRST_WIRE_S
        self._n_plain = 0

    async def coded(self, chunk: bytes | memoryview) -> bytes | None:
        """What to send in place of ``chunk``; None if that is the chunk itself."""
        if self._width not in _WIDTHS:
            return None
        if self._saved * self._wire_s <= self._coding_s:
            self._n_plain += 1
            if self._n_plain % _TRY_ONE_IN:
                return None
        coded, seconds = await self._timed(lambda: encode(chunk, self._width))
        self._coding_s += _MEMORY * (seconds / len(chunk) - self._coding_s)
        saved = 1 - len(coded) / len(chunk) if coded is not None else 0.0
        self._saved += _MEMORY * (saved - self._saved)
        return coded

    def wrote(self, nbytes: int, seconds: float) -> None:
        """Take note that the stream took ``nbytes`` in this time."""
        if nbytes:
            self._wire_s += _MEMORY * (seconds / nbytes - self._wire_s)

    async def _timed(self, work: Callable[[], bytes | None]) -> tuple[bytes | None, float]:
        began_s = self._clock.monotonic()
        return await self._clock.offload(work), self._clock.monotonic() - began_s
