"""TRL's side of :mod:`benchmarks.train`, for an interpreter that need not have anything but TRL.

``python -m benchmarks.train_trl POLICY BATCH ROWS STEPS THREADS DTYPE``

TRL's own trainer runs, with its own loop, accumulation and optimizer; only generation is replaced, by the batch. One
JSON object on the last line: seconds of the best step after the first, and the gradient's norm in the first.
"""

from __future__ import annotations

import json
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
import trl
from datasets import Dataset
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast, TrainerCallback
from trl import GRPOConfig, GRPOTrainer


class _Watch(TrainerCallback):  # type: ignore[misc]
    """When steps begin and end."""

    def __init__(self) -> None:
        self.began = 0.0
        self.seconds: list[float] = []

    def on_step_begin(self, *_: Any, **__: Any) -> None:
        self.began = time.perf_counter()

    def on_step_end(self, *_: Any, **__: Any) -> None:
        self.seconds.append(time.perf_counter() - self.began)


class _Fed(GRPOTrainer):  # type: ignore[misc]
    """Takes the batch for what it would have generated."""

    batch: dict[str, torch.Tensor]

    def _generate_and_score_completions(self, _: Any) -> dict[str, torch.Tensor]:
        return dict(self.batch)


def padded(sequences: list[list[int]], *, left: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """Ids and mask, as TRL pads: prompts on the left, completions on the right."""
    width = max(map(len, sequences))
    ids, mask = torch.zeros(2, len(sequences), width, dtype=torch.int64).unbind()
    for row, sequence in enumerate(sequences):
        place = slice(width - len(sequence), width) if left else slice(0, len(sequence))
        ids[row, place] = torch.tensor(sequence)
        mask[row, place] = 1
    return ids, mask


def main() -> None:
    policy, batch_file, rows, steps, threads, dtype = sys.argv[1:]
    torch.set_num_threads(int(threads))
    torch.set_flush_denormal(True)
    groups = json.loads(Path(batch_file).read_bytes())
    prompts = [prompt for prompt, samples in groups for _ in samples]
    completions = [completion for _, samples in groups for completion, _ in samples]
    rewards = torch.tensor([[reward for _, reward in samples] for _, samples in groups])
    advantages = (rewards - rewards.mean(1, keepdim=True)) / rewards.std(1, correction=0, keepdim=True)
    prompt_ids, prompt_mask = padded(prompts, left=True)
    completion_ids, completion_mask = padded(completions, left=False)

    words = {"<pad>": 0, "<unk>": 1}
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer(WordLevel(words, unk_token="<unk>")),
        pad_token="<pad>",
        eos_token="<pad>",
        unk_token="<unk>",
    )
    watch = _Watch()
    with tempfile.TemporaryDirectory() as scratch:
        config = GRPOConfig(
            output_dir=scratch,
            per_device_train_batch_size=int(rows),
            gradient_accumulation_steps=len(prompts) // int(rows),
            num_generations=rewards.shape[1],
            max_completion_length=completion_ids.shape[1],
            max_steps=int(steps) + 1,
            learning_rate=1e-6,
            lr_scheduler_type="constant",
            loss_type="dapo",
            epsilon_high=0.28,
            beta=0.0,
            bf16=dtype == "bfloat16",
            gradient_checkpointing=False,
            use_cpu=not torch.cuda.is_available(),
            save_strategy="no",
            report_to="none",
            logging_steps=1,
            disable_tqdm=True,
        )
        trainer = _Fed(
            model=AutoModelForCausalLM.from_pretrained(policy, dtype=torch.float32),
            reward_funcs=lambda completions, **_: [0.0] * len(completions),
            args=config,
            train_dataset=Dataset.from_dict({"prompt": ["x"] * len(prompts)}),
            processing_class=tokenizer,
            callbacks=[watch],
        )
        trainer.batch = {
            "prompt_ids": prompt_ids,
            "prompt_mask": prompt_mask,
            "completion_ids": completion_ids,
            "completion_mask": completion_mask,
            "advantages": advantages.flatten(),
            "num_items_in_batch": completion_mask.sum(),
        }
        trainer.train()
    [norm, *_] = [entry["grad_norm"] for entry in trainer.state.log_history if "grad_norm" in entry]
    result = {"seconds": min(watch.seconds[1:]), "grad_norm": norm, "rows": int(rows), "trl": trl.__version__}
    print(json.dumps(result))


if __name__ == "__main__":
    main()
