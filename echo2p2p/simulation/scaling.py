"""Large weights through one process: bodies and links are scaled down together, and scaled up again in the events.

A snapshot of many gigabytes is modelled by a few megabytes, and the rate of every link is divided by the same
factor, so that a transfer takes as long as the real one. Messages other than chunks are as long as in reality, so
they are weighed down. What is coarser than in reality is the chunk: the relay forwards after a whole one, so a
version is late by one chunk's time for every hop. Limits in time and rate follow the chunk's size.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from echo2p2p.errors import ProtocolError
from echo2p2p.simulation.scenario import Scenario
from echo2p2p.simulation.swarm import Manners
from echo2p2p.swarm.links import Block, LinkLimits
from echo2p2p.swarm.messages import LENGTH_BYTES, decode, protocol_id
from echo2p2p.telemetry.events import EventLog
from echo2p2p.weights.exchange import DEFAULT_SERVER_LIMITS
from echo2p2p.weights.lane import DEFAULT_FETCH_LIMITS
from echo2p2p.weights.wire import CHUNK_PROTOCOL, FirstRequest, OpenLane

_REAL_CHUNK_BYTES = 2**20
"""The limits of the relay are made for chunks of about this size."""
_SIZES = {
    "snapshot_bytes",
    "patch_bytes",
    "chain_bytes",
    "bytes_from_learner",
    "bytes_from_peers",
    "from_learner",
    "learner_chunk_bytes",
    "peer_chunk_bytes",
}


def weigher(scale: float) -> Callable[[str, Block], float]:
    """What a byte counts where links are ``scale`` times slower than real ones: only chunks are scaled down, too.

    For :class:`~echo2p2p.swarm.memory.MemorySwarm`.
    """
    chunks, light = protocol_id(CHUNK_PROTOCOL), 1 / scale

    def weigh(protocol: str, first: Block) -> float:
        if protocol != chunks or not first:
            return light
        try:
            request: FirstRequest = decode(bytes(first[LENGTH_BYTES:]), FirstRequest)
        except ProtocolError:
            return light
        return 1.0 if isinstance(request, OpenLane) else light

    return weigh


def link_limits(chunk_bytes: int) -> LinkLimits:
    """Blocks of a chunk at most, so that streams share a link as finely as they can."""
    block = min(LinkLimits.block, chunk_bytes)
    return LinkLimits(block=block, high_water=4 * block, window=16 * block)


def manners(scenario: Scenario) -> Manners:
    """The scenario's rules, with the relay as patient as its chunks are large."""
    fetch, server = DEFAULT_FETCH_LIMITS, DEFAULT_SERVER_LIMITS
    longer = max(1.0, scenario.policy.nbytes / scenario.policy.chunks / _REAL_CHUNK_BYTES)
    return Manners(
        relay=scenario.rules.relay,
        generate_while_fetching=scenario.rules.generate_while_fetching,
        just_in_time=scenario.rules.just_in_time,
        fetch_limits=replace(
            fetch,
            dial_s=fetch.dial_s * longer,
            manifest_s=fetch.manifest_s * longer,
            stall_s=fetch.stall_s * longer,
            patience_s=fetch.patience_s * longer,
            starved_s=fetch.starved_s * longer,
            slow_s=fetch.slow_s * longer,
            tick_s=fetch.tick_s * longer,
            min_bytes_per_s=fetch.min_bytes_per_s / scenario.scale,
        ),
        server_limits=replace(
            server,
            first_request_s=server.first_request_s * longer,
            unknown_version_s=server.unknown_version_s * longer,
            chunk_wait_s=server.chunk_wait_s * longer,
            write_s=server.write_s * longer,
            linger_s=server.linger_s * longer,
            heartbeat_s=server.heartbeat_s * longer,
            idle_s=server.idle_s * longer,
            min_bytes_per_s=server.min_bytes_per_s / scenario.scale,
        ),
    )


class ScaledLog(EventLog):
    """An event log that writes sizes and tokens as they would be in reality."""

    scale = 1.0
    tokens_each = 1

    def emit(self, kind: str, /, **fields: Any) -> None:
        for key in _SIZES & fields.keys():
            fields[key] = round(fields[key] * self.scale)
        if "upload_mbit" in fields:
            fields["upload_mbit"] *= self.scale
        for key in ("tokens", "tokens_per_s"):
            if fields.get(key) is not None:
                fields[key] *= self.tokens_each
        if "sent" in fields:
            fields["sent"] = {peer: round(nbytes * self.scale) for peer, nbytes in fields["sent"].items()}
        if "arrivals" in fields:
            fields["arrivals"] = [
                [ms, round(learner * self.scale), round(peers * self.scale)]
                for ms, learner, peers in fields["arrivals"]
            ]
        super().emit(kind, **fields)
