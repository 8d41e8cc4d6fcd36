"""Which way a peer takes to a version: by patches from one that it holds, or whole. Pure.

Guarantee: no way that is open to it leaves fewer bytes to fetch; where there is nothing to gain, it is the whole.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

from echo2p2p.weights.manifest import Manifest


@dataclass(frozen=True)
class Way:
    """One way to a version.

    Attributes:
        base: the version that it starts from; None for the whole.
        patches: how many are applied, from the oldest of them to the newest, which is the manifest's first.
        wanted: the chunks that it needs.
        missing_bytes: what is to be fetched of them.
    """

    base: Manifest | None
    patches: int
    wanted: range
    missing_bytes: int


def cheapest_way(manifest: Manifest, held: Iterable[Manifest], has: Callable[[bytes], bool]) -> Way:
    """The way to ``manifest`` with the fewest bytes to fetch.

    Args:
        held: versions whose snapshot is at hand.
        has: whether the chunk with a digest is at hand.
    """

    def way(base: Manifest | None, patches: int, wanted: range) -> Way:
        spans = (manifest.chunk_span(at) for at in wanted if not has(manifest.chunk_digest(at)))
        return Way(base, patches, wanted, sum(end - start for start, end in spans))

    bases = {(each.version, each.fingerprint): each for each in held if each.layout == manifest.layout}
    ways = [way(None, 0, manifest.whole)]
    for count, patch in enumerate(manifest.patches, 1):
        base = bases.get((patch.base_version, patch.base_fingerprint))
        if base is not None:
            ways.append(way(base, count, manifest.by_patches(count)))
            # From an older base it takes these patches and more.
            break
    return min(ways, key=lambda each: each.missing_bytes)
