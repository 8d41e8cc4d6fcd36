"""Streams over real p2pd: who is at the other end, what arrives, and what a bad handler can break."""

from __future__ import annotations

import asyncio
import hashlib
import logging
import random
import time

import pytest
from hivemind_helpers import Join

from echo2p2p.errors import DeadlineExceeded, NotSpoken, PeerUnreachable, ProtocolError
from echo2p2p.swarm.hivemind import NodeLimits, StreamLimits
from echo2p2p.swarm.identity import Identity
from echo2p2p.swarm.network import Stream

ECHO = "/echo2p2p/1/echo"
HASTY = NodeLimits(streams=StreamLimits(yield_s=0.2))
"""For tests that wait for the end that the dialled side puts to a stream."""


async def echo(stream: Stream) -> None:
    while data := await stream.read(65536):
        await stream.write(data)


async def test_both_ends_know_who_the_other_is(join: Join) -> None:
    first = await join("first", limits=HASTY)
    second = await join("second", through=first)
    callers = []

    async def greet(stream: Stream) -> None:
        callers.append(stream.remote)
        await stream.write(await stream.read_exactly(5))

    await first.handle(ECHO, greet)
    stream = await second.open_stream(first.peer_id, ECHO, timeout_s=5)
    await stream.write(b"hello")
    assert await stream.read_exactly(5) == b"hello"
    assert await stream.read(1) == b""
    assert stream.remote == first.peer_id
    assert callers == [second.peer_id]
    await stream.close()
    await stream.close()


async def test_two_workers_find_each_other_through_the_bootstrap_peer(join: Join) -> None:
    first = await join("first")
    second = await join("second", through=first)
    third = await join("third", through=first)
    await third.handle(ECHO, echo)
    stream = await second.open_stream(third.peer_id, ECHO, timeout_s=5)
    await stream.write(b"x")
    assert await stream.read_exactly(1) == b"x"
    await stream.close()


async def test_64_mib_arrive_intact_though_the_handler_returns_at_once(join: Join) -> None:
    first = await join("first")
    second = await join("second", through=first)
    block = random.Random(7).randbytes(2**20)

    async def give(stream: Stream) -> None:
        for _ in range(63):
            await stream.write(block)
        await stream.write(bytearray(block))

    await first.handle(ECHO, give)
    stream = await second.open_stream(first.peer_id, ECHO, timeout_s=5)
    await stream.write(b"unread" * 1000)  # must not make the other end's close lose anything
    digest = hashlib.sha256()
    async with asyncio.timeout(30):
        for _ in range(256):
            digest.update(await stream.read_exactly(2**18))
    await stream.close()
    assert digest.digest() == hashlib.sha256(block * 64).digest()


async def test_the_side_that_was_dialled_leaves_the_end_to_the_other_but_does_not_wait_for_ever(
    join: Join,
) -> None:
    first = await join("first", limits=HASTY)
    second = await join("second", through=first)

    async def greet(stream: Stream) -> None:
        await stream.write(b"hello")

    await first.handle(ECHO, greet)
    stream = await second.open_stream(first.peer_id, ECHO, timeout_s=5)
    assert await stream.read_exactly(5) == b"hello"
    started = time.monotonic()
    assert await stream.read(1) == b""
    assert 0.1 < time.monotonic() - started < 3
    await stream.close()


async def test_a_handler_that_fails_ends_its_stream_at_once(join: Join) -> None:
    first = await join("first")
    second = await join("second", through=first)

    async def refuse(stream: Stream) -> None:
        raise ProtocolError(f"{stream.remote} says nonsense")

    await first.handle(ECHO, refuse)
    stream = await second.open_stream(first.peer_id, ECHO, timeout_s=5)
    async with asyncio.timeout(StreamLimits().yield_s / 2):
        assert await stream.read(1) == b""
    await stream.close()


async def test_reading_more_than_was_sent_is_a_broken_stream(join: Join) -> None:
    first = await join("first", limits=HASTY)
    second = await join("second", through=first)

    async def short(stream: Stream) -> None:
        await stream.write(b"123")

    await first.handle(ECHO, short)
    stream = await second.open_stream(first.peer_id, ECHO, timeout_s=5)
    with pytest.raises(PeerUnreachable, match="after 3 of 10 bytes"):
        await stream.read_exactly(10)
    with pytest.raises(PeerUnreachable):  # noqa: PT012 - which write notices depends on the buffers between
        for _ in range(100):
            await stream.write(bytes(2**18))
    await stream.close()


