"""Checkpoints: one folder per step, written whole or not at all, believed only if every byte is as written.

::

    <root>/step-000000000042/
        tensors.safetensors   weights and optimizer moments
        trainer.json          the step and the trainer's counters
        learner.bin           what the learner wants beside them; opaque here
        checkpoint.json       size and BLAKE3 of each of the others; written last

A folder is written under a temporary name, synced and renamed. Nothing is unpickled.
"""

from __future__ import annotations

import errno
import os
import re
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, TypeVar

import msgspec
from blake3 import blake3
from msgspec import Meta
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

from echo2p2p.errors import OutOfDisk, VerificationError
from echo2p2p.learning.trainer import TrainerState

_TENSORS, _TRAINER, _LEARNER = "tensors.safetensors", "trainer.json", "learner.bin"
_LISTED = (_TENSORS, _TRAINER, _LEARNER)
_INDEX = "checkpoint.json"
_REPLACED = ".replaced"
_FOLDER = re.compile(rf"step-\d{{12}}({re.escape(_REPLACED)})?")
_TEMPORARY = ".writing-"
_MAX_JSON_BYTES = 2**16
_FORMAT = 1
_NO_ROOM = (errno.ENOSPC, errno.EDQUOT)

T = TypeVar("T")
Count = Annotated[int, Meta(ge=0, le=2**53)]


class _File(msgspec.Struct, frozen=True):
    nbytes: Count
    blake3: Annotated[str, Meta(pattern="^[0-9a-f]{64}$")]


class _Index(msgspec.Struct, frozen=True):
    format: Count
    files: dict[str, _File]


class _Trainer(msgspec.Struct, frozen=True):
    step: Count
    counters: dict[str, Count]


@dataclass(frozen=True)
class Checkpoint:
    """What a checkpoint holds."""

    step: int
    trainer: TrainerState
    learner_state: bytes


def save(root: Path, checkpoint: Checkpoint, *, keep: int) -> Path:
    """Write ``checkpoint`` under ``root`` and remove all but the newest ``keep``.

    A checkpoint of the same step is replaced. When this returns, the folder survives a power cut.

    Raises:
        OutOfDisk: there is no room; older checkpoints are untouched.
    """
    for left_over in root.glob(f"{_TEMPORARY}*"):
        shutil.rmtree(left_over)
    final = folder_of(root, checkpoint.step)
    temporary = root / f"{_TEMPORARY}{final.name}"
    try:
        root.mkdir(parents=True, exist_ok=True)
        _write(temporary, checkpoint)
    except (OSError, SafetensorError) as error:
        shutil.rmtree(temporary, ignore_errors=True)
        if getattr(error, "errno", None) in _NO_ROOM or "No space left" in str(error):
            raise OutOfDisk(f"no room for a checkpoint under {root}", hint="free disk space") from error
        raise
    replaced = final.with_name(final.name + _REPLACED)
    if final.exists():
        # It stays findable until the new one is in its place.
        _remove(replaced)
        final.rename(replaced)
    temporary.rename(final)
    _sync(root)
    _remove(replaced)
    others = [folder for folder in _folders(root) if folder != final]
    for old in others[max(1, keep) - 1 :]:
        shutil.rmtree(old)
    return final


def folder_of(root: Path, step: int) -> Path:
    """Where the checkpoint of ``step`` lies, if there is one."""
    return root / f"step-{step:012d}"


def load(folder: Path) -> Checkpoint:
    """Read one checkpoint and check every byte of it.

    Raises:
        VerificationError: it is not complete, not as it was written, or of a format we do not know.
    """
    index = _read_json(folder / _INDEX, _Index)
    if index.format != _FORMAT:
        raise VerificationError(f"{folder} has format {index.format}; this release reads {_FORMAT}")
    if index.files.keys() != set(_LISTED):
        raise VerificationError(f"{folder} lists other files than a checkpoint has")
    for name, expected in index.files.items():
        if _describe(folder / name) != expected:
            raise VerificationError(f"{folder / name} is not as it was written")
    trainer = _read_json(folder / _TRAINER, _Trainer)
    try:
        tensors = load_file(folder / _TENSORS)
    except SafetensorError as error:
        raise VerificationError(f"{folder / _TENSORS} cannot be read: {error}") from error
    return Checkpoint(
        step=trainer.step,
        trainer=TrainerState(tensors, trainer.counters),
        learner_state=(folder / _LEARNER).read_bytes(),
    )


def load_latest(root: Path) -> tuple[Checkpoint | None, list[VerificationError]]:
    """The newest checkpoint that is whole, and why newer ones were passed over.

    None if there is none at all: the run starts from its policy folder.

    Raises:
        VerificationError: there are checkpoints and none is whole; going on would silently start anew.
    """
    refused: list[VerificationError] = []
    for folder in _folders(root):
        try:
            return load(folder), refused
        except VerificationError as error:
            refused.append(error)
    if refused:
        raise VerificationError(
            f"no checkpoint under {root} is whole; the newest: {refused[0]}",
            hint="restore one from a copy, or move the folder away to start anew",
        )
    return None, refused


def _folders(root: Path) -> list[Path]:
    """Checkpoint folders, newest first; one that was being replaced comes after its replacement."""
    if not root.is_dir():
        return []
    found = [path for path in root.iterdir() if _FOLDER.fullmatch(path.name)]
    return sorted(found, key=lambda path: (path.stem, path.suffix != _REPLACED), reverse=True)


def _remove(folder: Path) -> None:
    if folder.exists():
        shutil.rmtree(folder)


def _write(folder: Path, checkpoint: Checkpoint) -> None:
    folder.mkdir()
    save_file(checkpoint.trainer.tensors, folder / _TENSORS)
    trainer = _Trainer(checkpoint.step, checkpoint.trainer.counters)
    (folder / _TRAINER).write_bytes(msgspec.json.encode(trainer))
    (folder / _LEARNER).write_bytes(checkpoint.learner_state)
    index = _Index(_FORMAT, {name: _describe(folder / name) for name in _LISTED})
    (folder / _INDEX).write_bytes(msgspec.json.format(msgspec.json.encode(index)))
    for path in (*(folder / name for name in (*_LISTED, _INDEX)), folder):
        _sync(path)


def _read_json(path: Path, type_: type[T]) -> T:
    try:
        if path.stat().st_size > _MAX_JSON_BYTES:
            raise VerificationError(f"{path} is larger than {_MAX_JSON_BYTES} bytes")
        return msgspec.json.decode(path.read_bytes(), type=type_)
    except (OSError, msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise VerificationError(f"{path} cannot be read: {error}") from error


def _describe(path: Path) -> _File:
    hasher, nbytes = blake3(), 0
    try:
        for block in _blocks(path):
            hasher.update(block)
            nbytes += len(block)
    except OSError as error:
        raise VerificationError(f"{path} cannot be read: {error}") from error
    return _File(nbytes, hasher.hexdigest())


def _blocks(path: Path) -> Iterator[bytes]:
    with path.open("rb") as file:
        while block := file.read(2**20):
            yield block


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
