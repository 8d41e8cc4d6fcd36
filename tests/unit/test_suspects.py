"""Liars and withholders among the members of a version: what they cost the honest ones, and for how long."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import pytest
from test_relay_memory import CHUNKS, TOTAL_BYTES, UP_MBIT, World, now, virtual
from test_withholding import withhold

from echo2p2p.swarm.messages import send
from echo2p2p.weights.manifest import Member
from echo2p2p.weights.plan import fluid_bound_s
from echo2p2p.weights.wire import Report, Suspects


async def honest_and_all_s(world: World, liars: Sequence[int], version: int = 0) -> tuple[float, float]:
    """Seconds until the honest peers have a new version, and until everybody has it; all of them are timed."""
    published = await world.publish(version)
    fetched = await asyncio.gather(*(each.fetch(published.record) for each in world.subscribers))
    took = [each.fetch_s for each in fetched]
    return max(each for at, each in enumerate(took) if at not in liars), max(took)


@pytest.mark.parametrize("liars", [(0, 1), (3, 4), (6, 7), (2, 5)])
def test_two_liars_of_eight_cost_the_honest_less_than_half_of_the_time_again(liars: tuple[int, int]) -> None:
    async def main(world: World) -> None:
        for at in liars:
            world.corrupt_all_from(world.peers[at])
        honest_s, all_s = await honest_and_all_s(world, liars)
        bound_s = fluid_bound_s(TOTAL_BYTES, UP_MBIT, [UP_MBIT] * 8, [UP_MBIT] * 8)
        print(liars, honest_s / bound_s, all_s / bound_s, world.learner_copies(), world.publisher.suspects)
        assert set(world.publisher.suspects) <= {world.peers[at].peer_id for at in liars}
        assert honest_s < 1.5 * bound_s + 1
        again_s, _ = await honest_and_all_s(world, liars, 1)
        print("again", again_s / bound_s, world.learner_copies(1))

    virtual([UP_MBIT] * 8)(main)()


@pytest.mark.parametrize("at", [0, 3])
def test_who_lets_others_wait_costs_it_once_and_forwards_nothing_for_a_while(at: int) -> None:
    async def main(world: World) -> None:
        # With such an uplink it is the only one above all others.
        world.members[at] = Member(world.peers[at].peer_id, 1e9)

        async def fetch_s(version: int) -> float:
            published = await world.publish(version)
            await withhold(world.peers[at], published, keeps=1000, pause_s=1.0)
            started = now()
            await world.fetch(published, at)
            return now() - started

        took = [await fetch_s(version) for version in range(3)]
        print(took)
        assert took[0] > 30
        assert max(took[1:]) < 5
        newest = world.publisher.newest
        assert newest is not None
        assert newest.suspects == (world.peers[at].peer_id,)

    virtual([UP_MBIT] * 6)(main)()


@virtual()
async def test_nobody_but_the_learner_says_whom_to_pass_over(world: World) -> None:
    published = await world.publish()
    for sender in world.peers[:2]:
        for other in (world.learner, *world.peers[2:]):
            stream = await sender.open_stream(other.peer_id, CHUNKS, timeout_s=5)
            await send(stream, Suspects(published.digest, 9, (0, 1, 2, 3), 1, 1))
            await send(stream, Report(published.digest, (2,)))
            await stream.close()
    fetched = await world.fetch(published)
    assert max(each.fetch_s for each in fetched) < 2
    assert world.learner_copies() == 1.0
