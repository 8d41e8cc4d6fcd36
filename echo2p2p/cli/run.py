"""Runs a role's coroutine: one loop, Ctrl-C and SIGTERM as an orderly stop, talk on stderr."""

from __future__ import annotations

import asyncio
import logging
import signal
import sys
from collections.abc import Awaitable, Callable
from typing import Any, TypeVar

import rich_click as click
from click.exceptions import Exit

from echo2p2p.errors import Echo2p2pError
from echo2p2p.telemetry.text import clean

T = TypeVar("T")

MAX_LOG_CHARS = 2000
STOP_GRACE_S = 20.0
"""A role that has been asked to stop may take this long to put its affairs in order."""


def setup_logging(verbose: int) -> None:
    """Warnings by default, what roles do with -v, everything with -vv; always on stderr."""
    from rich.console import Console
    from rich.logging import RichHandler

    level = (logging.WARNING, logging.INFO, logging.DEBUG)[min(verbose, 2)]
    handler: logging.Handler
    if sys.stderr.isatty():
        handler = RichHandler(console=Console(stderr=True), show_path=False, markup=False)
        handler.setFormatter(logging.Formatter("%(message)s"))
    else:
        handler = logging.StreamHandler()
        handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(message)s"))
    handler.addFilter(_clean_record)
    logging.basicConfig(level=logging.WARNING, handlers=[handler], force=True)
    logging.getLogger("echo2p2p").setLevel(level)


def _clean_record(record: logging.LogRecord) -> bool:
    """What peers said may be part of a message; it must not move the cursor."""
    record.msg, record.args = clean(record.getMessage(), MAX_LOG_CHARS), ()
    return True


def run_role(main: Callable[[asyncio.Event], Awaitable[T]]) -> T:
    """Run ``main(stop)`` to its end; ``stop`` is set by the first SIGINT or SIGTERM.

    A second signal, or ``STOP_GRACE_S`` after the first, cancels it. If a signal ended it, the command leaves
    with 130 (SIGINT) or 0 (SIGTERM, as service managers expect).

    Raises:
        Echo2p2pError: as ``main`` does; of several at once, the first.
    """
    try:
        import uvloop

        factory = uvloop.new_event_loop
    except ImportError:
        factory = asyncio.new_event_loop
    try:
        with asyncio.Runner(loop_factory=factory) as runner:
            return runner.run(_with_signals(main))
    except* Echo2p2pError as group:
        raise _first(group) from None


async def _with_signals(main: Callable[[asyncio.Event], Awaitable[T]]) -> T:
    loop = asyncio.get_running_loop()
    stop = asyncio.Event()
    received: list[signal.Signals] = []
    task = asyncio.ensure_future(main(stop))

    def on_signal(number: signal.Signals) -> None:
        received.append(number)
        if len(received) == 1:
            click.echo(
                "stopping … (again to stop at once)" if number == signal.SIGINT else "stopping …", err=True
            )
            stop.set()
            loop.call_later(STOP_GRACE_S, task.cancel)
        else:
            task.cancel()

    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, on_signal, number)
    try:
        result = await task
    except asyncio.CancelledError:
        if not received:
            raise
        raise Exit(130) from None
    finally:
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.remove_signal_handler(number)
    if signal.SIGINT in received:
        raise Exit(130)
    return result


def _first(group: BaseExceptionGroup[Echo2p2pError]) -> Echo2p2pError:
    error = group.exceptions[0]
    return _first(error) if isinstance(error, BaseExceptionGroup) else error


def join_line(network: Any, *further: str) -> str:
    """``--initial-peers …``: this node's addresses, best reached from afar first, then ``further`` peers'."""
    own = sorted(network.addresses(), key=lambda address: "/127.0.0.1/" in address)
    return "--initial-peers " + ",".join([*further, *own])
