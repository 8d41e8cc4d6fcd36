"""Typed messages on streams: length-prefixed msgpack, capped before it is read, checked against its type.

A frame is a 4-byte big-endian length followed by that many bytes of msgpack. The length is compared with
the cap before a single byte of the body is read, so a peer cannot make us buffer what we did not allow.
Raw bytes (chunks) follow a message outside the frame; the message says how many.
"""

from __future__ import annotations

import asyncio
from typing import Any, TypeVar

import msgspec

from echo2p2p.errors import DeadlineExceeded, MessageTooLarge, ProtocolError
from echo2p2p.swarm.network import Stream

T = TypeVar("T")

PROTOCOL_VERSION = 1
"""Part of every protocol id (``/echo2p2p/1/…``) and of every greeting."""

LENGTH_BYTES = 4
_encoder = msgspec.msgpack.Encoder()
_decoders: dict[Any, msgspec.msgpack.Decoder[Any]] = {}


def protocol_id(name: str) -> str:
    """The libp2p protocol id of one of our protocols, such as ``/echo2p2p/1/chunks``."""
    return f"/echo2p2p/{PROTOCOL_VERSION}/{name}"


def encode(message: Any) -> bytes:
    return _encoder.encode(message)


def decode(data: bytes, type_: type[T] | Any) -> T:
    """Parse ``data`` as ``type_`` (a msgspec struct, or a union of tagged structs).

    Raises:
        ProtocolError: not msgpack, nested too deeply, or not of that type.
    """
    decoder = _decoders.get(type_)
    if decoder is None:
        decoder = _decoders[type_] = msgspec.msgpack.Decoder(type_)
    try:
        result: T = decoder.decode(data)
    except (msgspec.MsgspecError, RecursionError, UnicodeDecodeError) as error:
        raise ProtocolError(f"not a valid {getattr(type_, '__name__', 'message')}: {error}") from error
    return result


def framed(message: Any) -> bytes:
    """One message as it goes over a stream, for who writes several things at once."""
    body = _encoder.encode(message)
    return len(body).to_bytes(LENGTH_BYTES, "big") + body


async def send(stream: Stream, message: Any) -> None:
    """Write one message.

    Raises:
        PeerUnreachable: the stream broke.
    """
    await stream.write(framed(message))


async def receive(stream: Stream, type_: type[T] | Any, *, max_bytes: int, timeout_s: float) -> T:
    """Read one message of ``type_``.

    Args:
        max_bytes: a longer one is refused before it is read.
        timeout_s: for the whole message, its first byte included.

    Raises:
        DeadlineExceeded: it did not come in time.
        MessageTooLarge: it announces more than ``max_bytes``.
        ProtocolError: it is not of that type.
        PeerUnreachable: the stream ended or broke.
    """
    try:
        async with asyncio.timeout(timeout_s):
            length = int.from_bytes(await stream.read_exactly(LENGTH_BYTES), "big")
            if length > max_bytes:
                raise MessageTooLarge(
                    f"{stream.remote} announced a message of {length} bytes, {max_bytes} are allowed"
                )
            body = await stream.read_exactly(length)
    except TimeoutError:
        raise DeadlineExceeded(f"no message from {stream.remote} within {timeout_s:g} s") from None
    message: T = decode(body, type_)
    return message
