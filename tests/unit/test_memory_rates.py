"""Rates of the memory network against the fluid figure: bytes over the narrowest share of a link."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import pytest

from echo2p2p.swarm.memory import MemoryNetwork, MemorySwarm
from echo2p2p.swarm.network import Stream
from echo2p2p.swarm.virtual_time import run_virtual

SINK = "/test/sink"
MB = 1_000_000


async def finish_times(
    swarm: MemorySwarm, transfers: Sequence[tuple[MemoryNetwork, MemoryNetwork, int]]
) -> list[float]:
    """Start all transfers (sender, receiver, bytes) at once; seconds until each was read to its end."""
    loop = asyncio.get_running_loop()

    async def source(stream: Stream) -> None:
        size = int.from_bytes(await stream.read_exactly(8), "big")
        for _ in range(size // 500_000):
            await stream.write(bytes(500_000))

    async def fetch(sender: MemoryNetwork, receiver: MemoryNetwork, size: int) -> float:
        stream = await receiver.open_stream(sender.peer_id, SINK, timeout_s=5)
        await stream.write(size.to_bytes(8, "big"))
        got = 0
        while data := await stream.read(1 << 20):
            got += len(data)
        assert got == size
        return loop.time() - started

    for sender, _, _ in transfers:
        await sender.handle(SINK, source)
    started = loop.time()
    async with asyncio.TaskGroup() as group:
        tasks = [group.create_task(fetch(*transfer)) for transfer in transfers]
    return [task.result() for task in tasks]


def test_one_sender_shares_its_uplink_among_four_receivers() -> None:
    async def main() -> list[float]:
        async with MemorySwarm() as swarm:
            sender = swarm.add_peer(upload_mbit=80)
            return await finish_times(swarm, [(sender, swarm.add_peer(), 5 * MB) for _ in range(4)])

    assert run_virtual(main) == pytest.approx([2.0] * 4, rel=0.05)


def test_four_senders_share_the_downlink_of_one_receiver() -> None:
    async def main() -> list[float]:
        async with MemorySwarm() as swarm:
            receiver = swarm.add_peer(download_mbit=80)
            return await finish_times(swarm, [(swarm.add_peer(), receiver, 5 * MB) for _ in range(4)])

    assert run_virtual(main) == pytest.approx([2.0] * 4, rel=0.05)


def test_slow_uplinks_fill_a_downlink_without_loss() -> None:
    async def main() -> list[float]:
        async with MemorySwarm() as swarm:
            receiver = swarm.add_peer(download_mbit=80)
            senders = [swarm.add_peer(upload_mbit=10) for _ in range(8)]
            return await finish_times(swarm, [(sender, receiver, 5 * MB) for sender in senders])

    assert run_virtual(main) == pytest.approx([4.0] * 8, rel=0.05)


def test_the_narrower_of_both_links_decides() -> None:
    async def main() -> list[float]:
        async with MemorySwarm() as swarm:
            times = []
            for up, down in ((40, 200), (200, 40), (40, 40)):
                a, b = swarm.add_peer(upload_mbit=up), swarm.add_peer(download_mbit=down)
                times += await finish_times(swarm, [(a, b, 5 * MB)])
            return times

    assert run_virtual(main) == pytest.approx([1.0] * 3, rel=0.05)


def test_a_relay_passes_blocks_on_as_they_come() -> None:
    async def main() -> float:
        async with MemorySwarm() as swarm:
            chain = [swarm.add_peer(upload_mbit=40, download_mbit=160) for _ in range(4)]

            async def relay(number: int, stream: Stream) -> None:
                onward = await chain[number + 1].open_stream(chain[number].peer_id, SINK, timeout_s=5)
                while data := await onward.read(64 * 1024):
                    await stream.write(data)

            async def source(stream: Stream) -> None:
                for _ in range(10):
                    await stream.write(bytes(500_000))

            await chain[3].handle(SINK, source)
            for number in (1, 2):

                async def serve(stream: Stream, number: int = number) -> None:
                    onward = await chain[number].open_stream(chain[number + 1].peer_id, SINK, timeout_s=5)
                    while data := await onward.read(64 * 1024):
                        await stream.write(data)

                await chain[number].handle(SINK, serve)
            stream = await chain[0].open_stream(chain[1].peer_id, SINK, timeout_s=5)
            while await stream.read(1 << 20):
                pass
            return asyncio.get_running_loop().time()

    assert run_virtual(main) == pytest.approx(1.0, rel=0.05)


def test_a_short_transfer_is_done_long_before_a_long_one() -> None:
    async def main() -> list[float]:
        async with MemorySwarm() as swarm:
            sender = swarm.add_peer(upload_mbit=80)
            return await finish_times(
                swarm, [(sender, swarm.add_peer(), 9 * MB), (sender, swarm.add_peer(), 1 * MB)]
            )

    assert run_virtual(main) == pytest.approx([1.0, 0.2], rel=0.05)


def test_a_short_message_does_not_wait_for_a_long_transfer() -> None:
    async def main() -> float:
        async with MemorySwarm() as swarm:
            a = swarm.add_peer(upload_mbit=8)
            b = swarm.add_peer()
            loop = asyncio.get_running_loop()
            heard: list[float] = []

            async def drop(stream: Stream) -> None:
                while await stream.read(1 << 20):
                    pass

            async def hear(stream: Stream) -> None:
                await stream.read_exactly(100)
                heard.append(loop.time())

            await b.handle(SINK, drop)
            await b.handle("/test/word", hear)
            bulk = await a.open_stream(b.peer_id, SINK, timeout_s=1)
            word = await a.open_stream(b.peer_id, "/test/word", timeout_s=1)
            async with asyncio.TaskGroup() as group:
                group.create_task(bulk.write(bytes(4 * MB)))
                await asyncio.sleep(1)
                await word.write(bytes(100))
            return heard[0] - 1

    assert run_virtual(main) < 0.2


def test_a_new_rate_counts_from_the_next_block() -> None:
    async def main() -> list[float]:
        async with MemorySwarm() as swarm:
            sender = swarm.add_peer(upload_mbit=40)
            receiver = swarm.add_peer(download_mbit=1000)
            loop = asyncio.get_running_loop()
            loop.call_later(1, lambda: swarm.set_rate(sender, upload_mbit=80))
            loop.call_later(2, lambda: swarm.set_rate(receiver, download_mbit=8))
            return await finish_times(swarm, [(sender, receiver, 16 * MB)])

    # 5 MB in the first second, 10 MB in the next, the last one at 1 MB/s.
    assert run_virtual(main) == pytest.approx([3.0], rel=0.05)


def test_writes_return_as_the_uplink_takes_them() -> None:
    async def main() -> float:
        async with MemorySwarm() as swarm:
            a, b = swarm.add_peer(upload_mbit=8), swarm.add_peer()

            async def drop(stream: Stream) -> None:
                while await stream.read(1 << 20):
                    pass

            await b.handle(SINK, drop)
            stream = await a.open_stream(b.peer_id, SINK, timeout_s=1)
            await stream.write(bytes(swarm.limits.high_water))
            assert asyncio.get_running_loop().time() == 0
            await stream.write(bytes(MB))
            return asyncio.get_running_loop().time()

    assert run_virtual(main) == pytest.approx(1.0, abs=0.1)
