"""A turn to send one chunk or manifest: its time under the cap, and the parts in which it is written."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from echo2p2p.swarm.clock import Clock
from echo2p2p.swarm.network import Stream
from echo2p2p.weights.gatekeeper import Gatekeeper
from echo2p2p.weights.rate import TokenBucket

_SLICE_BYTES = 16 * 1024
_UNCAPPED_SLICE_BYTES = 256 * 1024
_MAX_TURN_S = 2.0
"""A chunk is sent within this, however low the cap: its asker waits for the rest of what has begun to come."""
_INSTANT_S = 1e-6
"""A wait that is shorter than this is rounding."""


class Turn:
    """A place in the queue for the cap: the time in which ``nbytes`` are to be sent, evenly.

    It is a reservation, and is given back as far as it was not used.

    Args:
        gatekeeper: has let it through.
    """

    def __init__(
        self, cap: TokenBucket, gatekeeper: Gatekeeper, clock: Clock, nbytes: int, *, member: bool
    ) -> None:
        self._cap = cap
        self._gatekeeper = gatekeeper
        self._clock = clock
        self._nbytes = self._unused = nbytes
        self._member = member
        self._over = False
        self._ends_s = cap.reserve(nbytes, clock.monotonic())

    @property
    def wait_s(self) -> float:
        """Seconds until it begins; 0 if it has."""
        return self._until(self._unused)

    async def write(
        self, stream: Stream, head: bytes, data: bytes | memoryview, taken: Callable[[int], None]
    ) -> None:
        """Write ``head`` and then ``data`` to ``stream``, as fast as the turn allows.

        In parts, so that what an asker does not read waits here, by reference, and not as a copy in its buffer;
        ``taken`` is told after each how many bytes are left.
        """
        slice_bytes = _SLICE_BYTES if self._cap.capped else _UNCAPPED_SLICE_BYTES
        view = memoryview(data)
        for start in range(0, max(1, len(view)), slice_bytes):
            piece = view[start : start + slice_bytes]
            self._unused -= len(piece)
            # The last byte goes when the turn ends.
            if self._cap.capped and (wait_s := self._until(self._unused)) > 0:
                await asyncio.sleep(wait_s)
            await (stream.write(piece) if start else stream.write(head, piece))
            if left := len(view) - start - len(piece):
                taken(left)

    def shrink(self, nbytes: int) -> None:
        """So many bytes fewer are to be sent; before the first is."""
        if self._cap.capped:
            self._ends_s -= self._cap.seconds(nbytes)
            self._cap.give_back(nbytes)
        self._unused -= nbytes

    def _until(self, left: int) -> float:
        """Seconds until ``left`` bytes of the turn are to be sent; 0 for a time that is past."""
        wait_s = self._ends_s - min(_MAX_TURN_S, self._cap.seconds(left)) - self._clock.monotonic()
        return wait_s if wait_s > _INSTANT_S else 0.0

    def end(self) -> None:
        if not self._over:
            self._over = True
            self._cap.give_back(self._unused)
            self._gatekeeper.passed(
                member=self._member,
                nbytes=self._nbytes,
                sent=self._nbytes - self._unused,
                now=self._clock.monotonic(),
            )
