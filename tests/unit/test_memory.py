"""The memory network keeps the seam's promises, under every failure it can play."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Coroutine
from typing import Any

import pytest

from echo2p2p.errors import DeadlineExceeded, PeerUnreachable, ProtocolError
from echo2p2p.swarm.identity import Identity
from echo2p2p.swarm.links import LinkLimits
from echo2p2p.swarm.memory import MemoryNetwork, MemorySwarm
from echo2p2p.swarm.network import Network, Stream
from echo2p2p.swarm.virtual_time import VirtualLoop, run_virtual

ECHO = "/test/echo"


def virtual(test: Callable[..., Coroutine[Any, Any, None]]) -> Callable[[], None]:
    """Run a test under virtual time, in a swarm that has no handler errors at its end."""

    async def main() -> None:
        async with MemorySwarm(seed=7) as swarm:
            await test(swarm)

    def run() -> None:
        run_virtual(main)

    run.__name__ = test.__name__
    return run


async def echo(stream: Stream) -> None:
    while data := await stream.read(1 << 16):
        await stream.write(data)


async def never_reads(_stream: Stream) -> None:
    await asyncio.sleep(1e6)


async def pair(swarm: MemorySwarm, **options: float) -> tuple[MemoryNetwork, MemoryNetwork, Stream]:
    """Two peers and a stream from the first to the echo of the second."""
    a, b = swarm.add_peer(**options), swarm.add_peer(**options)
    await b.handle(ECHO, echo)
    return a, b, await a.open_stream(b.peer_id, ECHO, timeout_s=5)


def now() -> float:
    return asyncio.get_running_loop().time()


@virtual
async def test_bytes_come_back_as_they_went(swarm: MemorySwarm) -> None:
    _, b, stream = await pair(swarm)
    assert stream.remote == b.peer_id
    for data in (b"x", bytearray(b"some more"), memoryview(bytes(range(256)) * 1000)):
        await stream.write(data)
        assert await stream.read_exactly(len(data)) == bytes(data)


@virtual
async def test_parts_go_one_after_another_and_come_into_a_buffer(swarm: MemorySwarm) -> None:
    _, _, stream = await pair(swarm)
    await stream.write(b"a head", memoryview(bytes(range(256)) * 1000))
    buffer = bytearray(6 + 256_000)
    await stream.read_into(memoryview(buffer)[:3])
    await stream.read_into(memoryview(buffer)[3:])
    assert buffer == b"a head" + bytes(range(256)) * 1000


@virtual
async def test_both_ends_know_each_other(swarm: MemorySwarm) -> None:
    a, b = swarm.add_peer(), swarm.add_peer()

    async def who(stream: Stream) -> None:
        await stream.write(stream.remote.encode())

    await b.handle(ECHO, who)
    stream = await a.open_stream(b.peer_id, ECHO, timeout_s=1)
    assert (await stream.read(100)).decode() == a.peer_id
    assert await stream.read(100) == b""


@virtual
async def test_the_end_of_a_stream_comes_after_its_bytes(swarm: MemorySwarm) -> None:
    a, b = swarm.add_peer(upload_mbit=8, delay_s=0.1), swarm.add_peer(delay_s=0.1)
    got: list[bytes] = []
    done = asyncio.Event()

    async def collect(stream: Stream) -> None:
        while data := await stream.read(1 << 20):
            got.append(data)
        done.set()

    await b.handle(ECHO, collect)
    stream = await a.open_stream(b.peer_id, ECHO, timeout_s=1)
    await stream.write(bytes(300_000))
    await stream.close()
    await stream.close()
    await done.wait()
    assert sum(map(len, got)) == 300_000
    with pytest.raises(PeerUnreachable, match="closed"):
        await stream.write(b"late")


@virtual
async def test_a_stream_that_ends_too_early_breaks_an_exact_read(swarm: MemorySwarm) -> None:
    a, b = swarm.add_peer(), swarm.add_peer()

    async def too_little(stream: Stream) -> None:
        await stream.write(b"12345")

    await b.handle(ECHO, too_little)
    stream = await a.open_stream(b.peer_id, ECHO, timeout_s=1)
    with pytest.raises(PeerUnreachable, match="5 of 6"):
        await stream.read_into(memoryview(bytearray(6)))
    with pytest.raises(PeerUnreachable, match="5 of 6"):
        await stream.read_exactly(6)


@virtual
async def test_nobody_there_and_no_such_protocol(swarm: MemorySwarm) -> None:
    a, b, _ = await pair(swarm)
    with pytest.raises(PeerUnreachable, match="does not speak"):
        await a.open_stream(b.peer_id, "/test/other", timeout_s=1)
    with pytest.raises(PeerUnreachable):
        await a.open_stream(Identity.from_seed(bytes(32)).peer_id, ECHO, timeout_s=1)
    with pytest.raises(PeerUnreachable):
        await a.open_stream(a.peer_id, ECHO, timeout_s=1)


@virtual
async def test_a_dial_takes_a_round_trip_and_a_block_one_way(swarm: MemorySwarm) -> None:
    _, _, stream = await pair(swarm, delay_s=0.1)
    assert now() == pytest.approx(0.2)
    await stream.write(b"ping")
    await stream.read_exactly(4)
    assert now() == pytest.approx(0.4)


@virtual
async def test_a_dial_that_takes_too_long_meets_its_deadline(swarm: MemorySwarm) -> None:
    a, b = swarm.add_peer(delay_s=3), swarm.add_peer(delay_s=3)
    await b.handle(ECHO, echo)
    with pytest.raises(DeadlineExceeded, match=b.peer_id):
        await a.open_stream(b.peer_id, ECHO, timeout_s=5)
    assert now() == 5


@virtual
async def test_a_reader_that_does_not_read_stops_its_sender(swarm: MemorySwarm) -> None:
    a, b = swarm.add_peer(), swarm.add_peer()
    taken = asyncio.Event()
    limits = LinkLimits()

    async def slow(stream: Stream) -> None:
        await taken.wait()
        while await stream.read(1 << 16):
            pass

    await b.handle(ECHO, slow)
    stream = await a.open_stream(b.peer_id, ECHO, timeout_s=1)
    written = 0

    async def fill() -> None:
        nonlocal written
        while True:
            await stream.write(bytes(10_000))
            written += 10_000

    with pytest.raises(TimeoutError):
        await asyncio.wait_for(fill(), 10)
    assert written <= limits.window + limits.high_water + 2 * 10_000
    taken.set()
    await stream.write(bytes(10_000))
    await stream.close()
    assert swarm.bytes_sent(a.peer_id, b.peer_id) == written + 20_000


@virtual
async def test_a_read_longer_than_the_window_comes_through(swarm: MemorySwarm) -> None:
    size = 5 * LinkLimits().window
    for rates in ({}, {"upload_mbit": 800.0}, {"download_mbit": 800.0}, {"delay_s": 0.05}):
        a, b = swarm.add_peer(**rates), swarm.add_peer(**rates)

        async def whole(stream: Stream) -> None:
            await stream.write(b"%d" % len(await stream.read_exactly(size)))

        await b.handle(ECHO, whole)
        stream = await a.open_stream(b.peer_id, ECHO, timeout_s=1)
        await stream.write(bytes(size))
        assert int(await stream.read(20)) == size


@virtual
async def test_content_survives_blocks_windows_and_odd_reads(swarm: MemorySwarm) -> None:
    rng = random.Random(1)
    sent = rng.randbytes(2_500_000)
    a = swarm.add_peer(upload_mbit=200, delay_s=0.01)
    b = swarm.add_peer(download_mbit=100, delay_s=0.02)

    async def send(stream: Stream) -> None:
        at = 0
        while at < len(sent):
            size = rng.randrange(1, 300_000)
            await stream.write(sent[at : at + size])
            at += size

    await a.handle(ECHO, send)
    stream = await b.open_stream(a.peer_id, ECHO, timeout_s=1)
    got = bytearray(await stream.read_exactly(1_234_567))
    while data := await stream.read(rng.randrange(1, 100_000)):
        got += data
    assert bytes(got) == sent


@virtual
async def test_a_cut_breaks_streams_and_heal_lets_new_ones_through(swarm: MemorySwarm) -> None:
    a, b, stream = await pair(swarm)
    c = swarm.add_peer()
    await c.handle(ECHO, echo)
    other = await a.open_stream(c.peer_id, ECHO, timeout_s=1)
    async with asyncio.TaskGroup() as group:
        reading = group.create_task(_raises(stream.read(10)))
        await asyncio.sleep(1)
        swarm.cut(a, b)
    assert "cut" in reading.result()
    with pytest.raises(PeerUnreachable):
        await stream.write(b"x")
    with pytest.raises(PeerUnreachable):
        await b.open_stream(a.peer_id, ECHO, timeout_s=1)
    assert [info.peer for info in await a.peers()] == [c.peer_id]
    await other.write(b"x")
    assert await other.read(1) == b"x"
    swarm.heal(a, b)
    again = await a.open_stream(b.peer_id, ECHO, timeout_s=1)
    await again.write(b"y")
    assert await again.read(1) == b"y"


@virtual
async def test_a_stall_holds_one_direction_and_breaks_nothing(swarm: MemorySwarm) -> None:
    a, b, stream = await pair(swarm, upload_mbit=80, delay_s=0.01)
    swarm.stall(a, b)
    await stream.write(b"held")
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(100):
            await stream.read(4)
    with pytest.raises(DeadlineExceeded):
        await a.open_stream(b.peer_id, ECHO, timeout_s=10)
    swarm.unstall(a, b)
    assert await stream.read_exactly(4) == b"held"


@virtual
async def test_a_stall_catches_bytes_and_ends_under_way(swarm: MemorySwarm) -> None:
    a, b, stream = await pair(swarm, delay_s=1)
    await stream.write(b"under way")
    await asyncio.sleep(0.5)
    swarm.stall(a, b)
    await stream.close()
    await asyncio.sleep(100)
    assert swarm.bytes_sent(b.peer_id, a.peer_id) == 0
    swarm.unstall(a, b)
    await asyncio.sleep(5)
    # The echo found its stream closed, and ended.
    assert not b.streams
    assert not a.streams


@virtual
async def test_a_stream_opened_in_a_stall_waits_for_its_end(swarm: MemorySwarm) -> None:
    a, b, _ = await pair(swarm)
    swarm.stall(b, a)
    async with asyncio.TaskGroup() as group:
        opening = group.create_task(a.open_stream(b.peer_id, ECHO, timeout_s=60))
        await asyncio.sleep(30)
        assert not opening.done()
        swarm.unstall(b, a)
    assert opening.result().remote == b.peer_id


@virtual
async def test_a_killed_peer_takes_its_streams_handlers_and_calls_along(swarm: MemorySwarm) -> None:
    a, b, stream = await pair(swarm)
    ended: list[str] = []

    async def hangs(stream: Stream) -> None:
        try:
            await asyncio.sleep(1e6)
        finally:
            ended.append(stream.remote)

    await b.handle("/test/hangs", hangs)
    await a.handle(ECHO, echo)
    await a.open_stream(b.peer_id, "/test/hangs", timeout_s=1)
    own = await b.open_stream(a.peer_id, ECHO, timeout_s=1)
    swarm.stall(b, a)
    async with asyncio.TaskGroup() as group:
        reading = group.create_task(_raises(stream.read(10)))
        dialling = group.create_task(_raises(b.open_stream(a.peer_id, ECHO, timeout_s=1000)))
        await asyncio.sleep(1)
        swarm.kill(b)
    assert now() == 1
    assert "gone" in reading.result()
    assert "left" in dialling.result()
    assert ended == [a.peer_id]
    for call in (
        a.open_stream(b.peer_id, ECHO, timeout_s=1),
        b.open_stream(a.peer_id, ECHO, timeout_s=1),
        b.find_records("any", timeout_s=1),
        b.handle(ECHO, echo),
        own.write(b"x"),
    ):
        with pytest.raises(PeerUnreachable):
            await call
    assert swarm.peers == [a]


@virtual
async def test_a_killed_peer_comes_back_under_its_identity(swarm: MemorySwarm) -> None:
    a, b, _ = await pair(swarm)
    with pytest.raises(ValueError, match="already"):
        swarm.add_peer(b.identity)
    swarm.kill(b)
    again = swarm.add_peer(b.identity)
    await again.handle(ECHO, echo)
    stream = await a.open_stream(b.peer_id, ECHO, timeout_s=1)
    await stream.write(b"hello")
    assert await stream.read(10) == b"hello"


@virtual
async def test_corruption_damages_every_nth_block_by_one_bit(swarm: MemorySwarm) -> None:
    a, b, stream = await pair(swarm)
    swarm.corrupt(a, b, every=3, min_bytes=1000)
    await stream.write(bytes(10))
    assert await stream.read_exactly(10) == bytes(10)
    size = LinkLimits().block
    await stream.write(bytes(9 * size))
    got = await stream.read_exactly(9 * size)
    damaged = [n for n in range(9) if got[n * size : (n + 1) * size] != bytes(size)]
    assert damaged == [2, 5, 8]
    assert sum(byte.bit_count() for byte in got) == 3
    swarm.corrupt(a, b, every=0)
    await stream.write(bytes(9 * size))
    assert await stream.read_exactly(9 * size) == bytes(9 * size)


@virtual
async def test_bytes_are_counted_by_pair_and_protocol(swarm: MemorySwarm) -> None:
    a, b, stream = await pair(swarm)
    await stream.write(bytes(1000))
    await stream.read_exactly(1000)
    await b.handle("/test/sink", never_reads)
    sink = await a.open_stream(b.peer_id, "/test/sink", timeout_s=1)
    await sink.write(bytes(50))
    assert swarm.traffic == {
        (a.peer_id, b.peer_id, ECHO): 1000,
        (b.peer_id, a.peer_id, ECHO): 1000,
        (a.peer_id, b.peer_id, "/test/sink"): 50,
    }
    assert swarm.bytes_sent(a.peer_id) == 1050
    assert swarm.bytes_sent(protocol=ECHO) == 2000


@virtual
async def test_an_error_of_the_tree_ends_only_its_stream(swarm: MemorySwarm) -> None:
    a, b = swarm.add_peer(), swarm.add_peer()

    async def picky(stream: Stream) -> None:
        if await stream.read(1) == b"!":
            raise ProtocolError("not with me")
        await stream.write(b"ok")

    await b.handle(ECHO, picky)
    for word, answer in ((b"!", b""), (b"?", b"ok")):
        stream = await a.open_stream(b.peer_id, ECHO, timeout_s=1)
        await stream.write(word)
        assert await stream.read(10) == answer


def test_a_bug_in_a_handler_surfaces_when_the_swarm_closes() -> None:
    async def buggy(_stream: Stream) -> None:
        raise KeyError("a bug")

    async def main() -> None:
        swarm = MemorySwarm()
        a, b = swarm.add_peer(), swarm.add_peer()
        await b.handle(ECHO, buggy)
        stream = await a.open_stream(b.peer_id, ECHO, timeout_s=1)
        assert await stream.read(1) == b""
        with pytest.raises(ExceptionGroup) as caught:
            await swarm.close()
        assert caught.value.subgroup(KeyError) is not None

    run_virtual(main)


@virtual
async def test_closing_a_network_twice_and_from_a_handler(swarm: MemorySwarm) -> None:
    a, b = swarm.add_peer(), swarm.add_peer()

    async def goes(_stream: Stream) -> None:
        await b.close()

    await b.handle(ECHO, goes)
    stream = await a.open_stream(b.peer_id, ECHO, timeout_s=1)
    with pytest.raises(PeerUnreachable):
        await stream.read(1)
    await b.close()
    assert b.dead


@virtual
async def test_two_reads_at_once_are_a_bug(swarm: MemorySwarm) -> None:
    _, _, stream = await pair(swarm)
    async with asyncio.TaskGroup() as group:
        first = group.create_task(stream.read(1))
        await asyncio.sleep(0)
        with pytest.raises(RuntimeError, match="two reads"):
            await stream.read(1)
        await stream.write(b"x")
    assert first.result() == b"x"


@virtual
async def test_a_read_that_was_cancelled_loses_nothing(swarm: MemorySwarm) -> None:
    _, _, stream = await pair(swarm, delay_s=0.5)
    await stream.write(b"1234")
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.9):
            await stream.read_exactly(4)
    assert await stream.read_exactly(4) == b"1234"


@virtual
async def test_dialling_again_and_again_in_vain_is_seen(swarm: MemorySwarm) -> None:
    a, b, _ = await pair(swarm)
    swarm.cut(a, b)
    with pytest.raises(PeerUnreachable):
        await a.open_stream(b.peer_id, ECHO, timeout_s=1)
    loop = asyncio.get_running_loop()
    assert isinstance(loop, VirtualLoop)
    turns = loop._turns
    for _ in range(10):
        await _raises(a.open_stream(b.peer_id, ECHO, timeout_s=1))
    assert loop._turns >= turns + 10


def test_the_same_seed_gives_the_same_run() -> None:
    async def main() -> list[tuple[float, str]]:
        history: list[tuple[float, str]] = []
        async with MemorySwarm(seed=3, default_delay_s=0.01) as swarm:
            rng = random.Random(5)
            peers = [
                swarm.add_peer(upload_mbit=rng.uniform(5, 50), download_mbit=rng.uniform(20, 90))
                for _ in range(6)
            ]

            async def sink(stream: Stream) -> None:
                while data := await stream.read(1 << 20):
                    history.append((now(), f"{stream.remote} {len(data)}"))

            async def talk(a: Network, b: Network, size: int) -> None:
                stream = await a.open_stream(b.peer_id, ECHO, timeout_s=5)
                await stream.write(bytes(size))
                await stream.close()

            for peer in peers:
                await peer.handle(ECHO, sink)
            async with asyncio.TaskGroup() as group:
                for _ in range(30):
                    a, b = rng.sample(peers, 2)
                    group.create_task(talk(a, b, rng.randrange(1, 500_000)))
            await asyncio.sleep(10)
        return history

    first = run_virtual(main)
    assert len(first) > 30
    assert run_virtual(main) == first


async def test_it_serves_an_ordinary_loop_too() -> None:
    async with MemorySwarm() as swarm:
        a, _, stream = await pair(swarm)
        await stream.write(b"now")
        assert await stream.read_exactly(3) == b"now"
        assert a.clock.unix() > 1e9


async def _raises(call: Coroutine[Any, Any, Any]) -> str:
    with pytest.raises(PeerUnreachable) as caught:
        await call
    return str(caught.value)
