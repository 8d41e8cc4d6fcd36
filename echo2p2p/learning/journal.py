"""The journal: accepted groups and drawn batches, on the disk before anybody is told of them.

A verdict "accepted" is a promise, and a batch decides a policy version. Both are in the journal first, so that a
learner that is killed at any point and resumes from its last checkpoint

* trains the same batches again, in the same order: with a trainer that computes the same bits from the same
  state, the same versions come out as if nothing had happened;
* then has every group in its buffer that was accepted and not yet drawn. No worker has to do it again.

::

    <folder>/groups-000000000042.journal     from the capture of version 42 on

A segment begins with all that waited when its version was captured, so a checkpoint needs no older one. A record is
a length, a BLAKE3 digest and msgpack. What was written survives the end of the process; after a power cut the last
seconds may be missing, which costs work and no correctness: those prompts are leased again.
"""

from __future__ import annotations

import logging
import os
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import msgspec
from blake3 import blake3

from echo2p2p.data.trajectory import Group
from echo2p2p.errors import ProtocolError
from echo2p2p.learning.replay import Entry
from echo2p2p.swarm.messages import decode, encode

log = logging.getLogger("echo2p2p.learner")

_NAME = re.compile(r"groups-(\d{12})\.journal")
_WRITING = ".writing"
_LENGTH_BYTES = 4
_DIGEST_BYTES = 16


class _Accepted(msgspec.Struct, frozen=True, tag="accepted"):
    worker: str
    lease: int
    group: Group


class _Drawn(msgspec.Struct, frozen=True, tag="drawn"):
    version: int
    indices: list[int]


_Record = _Accepted | _Drawn


@dataclass(frozen=True)
class Contents:
    """What a journal says.

    Attributes:
        batches: by the version they were drawn at, which is the version that was trained on them, ascending.
        waiting: accepted, and in none of ``batches``; in order of acceptance.
    """

    batches: dict[int, list[Entry]] = field(default_factory=dict)
    waiting: list[Entry] = field(default_factory=list)


class Journal:
    """The journal of one run. Writes block, for as long as it takes the system to buffer them.

    Args:
        folder: of the segments.
        resume_from: version of the checkpoint that the run goes on from. If None, or if no segment begins there,
            the journal begins anew and what is there goes.
        keep: leave segments where they are that no checkpoint needs any more, so that the whole run can be
            trained again with :func:`read`.

    Attributes:
        found: what was written since the checkpoint of ``resume_from``.
    """

    def __init__(self, folder: Path, *, resume_from: int | None = None, keep: bool = False) -> None:
        self._folder = folder
        self._keep = keep
        self._file: int | None = None
        self._newest = -1
        self.found = Contents()
        folder.mkdir(parents=True, exist_ok=True)
        for left_over in folder.glob(f"*{_WRITING}"):
            left_over.unlink()
        segments = _segments(folder)
        if resume_from is None or resume_from not in segments:
            for path in segments.values():
                path.unlink()
        else:
            self.found = _since(read(folder, first=resume_from), resume_from)
            self._newest = max(segments)
            _cut_torn_end(segments[self._newest])
            self._file = os.open(segments[self._newest], os.O_WRONLY | os.O_APPEND)

    def accept(self, entry: Entry) -> None:
        """``entry`` is in the buffer; its worker may be told once this returns."""
        self._write([_accepted(entry)])

    def draw(self, version: int, batch: Sequence[Entry]) -> None:
        """``batch``, all of it accepted before, is what ``version`` is trained on."""
        self._write([_Drawn(version, [entry.group.index for entry in batch])])

    def begin(
        self, version: int, *, durable: int, waiting: Iterable[Entry], batches: Mapping[int, Sequence[Entry]]
    ) -> None:
        """A segment for the checkpoint of ``version``, which is being taken; nothing if there is one.

        Args:
            durable: version of the newest checkpoint on disk; older segments go.
            waiting, batches: what is buffered, and drawn but not trained.
        """
        if version > self._newest:
            self._open(version, waiting, batches)
        for number, path in _segments(self._folder).items():
            if number < durable and not self._keep:
                path.unlink()

    def close(self) -> None:
        if self._file is not None:
            os.close(self._file)
            self._file = None

    def _open(self, version: int, waiting: Iterable[Entry], batches: Mapping[int, Sequence[Entry]]) -> None:
        self.close()
        self._newest = version
        path = self._folder / f"groups-{version:012d}.journal"
        temporary = path.with_suffix(_WRITING)
        try:
            self._file = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_APPEND, 0o644)
        except OSError as error:
            self._give_up(error)
            return
        for number, batch in batches.items():
            self._write([*map(_accepted, batch), _Drawn(number, [entry.group.index for entry in batch])])
        self._write([_accepted(entry) for entry in waiting])
        if self._file is not None:
            # Whole or not at all: a checkpoint of this version would find no more than what is in here.
            temporary.rename(path)
        else:
            temporary.unlink(missing_ok=True)

    def _write(self, records: Sequence[_Record]) -> None:
        if self._file is None:
            return
        try:
            for record in records:
                body = encode(record)
                _write_all(self._file, len(body).to_bytes(_LENGTH_BYTES, "big") + _digest(body) + body)
        except OSError as error:
            self._give_up(error)

    def _give_up(self, error: OSError) -> None:
        """A gap would make what follows it useless: nothing more until the next segment."""
        self.close()
        log.warning(
            "the journal cannot be written (%s): what is accepted until the next publication would have to be "
            "rolled out again after a crash",
            error,
        )


