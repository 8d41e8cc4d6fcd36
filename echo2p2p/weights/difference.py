"""Which words differ between two snapshots, in the form in which they are written over the old ones in place.

Both snapshots are compared, however the newer one arrived: so it serves a version that came whole as well as one
that came as a patch, and a base other than the held one cannot be mistaken for it. Comparing costs a pass over
both, while generation goes on; what is left for the pause is in proportion to what changed.

A tensor is compared in blocks. Changed words that are few in their block are listed by index with their new bits:
even where one word in a hundred changes, nearly every page and a quarter of the cache lines have one, so spans
would be nearly everything. Where more than one in ``LISTED_ONE_IN`` changed, the block is copied whole: a copy in
order moves a word ten times as fast as a list does, and lists of int64 indices would be larger than the weights.
Words are compared as bits, so no dtype is rounded. Pure: no I/O, no torch.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from echo2p2p.errors import ManifestError
from echo2p2p.weights.patch_words import Indices, Words, changed
from echo2p2p.weights.snapshot import DTYPE_BYTES, Snapshot, TensorSpec

LISTED_ONE_IN = 32
"""Of a block's words at most one in so many is listed. Keeps all lists below a third of a bf16 snapshot."""
BLOCK_WORDS = 2**17


@dataclass(frozen=True)
class TensorDifference:
    """What changes in one tensor; places are counted in its elements, in row-major order.

    Attributes:
        name: as the layout stores it; tied names share the tensor.
        at: int64, rising: the listed words. None of them lies in a run.
        words: unsigned integers of the width of the dtype, the shape of ``at``: their new bits.
        runs: (start, stop), rising and apart: stretches that are copied from the new snapshot whole.
    """

    name: str
    at: Indices
    words: Words
    runs: tuple[tuple[int, int], ...]

    @property
    def n_words(self) -> int:
        """Words to be written."""
        return self.at.size + sum(stop - start for start, stop in self.runs)


def difference(held: Snapshot, new: Snapshot) -> tuple[TensorDifference, ...]:
    """What must be written over ``held`` for ``new``, tensor by tensor; those without a change are left out.

    Raises:
        ManifestError: the two have different layouts.
    """
    if held.layout != new.layout:
        raise ManifestError("two snapshots with different layouts have no difference in words")
    found = (compared(spec.name, _words(held, spec), _words(new, spec)) for spec in new.layout.tensors)
    return tuple(each for each in found if each.n_words)


def compared(name: str, old_words: Words, new_words: Words) -> TensorDifference:
    """What must be written over ``old_words`` for ``new_words``; both flat, of one length."""
    listed: list[Indices] = []
    runs: list[tuple[int, int]] = []
    for start in range(0, new_words.size, BLOCK_WORDS):
        stop = min(start + BLOCK_WORDS, new_words.size)
        at = changed(old_words[start:stop], new_words[start:stop])
        if at.size * LISTED_ONE_IN <= stop - start:
            listed.append(at + start)
        elif runs and runs[-1][1] == start:
            runs[-1] = (runs[-1][0], stop)
        else:
            runs.append((start, stop))
    at = np.concatenate(listed) if listed else np.empty(0, np.int64)
    return TensorDifference(name, at, new_words[at], tuple(runs))


def _words(snapshot: Snapshot, spec: TensorSpec) -> Words:
    raw = np.frombuffer(snapshot.data, np.uint8)[spec.offset : spec.offset + spec.nbytes]
    return raw.view(f"<u{DTYPE_BYTES[spec.dtype]}")
