"""Every point at which the chunk store touches the disk: killed there, or told that the disk is full."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import os
import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from blake3 import blake3

from echo2p2p.errors import OutOfDisk, ResourceError
from echo2p2p.swarm.memory import MemorySwarm
from echo2p2p.swarm.virtual_time import run_virtual
from echo2p2p.weights.holding import restore
from echo2p2p.weights.manifest import Member, Trusted
from echo2p2p.weights.publisher import WeightPublisher
from echo2p2p.weights.snapshot import Layout, Snapshot, TensorSpec
from echo2p2p.weights.store import DiskStore, MemoryStore
from echo2p2p.weights.subscriber import WeightSubscriber

BLOBS = [bytes([at]) * (100 + at) for at in range(3)]
DIGESTS = [blake3(blob).digest() for blob in BLOBS]
NEW = blake3(b"new").digest()
NBYTES = 4096 * 3
ASSETS = {"config.json": b"{}"}


class Killed(BaseException):
    """Stands for kill -9: nothing that is done to the disk after it happens."""


class Disk:
    """Counts what is done to the disk, and fails at step ``at``: for good (a kill), or as a full disk does."""

    def __init__(self, at: int | None, error: Callable[[], BaseException], *, for_good: bool) -> None:
        self.steps = 0
        self._at = at
        self._error = error
        self._for_good = for_good

    def step(self) -> bool:
        """Whether this is the step that fails; raises for those after a kill."""
        self.steps += 1
        if self._at is not None and self._for_good and self.steps > self._at:
            raise self._error()
        return self.steps == self._at

    def wrap(self, real: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any, **options: Any) -> Any:
            if self.step():
                raise self._error()
            return real(*arguments, **options)

        return call


class TornFile:
    """A file whose failing write leaves half of the data behind."""

    def __init__(self, file: Any, disk: Disk) -> None:
        self._file = file
        self._disk = disk

    def write(self, data: bytes) -> None:
        if self._disk.step():
            self._file.write(bytes(data)[: len(data) // 2])
            self._file.flush()
            raise self._disk._error()
        self._file.write(data)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._file, name)

    def __enter__(self) -> TornFile:
        return self

    def __exit__(self, *_: object) -> None:
        self._file.close()


@contextmanager
def failing(at: int | None, error: Callable[[], BaseException] = Killed) -> Iterator[Disk]:
    disk = Disk(at, error, for_good=error is Killed)
    real_open, real_pwritev = Path.open, os.pwritev

    def pwritev(fd: int, parts: list[memoryview], at: int) -> int:
        if disk.step():
            torn = b"".join(parts)
            os.pwrite(fd, torn[: len(torn) // 2], at)
            raise disk._error()
        return real_pwritev(fd, parts, at)

    def open_(path: Path, mode: str = "r", **options: Any) -> Any:
        if "w" not in mode:
            return real_open(path, mode, **options)
        if disk.step():
            raise disk._error()
        return TornFile(real_open(path, mode, **options), disk)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Path, "open", open_)
        patch.setattr(os, "fsync", disk.wrap(os.fsync))
        patch.setattr(os, "pwritev", pwritev)
        for name in ("replace", "mkdir"):
            patch.setattr(Path, name, disk.wrap(getattr(Path, name)))
        if error is Killed:
            patch.setattr(Path, "unlink", disk.wrap(Path.unlink))
            patch.setattr(os, "ftruncate", disk.wrap(os.ftruncate))
        yield disk


def full() -> OSError:
    return OSError(errno.ENOSPC, "No space left on device")


def old_state(root: Path) -> None:
    store = DiskStore(root)
    for digest, blob in zip(DIGESTS, BLOBS, strict=True):
        store.put(digest, blob)
    store.pin(1, b"one", DIGESTS[:2])
    store.pin(2, b"two", DIGESTS[1:])
    store.remember(Trusted(2, "aa" * 32))


def change(store: DiskStore) -> None:
    store.put(NEW, b"new")
    store.remember(Trusted(3, "bb" * 32))
    store.pin(3, b"three", [NEW, DIGESTS[2]])
    store.pin(2, b"two again", [DIGESTS[1]])
    store.prune({2, 3})


def steps_of(root: Path, work: Callable[[], Any]) -> int:
    with failing(None) as disk:
        work()
    return disk.steps


def check_old_or_new(root: Path) -> None:
    store = DiskStore(root)
    assert len(list((root / "tmp").iterdir())) <= 1
    found = store.manifests()
    assert set(found) <= {1, 2, 3}
    assert found[2] in (b"two", b"two again")
    assert found.get(1, b"one") == b"one"
    assert found.get(3, b"three") == b"three"
    assert 1 in found or 3 in found
    assert store.trusted() in (Trusted(2, "aa" * 32), Trusted(3, "bb" * 32))
    if 3 in found:
        assert store.trusted().version == 3
        assert store.get(NEW) == b"new"
    assert store.get(NEW) in (None, b"new")
    assert store.get(DIGESTS[1]) == BLOBS[1]
    store.prune(sorted(found)[-2:])
    change(store)
    assert store.manifests() == {2: b"two again", 3: b"three"}
    assert not list((root / "tmp").iterdir())
    assert {path.name for path in (root / "pins").iterdir()} == {"2", "3"}
    assert store.get(DIGESTS[0]) is None


def test_a_kill_at_any_step_of_any_change_leaves_old_or_new(tmp_path: Path) -> None:
    old_state(tmp_path / "dry")
    dry = DiskStore(tmp_path / "dry")
    n_steps = steps_of(tmp_path, lambda: change(dry))
    assert n_steps >= 20
    for at in range(1, n_steps + 1):
        root = tmp_path / str(at)
        old_state(root)
        store = DiskStore(root)
        with failing(at), pytest.raises(Killed):
            change(store)
        check_old_or_new(root)


def test_a_full_disk_at_any_step_is_told_and_the_same_store_goes_on(tmp_path: Path) -> None:
    old_state(tmp_path / "dry")
    dry = DiskStore(tmp_path / "dry")
    n_steps = steps_of(tmp_path, lambda: change(dry))
    for at in range(1, n_steps + 1):
        root = tmp_path / str(at)
        old_state(root)
        store = DiskStore(root)
        # What only gives room back is put off where there is none for it, without an error.
        with failing(at, full), contextlib.suppress(OutOfDisk):
            change(store)
        assert not list((root / "tmp").iterdir())
        check_old_or_new(root)


def weights(version: int) -> Snapshot:
    layout = Layout((TensorSpec("w", "uint8", (NBYTES,), 0, NBYTES),), {})
    return Snapshot(layout, random.Random(version).randbytes(NBYTES))


def whole_versions(root: Path, run: str, clock: Any) -> dict[int, bytes]:
    store = DiskStore(root)
    assert len(list((root / "tmp").iterdir())) <= 1
    found = {}
    for holding in restore(run, store, clock).values():
        manifest = holding.manifest
        chunks = [store.get(manifest.chunk_digest(at)) for at in range(len(manifest.chunks) // 32)]
        assert None not in chunks
        found[manifest.version] = b"".join(chunk or b"" for chunk in chunks)
    return found


def crash_everywhere(tmp_path: Path, side: str) -> int:
    """Kill a learner that publishes, or a worker that fetches, version 1 at every step; count the steps."""

    async def life(root: Path, at: int | None) -> int:
        async with MemorySwarm(seed=1) as swarm:
            learner, worker = swarm.add_peer(), swarm.add_peer()
            run = f"run@{learner.peer_id}"
            members = [Member(worker.peer_id, 50.0)]
            ours = DiskStore(root)
            stores = (ours, MemoryStore()) if side == "learner" else (MemoryStore(), ours)
            publisher = WeightPublisher(learner, run, stores[0], chunk_bytes=4096, keep_versions=1)
            subscriber = WeightSubscriber(worker, run, stores[1], keep_versions=1)
            await publisher.start()
            await subscriber.start()
            await subscriber.fetch((await publisher.publish(weights(0), 0, members, ASSETS)).record)
            if side == "worker":
                published = await publisher.publish(weights(1), 1, members, ASSETS)
            with failing(at) as disk:
                try:
                    if side == "worker":
                        await subscriber.fetch(published.record)
                    else:
                        await publisher.publish(weights(1), 1, members, ASSETS)
                    assert at is None
                except BaseException as error:
                    if at is None or not isinstance(error, Killed | BaseExceptionGroup):
                        raise
            found = whole_versions(root, run, learner.clock)
            assert found
            for version, data in found.items():
                assert data == bytes(weights(version).data)
            # A new life goes on from there.
            again = DiskStore(root)
            if side == "learner":
                publisher = WeightPublisher(learner, run, again, chunk_bytes=4096, keep_versions=1)
                await publisher.start()
                await publisher.publish(weights(1), 1, members, ASSETS)
            else:
                subscriber = WeightSubscriber(worker, run, again, keep_versions=1)
                await subscriber.start()
                fetched = await subscriber.fetch(published.record)
                assert fetched.snapshot.data == weights(1).data
            assert 1 in whole_versions(root, run, learner.clock)
            await asyncio.sleep(0)
            return disk.steps

    n_steps = run_virtual(lambda: life(tmp_path / "dry", None))
    for at in range(1, n_steps + 1):
        run_virtual(lambda at=at: life(tmp_path / str(at), at))
    return n_steps


@pytest.mark.parametrize("side", ["learner", "worker"])
def test_a_kill_at_any_step_of_a_publication_or_a_fetch_leaves_whole_versions(
    tmp_path: Path, side: str
) -> None:
    assert crash_everywhere(tmp_path, side) > 10


def test_a_damaged_pin_counts_for_nothing(tmp_path: Path) -> None:
    old_state(tmp_path)
    (tmp_path / "pins" / "2").write_bytes(b"\xc1")
    assert DiskStore(tmp_path).manifests() == {1: b"one"}


def test_reading_a_store_leaves_the_unfinished_files_of_its_owner_alone(tmp_path: Path) -> None:
    old_state(tmp_path)
    (tmp_path / "tmp" / "1").write_bytes(b"half")
    other = DiskStore(tmp_path)
    assert (tmp_path / "tmp" / "1").exists()
    other.remember(Trusted(2, "aa" * 32))
    assert not (tmp_path / "tmp" / "1").exists()


def test_room_is_what_the_limit_and_the_disk_leave(tmp_path: Path) -> None:
    store = DiskStore(tmp_path, max_bytes=1000)
    store.put(DIGESTS[0], BLOBS[0])
    assert store.room() < 1000 - len(BLOBS[0])
    with pytest.raises((OutOfDisk, ResourceError)):
        store.put(blake3(bytes(901)).digest(), bytes(901))
