"""Tiny policies for tests."""

from __future__ import annotations

import string
from pathlib import Path
from typing import Any

import numpy as np
import torch
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

from echo2p2p.data.trajectory import Group, Trajectory, pack_logprobs

EOS = 1
VOCABULARY = 19


def make_policy(
    folder: Path, *, seed: int = 0, tied: bool = True, head_dim: int = 8, positions: int = 64
) -> Path:
    """A random two-layer policy folder with weights; large weights, so that its distributions are uneven."""
    return _save_qwen3(
        folder,
        seed=seed,
        vocab_size=VOCABULARY,
        hidden_size=16,
        intermediate_size=32,
        head_dim=head_dim,
        max_position_embeddings=positions,
        tie_word_embeddings=tied,
        initializer_range=0.4,
    )


def make_groups(seed: int, *, groups: int = 3, samples: int = 4) -> list[Group]:
    """Groups of random tokens, rewards and log-probabilities, of uneven lengths."""
    rng = np.random.default_rng(seed)
    made = []
    for index in range(groups):
        trajectories = []
        for number in range(samples):
            length = int(rng.integers(1, 7))
            trajectories.append(
                Trajectory(
                    completion=rng.integers(0, VOCABULARY, length).tolist(),
                    logprobs=pack_logprobs(-rng.random(length) * 4),
                    version_min=0,
                    version_max=0,
                    reward=float(number % 2),
                    finish="length",
                )
            )
        prompt = rng.integers(0, VOCABULARY, int(rng.integers(2, 6))).tolist()
        made.append(Group(index=index, prompt=prompt, samples=trajectories))
    return made


def make_text_policy(folder: Path, *, seed: int = 0, positions: int = 1024, head_dim: int = 16) -> Path:
    """A random two-layer policy folder whose tokens are the printable characters, with weights and tokenizer."""
    characters = [*string.printable[:95], "\n"]
    vocabulary = {token: number for number, token in enumerate(("<pad>", "<eos>", "<unk>", *characters))}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
    tokenizer.decoder = decoders.Fuse()
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="<pad>", eos_token="<eos>", unk_token="<unk>"
    ).save_pretrained(folder)
    return _save_qwen3(
        folder,
        seed=seed,
        vocab_size=len(vocabulary),
        hidden_size=32,
        intermediate_size=64,
        head_dim=head_dim,
        max_position_embeddings=positions,
        tie_word_embeddings=True,
    )


def _save_qwen3(folder: Path, *, seed: int, **shape: Any) -> Path:
    torch.manual_seed(seed)
    config = Qwen3Config(
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        eos_token_id=EOS,
        bos_token_id=None,
        pad_token_id=0,
        **shape,
    )
    Qwen3ForCausalLM(config).save_pretrained(folder)
    return folder
