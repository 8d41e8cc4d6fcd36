"""Completion tokens a second of the learner's training step, and of TRL's GRPO step on the same batch.

``python -m benchmarks.train --trl-python /path/to/venv/bin/python``

One policy (SmolLM2-135M-Instruct as :mod:`benchmarks.smollm2` makes it, unless ``--policy`` names another folder with
weights), one batch of groups, float32, one update. Each side takes a step that is
not counted, then ``--steps`` that are; the best counts. TRL runs in a process of its own by ``--trl-python``, or by
this interpreter where it can be imported, in micro-batches of ``--trl-rows`` sequences (of several numbers the
fastest counts). Both sides compute the same objective (DAPO) on the same policy without gradient checkpointing, with
as many threads; if their gradient norms differ, the benchmark ends. What TRL does beside a step is
left out: generation, rewards, and the second forward pass with which it corrects for the sampler (the learner needs
none).

The last line on stdout is one JSON object, ``{"train": {…}}``:

* ``tokens_per_s``, ``trl_tokens_per_s``: tokens of all sequences, padding not counted, a second of the step;
* ``speedup_vs_trl``;
* ``padding``: the part of the places in TRL's micro-batches that is padding, which the learner has none of;
  ``shared``: the part of the tokens that the learner reads once for all samples of a group, their prompt;
* ``grad_norm``, ``trl_grad_norm``, and the sizes of everything.

Without TRL its figures are null, and stderr says so.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import torch

from benchmarks import smollm2
from echo2p2p.data.policy import load_config
from echo2p2p.data.trajectory import Group, Trajectory, pack_logprobs
from echo2p2p.learning.trainer import GRPOTrainer, TrainerSettings

_TOLERANCE = 0.02
"""Relative difference of the two gradient norms that rounding explains."""


def make_groups(count: int, samples: int, longest: int, vocabulary: int, *, equal: bool) -> list[Group]:
    """Random groups; completions of a sixteenth of ``longest`` up to all of it, evenly, unless ``equal``."""
    rng = np.random.default_rng(0)
    groups = []
    for index in range(count):
        trajectories = []
        for number in range(samples):
            length = longest if equal else int(rng.integers(longest // 16, longest + 1))
            tokens = rng.integers(1, vocabulary, length).tolist()
            logprobs = pack_logprobs(np.zeros(length))
            reward = float(number % 2)
            trajectories.append(Trajectory(tokens, logprobs, 0, 0, reward, "length"))
        prompt = rng.integers(
            1, vocabulary, longest // 4 if equal else int(rng.integers(8, longest // 2))
        ).tolist()
        groups.append(Group(index, prompt, trajectories))
    return groups


def sampled_by(trainer: GRPOTrainer, groups: list[Group]) -> list[Group]:
    """``groups`` with the policy's own log-probabilities, as if it had sampled them."""
    replace = msgspec.structs.replace
    return [
        replace(
            group,
            samples=[
                replace(sample, logprobs=pack_logprobs(own.numpy()))
                for sample, own in zip(group.samples, logprobs, strict=True)
            ],
        )
        for group, logprobs in zip(groups, trainer.logprobs(groups), strict=True)
    ]


def learner_step(folder: Path, groups: list[Group], options: argparse.Namespace) -> dict[str, Any]:
    """Seconds of the best step, and the gradient's norm in the first."""
    settings = TrainerSettings(
        threads=options.threads,
        micro_batch_tokens=options.micro_batch_tokens,
        compute_dtype=options.dtype,
        max_completion_tokens=options.longest,
    )
    trainer = GRPOTrainer(folder, settings)
    groups = sampled_by(trainer, groups)
    norms, times = [], []
    for _ in range(options.steps + 1):
        began = time.perf_counter()
        norms.append(trainer.train(groups).grad_norm)
        times.append(time.perf_counter() - began)
        print(f"learner: {times[-1]:.2f} s", file=sys.stderr)
    return {"seconds": min(times[1:]), "grad_norm": norms[0]}


