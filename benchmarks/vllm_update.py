"""How long vLLM takes, and stands still, for a new policy version: written in place, against loaded anew.

``python -m benchmarks.vllm_update``

SmolLM2-135M-Instruct in fp32 (538 MB, :mod:`benchmarks.smollm2`) on vLLM, on the CPU unless ``--device cuda``.
The last line on stdout is one JSON object; times in seconds, best of ``--repeats``:

* ``patch_s``: a version with 1 % of its words changed, from the verified snapshot until the engine is proven to hold
  it: staged and read back beside generation; ``patch_pause_s``: how long generation stands still in between;
* ``whole_pause_s``: every word written and proven while generation stands still;
* ``reload_s``: the same version without any of this: saved as a folder, and vLLM started on it. ``reload_start_s`` is
  the start alone.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import shutil
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")

import numpy as np
import torch
from safetensors.torch import save_file

from benchmarks import smollm2
from echo2p2p.data.policy import build_model
from echo2p2p.data.trajectory import Sampling
from echo2p2p.rollout.vllm_engine import VLLMEngine
from echo2p2p.rollout.vllm_process import shut_down
from echo2p2p.settings import VLLMSettings
from echo2p2p.weights.snapshot import Snapshot, from_state_dict

_SHARE = 0.01
_PROMPT = list(range(5, 37))
_OPTIONS = VLLMSettings(eager=True, kv_cache_gib=0.1, max_sequences=16, max_sequence_tokens=512)


def main() -> None:
    arguments = _parser().parse_args()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        print(json.dumps(asyncio.run(_measure(arguments, Path(folder)))))


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.vllm_update", description=__doc__.split("\n")[0]
    )
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--policy", type=Path, help="a folder with fp32 weights; SmolLM2 by default")
    parser.add_argument("--repeats", type=int, default=3)
    return parser


async def _measure(arguments: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """``folder``: an empty one, for the version that is loaded anew."""
    policy = arguments.policy or smollm2.policy()
    snapshot = from_state_dict(build_model(policy, dtype=None, device="cpu", weights=True).state_dict())
    rng = np.random.default_rng(1)
    figures: dict[str, Any] = {"policy_mb": round(len(snapshot.data) / 1e6)}
    engine = VLLMEngine(policy, _OPTIONS, device=arguments.device, threads=1)
    try:
        started = time.perf_counter()
        await engine.install(snapshot, 0)
        _say(f"started and installed in {time.perf_counter() - started:.1f} s")
        patches, pauses = [], []
        for version in range(1, arguments.repeats + 1):
            snapshot = _moved(snapshot, rng)
            await engine.generate([_PROMPT], n_samples=1, sampling=Sampling(max_new_tokens=4), seed=version)
            began = time.perf_counter()
            swap = await engine.stage(snapshot, version)
            staged = time.perf_counter()
            await swap()
            pauses.append(time.perf_counter() - staged)
            held = await engine.fingerprint()
            patches.append(time.perf_counter() - began)
            if held != snapshot.fingerprint():
                raise SystemExit("vLLM does not hold what was swapped in")
            _say(f"version {version}: {patches[-1]:.3f} s, of which {pauses[-1]:.3f} s pause")
        figures["patch_s"], figures["patch_pause_s"] = round(min(patches), 3), round(min(pauses), 3)
        began = time.perf_counter()
        await engine.install(snapshot, arguments.repeats + 1)
        figures["whole_pause_s"] = round(time.perf_counter() - began, 3)
    finally:
        await engine.close()
    for file in policy.glob("*.json"):
        shutil.copy(file, folder)
    began = time.perf_counter()
    tensors = {
        name: each for name, each in snapshot.state_dict().items() if name not in snapshot.layout.aliases
    }
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    saved = time.perf_counter()
    llm = await asyncio.to_thread(_start_on, folder)
    done = time.perf_counter()
    await asyncio.to_thread(shut_down, llm)
    figures["reload_s"], figures["reload_start_s"] = round(done - began, 3), round(done - saved, 3)
    return figures


def _start_on(folder: Path) -> Any:
    """vLLM as anybody starts it, with the weights in ``folder``."""
    from vllm import AsyncEngineArgs
    from vllm.v1.engine.async_llm import AsyncLLM

    arguments = AsyncEngineArgs(
        model=str(folder),
        skip_tokenizer_init=True,
        dtype="float32",
        max_model_len=_OPTIONS.max_sequence_tokens,
        max_num_seqs=_OPTIONS.max_sequences,
        kv_cache_memory_bytes=int(_OPTIONS.kv_cache_gib * 2**30),
        enforce_eager=_OPTIONS.eager,
        disable_log_stats=True,
    )
    return AsyncLLM.from_engine_args(arguments)


def _moved(snapshot: Snapshot, rng: np.random.Generator) -> Snapshot:
    buffer = np.frombuffer(snapshot.data, np.uint8).copy()
    words = buffer.view("<u4")
    words[rng.integers(0, words.size, int(words.size * _SHARE))] ^= 1
    return Snapshot(snapshot.layout, memoryview(buffer).cast("B"))


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


if __name__ == "__main__":
    main()
