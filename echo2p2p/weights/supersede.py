"""Whether a fetch is given up when a newer version is announced. Pure.

What counts is when the worker can have the newer one, in bytes that it has to fetch until then:

    going on   r + c_older     the rest of the older version, then the newer one from there
    turning    c_here          the newer one from what is here now

Where patches travel, going on costs next to nothing: the patch of the older version is one of those that lead to
the newer, or makes the newer one cheap. Where everything changes, c_older = c_here, and every byte of r delays the
newer version. A part of that delay is accepted, for the older version is then installed a whole fetch earlier.

And it is given up only if next to nothing of it is here, so that the next version to be installed, whichever it is,
comes hardly later: c_here may be more than r by the same part. So a worker whose fetches take longer than the learner
takes from version to version installs one in the time of one transfer and a quarter at most. Its version is then as
old as that transfer took, which no choice could help.

Two more things bound the loss: what was fetched stays in the store until the next one has come, and a fetch that
follows one that was given up is left to finish (:mod:`echo2p2p.rollout.following`).
"""

from __future__ import annotations

from dataclasses import dataclass

MAX_DELAY = 0.25
"""Going on may delay the newer version by this part of what it costs, turning the next one by this part of what is
missing."""


@dataclass(frozen=True)
class Arriving:
    """A version on its way, in bytes.

    Attributes:
        missing_bytes: what is still to come of it.
        whole_bytes: all of it, without patches.
        patch_bytes: its own patch; None if it has none.
        by_patches: it comes as patches itself.
    """

    missing_bytes: int
    whole_bytes: int
    patch_bytes: int | None
    by_patches: bool


def gives_up(arriving: Arriving) -> bool:
    """Whether to turn to the newer version, of which only the announcement is known: it is taken to be like this."""
    next_bytes = arriving.whole_bytes if arriving.patch_bytes is None else arriving.patch_bytes
    going_on = arriving.missing_bytes + next_bytes
    turning = arriving.missing_bytes + next_bytes if arriving.by_patches else arriving.whole_bytes
    return going_on > (1 + MAX_DELAY) * turning and turning <= (1 + MAX_DELAY) * arriving.missing_bytes
