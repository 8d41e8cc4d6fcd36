"""How long generation stands still for a new policy version, and what a hundred of them leave behind in memory.

``python -m benchmarks.install``

A Qwen3 policy in bf16 with random weights generates without pause on the transformers engine while versions are
installed. Versions are snapshots of which a share of all words, anywhere, moved by one unit in the last place. The
last line on stdout is one JSON object:

* ``pause_s``: how long generation stood still for a version with 1 % of its words changed; best of a few, as all
  times. ``pause_full_s``: the same where every tensor is written and the result is proven before generation goes on;
* ``by_share``: for 0.1 %, 1 % and 10 %: ``pause_s``; ``written_mb``: 10⁶ bytes written in the pause, which are whole
  blocks where many words of a block changed; ``staged_s``: from the call of ``stage`` to its end, beside generation;
  ``proven_s``: reading back, beside generation; ``tokens_per_s`` meanwhile;
* ``copy_s``: writing every tensor and nothing else, what a pause costs that does not look at what changed;
* ``by_size``: the pause for the same number of changed bytes in this policy and in one of a third of its layers;
* ``rss_slope_mb``: growth of resident memory per publication, by a least-squares line through the second half of
  ``publications``, each with 1 % changed, from the publisher over the memory network to the subscriber and into the
  engine; ``rss_mb``: first, last and largest sample of that half.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import Qwen3Config

from echo2p2p.data.policy import build_model
from echo2p2p.data.trajectory import Sampling
from echo2p2p.rollout.transformers_engine import TransformersEngine
from echo2p2p.swarm.memory import MemorySwarm
from echo2p2p.weights.difference import difference
from echo2p2p.weights.manifest import Member
from echo2p2p.weights.publisher import WeightPublisher
from echo2p2p.weights.snapshot import DTYPE_BYTES, Snapshot, from_state_dict
from echo2p2p.weights.store import DiskStore
from echo2p2p.weights.subscriber import WeightSubscriber

SHARES = (0.001, 0.01, 0.1)
_SHARE_OF_LARGE = 0.003
"""Of the large policy's words change where two sizes are compared."""
_PROMPTS = [[5, 6, 7, 8], [9, 10], [11, 12, 13], [14]]
_SAMPLING = Sampling(max_new_tokens=4)
_CHUNK_BYTES = 1024 * 1024


def main() -> None:
    arguments = _parser().parse_args()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        print(json.dumps(asyncio.run(_measure(arguments, Path(folder)))))


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.install", description=__doc__.split("\n")[0])
    parser.add_argument("--layers", type=int, default=32, help="of the large policy, each 15 MB")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--publications", type=int, default=100)
    parser.add_argument("--published-layers", type=int, default=1, help="of the policy that is published")
    return parser


