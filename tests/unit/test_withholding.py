"""Peers that keep lanes alive and send less, or more, than they owe: they cost time, and no fetch fails for them."""

from __future__ import annotations

import asyncio
from contextlib import suppress

import pytest
from test_relay_memory import ASSETS, CHUNKS, UP_MBIT, World, now, snapshot, virtual

from echo2p2p.errors import SwarmError
from echo2p2p.swarm.memory import MemoryNetwork
from echo2p2p.swarm.messages import receive, send
from echo2p2p.swarm.network import Stream
from echo2p2p.weights.manifest import Member
from echo2p2p.weights.publisher import Published
from echo2p2p.weights.wire import (
    MAX_MESSAGE_BYTES,
    Chunk,
    FirstRequest,
    GetManifest,
    LaneRequest,
    OpenLane,
    Refused,
    Waiting,
    Want,
)


async def withhold(member: MemoryNetwork, published: Published, keeps: int, pause_s: float) -> None:
    """Let ``member`` send a chunk every ``pause_s``, but for the last ``keeps`` that it was asked for."""
    data = bytes(snapshot().data) + b"".join(ASSETS[name] for name in sorted(ASSETS))

    async def take(stream: Stream, wanted: list[int]) -> None:
        while True:
            request: LaneRequest = await receive(
                stream, LaneRequest, max_bytes=MAX_MESSAGE_BYTES, timeout_s=1000
            )
            if isinstance(request, Want):
                wanted.extend(request.chunks)

    async def serve(stream: Stream) -> None:
        first: FirstRequest = await receive(stream, FirstRequest, max_bytes=MAX_MESSAGE_BYTES, timeout_s=5)
        if isinstance(first, GetManifest):
            await send(stream, Refused("not here"))
            return
        wanted: list[int] = []
        taking = asyncio.create_task(take(stream, wanted))
        try:
            last_s = now()
            while not taking.done():
                await asyncio.sleep(min(1.0, pause_s))
                if len(wanted) > keeps and now() - last_s >= pause_s:
                    index, last_s = wanted.pop(0), now()
                    start, end = published.manifest.chunk_span(index)
                    await send(stream, Chunk(index))
                    await stream.write(data[start:end])
                else:
                    await send(stream, Waiting())
        finally:
            taking.cancel()
            with suppress(SwarmError, asyncio.CancelledError):
                await taking

    await member.handle(CHUNKS, serve)


@pytest.mark.parametrize("n_members", [3, 6])
def test_one_chunk_withheld_for_ever_costs_time_only(n_members: int) -> None:
    async def main(world: World) -> None:
        published = await world.publish()
        await withhold(world.peers[0], published, keeps=1, pause_s=0.01)
        await world.fetch(published, 0)
        assert now() < 45
        assert world.learner_copies() < 1.3

    virtual([UP_MBIT] * n_members)(main)()


@pytest.mark.parametrize(("keeps", "pause_s"), [(1000, 1.0), (0, 15.0), (0, 50.0)])
def test_a_sole_source_that_trickles_or_only_says_waiting_costs_time_only(keeps: int, pause_s: float) -> None:
    async def main(world: World) -> None:
        # With such an uplink, a member is the only one above all others.
        world.members[0] = Member(world.peers[0].peer_id, 1e9)
        published = await world.publish()
        assert published.manifest.trees == 1
        await withhold(world.peers[0], published, keeps, pause_s)
        await world.fetch(published, 0)
        assert now() < 60
        assert world.learner_copies() < 1.5

    virtual()(main)()


@virtual()
async def test_a_source_that_sends_one_chunk_over_and_over_is_done_with_at_once(world: World) -> None:
    published = await world.publish()
    start, end = published.manifest.chunk_span(0)
    first_chunk = bytes(snapshot().data[start:end])

    async def repeat(stream: Stream) -> None:
        while True:
            await send(stream, Chunk(0))
            await stream.write(first_chunk)

    await world.peers[0].handle(CHUNKS, repeat)
    await world.fetch(published, 0)
    assert now() < 8
    assert world.swarm.bytes_sent(sender=world.peers[0].peer_id) < 8 * 2**20


@virtual()
async def test_strangers_with_many_identities_leave_streams_to_the_members(world: World) -> None:
    published = await world.publish()
    for _ in range(64):
        stranger = world.swarm.add_peer(delay_s=0.01)
        for _ in range(32):
            stream = await stranger.open_stream(world.learner.peer_id, CHUNKS, timeout_s=5)
            await send(stream, OpenLane(published.digest))
    await world.fetch(published)
    assert now() < 60
