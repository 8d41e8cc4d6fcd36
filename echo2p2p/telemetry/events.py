"""The event log: append-only JSONL, one line an event, readable by hand and after any crash.

Guarantees: :meth:`EventLog.emit` never raises, whatever the disk does and whatever it is given; every line
is in the kernel's hands when it returns; a reader never takes a half-written line for an event; no line is
longer than :data:`MAX_LINE_BYTES`, on either side. What each kind means stands in
:mod:`echo2p2p.telemetry.kinds`.
"""

from __future__ import annotations

import json
import logging
import math
import os
import threading
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from echo2p2p.errors import SettingsError

logger = logging.getLogger(__name__)

MAX_LINE_BYTES = 8 * 2**20
"""A longer line is neither written nor read. An activation over 10,000 workers takes about 2 MiB."""
MAX_TEXT_CHARS = 2048
"""Longer strings are cut when they are written."""
_MAX_DEPTH = 8

Event = dict[str, Any]
Listener = Callable[[Event], None]


class Clock(Protocol):
    """Where a log gets the time from; :class:`echo2p2p.swarm.clock.SystemClock` is one."""

    def monotonic(self) -> float: ...

    def unix(self) -> float: ...


class EventLog:
    """Writes the events of one process, and hands them to listeners as they happen. Thread-safe.

    Args:
        path: the JSONL file, made with its folders if missing, appended to if there; None for listeners only.
        role: learner, worker or bootstrap.
        peer: peer id of this node.
        clock: the time; ``t`` counts from construction.

    Raises:
        SettingsError: the file cannot be opened.
    """

    def __init__(self, path: Path | None, *, role: str, peer: str, clock: Clock) -> None:
        self._role = role
        self._peer = peer
        self._clock = clock
        self._start = clock.monotonic()
        self._lock = threading.Lock()
        self._listeners: list[Listener] = []
        self._fd: int | None = None
        self._torn = False
        self._unreported = 0
        self.lost = 0
        """Events that did not reach the file, over the life of this log."""
        if path is not None:
            try:
                path.parent.mkdir(parents=True, exist_ok=True)
                self._fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o644)
                size = os.fstat(self._fd).st_size
                self._torn = size > 0 and os.pread(self._fd, 1, size - 1) != b"\n"
            except OSError as error:
                raise SettingsError(
                    f"event log {path} cannot be opened: {error.strerror}", hint="choose another run folder"
                ) from error

    def emit(self, kind: str, /, **fields: Any) -> None:
        """Append one event. Never raises.

        Values are JSON scalars, lists and dicts. numpy scalars and arrays are converted, NaN and infinity
        become null, strings are cut at :data:`MAX_TEXT_CHARS`; a value of another type becomes its type's
        name in angle brackets. An event that does not fit a line, or the disk, is counted in :attr:`lost`.
        """
        envelope = self._envelope(kind)
        event = envelope | {key: _plain(value) for key, value in fields.items() if key not in envelope}
        with self._lock:
            self._write(event)
            listeners = tuple(self._listeners)
        for listener in listeners:
            try:
                listener(event)
            except Exception:  # a view that fails must not take the run with it
                logger.exception("a listener of the event log failed and is left out from now on")
                self._unsubscribe(listener)

    def subscribe(self, listener: Listener) -> Callable[[], None]:
        """Call ``listener`` with every event from now on, in the thread that emits it.

        It must return at once, must not change the event, and is dropped if it raises.

        Returns:
            A function that ends the subscription.
        """
        with self._lock:
            self._listeners.append(listener)
        return lambda: self._unsubscribe(listener)

    def close(self) -> None:
        """Close the file; events after that reach the listeners only."""
        with self._lock:
            if self._fd is not None:
                os.close(self._fd)
                self._fd = None

    def _unsubscribe(self, listener: Listener) -> None:
        with self._lock:
            if listener in self._listeners:
                self._listeners.remove(listener)

    def _envelope(self, kind: str) -> Event:
        return {
            "t": round(self._clock.monotonic() - self._start, 3),
            "unix": round(self._clock.unix(), 3),
            "role": self._role,
            "peer": self._peer,
            "event": kind,
        }

    def _write(self, event: Event) -> None:
        if self._fd is None:
            return
        if self._unreported and self._append(self._envelope("events_lost") | {"count": self._unreported}):
            self._unreported = 0
        if not self._append(event):
            self.lost += 1
            self._unreported += 1

    def _append(self, event: Event) -> bool:
        """Write one line; False if it is too long or the disk refuses it."""
        assert self._fd is not None
        # Only ASCII leaves json.dumps, so that even `cat` of a log shows no stranger's control characters.
        line = json.dumps(event, allow_nan=False, separators=(",", ":")).encode() + b"\n"
        if len(line) > MAX_LINE_BYTES:
            self._warn(f"an event of {len(line)} bytes is longer than {MAX_LINE_BYTES}")
            return False
        data = b"\n" + line if self._torn else line
        try:
            written = os.write(self._fd, data)
        except OSError as error:
            self._warn(error.strerror or str(error))
            return False
        if written < len(data):
            self._torn = True
            self._warn("the disk took only part of a line")
            return False
        self._torn = False
        return True

    def _warn(self, why: str) -> None:
        if self.lost == 0:
            logger.warning("events are missing from the event log: %s; the run goes on", why)


def read_events(path: Path) -> Iterator[Event]:
    """The events of a log in order, also while it is being written.

    Skips a last line that is still incomplete, and every line that is no event: torn, too long, not a JSON
    object, without a kind. Holds one line in memory at a time.

    Raises:
        SettingsError: the file cannot be read.
    """
    try:
        with path.open("rb") as file:
            whole = True  # whether the line that starts here is not the rest of one that was too long
            while line := file.readline(MAX_LINE_BYTES):
                complete = line.endswith(b"\n")
                if complete and whole and (event := _parse(line)) is not None:
                    yield event
                whole = complete
    except OSError as error:
        raise SettingsError(
            f"event log {path} cannot be read: {error.strerror}", hint="name the folder of a run"
        ) from error


def _parse(line: bytes) -> Event | None:
    try:
        event = json.loads(line, parse_constant=lambda _: None)
    except (ValueError, RecursionError):
        return None
    return event if isinstance(event, dict) and isinstance(event.get("event"), str) else None


def _plain(value: Any, depth: int = 0) -> Any:
    """``value`` as something that JSON can hold, whatever it is."""
    if isinstance(value, np.generic):
        value = value.item()
    if value is None or isinstance(value, bool):
        return value
    if isinstance(value, str):
        return value if len(value) <= MAX_TEXT_CHARS else value[: MAX_TEXT_CHARS - 1] + "…"
    if isinstance(value, int):
        return int(value) if -(2**63) <= value < 2**63 else None
    if isinstance(value, float):
        return float(value) if math.isfinite(value) else None
    if depth < _MAX_DEPTH:
        if isinstance(value, np.ndarray):
            return _plain(value.tolist(), depth)
        if isinstance(value, Mapping):
            return {_key(key): _plain(item, depth + 1) for key, item in list(value.items())}
        if isinstance(value, list | tuple | set | frozenset):
            return [_plain(item, depth + 1) for item in list(value)]
    return f"<{type(value).__name__}>"


def _key(key: Any) -> str:
    plain = _plain(key, _MAX_DEPTH)
    return plain if isinstance(plain, str) else json.dumps(plain)
