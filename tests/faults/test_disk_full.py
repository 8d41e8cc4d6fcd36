"""A real disk of 4 MiB that somebody else fills; needs the right to mount one. The unit tests pretend instead."""

from __future__ import annotations

import random
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from echo2p2p.errors import OutOfDisk
from echo2p2p.learning.checkpoint import Checkpoint, load_latest, save
from echo2p2p.learning.trainer import TrainerState
from echo2p2p.swarm.memory import MemorySwarm
from echo2p2p.swarm.virtual_time import run_virtual
from echo2p2p.weights.holding import restore
from echo2p2p.weights.publisher import WeightPublisher
from echo2p2p.weights.snapshot import Layout, Snapshot, TensorSpec
from echo2p2p.weights.store import DiskStore, MemoryStore
from echo2p2p.weights.subscriber import WeightSubscriber

NBYTES = 2**20


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Path]:
    mount = tmp_path / "disk"
    mount.mkdir()
    done = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=4m", "tmpfs", str(mount)], capture_output=True, check=False
    )
    if done.returncode:
        pytest.skip("a tmpfs cannot be mounted here")
    try:
        yield mount
    finally:
        subprocess.run(["umount", "-l", str(mount)], check=True)


def fill(disk: Path) -> Path:
    filler = disk / "filler"
    with filler.open("wb", buffering=0) as file:
        try:
            while True:
                file.write(bytes(4096))
        except OSError:
            return filler


def weights(version: int) -> Snapshot:
    layout = Layout((TensorSpec("w", "uint8", (NBYTES,), 0, NBYTES),), {})
    return Snapshot(layout, random.Random(version).randbytes(NBYTES))


def on_disk(root: Path, run: str, clock: object) -> dict[int, bytes]:
    store = DiskStore(root)
    return {
        h.manifest.version: b"".join(
            store.get(h.manifest.chunk_digest(at)) or b"" for at in range(len(h.manifest.chunks) // 32)
        )
        for h in restore(run, store, clock).values()  # type: ignore[arg-type]
    }


def test_a_full_disk_costs_neither_the_current_version_nor_more_than_the_wait(disk: Path) -> None:
    async def main() -> None:
        async with MemorySwarm(seed=1) as swarm:
            learner, peer = swarm.add_peer(), swarm.add_peer()
            run = f"run@{learner.peer_id}"
            publisher = WeightPublisher(learner, run, MemoryStore(), chunk_bytes=65536)
            subscriber = WeightSubscriber(peer, run, DiskStore(disk / "store"))
            await publisher.start()
            await subscriber.start()
            await subscriber.fetch((await publisher.publish(weights(0), 0, [], {})).record)
            filler = fill(disk)
            second = (await publisher.publish(weights(1), 1, [], {})).record
            sent = swarm.bytes_sent(sender=learner.peer_id)
            for _ in range(5):
                with pytest.raises(OutOfDisk):
                    await subscriber.fetch(second)
            # No chunk was asked for in vain.
            assert swarm.bytes_sent(sender=learner.peer_id) - sent < NBYTES / 16
            assert on_disk(disk / "store", run, peer.clock) == {0: bytes(weights(0).data)}
            filler.unlink()
            assert (await subscriber.fetch(second)).snapshot.data == weights(1).data
            assert on_disk(disk / "store", run, peer.clock)[1] == bytes(weights(1).data)

    run_virtual(main)


def test_a_checkpoint_that_finds_no_room_leaves_the_one_before_and_no_rubbish(disk: Path) -> None:
    import torch

    def checkpoint(step: int) -> Checkpoint:
        return Checkpoint(
            step, TrainerState({"w": torch.full((2**18,), float(step))}, {"steps": step}), b"books"
        )

    save(disk / "checkpoints", checkpoint(1), keep=2)
    filler = fill(disk)
    with pytest.raises(OutOfDisk):
        save(disk / "checkpoints", checkpoint(2), keep=2)
    assert [path.name for path in (disk / "checkpoints").iterdir()] == ["step-000000000001"]
    found, _ = load_latest(disk / "checkpoints")
    assert found is not None
    assert found.step == 1
    filler.unlink()
    save(disk / "checkpoints", checkpoint(2), keep=2)
