"""Messages on streams: capped before they are read, dated, and refused with the right error."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from echo2p2p.errors import DeadlineExceeded, MessageTooLarge, PeerUnreachable, ProtocolError
from echo2p2p.swarm.memory import MemorySwarm
from echo2p2p.swarm.messages import decode, encode, protocol_id, receive, send
from echo2p2p.swarm.network import Stream
from echo2p2p.swarm.virtual_time import run_virtual


class Greeting(msgspec.Struct, frozen=True, tag="greeting"):
    name: str
    numbers: list[int]


class Farewell(msgspec.Struct, frozen=True, tag="farewell"):
    reason: str


Message = Greeting | Farewell


def on_a_stream(test: Callable[[Stream, Stream], Coroutine[Any, Any, None]]) -> Callable[[], None]:
    """Give a test both ends of a stream."""

    async def main() -> None:
        async with MemorySwarm() as swarm:
            a, b = swarm.add_peer(), swarm.add_peer()
            ends: asyncio.Queue[Stream] = asyncio.Queue(1)

            async def handler(stream: Stream) -> None:
                await ends.put(stream)
                await asyncio.sleep(1e6)

            await b.handle(protocol_id("test"), handler)
            near = await a.open_stream(b.peer_id, protocol_id("test"), timeout_s=1)
            await test(near, await ends.get())

    def run() -> None:
        run_virtual(main)

    run.__name__ = test.__name__
    return run


@on_a_stream
async def test_messages_arrive_in_order_and_whole(near: Stream, far: Stream) -> None:
    messages: list[Message] = [
        Greeting("a", [1, 2]),
        Farewell("b"),
        Greeting("c" * 100_000, list(range(1000))),
    ]
    for message in messages:
        await send(near, message)
    await near.write(b"raw")
    for message in messages:
        assert await receive(far, Message, max_bytes=200_000, timeout_s=1) == message
    assert await far.read_exactly(3) == b"raw"


@on_a_stream
async def test_a_message_over_the_cap_is_refused_before_it_is_read(near: Stream, far: Stream) -> None:
    await near.write((2**32 - 1).to_bytes(4, "big") + b"body")
    with pytest.raises(MessageTooLarge, match=f"{far.remote} announced .* 4294967295 bytes, 1000 are"):
        await receive(far, Message, max_bytes=1000, timeout_s=1)
    assert await far.read(100) == b"body"


@on_a_stream
async def test_the_cap_itself_is_allowed(near: Stream, far: Stream) -> None:
    message = Greeting("x", [])
    size = len(encode(message))
    await send(near, message)
    assert await receive(far, Message, max_bytes=size, timeout_s=1) == message
    await send(near, message)
    with pytest.raises(MessageTooLarge):
        await receive(far, Message, max_bytes=size - 1, timeout_s=1)


@pytest.mark.parametrize("sent", [b"", b"\0\0", b"\0\0\0\x0a", b"\0\0\0\x0ahalf"])
def test_silence_meets_the_deadline_wherever_it_begins(sent: bytes) -> None:
    async def test(near: Stream, far: Stream) -> None:
        await near.write(sent)
        with pytest.raises(DeadlineExceeded, match=f"{far.remote} within 5 s"):
            await receive(far, Message, max_bytes=1000, timeout_s=5)
        assert asyncio.get_running_loop().time() == 5

    on_a_stream(test)()


def test_a_drip_does_not_extend_the_deadline() -> None:
    async def test(near: Stream, far: Stream) -> None:
        async def drip() -> None:
            await near.write((1000).to_bytes(4, "big"))
            while True:
                await near.write(b"x")
                await asyncio.sleep(0.9)

        dripping = asyncio.ensure_future(drip())
        with pytest.raises(DeadlineExceeded):
            await receive(far, Message, max_bytes=1000, timeout_s=5)
        assert asyncio.get_running_loop().time() == 5
        dripping.cancel()

    on_a_stream(test)()


@pytest.mark.parametrize("sent", [b"", b"\0", b"\0\0\0\x0a", b"\0\0\0\x0ahalf"])
def test_a_stream_that_ends_within_a_message_is_an_unreachable_peer(sent: bytes) -> None:
    async def test(near: Stream, far: Stream) -> None:
        await near.write(sent)
        await near.close()
        with pytest.raises(PeerUnreachable):
            await receive(far, Message, max_bytes=1000, timeout_s=5)

    on_a_stream(test)()


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"\xc1",
        b"\x91" * 100_000,
        b"\x81\xa1a" * 100_000,
        b"\xdd\xff\xff\xff\xff" * 1000,
        b"\xdf\xff\xff\xff\xff",
        b"\xc6\xff\xff\xff\xff",
        encode({"type": "greeting", "name": "a"}),
        encode({"type": "greeting", "name": 7, "numbers": []}),
        encode({"type": "unknown"}),
        encode(Greeting("a", [])) + b"\0",
        b"\x83\xa4type\xa8greeting\xa4name\xa1\xff\xa7numbers\x90",
        # Deep nesting below a field that the type does not know.
        b"\x82\xa4type\xa8farewell\xa1z" + b"\x91" * 100_000,
        b"\x84\xa4type\xa8greeting\xa1z" + b"\x91" * 100_000 + b"\xc0",
    ],
)
def test_what_is_not_a_message_is_a_protocol_error(body: bytes) -> None:
    async def test(near: Stream, far: Stream) -> None:
        await near.write(len(body).to_bytes(4, "big") + body)
        with pytest.raises(ProtocolError):
            await receive(far, Message, max_bytes=1_000_000, timeout_s=1)

    on_a_stream(test)()


@settings(max_examples=200, deadline=None)
@given(st.data())
def test_every_truncation_is_a_protocol_error(data: st.DataObject) -> None:
    message = Greeting(
        data.draw(st.text(max_size=50)), data.draw(st.lists(st.integers(-(2**63), 2**63 - 1), max_size=10))
    )
    body = encode(message)
    assert decode(body, Message) == message
    with pytest.raises(ProtocolError):
        decode(body[: data.draw(st.integers(0, len(body) - 1))], Message)


@settings(max_examples=300, deadline=None)
@given(st.binary(max_size=200))
def test_arbitrary_bytes_are_a_message_or_a_protocol_error(body: bytes) -> None:
    try:
        message: Message = decode(body, Message)
    except ProtocolError:
        return
    assert isinstance(message, Greeting | Farewell)


def test_protocol_ids_carry_the_version() -> None:
    assert protocol_id("chunks") == "/echo2p2p/1/chunks"
