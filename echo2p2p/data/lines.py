"""One line to a child process and one line back, within a deadline and a size."""

from __future__ import annotations

import socket
import time

_PART_BYTES = 2**16


def ask(channel: socket.socket, line: bytes, *, seconds: float, max_bytes: int) -> bytes:
    """Send ``line``, which may be empty, and return the next line that comes, with its end.

    Raises:
        TimeoutError: none came within ``seconds``.
        OSError: the other side ended, or sent more than ``max_bytes``.
    """
    deadline = time.monotonic() + seconds
    received = bytearray()
    channel.settimeout(seconds)
    channel.sendall(line)
    while not received.endswith(b"\n"):
        channel.settimeout(max(0.001, deadline - time.monotonic()))
        part = channel.recv(_PART_BYTES)
        received += part
        if not part or len(received) > max_bytes:
            raise ConnectionError("the other side ended, or does not end its line")
    return bytes(received)
