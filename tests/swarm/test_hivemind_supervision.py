"""p2pd is killed or stopped; the node comes back, and says so while it is away."""

from __future__ import annotations

import asyncio
import os
import signal

import psutil
import pytest
from hivemind_helpers import Join, run_of, sealed_advert

from echo2p2p.errors import JoinError, PeerUnreachable, SwarmError
from echo2p2p.swarm.hivemind import HivemindNetwork, NodeLimits
from echo2p2p.swarm.hivemind.daemon import Daemon
from echo2p2p.swarm.network import Stream

ECHO = "/echo2p2p/1/echo"
QUICK = NodeLimits(watch_period_s=0.2, health_timeout_s=0.5, tend_period_s=1, retry_period_s=0.2)


def p2pd_of(node: HivemindNetwork) -> int:
    identity = f"-{node.peer_id}/"
    for child in psutil.Process().children():
        if any(identity in argument for argument in child.cmdline()):
            return child.pid
    raise LookupError(node.peer_id)


async def restarted(node: HivemindNetwork, times: int) -> None:
    async with asyncio.timeout(20):
        while node.restarts < times:
            await asyncio.sleep(0.05)


async def echo(stream: Stream) -> None:
    while data := await stream.read(65536):
        await stream.write(data)


async def echoes(caller: HivemindNetwork, called: HivemindNetwork) -> bool:
    stream = await caller.open_stream(called.peer_id, ECHO, timeout_s=5)
    try:
        await stream.write(b"x")
        return await stream.read_exactly(1) == b"x"
    finally:
        await stream.close()


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGSTOP])
async def test_a_node_whose_p2pd_dies_or_hangs_serves_again(join: Join, how: signal.Signals) -> None:
    first = await join("first", limits=QUICK)
    second = await join("second", through=first, limits=QUICK)
    await second.handle(ECHO, echo)
    key, value, expires = sealed_advert(second.identity, run_of(first))
    assert await second.store_record(key, value, expires_unix=expires, timeout_s=5)
    before, addresses = p2pd_of(second), second.addresses()
    broken = await first.open_stream(second.peer_id, ECHO, timeout_s=5)

    os.kill(before, how)
    if how == signal.SIGKILL:
        with pytest.raises(PeerUnreachable):
            await second.open_stream(first.peer_id, ECHO, timeout_s=5)
    await restarted(second, 1)

    assert not psutil.pid_exists(before)
    assert second.addresses() == addresses
    assert await broken.read(1) == b""
    await broken.close()
    async with asyncio.timeout(15):  # first dials again once p2pd's backoff is over
        while True:
            try:
                assert await echoes(first, second)
                break
            except PeerUnreachable:
                await asyncio.sleep(0.2)
    assert await second.find_records(key, timeout_s=5) == {second.peer_id: value}
    key, value, expires = sealed_advert(second.identity, run_of(first), sequence=2)
    assert await second.store_record(key, value, expires_unix=expires, timeout_s=5)
    assert await first.find_records(key, timeout_s=5) == {second.peer_id: value}


async def test_calls_raise_while_p2pd_is_down_and_its_loss_is_reported(
    join: Join, monkeypatch: pytest.MonkeyPatch
) -> None:
    limits = NodeLimits(watch_period_s=0.2, restart_within_s=1, retry_period_s=0.2)
    first = await join("first", limits=limits)

    async def fail(*_: object, **__: object) -> Daemon:
        raise JoinError("p2pd is gone")

    monkeypatch.setattr(Daemon, "start", fail)
    os.kill(p2pd_of(first), signal.SIGKILL)
    failed = asyncio.ensure_future(first.wait_failed())
    await asyncio.sleep(0.5)
    key, value, expires = sealed_advert(first.identity, run_of(first))
    for call in (
        first.open_stream(first.peer_id, ECHO, timeout_s=1),
        first.find_records(key, timeout_s=1),
        first.store_record(key, value, expires_unix=expires, timeout_s=1),
        first.handle(ECHO, echo),
        first.peers(),
    ):
        with pytest.raises(PeerUnreachable, match="restarted"):
            await call
    with pytest.raises(SwarmError, match="p2pd is gone"):
        async with asyncio.timeout(10):
            await failed


async def test_a_node_finds_its_swarm_again_after_the_bootstrap_peer_restarted(join: Join) -> None:
    first = await join("first", limits=QUICK)
    second = await join("second", through=first, limits=QUICK)
    address = first.addresses()[0].split("/p2p/")[0]
    await first.close()
    key, value, expires = sealed_advert(second.identity, run_of(second))
    assert not await second.store_record(key, value, expires_unix=expires, timeout_s=5)
    await join("first", host_maddrs=[address])
    async with asyncio.timeout(20):
        while not await second.store_record(key, value, expires_unix=expires, timeout_s=5):
            await asyncio.sleep(0.2)