def trl_step(folder: Path, batch: Path, options: argparse.Namespace, rows: int) -> dict[str, Any]:
    """The same of TRL in micro-batches of ``rows``."""
    python = options.trl_python or sys.executable
    arguments = (folder, batch, rows, options.steps, options.threads, options.dtype)
    root = str(Path(__file__).parents[1])
    done = subprocess.run(
        [python, "-m", "benchmarks.train_trl", *map(str, arguments)],
        cwd=root,
        env={**os.environ, "OMP_NUM_THREADS": str(options.threads), "HF_HUB_OFFLINE": "1"},
        stdout=subprocess.PIPE,
        text=True,
        timeout=600,
        check=True,
    )
    result: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    print(f"TRL, {rows} rows: {result['seconds']:.2f} s", file=sys.stderr)
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", maxsplit=1)[0])
    parser.add_argument("--policy", type=Path, help="a folder with weights; SmolLM2 by default")
    parser.add_argument("--trl-python", help="an interpreter that has TRL")
    parser.add_argument("--trl-rows", default="4", help="sequences in TRL's micro-batches, several by commas")
    parser.add_argument("--groups", type=int, default=4)
    parser.add_argument("--samples", type=int, default=4)
    parser.add_argument("--longest", type=int, default=256, help="tokens of the longest completion")
    parser.add_argument(
        "--equal", action="store_true", help="all sequences of one length: nothing is padding"
    )
    parser.add_argument("--dtype", default="float32", choices=("float32", "bfloat16"))
    parser.add_argument("--steps", type=int, default=2)
    parser.add_argument("--threads", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--micro-batch-tokens", type=int, default=4096)
    options = parser.parse_args()
    torch.set_flush_denormal(True)

    folder = options.policy or smollm2.policy()
    vocabulary = load_config(folder).vocab_size
    groups = make_groups(options.groups, options.samples, options.longest, vocabulary, equal=options.equal)
    lengths = [len(g.prompt) + len(s.completion) for g in groups for s in g.samples]
    widest = max(len(g.prompt) for g in groups) + max(len(s.completion) for g in groups for s in g.samples)
    with tempfile.TemporaryDirectory() as scratch:
        batch = Path(scratch) / "batch.json"
        batch.write_bytes(
            msgspec.json.encode([[g.prompt, [[s.completion, s.reward] for s in g.samples]] for g in groups])
        )
        ours = learner_step(folder, groups, options)
        trl = None
        if options.trl_python or importlib.util.find_spec("trl"):
            tried = [trl_step(folder, batch, options, int(rows)) for rows in options.trl_rows.split(",")]
            trl = min(tried, key=lambda found: found["seconds"])
        else:
            print("there is no TRL here: name an interpreter that has it with --trl-python", file=sys.stderr)
    if trl and abs(trl["grad_norm"] / ours["grad_norm"] - 1) > _TOLERANCE:
        sys.exit(f"not the same step: gradients of norm {ours['grad_norm']} and {trl['grad_norm']} (TRL)")
    tokens = sum(lengths)
    figures = {
        "tokens_per_s": round(tokens / ours["seconds"], 1),
        "trl_tokens_per_s": round(tokens / trl["seconds"], 1) if trl else None,
        "speedup_vs_trl": round(trl["seconds"] / ours["seconds"], 3) if trl else None,
        "padding": round(1 - tokens / (widest * len(lengths)), 3),
        "shared": round(sum(len(g.prompt) * (len(g.samples) - 1) for g in groups) / tokens, 3),
        "grad_norm": ours["grad_norm"],
        "trl_grad_norm": trl["grad_norm"] if trl else None,
        "trl": trl["trl"] if trl else None,
        "trl_rows": trl["rows"] if trl else None,
        "sequences": len(lengths),
        "tokens": tokens,
        "policy": folder.name,
        "dtype": options.dtype,
        "threads": options.threads,
    }
    print(json.dumps({"train": figures}))


if __name__ == "__main__":
    main()