async def _measure(arguments: argparse.Namespace, folder: Path) -> dict[str, Any]:
    figures: dict[str, Any] = {}
    # First, so that no growth hides in what the allocator has kept of larger policies.
    published = _policy(folder / "published", arguments.published_layers)
    samples = await _publish(folder, published, arguments.publications)
    settled = np.array(samples[len(samples) // 2 :])
    slope, _ = np.polyfit(np.arange(settled.size), settled, 1)
    large = _policy(folder / "large", arguments.layers)
    async with _Generating(folder / "large", large) as engine:
        figures["policy_mb"] = round(len(large.data) / 1e6)
        figures["by_share"] = {f"{share:g}": await engine.swaps(share, arguments.repeats) for share in SHARES}
        figures["pause_s"] = figures["by_share"]["0.01"]["pause_s"]
        figures["pause_full_s"] = await engine.full(arguments.repeats)
        figures["copy_s"] = await engine.copy(arguments.repeats)
        by_size = [await engine.size(_SHARE_OF_LARGE, arguments.repeats, figures["pause_full_s"])]
    small = _policy(folder / "small", arguments.layers // 3)
    async with _Generating(folder / "small", small) as engine:
        share = _SHARE_OF_LARGE * len(large.data) / len(small.data)
        by_size.append(await engine.size(share, arguments.repeats, await engine.full(arguments.repeats)))
    figures["by_size"] = by_size
    figures["rss_slope_mb"] = round(float(slope), 4)
    figures["rss_mb"] = [round(float(each), 1) for each in (settled[0], settled[-1], settled.max())]
    figures["publications"] = len(samples)
    figures["published_mb"] = round(len(published.data) / 1e6)
    return figures


# Policies --------------------------------------------------------------------------------------------------


def _policy(folder: Path, layers: int) -> Snapshot:
    """A policy folder without weights, and weights for it."""
    Qwen3Config(
        vocab_size=16_000,
        hidden_size=768,
        intermediate_size=2304,
        num_hidden_layers=layers,
        num_attention_heads=12,
        num_key_value_heads=4,
        head_dim=64,
        max_position_embeddings=512,
        tie_word_embeddings=True,
        eos_token_id=1,
        bos_token_id=None,
        pad_token_id=0,
        dtype="bfloat16",
    ).save_pretrained(folder)
    torch.manual_seed(layers)
    return from_state_dict(
        build_model(folder, dtype=torch.bfloat16, device="cpu", weights=False).state_dict()
    )


def _moved(base: Snapshot, share: float, rng: np.random.Generator) -> Snapshot:
    """``share`` of all words one unit in the last place away, and nothing else."""
    buffer = bytearray(base.data)
    for spec in base.layout.tensors:
        raw = np.frombuffer(buffer, np.uint8)[spec.offset : spec.offset + spec.nbytes]
        words = raw.view(f"<u{DTYPE_BYTES[spec.dtype]}")
        gaps = rng.geometric(share, int(words.size * share * 1.2) + 64)
        at = np.cumsum(gaps) - 1
        words[at[at < words.size]] ^= 1
    return Snapshot(base.layout, buffer)


# Pauses ----------------------------------------------------------------------------------------------------


class _Generating:
    """An engine that generates one batch after another, but for the pauses that are measured."""

    def __init__(self, folder: Path, snapshot: Snapshot) -> None:
        self._engine = TransformersEngine(folder, threads=1)
        self._snapshot = snapshot
        self._version = 0
        self._tokens = 0
        self._rng = np.random.default_rng(1)
        self._may_generate = asyncio.Lock()
        self._loop: asyncio.Task[None] | None = None

    async def __aenter__(self) -> _Generating:
        await self._engine.install(self._snapshot, 0)
        self._loop = asyncio.ensure_future(self._generate())
        return self

    async def __aexit__(self, *_: object) -> None:
        if self._loop is not None:
            self._loop.cancel()
            await asyncio.gather(self._loop, return_exceptions=True)
        await self._engine.close()

    async def _generate(self) -> None:
        seed = 0
        while True:
            async with self._may_generate:
                done = await self._engine.generate(_PROMPTS, n_samples=1, sampling=_SAMPLING, seed=seed)
            self._tokens += sum(len(sample.tokens) for samples in done for sample in samples)
            seed += 1
            await asyncio.sleep(0)

    @asynccontextmanager
    async def _pause(self) -> AsyncIterator[None]:
        async with self._may_generate:
            yield

    async def swaps(self, share: float, repeats: int) -> dict[str, float]:
        """Versions with ``share`` of the words changed, staged and proven beside generation."""
        found: dict[str, list[float]] = {"pause_s": [], "staged_s": [], "proven_s": [], "tokens_per_s": []}
        written = 0
        for _ in range(repeats):
            snapshot = await asyncio.to_thread(_moved, self._snapshot, share, self._rng)
            if not written:
                written = await asyncio.to_thread(_written_bytes, self._snapshot, snapshot)
            self._version += 1
            began, tokens = time.perf_counter(), self._tokens
            swap = await self._engine.stage(snapshot, self._version)
            found["staged_s"].append(time.perf_counter() - began)
            async with self._pause():
                found["pause_s"].append(await _timed(swap))
            found["proven_s"].append(await _timed(self._prove, snapshot))
            found["tokens_per_s"].append((self._tokens - tokens) / (time.perf_counter() - began))
            self._snapshot = snapshot
        figures = {name: round(min(each), 4) for name, each in found.items()}
        figures["tokens_per_s"] = round(max(found["tokens_per_s"]), 1)
        figures["written_mb"] = round(written / 1e6, 2)
        _say(f"{len(self._snapshot.data) / 1e6:.0f} MB, {share:g} changed: {figures}")
        return figures

    async def size(self, share: float, repeats: int, pause_full_s: float) -> dict[str, float]:
        """How this policy does with ``share`` of its words changed, beside its size."""
        swaps = await self.swaps(share, repeats)
        return {
            "policy_mb": round(len(self._snapshot.data) / 1e6),
            "written_mb": swaps["written_mb"],
            "pause_s": swaps["pause_s"],
            "pause_full_s": pause_full_s,
        }

    async def full(self, repeats: int) -> float:
        """Everything written and proven, while generation stands still."""
        pauses = []
        for _ in range(repeats):
            async with self._pause():
                pauses.append(await _timed(self._engine.install, self._snapshot, self._version))
        _say(f"{len(self._snapshot.data) / 1e6:.0f} MB, full: {min(pauses):.4f} s")
        return round(min(pauses), 4)

    async def copy(self, repeats: int) -> float:
        """Every tensor written, as one whose words have all changed."""
        pauses = []
        for _ in range(repeats):
            flipped = Snapshot(
                self._snapshot.layout, (np.frombuffer(self._snapshot.data, np.uint8) ^ 1).tobytes()
            )
            self._version += 1
            swap = await self._engine.stage(flipped, self._version)
            async with self._pause():
                pauses.append(await _timed(swap))
            self._snapshot = flipped
        _say(f"{len(self._snapshot.data) / 1e6:.0f} MB, all words changed: {min(pauses):.4f} s")
        return round(min(pauses), 4)

    async def _prove(self, snapshot: Snapshot) -> None:
        if await self._engine.fingerprint() != await asyncio.to_thread(snapshot.fingerprint):
            raise SystemExit("the engine does not hold what was swapped in")


def _written_bytes(base: Snapshot, new: Snapshot) -> int:
    return sum(each.n_words * each.words.itemsize for each in difference(base, new))


async def _timed(work: Callable[..., Awaitable[Any]], *arguments: Any) -> float:
    started = time.perf_counter()
    await work(*arguments)
    return time.perf_counter() - started


# Memory ----------------------------------------------------------------------------------------------------


async def _publish(folder: Path, snapshot: Snapshot, publications: int) -> list[float]:
    """Resident memory in 10⁶ bytes after each of the versions, all of them installed and proven."""
    rng = np.random.default_rng(2)
    engine = TransformersEngine(folder / "published", threads=1)
    samples: list[float] = []
    async with MemorySwarm(seed=0) as swarm:
        learner, worker = swarm.add_peer(), swarm.add_peer()
        run = f"install@{learner.peer_id}"
        publisher = WeightPublisher(
            learner, run, DiskStore(folder / "learner", 10**10), chunk_bytes=_CHUNK_BYTES
        )
        subscriber = WeightSubscriber(worker, run, DiskStore(folder / "worker", 10**10))
        await publisher.start()
        await subscriber.start()
        members = [Member(worker.peer_id, 1000.0)]
        by_patch = 0
        for version in range(publications):
            published = await publisher.publish(snapshot, version, members, {"config.json": b"{}"})
            fetched = await subscriber.fetch(published.record)
            by_patch += fetched.bytes_from_learner < len(snapshot.data) // 2
            swap = await engine.stage(fetched.snapshot, version)
            await swap()
            if await engine.fingerprint() != published.manifest.fingerprint:
                raise SystemExit(f"the engine does not hold version {version}")
            await engine.generate(_PROMPTS, n_samples=1, sampling=_SAMPLING, seed=version)
            snapshot = await asyncio.to_thread(_moved, snapshot, 0.01, rng)
            samples.append(_resident_mb())
            if version % 10 == 9:
                _say(f"version {version}, {by_patch} came as patches: {samples[-1]:.1f} MB resident")
    await engine.close()
    return samples


def _resident_mb() -> float:
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * 4096 / 1e6


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


if __name__ == "__main__":
    main()
