"""How many tokens a second the engines sample, beside ``generate`` of transformers with one prompt at a time.

``python -m benchmarks.engine``

All of them sample at temperature 1 from the same policy (the demo's, unless ``--policy`` names another folder with
weights) for the same prompts, on the CPU with one thread, until an end of sequence or ``--max-new-tokens``. The last
line on stdout is one JSON object, best of ``--repeats`` each:

* ``transformers``: ``tokens_per_s`` of the batched engine, ``one_at_a_time_tokens_per_s`` of transformers' own
  ``generate`` on the same model, and the ratio ``speedup_vs_one_at_a_time``;
* ``vllm_cpu``: ``tokens_per_s`` of the vLLM engine, null where vLLM is not installed.
"""

from __future__ import annotations

import argparse
import asyncio
import importlib.util
import json
import os
import sys
import time
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")  # before torch: all that is compared has one thread

import torch

from echo2p2p.data.policy import build_model, eos_token_ids
from echo2p2p.data.task import make_task
from echo2p2p.data.tokens import PolicyTokenizer
from echo2p2p.data.trajectory import Sampling
from echo2p2p.parts import SEED_POLICY
from echo2p2p.rollout.engine import InferenceEngine
from echo2p2p.rollout.transformers_engine import TransformersEngine
from echo2p2p.weights.snapshot import from_state_dict


def main() -> None:
    arguments = _parser().parse_args()
    torch.set_num_threads(1)
    print(json.dumps({"engine": asyncio.run(_measure(arguments))}))


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.engine", description=__doc__.split("\n")[0])
    parser.add_argument("--policy", type=Path, default=SEED_POLICY, help="a folder with weights")
    parser.add_argument("--prompts", type=int, default=32)
    parser.add_argument("--max-new-tokens", type=int, default=64)
    parser.add_argument("--repeats", type=int, default=3)
    return parser


async def _measure(arguments: argparse.Namespace) -> dict[str, Any]:
    policy: Path = arguments.policy
    task = make_task("strings", seed=0, options={"kind": "reverse", "length": 5})
    tokenizer = PolicyTokenizer(policy)
    prompts = [tokenizer.encode_prompt(task.prompt(index)) for index in range(arguments.prompts)]
    sampling = Sampling(max_new_tokens=arguments.max_new_tokens)
    alone = _one_at_a_time(policy, prompts, sampling, arguments.repeats)
    ours = await _engine(TransformersEngine(policy, threads=1), policy, prompts, sampling, arguments.repeats)
    figures: dict[str, Any] = {
        "transformers": {
            "tokens_per_s": round(ours),
            "one_at_a_time_tokens_per_s": round(alone),
            "speedup_vs_one_at_a_time": round(ours / alone, 2),
        },
        "vllm_cpu": {"tokens_per_s": None},
    }
    if importlib.util.find_spec("vllm") is not None:
        from echo2p2p.rollout.vllm_engine import VLLMEngine
        from echo2p2p.settings import VLLMSettings

        options = VLLMSettings(eager=True, kv_cache_gib=0.25, max_sequences=max(32, arguments.prompts))
        engine = VLLMEngine(policy, options, threads=1)
        theirs = await _engine(engine, policy, prompts, sampling, arguments.repeats)
        figures["vllm_cpu"]["tokens_per_s"] = round(theirs)
    return figures


def _one_at_a_time(policy: Path, prompts: list[list[int]], sampling: Sampling, repeats: int) -> float:
    model: Any = build_model(policy, dtype=None, device="cpu", weights=True)
    best = 0.0
    for seed in range(repeats):
        torch.manual_seed(seed)
        started, tokens = time.perf_counter(), 0
        for prompt in prompts:
            ids = torch.tensor([prompt])
            done = model.generate(
                ids,
                attention_mask=torch.ones_like(ids),
                do_sample=True,
                temperature=1.0,
                top_k=0,
                max_new_tokens=sampling.max_new_tokens,
                eos_token_id=sorted(eos_token_ids(policy)),
                pad_token_id=0,
            )
            tokens += done.shape[1] - len(prompt)
        best = max(best, tokens / (time.perf_counter() - started))
    _say(f"one at a time: {best:.0f} tokens/s")
    return best


async def _engine(
    engine: InferenceEngine, policy: Path, prompts: list[list[int]], sampling: Sampling, repeats: int
) -> float:
    snapshot = from_state_dict(build_model(policy, dtype=None, device="cpu", weights=True).state_dict())
    best = 0.0
    try:
        await engine.install(snapshot, 0)
        for seed in range(repeats + 1):  # the first one warms up
            started = time.perf_counter()
            done = await engine.generate(prompts, n_samples=1, sampling=sampling, seed=seed)
            tokens = sum(len(sample.tokens) for samples in done for sample in samples)
            if seed:
                best = max(best, tokens / (time.perf_counter() - started))
    finally:
        await engine.close()
    _say(f"{type(engine).__name__}: {best:.0f} tokens/s")
    return best


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


if __name__ == "__main__":
    main()
