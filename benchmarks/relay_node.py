"""One node of the relay benchmark: a learner or a worker of the package, with its own p2pd.

It does what its parent says, one message after another. Of a worker that was told to lie, everything that it
serves has a flipped bit.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import json
import mmap
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import uvloop
from blake3 import blake3

from benchmarks.nodes import answer, messages
from benchmarks.payload import payload
from echo2p2p.swarm.hivemind import HivemindNetwork
from echo2p2p.swarm.network import Stream
from echo2p2p.swarm.records import ManifestRecord
from echo2p2p.weights.holding import Holding
from echo2p2p.weights.manifest import Member
from echo2p2p.weights.publisher import WeightPublisher
from echo2p2p.weights.segments import Segments
from echo2p2p.weights.snapshot import DTYPE_BYTES, Layout, Snapshot, TensorSpec
from echo2p2p.weights.store import DiskStore
from echo2p2p.weights.subscriber import WeightSubscriber

_START_S = 180.0
_BLOCK_BYTES = 2**16
_BARE = "/echo2p2p-bench/1/bare"
_BARE_WRITE_BYTES = 2**20
_DTYPES = {"random": "uint8", "bf16": "bfloat16"}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--node", required=True)
    # As the package's own commands do.
    uvloop.run(_node(json.loads(parser.parse_args().node)))


async def _node(settings: dict[str, Any]) -> None:
    folder = Path(settings["folder"])
    network = await HivemindNetwork.join(
        folder / "identity",
        initial_peers=settings.get("initial_peers", ()),
        host_maddrs=[f"/ip4/{settings['address']}/tcp/0"],
        startup_timeout_s=_START_S,
    )
    try:
        if "run" in settings:
            await _work(network, folder, settings["run"])
        else:
            await _learn(network, folder, settings)
    finally:
        await network.close()


async def _learn(network: HivemindNetwork, folder: Path, settings: dict[str, Any]) -> None:
    run, up_mbit = f"bench@{network.peer_id}", settings["up_mbit"]
    publisher = WeightPublisher(
        network, run, DiskStore(folder / "store"), chunk_bytes=settings["chunk_bytes"], upload_mbit=up_mbit
    )
    await publisher.start()
    snapshot = _snapshot(b"")

    async def send_bare(stream: Stream) -> None:
        data = snapshot.data
        for start in range(0, len(data), _BARE_WRITE_BYTES):
            await stream.write(data[start : start + _BARE_WRITE_BYTES])

    await network.handle(_BARE, send_bare)
    answer({"run": run, "peer_id": network.peer_id, "addresses": network.addresses()})
    async for message in _messages():
        match message:
            case {"publish": version, "members": members, "nbytes": nbytes}:
                snapshot = _snapshot(payload(settings["payload"], nbytes), _DTYPES[settings["payload"]])
                published = await publisher.publish(
                    snapshot,
                    version,
                    [Member(peer, up_mbit, download_mbit=down_mbit) for peer, up_mbit, down_mbit in members],
                    {},
                )
                record = published.record
                fields = [
                    record.version,
                    record.manifest_digest,
                    record.manifest_bytes,
                    record.snapshot_bytes,
                ]
                answer({"record": fields, "blocks": _blocks(snapshot)})
            case {"sent": version}:
                sent = sum(publisher.bytes_sent[version].values())
                answer({"bytes": sent, "suspects": publisher.suspects})


async def _work(network: HivemindNetwork, folder: Path, run: str) -> None:
    subscriber = WeightSubscriber(network, run, DiskStore(folder / "store"))
    await subscriber.start()
    newest = _snapshot(b"")
    answer({"peer_id": network.peer_id})
    async for message in _messages():
        match message:
            case {"ready": touched_bytes}:
                # Not in the measured time, as it would not be in that of a worker.
                gc.collect()
                _touch(touched_bytes)
                answer({})
            case {"fetch": fields}:
                started = time.monotonic()
                fetched = await subscriber.fetch(ManifestRecord(*fields))
                newest = fetched.snapshot
                timeline = fetched.timeline
                answer(
                    {
                        "done": started + fetched.fetch_s,
                        "arrivals": timeline.points(64),
                        "sources": timeline.by_source,
                    }
                )
            case {"bare": learner, "nbytes": nbytes}:
                answer({"seconds": await _take_bare(network, learner, nbytes)})
            case {"audit": blocks}:
                differing = sum(mine != theirs for mine, theirs in zip(_blocks(newest), blocks, strict=True))
                bad_bytes = differing * _BLOCK_BYTES + _misnamed_bytes(folder / "store" / "chunks")
                answer({"bad_bytes": bad_bytes})
            case {"lie": _}:
                _lie()
                answer({})


async def _take_bare(network: HivemindNetwork, learner: str, nbytes: int) -> float:
    """Seconds from opening a plain stream to the learner until ``nbytes`` have come, into one buffer."""
    buffer = memoryview(bytearray(nbytes))
    at, started = 0, time.monotonic()
    stream = await network.open_stream(learner, _BARE, timeout_s=10)
    while at < nbytes:
        data = await stream.read(_BARE_WRITE_BYTES)
        if not data:
            raise ConnectionError(f"the bare stream ended after {at} of {nbytes} bytes")
        buffer[at : at + len(data)] = data
        at += len(data)
    seconds = time.monotonic() - started
    await stream.close()
    return seconds


def _touch(nbytes: int) -> None:
    """Use so much memory and free it: a virtual machine may get its memory only now, and that takes its time."""
    with mmap.mmap(-1, max(1, nbytes)) as memory:
        for at in range(0, nbytes, mmap.PAGESIZE):
            memory[at] = 1


def _lie() -> None:
    """From now on, whatever this process serves is one bit off. What it stores stays as it came."""
    honest = Holding.read

    async def read(self: Holding, index: int) -> bytes | memoryview | None:
        data = await honest(self, index)
        if data is None:
            return None
        wrong = bytearray(data)
        wrong[len(wrong) // 2] ^= 1
        return bytes(wrong)

    setattr(Holding, "read", read)  # noqa: B010 - an assignment would be a redefinition to a type checker


def _snapshot(data: bytes, dtype: str = "uint8") -> Snapshot:
    shape = (len(data) // DTYPE_BYTES[dtype],)
    return Snapshot(Layout((TensorSpec("weights", dtype, shape, 0, len(data)),), {}), data)


def _blocks(snapshot: Snapshot) -> list[str]:
    """Hashes of the snapshot, block by block, that owe nothing to the manifest."""
    data = snapshot.data
    starts = range(0, len(data), _BLOCK_BYTES)
    return [blake3(data[start : start + _BLOCK_BYTES]).hexdigest(length=16) for start in starts]


def _misnamed_bytes(folder: Path) -> int:
    """Bytes in a chunk store that do not hash to the digest that they are kept under."""
    kept = Segments(folder)
    chunks = ((digest, kept.read(digest) or b"") for digest in kept)
    return sum(len(data) for digest, data in chunks if blake3(data).digest() != digest)


async def _messages() -> AsyncIterator[dict[str, Any]]:
    told = messages()
    while (message := await asyncio.to_thread(next, told, None)) is not None:
        yield message


if __name__ == "__main__":
    main()
