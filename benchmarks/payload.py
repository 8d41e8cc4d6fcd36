"""What the hosts of the relay benchmark send each other."""

from __future__ import annotations

import os

import numpy as np

PAYLOADS = ("random", "bf16")
_DRAWN = 2**20


def payload(kind: str, nbytes: int) -> bytes:
    """``random`` bytes, of which nothing can be saved, or normally distributed weights in ``bf16``, which is what
    policies look like: 2.6 bits of sign and exponent are information, and all 8 of the rest."""
    if kind == "random":
        return os.urandom(nbytes)
    generator = np.random.default_rng()
    words = np.empty(nbytes // 2, np.uint16)
    for start in range(0, len(words), _DRAWN):
        part = words[start : start + _DRAWN]
        drawn = generator.standard_normal(len(part), np.float32) * np.float32(0.02)
        part[:] = drawn.view(np.uint32) >> 16
    return words.tobytes()
