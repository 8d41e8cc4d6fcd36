"""Makes the seed policy that ships with echo2p2p, so that a swarm can be tried without downloading a model.

A Qwen3 of 0.4 million parameters over printable characters, shown reversed digit strings until it gets about
a quarter of them right: enough for GRPO to find something to reward, far from what it can become.

    python scripts/make_seed_policy.py echo2p2p/seed_policy

takes about ten seconds on one core. The same torch on the same machine gives the same policy.
"""

from __future__ import annotations

import argparse
import json
import string
import sys
from pathlib import Path

import torch
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from torch import Tensor
from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

from echo2p2p.data.task import Task, make_task

SPECIAL = PAD, EOS, UNKNOWN = ("<pad>", "<eos>", "<unk>")
PAD_ID, EOS_ID = 0, 1
CHARACTERS = string.digits + string.ascii_letters + string.punctuation + " "

TASK_SEED = 2**31 - 1  # no run trains on the prompts of this seed, unless somebody asks for it
BATCH = 128
LEARNING_RATE = 7e-4
WARMUP_STEPS = 30
ENOUGH = 0.24
MAX_STEPS = 400


def character_tokenizer() -> PreTrainedTokenizerFast:
    """One token a printable character; AutoTokenizer loads what it saves."""
    vocabulary = {token: number for number, token in enumerate((*SPECIAL, *CHARACTERS))}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token=UNKNOWN))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
    tokenizer.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token=PAD,
        eos_token=EOS,
        unk_token=UNKNOWN,
        model_max_length=256,
        clean_up_tokenization_spaces=False,
    )


def tiny_qwen3() -> Qwen3ForCausalLM:
    """Two layers of width 128, embeddings tied."""
    return Qwen3ForCausalLM(
        Qwen3Config(
            vocab_size=len(SPECIAL) + len(CHARACTERS),
            hidden_size=128,
            intermediate_size=384,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            head_dim=32,
            max_position_embeddings=256,
            initializer_range=0.05,
            tie_word_embeddings=True,
            eos_token_id=EOS_ID,
            pad_token_id=PAD_ID,
            bos_token_id=None,
        )
    )


def demonstrations(task: Task, tokenizer: PreTrainedTokenizerFast, start: int) -> tuple[Tensor, Tensor]:
    """Prompts ``start`` … and their answers with an end of sequence, as ids (BATCH, length)."""
    indices = range(start, start + BATCH)
    prompts = [tokenizer.encode(task.prompt(index)) for index in indices]
    answers = [[*tokenizer.encode(task.answer(index)), EOS_ID] for index in indices]
    return torch.tensor(prompts), torch.tensor(answers)


def warm_start(model: Qwen3ForCausalLM, tokenizer: PreTrainedTokenizerFast) -> float:
    """Train on fresh demonstrations until sampling would get ``ENOUGH`` of the next ones right."""
    task = make_task("strings", seed=TASK_SEED, options={"kind": "reverse", "length": 5})
    optimizer = torch.optim.AdamW(model.parameters(), betas=(0.9, 0.98), weight_decay=0.01)
    for step in range(MAX_STEPS):
        prompts, answers = demonstrations(task, tokenizer, step * BATCH)
        ids = torch.cat([prompts, answers], dim=1)
        logprobs = model(ids[:, :-1]).logits[:, prompts.shape[1] - 1 :].log_softmax(-1)
        chosen = logprobs.gather(-1, answers[..., None]).squeeze(-1)
        competence = chosen.detach().sum(dim=1).exp().mean().item()
        if competence >= ENOUGH:
            return competence
        optimizer.param_groups[0]["lr"] = LEARNING_RATE * min(1.0, (step + 1) / WARMUP_STEPS)
        optimizer.zero_grad()
        (-chosen.mean()).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        if step % 10 == 9:
            sys.stderr.write(f"step {step + 1}: answers right when sampled: {competence:.3f}\n")
    raise SystemExit(f"after {MAX_STEPS} steps the policy gets only {competence:.3f} right")


def name_the_common_tokenizer_class(path: Path) -> None:
    """Give the class the name that transformers 4 and 5 both know."""
    settings = json.loads(path.read_text())
    settings["tokenizer_class"] = "PreTrainedTokenizerFast"
    path.write_text(json.dumps(settings, indent=2) + "\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("folder", type=Path, help="where the policy goes")
    folder: Path = parser.parse_args().folder
    torch.set_num_threads(1)
    torch.manual_seed(0)
    tokenizer, model = character_tokenizer(), tiny_qwen3()
    competence = warm_start(model, tokenizer)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    name_the_common_tokenizer_class(folder / "tokenizer_config.json")
    for path in folder.iterdir():
        path.chmod(0o644)  # safetensors writes files that only their owner can read
    sys.stderr.write(f"{folder}: {model.num_parameters()} parameters, {competence:.3f} right when sampled\n")


if __name__ == "__main__":
    main()
