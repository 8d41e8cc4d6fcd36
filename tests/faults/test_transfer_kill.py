"""A worker that is killed in the middle of a transfer goes on from what it has on its disk."""

from __future__ import annotations

import asyncio
import json
import os
import sys
from pathlib import Path
from typing import Any

from echo2p2p.swarm.clock import Clock
from echo2p2p.swarm.hivemind import HivemindNetwork
from echo2p2p.swarm.identity import Identity, PeerId
from echo2p2p.swarm.network import Stream, StreamHandler
from echo2p2p.weights.publisher import WeightPublisher
from echo2p2p.weights.snapshot import Layout, Snapshot, TensorSpec
from echo2p2p.weights.store import DiskStore, MemoryStore

CHUNK_BYTES = 64 * 1024
N_CHUNKS = 256
NBYTES = CHUNK_BYTES * N_CHUNKS

WORKER = """
import asyncio, json, sys
from pathlib import Path
from echo2p2p.swarm.hivemind import HivemindNetwork
from echo2p2p.swarm.records import ManifestRecord
from echo2p2p.weights.store import DiskStore
from echo2p2p.weights.subscriber import WeightSubscriber

async def main(folder, run, record, addresses):
    network = await HivemindNetwork.join(Path(folder) / "identity", initial_peers=addresses)
    subscriber = WeightSubscriber(network, run, DiskStore(Path(folder) / "store"))
    await subscriber.start()
    fetched = await subscriber.fetch(ManifestRecord(*record))
    await network.close()
    print(json.dumps([fetched.snapshot.fingerprint(), fetched.bytes_from_learner + fetched.bytes_from_peers]))

asyncio.run(main(*json.loads(sys.argv[1])))
"""


class PacedStream:
    """Writes a chunk at a time with a pause after it, so that there is a middle to be killed in."""

    def __init__(self, stream: Stream) -> None:
        self._stream = stream
        self.remote = stream.remote
        self.read = stream.read
        self.read_exactly = stream.read_exactly
        self.read_into = stream.read_into
        self.close = stream.close

    async def write(self, *parts: bytes | bytearray | memoryview) -> None:
        for data in parts:
            await self._stream.write(data)
            if len(data) == CHUNK_BYTES:
                await asyncio.sleep(0.01)


class PacedNetwork:
    """The parts of a network that a publisher uses, with paced streams."""

    def __init__(self, network: HivemindNetwork) -> None:
        self._network = network
        self.identity: Identity = network.identity
        self.peer_id: PeerId = network.peer_id
        self.clock: Clock = network.clock

    async def handle(self, protocol: str, handler: StreamHandler) -> None:
        await self._network.handle(protocol, lambda stream: handler(PacedStream(stream)))


async def start_worker(*settings: Any) -> asyncio.subprocess.Process:
    return await asyncio.create_subprocess_exec(
        *(sys.executable, "-W", "ignore", "-c", WORKER, json.dumps(settings)),
        stdout=asyncio.subprocess.PIPE,
    )


def stored(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.glob("store/chunks/*")) // CHUNK_BYTES


async def test_kill_9_in_mid_transfer_loses_no_chunk_that_was_stored(tmp_path: Path) -> None:
    network = await HivemindNetwork.join(tmp_path / "learner-identity")
    folder = tmp_path / "worker"
    try:
        run = f"run@{network.peer_id}"
        publisher = WeightPublisher(PacedNetwork(network), run, MemoryStore(), chunk_bytes=CHUNK_BYTES)  # type: ignore[arg-type]
        await publisher.start()
        layout = Layout((TensorSpec("w", "uint8", (NBYTES,), 0, NBYTES),), {})
        published = await publisher.publish(Snapshot(layout, os.urandom(NBYTES)), 0, [], {})
        record = published.record
        settings = (
            str(folder),
            run,
            [record.version, record.manifest_digest, record.manifest_bytes, record.snapshot_bytes],
            network.addresses(),
        )
        for share in (0.1, 0.5, 0.9):
            worker = await start_worker(*settings)
            async with asyncio.timeout(40):
                while stored(folder) < share * N_CHUNKS:
                    await asyncio.sleep(0.005)
            worker.kill()
            await worker.wait()
        kept = stored(folder)
        assert kept < N_CHUNKS
        worker = await start_worker(*settings)
        async with asyncio.timeout(40):
            out, _ = await worker.communicate()
        fingerprint, fetched_bytes = json.loads(out)
        assert fingerprint == published.manifest.fingerprint
        assert fetched_bytes == (N_CHUNKS - kept) * CHUNK_BYTES
        assert DiskStore(folder / "store").trusted().version == 0
    finally:
        await network.close()
