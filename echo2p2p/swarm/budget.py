"""How many messages one peer may send that bring nothing, before its stream ends. Pure: the time is an argument.

Reading a message costs a fixed time, however short it is: a few megabits of the shortest ones keep a core busy.
So each has a price; what came of it brings some of that back, and time brings back the rest.
"""

from __future__ import annotations

from echo2p2p.errors import ProtocolError
from echo2p2p.swarm.identity import PeerId


class MessageBudget:
    """A bucket of messages: full at first, refilled at a rate, and by :meth:`earn`.

    Args:
        burst: messages that a full bucket is worth.
        per_s: messages that a second brings back.
        now: monotonic seconds, as for all methods.
    """

    def __init__(self, remote: PeerId, *, burst: int, per_s: float, now: float) -> None:
        self._remote = remote
        self._burst = float(burst)
        self._per_s = per_s
        self._left = float(burst)
        self._now = now

    def spend(self, now: float, price: int = 1) -> None:
        """A message has come, that costs as much as ``price`` of the cheapest.

        Raises:
            ProtocolError: it is one too many.
        """
        if self._left < price:
            self._left = min(self._burst, self._left + max(0.0, now - self._now) * self._per_s)
            self._now = now
            if self._left < price:
                raise ProtocolError(f"{self._remote} sends more messages than it has use for")
        self._left -= price

    def earn(self, messages: int) -> None:
        """Something came of the messages before: so many more are welcome."""
        self._left = min(self._burst, self._left + messages)
