"""Which patches and which anchor bring a worker from the version that it holds to another one. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple


class Offer(NamedTuple):
    """What is to be had of one version; None for what is not. ``base_version`` is what the patch starts from."""

    anchor_bytes: int | None
    patch_bytes: int | None
    base_version: int | None


class Step(NamedTuple):
    """Fetch ``version`` as a patch on ``base_version``, or as an anchor where that is None."""

    version: int
    base_version: int | None
    nbytes: int


def cheapest_path(held: int | None, target: int, available: Mapping[int, Offer]) -> list[Step] | None:
    """The steps from ``held`` to ``target`` with the fewest bytes; of equal ones, the fewest steps.

    A version has one patch at most, so the patches that lead to ``target`` are one chain: it is followed
    back to ``held``, and the cheapest anchor on the way competes with that.

    Returns:
        The steps in the order of their application, [] if ``target`` is held, None if nothing leads there.
    """
    best: list[Step] | None = None
    chain: list[Step] = []
    behind = 0
    fewest = 0
    version = target
    seen: set[int] = set()
    while version not in seen:
        seen.add(version)
        if version == held:
            return chain[::-1] if best is None or behind <= fewest else best
        offer = available.get(version)
        if offer is None:
            break
        if offer.anchor_bytes is not None and (best is None or behind + offer.anchor_bytes < fewest):
            best = [Step(version, None, offer.anchor_bytes), *reversed(chain)]
            fewest = behind + offer.anchor_bytes
        if offer.patch_bytes is None or offer.base_version is None:
            break
        chain.append(Step(version, offer.base_version, offer.patch_bytes))
        behind += offer.patch_bytes
        version = offer.base_version
    return best
