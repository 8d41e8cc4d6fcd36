"""One word about the members of a version: from a reader to the learner, or from the learner to a reader.

It may get lost: who was not heard meets the same fault again in the next version, and says so again.
"""

from __future__ import annotations

import asyncio
import logging

from echo2p2p.errors import SwarmError
from echo2p2p.swarm.identity import PeerId
from echo2p2p.swarm.messages import protocol_id, send
from echo2p2p.swarm.network import Network
from echo2p2p.weights.wire import CHUNK_PROTOCOL, Report, Suspects

log = logging.getLogger("echo2p2p.weights")

_TELL_S = 10.0
"""For dialling, and for the rest."""


async def tell(network: Network, peer: PeerId, message: Report | Suspects) -> None:
    """Send ``message`` to ``peer``, if that is possible."""
    try:
        stream = await network.open_stream(peer, protocol_id(CHUNK_PROTOCOL), timeout_s=_TELL_S)
        try:
            async with asyncio.timeout(_TELL_S):
                await send(stream, message)
                await stream.close()
        except TimeoutError:
            log.debug("%s does not take a %s", peer, type(message).__name__)
    except SwarmError as error:
        log.debug("%s is not told of a %s: %s", peer, type(message).__name__, error)
