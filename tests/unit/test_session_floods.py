"""Work sessions under floods: what one peer says too often, and streams on which it says nothing."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from contextlib import suppress
from functools import wraps
from typing import Any

import pytest

from echo2p2p.data.work import WORK_PROTOCOL, Advertise, Beat, FromLearner, Goodbye, Join, TaskSpec, Welcome
from echo2p2p.errors import PeerUnreachable
from echo2p2p.learning.sessions import JOIN_BURST, Session, WorkSessions
from echo2p2p.swarm.directory import Directory
from echo2p2p.swarm.memory import MemoryNetwork, MemorySwarm
from echo2p2p.swarm.messages import PROTOCOL_VERSION, protocol_id, receive, send
from echo2p2p.swarm.network import Stream
from echo2p2p.swarm.records import WorkerAdvert
from echo2p2p.swarm.virtual_time import run_virtual

WORK = protocol_id(WORK_PROTOCOL)
ADVERT = WorkerAdvert("x", 1, 1, 100, 100, 0.1, 100, -1, "x", "standby", "0")


class Handler:
    """Greets everybody, accepts a group now and then, and notes why sessions ended."""

    def __init__(self) -> None:
        self.received_count = 0
        self.accept_every = 0
        self.reasons: list[str] = []

    def welcome(self, session: Session, join: Join) -> Welcome:
        return Welcome(TaskSpec("strings", 0, {}), -1, 5.0)

    def advertised(self, session: Session, advert: WorkerAdvert) -> None: ...

    async def received(self, session: Session, message: object) -> None:
        self.received_count += 1
        if self.accept_every and not self.received_count % self.accept_every:
            session.accepted += 1

    def left(self, session: Session, reason: str) -> None:
        self.reasons.append(reason)


class Learner:
    def __init__(self, swarm: MemorySwarm) -> None:
        self.swarm = swarm
        self.network = swarm.add_peer(delay_s=0.01)
        self.run = f"run@{self.network.peer_id}"
        self.handler = Handler()
        self.sessions = WorkSessions(
            self.network, self.run, self.handler, max_message_bytes=2**20, beat_period_s=5.0, max_sessions=64
        )

    def peer(self) -> tuple[MemoryNetwork, Directory]:
        network = self.swarm.add_peer(delay_s=0.01)
        return network, Directory(network, self.run)

    async def join(self, network: MemoryNetwork, directory: Directory) -> tuple[Stream, Welcome | Goodbye]:
        stream = await network.open_stream(self.network.peer_id, WORK, timeout_s=5)
        await send(stream, Join(self.run, PROTOCOL_VERSION, directory.seal(ADVERT), -1, ""))
        return stream, await receive(stream, Welcome | Goodbye, max_bytes=65536, timeout_s=5)


def virtual(test: Callable[[Learner], Coroutine[Any, Any, None]]) -> Callable[[], None]:
    async def main() -> None:
        async with MemorySwarm(seed=1) as swarm:
            learner = Learner(swarm)
            await learner.sessions.listen()
            await test(learner)

    @wraps(test)
    def run() -> None:
        run_virtual(main)

    del run.__wrapped__
    return run


async def flood(stream: Stream, message: Callable[[], Any], count: int) -> int:
    """Send up to ``count`` messages, reading the answers; how many could be sent."""

    async def read() -> None:
        while True:
            await receive(stream, FromLearner, max_bytes=65536, timeout_s=1000)

    reading = asyncio.create_task(read())
    sent = 0
    with suppress(PeerUnreachable):
        while sent < count:
            await send(stream, message())
            sent += 1
            await asyncio.sleep(0.001)
    reading.cancel()
    with suppress(PeerUnreachable, asyncio.CancelledError):
        await reading
    return sent


@virtual
async def test_a_worker_that_floods_its_session_loses_it(learner: Learner) -> None:
    network, directory = learner.peer()
    stream, _ = await learner.join(network, directory)
    assert await flood(stream, lambda: Beat(-1, 0), 5000) < 1200
    assert "messages" in learner.handler.reasons[0]
    assert isinstance((await learner.join(network, directory))[1], Welcome)


@virtual
async def test_adverts_over_and_over_end_the_session_sooner(learner: Learner) -> None:
    network, directory = learner.peer()
    stream, _ = await learner.join(network, directory)
    assert await flood(stream, lambda: Advertise(directory.seal(ADVERT)), 1000) < 200


@virtual
async def test_a_worker_whose_groups_are_accepted_may_send_as_many_as_it_can(learner: Learner) -> None:
    learner.handler.accept_every = 2
    stream, _ = await learner.join(*learner.peer())
    assert await flood(stream, lambda: Beat(-1, 0), 5000) == 5000


@virtual
async def test_a_peer_that_joins_over_and_over_is_turned_away_for_a_while(learner: Learner) -> None:
    network, directory = learner.peer()
    answers = [(await learner.join(network, directory))[1] for _ in range(JOIN_BURST + 1)]
    assert all(isinstance(answer, Welcome) for answer in answers[:-1])
    assert isinstance(answers[-1], Goodbye)
    assert answers[-1].retry
    await asyncio.sleep(6)
    assert isinstance((await learner.join(network, directory))[1], Welcome)


@virtual
async def test_a_peer_holds_few_streams_on_which_it_does_not_join(learner: Learner) -> None:
    network, directory = learner.peer()
    streams = [await network.open_stream(learner.network.peer_id, WORK, timeout_s=5) for _ in range(3)]
    await asyncio.sleep(0.1)
    with pytest.raises(PeerUnreachable):
        await streams[-1].read_exactly(1)
    await asyncio.sleep(16)
    assert isinstance((await learner.join(network, directory))[1], Welcome)