async def test_a_buffer_is_filled_with_what_came_before_and_after_it_was_given(join: Join) -> None:
    first = await join("first", limits=HASTY)
    second = await join("second", through=first)
    block = random.Random(8).randbytes(3 * 2**20)

    async def send(stream: Stream) -> None:
        await stream.write(b"head", block, memoryview(block)[:1000])

    await first.handle(ECHO, send)
    stream = await second.open_stream(first.peer_id, ECHO, timeout_s=5)
    assert await stream.read_exactly(4) == b"head"
    buffer = bytearray(len(block))
    await stream.read_into(memoryview(buffer)[:5])
    await stream.read_into(memoryview(buffer)[5:])
    assert buffer == block
    with pytest.raises(PeerUnreachable, match="after 1000 of 1001 bytes"):
        await stream.read_into(memoryview(bytearray(1001)))
    await stream.close()


async def test_unknown_peers_and_protocols_are_unreachable(join: Join) -> None:
    first = await join("first")
    second = await join("second", through=first)
    stranger = Identity.from_seed(b"s" * 32).peer_id
    for peer, protocol in ((stranger, ECHO), (first.peer_id, "/nobody/speaks/this"), ("no peer id", ECHO)):
        with pytest.raises(PeerUnreachable, match=peer) as refused:
            await second.open_stream(peer, protocol, timeout_s=10)
        assert isinstance(refused.value, NotSpoken) == (peer == first.peer_id)


async def test_a_peer_that_left_is_unreachable_within_the_deadline(join: Join) -> None:
    first = await join("first")
    second = await join("second", through=first)
    await first.handle(ECHO, echo)
    stream = await second.open_stream(first.peer_id, ECHO, timeout_s=5)
    await first.close()
    assert await stream.read(1) == b""
    with pytest.raises((PeerUnreachable, DeadlineExceeded)):
        await second.open_stream(first.peer_id, ECHO, timeout_s=2)
    await stream.close()


async def test_a_failing_handler_ends_its_stream_and_nothing_else(
    join: Join, caplog: pytest.LogCaptureFixture
) -> None:
    first = await join("first")
    second = await join("second", through=first)
    errors: list[Exception] = [ProtocolError("nonsense"), ZeroDivisionError("a bug")]

    async def fail(stream: Stream) -> None:
        raise errors.pop(0)

    await first.handle("/fail", fail)
    await first.handle(ECHO, echo)
    with caplog.at_level(logging.INFO, logger="echo2p2p.swarm"):
        for _ in range(2):
            stream = await second.open_stream(first.peer_id, "/fail", timeout_s=5)
            assert await stream.read(1) == b""
            await stream.close()
    told = [(record.levelname, record.exc_info is not None) for record in caplog.records]
    assert told == [("INFO", False), ("ERROR", True)]
    stream = await second.open_stream(first.peer_id, ECHO, timeout_s=5)
    await stream.write(b"x")
    assert await stream.read_exactly(1) == b"x"
    await stream.close()


async def test_a_peer_holds_no_more_streams_than_it_may(join: Join) -> None:
    limits = NodeLimits(streams=StreamLimits(max_incoming_per_peer=3))
    first = await join("first", limits=limits)
    second = await join("second", through=first)
    third = await join("third", through=first)
    await first.handle(ECHO, echo)

    async def works(stream: Stream) -> bool:
        try:
            await stream.write(b"x")
            return await stream.read(1) == b"x"
        except PeerUnreachable:
            return False

    held = [await second.open_stream(first.peer_id, ECHO, timeout_s=5) for _ in range(3)]
    assert [await works(stream) for stream in held] == [True] * 3
    over = await second.open_stream(first.peer_id, ECHO, timeout_s=5)
    assert not await works(over)
    other = await third.open_stream(first.peer_id, ECHO, timeout_s=5)
    assert await works(other)
    await held.pop().close()
    await asyncio.sleep(0.1)
    again = await second.open_stream(first.peer_id, ECHO, timeout_s=5)
    assert await works(again)
    for stream in (*held, over, other, again):
        await stream.close()


async def test_a_replaced_handler_serves_the_next_stream(join: Join) -> None:
    first = await join("first")
    second = await join("second", through=first)

    async def say(word: bytes, stream: Stream) -> None:
        await stream.write(word)

    for word in (b"old", b"new"):
        await first.handle(ECHO, lambda stream, word=word: say(word, stream))
        stream = await second.open_stream(first.peer_id, ECHO, timeout_s=5)
        assert await stream.read_exactly(3) == word
        await stream.close()


async def test_closing_the_node_cancels_its_handlers(join: Join) -> None:
    first = await join("first")
    second = await join("second", through=first)
    ended = asyncio.Event()

    async def wait(stream: Stream) -> None:
        try:
            await stream.write(b"!")
            await asyncio.Event().wait()
        finally:
            ended.set()

    await first.handle(ECHO, wait)
    stream = await second.open_stream(first.peer_id, ECHO, timeout_s=5)
    await stream.read_exactly(1)
    await first.close()
    assert ended.is_set()
    await stream.close()
