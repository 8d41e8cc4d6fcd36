"""Whose chunk may leave now: members before strangers, and no more at a time than memory is meant for. Pure.

A stranger is who relays no version that is served here and was not told of one: identities cost nothing, so all
strangers together count as one. While members are served, strangers get a small share of what members get; when
they are not, strangers may have everything.

Guarantee: over any time in which members are served, strangers get at most their share of it and one burst.
"""

from __future__ import annotations

STRANGERS_SHARE = 1 / 8
"""Strangers get so many bytes for each byte that members get at the same time."""
_BURST_BYTES = 2**20
_QUIET_S = 1.0
"""Members are being served until nothing was sent to any for so long."""
MAX_QUEUED_BYTES = 2**27
"""Chunks that are being written to askers, all together; each may wait for one that reads slowly."""
MAX_STRANGERS_QUEUED_BYTES = 2**25


class Gatekeeper:
    """Counts what is on its way out of one peer, in bytes; times are monotonic seconds."""

    def __init__(self) -> None:
        self._queued = {True: 0, False: 0}
        self._credit = 0.0
        self._last_member_s = float("-inf")

    def opens(self, *, member: bool, nbytes: int, now: float) -> bool:
        """Whether ``nbytes`` may be sent now. If so they count as on their way until :meth:`passed`."""
        queued, limit = self._queued[member], MAX_QUEUED_BYTES if member else MAX_STRANGERS_QUEUED_BYTES
        if queued and queued + nbytes > limit:
            return False
        if not member:
            if not self._is_quiet(now) and self._credit <= 0:
                return False
            self._credit = max(-float(_BURST_BYTES), self._credit - nbytes)
        self._queued[member] += nbytes
        return True

    def passed(self, *, member: bool, nbytes: int, sent: int, now: float) -> None:
        """Of ``nbytes`` that were let through, ``sent`` have been sent; the rest will not be."""
        self._queued[member] -= nbytes
        if member:
            self._credit = min(float(_BURST_BYTES), self._credit + STRANGERS_SHARE * sent)
            if sent:
                self._last_member_s = now
        else:
            self._credit += nbytes - sent

    def _is_quiet(self, now: float) -> bool:
        return not self._queued[True] and now - self._last_member_s > _QUIET_S
