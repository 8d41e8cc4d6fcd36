"""From whom a peer asks for a signed manifest, and when it turns to the next.

Who relays a version stands in its manifest, so the members of the version before are taken for them: they pass a
large manifest on along a tree, and the learner sends it to the first few only.

Guarantee: whoever is slow, gone or lying costs time; the learner is asked before the search fails.
"""

from __future__ import annotations

import asyncio
import zlib
from collections import deque
from collections.abc import Awaitable, Callable, Iterable, Sequence
from dataclasses import dataclass

from echo2p2p.errors import PeerUnreachable, SwarmError, VerificationError
from echo2p2p.swarm.clock import Clock
from echo2p2p.swarm.identity import PeerId
from echo2p2p.weights.manifest import Member

SMALL_BYTES = 128 * 1024
"""Manifests that are together no larger than this all come from the learner: it is the shortest way."""
FAN_OUT = 4
"""To so many the learner, and each member, passes a manifest on."""
_HOP_S = 0.25
"""To hear of a version, to dial, and to check and pin a manifest before it is passed on."""
_LEARNER_MBIT = 20.0
_MIN_MBIT = 1.0
_MAX_HEAD_START_S = 8.0
_STEP_S = 1.0
_MAX_AT_ONCE = 3
_ROUNDS = 2


@dataclass(frozen=True)
class Ask:
    """``source`` is asked ``after_s`` seconds, or as soon as one that was asked before it has failed."""

    source: PeerId
    after_s: float


def order(
    members: Sequence[Member], me: PeerId, learner: PeerId, nbytes: int, others: Iterable[PeerId] = ()
) -> list[Ask]:
    """Whom ``me`` asks for a manifest of ``nbytes``, and when. Pure; the same tree on every peer.

    The members with the most uplink are the first in the tree. Who is below them asks its parent, then the one
    above that, then the learner, with a head start that lets the manifest come down the tree.

    Args:
        members: of the version before.
        others: who may have it besides; asked last, with the members.
    """
    ranked = sorted(members, key=lambda member: (-member.upload_mbit, member.peer))
    above: list[Member] = []
    if len(ranked) * nbytes > SMALL_BYTES:
        place = next((at for at, member in enumerate(ranked) if member.peer == me), None)
        if place is None:
            # A latecomer is the child of somebody, of another one each.
            above.append(ranked[zlib.crc32(me.encode()) % len(ranked)])
            place = ranked.index(above[0])
        while place >= FAN_OUT:
            place = place // FAN_OUT - 1
            above.append(ranked[place])
    uplinks = [_LEARNER_MBIT, *(member.upload_mbit for member in above)]
    expected_s = sum(_HOP_S + FAN_OUT * nbytes * 8e-6 / max(_MIN_MBIT, mbit) for mbit in uplinks)
    head_start_s = min(_MAX_HEAD_START_S, 1.5 * expected_s) if above else 0.0
    asks = [Ask(member.peer, at * head_start_s) for at, member in enumerate(above[:2])]
    after_s = 1.5 * head_start_s
    asks.append(Ask(learner, after_s))
    asked = {me, *(ask.source for ask in asks)}
    rest = [peer for peer in (*others, *(member.peer for member in ranked)) if peer not in asked]
    again = [*(ask.source for ask in asks), *dict.fromkeys(rest)] * (_ROUNDS - 1)
    for source in (*dict.fromkeys(rest), *again):
        after_s += _STEP_S
        asks.append(Ask(source, after_s))
    return asks


async def find(ask: Callable[[PeerId], Awaitable[bytes]], asks: Iterable[Ask], clock: Clock) -> bytes:
    """The first answer of those who are asked, a few at a time.

    Args:
        ask: brings and checks the answer of one source.

    Raises:
        PeerUnreachable: nobody had an answer; it says why each had not.
    """
    failures: list[str] = []

    async def one(source: PeerId) -> bytes | None:
        try:
            return await ask(source)
        except (SwarmError, VerificationError) as error:
            failures.append(error.message)
            return None

    began_s = clock.monotonic()
    waiting = deque(asks)
    running: list[asyncio.Task[bytes | None]] = []
    async with asyncio.TaskGroup() as tasks:
        while waiting or running:
            # To the moment when it is due, which the clock reaches; rounding may keep a sum of spans above zero.
            wait_s = (began_s + waiting[0].after_s) - clock.monotonic() if waiting else None
            if wait_s is not None and (not running or (wait_s <= 0 and len(running) < _MAX_AT_ONCE)):
                running.append(tasks.create_task(one(waiting.popleft().source)))
                continue
            timeout_s = max(0.0, wait_s) if wait_s is not None and len(running) < _MAX_AT_ONCE else None
            await asyncio.wait(running, timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED)
            done = [task for task in running if task.done()]
            body = next((body for task in done if (body := task.result()) is not None), None)
            if body is not None:
                for task in running:
                    task.cancel()
                return body
            running = [task for task in running if not task.done()]
            if done and waiting:
                # The next one needs not wait for its time: it stands in for the one that failed.
                began_s = min(began_s, clock.monotonic() - waiting[0].after_s)
    raise PeerUnreachable("; ".join(failures) or "nobody could be asked")
