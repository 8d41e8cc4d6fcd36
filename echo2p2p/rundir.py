"""The folder of one node: its identity, settings, events, chunks and checkpoints, used by one process at a time."""

from __future__ import annotations

import errno
import fcntl
import os
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import IO

from echo2p2p.errors import OutOfDisk, SettingsError
from echo2p2p.layering import to_toml
from echo2p2p.settings import Settings


class RunDir:
    """A locked run folder. The lock goes with the process, whatever ends it.

    Args:
        made: the folders that were made for it, the innermost first.
    """

    def __init__(self, path: Path, lock: IO[str], made: Sequence[Path] = ()) -> None:
        self.path = path
        self._lock = lock
        self._made = made

    @classmethod
    def open(cls, path: Path) -> RunDir:
        """Make the folder if need be, and take it.

        Raises:
            SettingsError: it cannot be made, or another process works in it.
        """
        try:
            made = [folder for folder in (path, *path.parents) if not folder.exists()]
            path.mkdir(parents=True, exist_ok=True)
            lock = (path / "lock").open("w")
        except OSError as error:
            raise SettingsError(f"run folder {path} cannot be used: {error.strerror}") from error
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            # One that was opened just before another process removed its folder guards nothing.
            if not os.path.samestat(os.fstat(lock.fileno()), (path / "lock").stat()):
                raise FileNotFoundError
        except OSError:
            lock.close()
            raise SettingsError(
                f"run folder {path} is in use by another process", hint="name another one with --run-dir"
            ) from None
        return cls(path, lock, made)

    @classmethod
    def first_free(cls, stem: Path) -> RunDir:
        """``stem``, or ``stem-2``, ``stem-3``, … where those before are in use."""
        for number in range(1, 1000):
            try:
                return cls.open(stem if number == 1 else stem.with_name(f"{stem.name}-{number}"))
            except SettingsError as error:
                if "in use" not in error.message:
                    raise
        raise SettingsError(f"{stem} and its 999 siblings are all in use")

    @property
    def events(self) -> Path:
        return self.path / "events.jsonl"

    @property
    def identity(self) -> Path:
        return self.path / "identity.key"

    @property
    def store(self) -> Path:
        return self.path / "store"

    @property
    def checkpoints(self) -> Path:
        return self.path / "checkpoints"

    @property
    def journal(self) -> Path:
        return self.path / "journal"

    @property
    def policy(self) -> Path:
        """Where a worker unpacks the run's pinned policy files."""
        return self.path / "policy"

    def write_settings(self, settings: Settings) -> None:
        """Raises OutOfDisk, or SettingsError if the folder cannot be written to."""
        path = self.path / "config.resolved.toml"
        try:
            path.write_text(to_toml(settings), encoding="utf-8")
        except OSError as error:
            kind = OutOfDisk if error.errno == errno.ENOSPC else SettingsError
            raise kind(f"{path} cannot be written: {error.strerror}") from error

    def close(self) -> None:
        """Give the folder back. One that was made here, and that nothing was written to, is removed."""
        with suppress(OSError):  # somebody has put something there, or taken it away
            if self._made and [entry.name for entry in self.path.iterdir()] == ["lock"]:
                (self.path / "lock").unlink()
                for folder in self._made:
                    folder.rmdir()
        self._lock.close()