def read(folder: Path, *, first: int = 0) -> Contents:
    """All that the segments from version ``first`` on say, as far as they are whole.

    Of two batches for one version the later one counts. Groups may be of any age: the window is not checked here.
    """
    accepted: dict[int, Entry] = {}
    batches: dict[int, list[Entry]] = {}
    for version, path in _segments(folder).items():
        if version < first:
            continue
        for record, _ in _records(path):
            if isinstance(record, _Accepted):
                accepted.pop(record.group.index, None)
                accepted[record.group.index] = Entry(record.group, record.worker, record.lease)
            elif all(index in accepted for index in record.indices):
                batches[record.version] = [accepted[index] for index in record.indices]
    drawn = {entry.group.index for batch in batches.values() for entry in batch}
    waiting = [entry for index, entry in accepted.items() if index not in drawn]
    return Contents(dict(sorted(batches.items())), waiting)


def _since(contents: Contents, version: int) -> Contents:
    """Of ``contents`` the batches that follow each other from ``version`` on; all others wait again."""
    batches: dict[int, list[Entry]] = {}
    seen: set[int] = set()
    waiting = {entry.group.index: entry for entry in contents.waiting}
    for number, batch in contents.batches.items():
        indices = {entry.group.index for entry in batch}
        if number == version + len(batches) and not indices & seen:
            batches[number] = batch
            seen |= indices
        else:
            waiting.update((entry.group.index, entry) for entry in batch)
    return Contents(batches, [entry for index, entry in waiting.items() if index not in seen])


def _segments(folder: Path) -> dict[int, Path]:
    """By version, ascending."""
    found = ((_NAME.fullmatch(path.name), path) for path in folder.iterdir())
    return dict(sorted((int(match[1]), path) for match, path in found if match))


def _records(path: Path) -> Iterator[tuple[_Record, int]]:
    """Each whole record and where it ends; nothing after the first that is not whole."""
    size, end = path.stat().st_size, 0
    with path.open("rb") as file:
        while head := file.read(_LENGTH_BYTES + _DIGEST_BYTES):
            length = int.from_bytes(head[:_LENGTH_BYTES], "big")
            end += len(head) + length
            if end > size:
                return
            body = file.read(length)
            if _digest(body) != head[_LENGTH_BYTES:]:
                return
            try:
                yield decode(body, _Record), end
            except ProtocolError:
                return


def _cut_torn_end(path: Path) -> None:
    os.truncate(path, max((end for _, end in _records(path)), default=0))


def _accepted(entry: Entry) -> _Accepted:
    return _Accepted(entry.worker, entry.lease, entry.group)


def _digest(body: bytes) -> bytes:
    return blake3(body).digest(length=_DIGEST_BYTES)


def _write_all(file: int, data: bytes) -> None:
    view = memoryview(data)
    while view:
        view = view[os.write(file, view) :]
