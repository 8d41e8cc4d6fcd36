"""A worker that is killed in the middle of a patch ends on the same bits as one that is not."""

from __future__ import annotations

import asyncio
import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import test_transfer_kill as paced
from test_transfer_kill import stored

from echo2p2p.swarm.hivemind import HivemindNetwork
from echo2p2p.swarm.network import StreamHandler
from echo2p2p.weights.manifest import Manifest
from echo2p2p.weights.publisher import Published, WeightPublisher
from echo2p2p.weights.snapshot import Layout, Snapshot, TensorSpec
from echo2p2p.weights.store import DiskStore, MemoryStore

CHUNK_BYTES = 64 * 1024
WORDS = 2**22
N_CHUNKS = 2 * WORDS // CHUNK_BYTES

WORKER = """
import asyncio, json, sys
from pathlib import Path
from echo2p2p.swarm.hivemind import HivemindNetwork
from echo2p2p.swarm.records import ManifestRecord
from echo2p2p.weights.store import DiskStore
from echo2p2p.weights.subscriber import WeightSubscriber

async def main(folder, run, records, addresses):
    network = await HivemindNetwork.join(Path(folder) / "identity", initial_peers=addresses)
    subscriber = WeightSubscriber(network, run, DiskStore(Path(folder) / "store"), keep_versions=3)
    await subscriber.start()
    for record in records:
        fetched = await subscriber.fetch(ManifestRecord(*record))
        print(json.dumps([fetched.snapshot.fingerprint(), fetched.bytes_from_learner]), flush=True)
    await network.close()

asyncio.run(main(*json.loads(sys.argv[1])))
"""


class PacedStream(paced.PacedStream):
    """Pauses after a chunk of a patch only."""

    async def write(self, *parts: bytes | bytearray | memoryview) -> None:
        for data in parts:
            await self._stream.write(data)
            if 4096 < len(data) < CHUNK_BYTES:
                await asyncio.sleep(0.02)


class PacedNetwork(paced.PacedNetwork):
    async def handle(self, protocol: str, handler: StreamHandler) -> None:
        await self._network.handle(protocol, lambda stream: handler(PacedStream(stream)))


async def start_worker(*settings: Any) -> asyncio.subprocess.Process:
    return await asyncio.create_subprocess_exec(
        *(sys.executable, "-W", "ignore", "-c", WORKER, json.dumps(settings)),
        stdout=asyncio.subprocess.PIPE,
    )


def consecutive() -> list[Snapshot]:
    """Two bf16 snapshots; a third of the words differ, so that the patch has many chunks."""
    rng = np.random.default_rng(0)
    words = rng.integers(0, 2**15, WORDS).astype(np.uint16)
    layout = Layout((TensorSpec("w", "bfloat16", (WORDS,), 0, 2 * WORDS),), {})
    return [
        Snapshot(layout, each.tobytes())
        for each in (words, words + (rng.random(WORDS) < 1 / 3).astype(np.uint16))
    ]


def fields(published: Published) -> list[Any]:
    record = published.record
    return [record.version, record.manifest_digest, record.manifest_bytes, record.snapshot_bytes]


def _size(manifest: Manifest, chunk: int) -> int:
    start, end = manifest.chunk_span(chunk)
    return end - start


async def test_kill_9_in_mid_patch_ends_on_the_right_bits(tmp_path: Path) -> None:
    network = await HivemindNetwork.join(tmp_path / "learner-identity")
    killed, other = tmp_path / "killed", tmp_path / "other"
    try:
        run = f"run@{network.peer_id}"
        publisher = WeightPublisher(PacedNetwork(network), run, MemoryStore(), chunk_bytes=CHUNK_BYTES)  # type: ignore[arg-type]
        await publisher.start()
        published = [await publisher.publish(each, at, [], {}) for at, each in enumerate(consecutive())]
        (patch,) = published[1].manifest.patches
        records = [fields(each) for each in published]
        n_patch = published[1].manifest.n_chunks - N_CHUNKS

        worker = await start_worker(str(killed), run, records, network.addresses())
        async with asyncio.timeout(60):
            while stored(killed) <= N_CHUNKS:
                await asyncio.sleep(0.002)
        worker.kill()
        await worker.wait()
        assert N_CHUNKS < stored(killed) < N_CHUNKS + n_patch
        manifest, left = published[1].manifest, DiskStore(killed / "store")
        missing = [at for at in manifest.by_patches(1) if not left.has(manifest.chunk_digest(at))]

        expected_bytes = {killed: sum(_size(manifest, at) for at in missing), other: patch.nbytes}
        for folder, wanted in ((killed, records[1:]), (other, records)):
            worker = await start_worker(str(folder), run, wanted, network.addresses())
            async with asyncio.timeout(60):
                out, _ = await worker.communicate()
            fingerprint, nbytes = json.loads(out.splitlines()[-1])
            assert fingerprint == published[1].manifest.fingerprint
            assert nbytes == expected_bytes[folder]
            assert DiskStore(folder / "store").trusted().version == 1
    finally:
        await network.close()
