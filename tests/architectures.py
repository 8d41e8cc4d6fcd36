"""Tiny random policies of the architectures that are trained in practice."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from policies import EOS, VOCABULARY
from transformers import (
    AutoModelForCausalLM,
    Gemma2Config,
    Gemma3TextConfig,
    LlamaConfig,
    PretrainedConfig,
    Qwen3Config,
    Qwen3MoeConfig,
)

_COMMON: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 64,
    "initializer_range": 0.3,
    "eos_token_id": EOS,
    "bos_token_id": None,
    "pad_token_id": 0,
}
_WINDOWS = {"sliding_window": 4, "query_pre_attn_scalar": 8, "tie_word_embeddings": True}
"""A window that even the shortest sequences of the tests outgrow."""

ARCHITECTURES: dict[str, Callable[[], PretrainedConfig]] = {
    "qwen3": lambda: Qwen3Config(**_COMMON, tie_word_embeddings=True),
    "qwen3-untied": lambda: Qwen3Config(**_COMMON, tie_word_embeddings=False),
    "qwen3-moe": lambda: Qwen3MoeConfig(
        **_COMMON, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=16, tie_word_embeddings=False
    ),
    "llama": lambda: LlamaConfig(**_COMMON, tie_word_embeddings=False),
    "smollm": lambda: LlamaConfig(
        **{**_COMMON, "hidden_size": 24, "num_attention_heads": 3, "num_key_value_heads": 1},
        tie_word_embeddings=True,
    ),
    "gemma2": lambda: Gemma2Config(**_COMMON, **_WINDOWS),
    "gemma3": lambda: Gemma3TextConfig(
        **_COMMON, **_WINDOWS, layer_types=["sliding_attention", "full_attention", "sliding_attention"]
    ),
}
"""By name, what makes its ``config.json``."""


def make_architecture(folder: Path, name: str, *, seed: int = 0) -> Path:
    """A random policy folder of ``name``, with weights, float32."""
    torch.manual_seed(seed)
    AutoModelForCausalLM.from_config(ARCHITECTURES[name]()).save_pretrained(folder)
    return folder
