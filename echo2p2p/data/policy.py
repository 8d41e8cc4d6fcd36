"""The policy folder: a Hugging Face folder that says what a policy is, and how engine and trainer build it.

``config.json`` and the tokenizer files define the policy; weights come separately, as snapshots, except for
the learner's very first version. The folder may come from another peer, so nothing in it is executed: no
remote code, no pickle, no kernels from a hub, no network.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import MODEL_FOR_CAUSAL_LM_MAPPING, AutoConfig, AutoModelForCausalLM, PretrainedConfig
from transformers.utils import logging

from echo2p2p.errors import SettingsError

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
"""What a policy is computed and published in."""

_ATTENTION = ("sdpa", "eager")
_MAX_JSON_BYTES = 2**20


def load_config(policy_dir: Path) -> PretrainedConfig:
    """The policy's architecture.

    Raises:
        SettingsError: the folder has no usable ``config.json``, or it needs code of its own.
    """
    if not (policy_dir / "config.json").is_file():
        raise SettingsError(
            f"{policy_dir} is not a policy folder: it holds no config.json",
            hint="name a Hugging Face folder; what a run published becomes one with `echo2p2p export`",
        )
    _read_json(policy_dir / "config.json")
    try:
        return AutoConfig.from_pretrained(policy_dir, local_files_only=True, trust_remote_code=False)
    except (ValueError, KeyError, TypeError, OSError) as error:
        raise SettingsError(f"{policy_dir} holds no usable config.json: {error}") from error


def build_model(
    policy_dir: Path, *, dtype: torch.dtype | None, device: str, weights: bool, attention: str = "sdpa"
) -> nn.Module:
    """The policy's model, in evaluation mode: dropout would make learner and sampler disagree.

    Args:
        dtype: of the weights; None for the one that ``config.json`` names, float32 if it names none.
        weights: load ``model.safetensors`` from the folder; otherwise the weights are whatever the
            architecture initialises, and a snapshot has to be installed before use.
        attention: ``sdpa`` or ``eager``. Never taken from the folder, whose ``config.json`` could name a
            kernel to be downloaded. Architectures without ``sdpa`` (Gemma 2 caps its scores) get ``eager``.

    Raises:
        SettingsError: the folder is no usable policy.
    """
    if attention not in _ATTENTION:
        raise SettingsError(f"attention {attention!r} is unknown", hint=f"one of {', '.join(_ATTENTION)}")
    config = load_config(policy_dir)
    common: dict[str, Any] = {
        "attn_implementation": attention if _has_sdpa(config) else "eager",
        "dtype": dtype or getattr(config, "dtype", None) or torch.float32,
        "trust_remote_code": False,
    }
    try:
        if weights:
            model = _load_weights(policy_dir, config, common)
        else:
            model = AutoModelForCausalLM.from_config(config, **common)
        built: nn.Module = model.to(device)
    except (ValueError, KeyError, TypeError, OSError, ImportError, RuntimeError) as error:
        raise SettingsError(f"no model can be built from {policy_dir}: {error}") from error
    return built.eval().requires_grad_(False)


def eos_token_ids(policy_dir: Path) -> frozenset[int]:
    """The ids that end a completion: ``generation_config.json``'s if it names any, else ``config.json``'s.

    Raises:
        SettingsError: neither file names one.
    """
    for name in ("generation_config.json", "config.json"):
        path = policy_dir / name
        if not path.exists():
            continue
        value = _read_json(path).get("eos_token_id")
        ids = frozenset(value if isinstance(value, list) else [] if value is None else [value])
        if ids:
            if not all(type(token) is int and token >= 0 for token in ids):
                raise SettingsError(f"{path}: eos_token_id = {value!r} is not a token id")
            return ids
    raise SettingsError(
        f"{policy_dir} names no end-of-sequence token", hint="set eos_token_id in generation_config.json"
    )


def vocabulary_size(model: nn.Module) -> int:
    """How many token ids the model's input embedding knows."""
    size: int = model.get_input_embeddings().weight.shape[0]  # type: ignore[operator]
    return size


def max_positions(config: PretrainedConfig) -> int:
    """The longest sequence, prompt and completion together, that the architecture allows."""
    return int(getattr(config, "max_position_embeddings", None) or 2**31)


def is_out_of_memory(error: Exception) -> bool:
    """Whether torch raised ``error`` for want of memory."""
    # Only the GPU's allocator has an error type of its own; the CPU's is told by its words.
    kinds = torch.OutOfMemoryError, MemoryError
    return isinstance(error, kinds) or "can't allocate memory" in str(error)


def scaled_log_softmax(logits: Tensor, temperature: float) -> Tensor:
    """Log-probabilities at the sampling temperature, in float32: the one definition of engine and trainer.

    Temperature 0 (greedy) reports log-probabilities at 1. Nucleus truncation (top_p) is not part of it: the
    trainer could not reproduce the sampler's nucleus from its own logits, while the untruncated ratio is
    exactly 1 where learner and sampler are the same policy.

    Args:
        logits: (…, vocabulary), any float dtype.

    Returns:
        float32, the same shape.
    """
    return torch.log_softmax(logits.float() / (temperature or 1.0), dim=-1)


def _has_sdpa(config: PretrainedConfig) -> bool:
    """Whether the architecture can use it; transformers refuses to build one that cannot."""
    architecture = MODEL_FOR_CAUSAL_LM_MAPPING.get(type(config), None)
    return bool(getattr(architecture, "_supports_sdpa", True))


def _load_weights(policy_dir: Path, config: PretrainedConfig, common: dict[str, Any]) -> Any:
    with _no_progress_bar():
        model, info = AutoModelForCausalLM.from_pretrained(
            policy_dir,
            config=config,
            local_files_only=True,
            use_safetensors=True,
            output_loading_info=True,
            **common,
        )
    # transformers only warns, and would train a policy that is partly random.
    missing = sorted(info["missing_keys"])
    if missing:
        raise SettingsError(
            f"the weights in {policy_dir} lack {len(missing)} of the model's tensors, such as {missing[0]}"
        )
    return model


@contextmanager
def _no_progress_bar() -> Iterator[None]:
    """transformers draws one on stderr, over whatever the caller shows there."""
    shown = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        if shown:
            logging.enable_progress_bar()


def _read_json(path: Path) -> dict[str, Any]:
    try:
        if path.stat().st_size > _MAX_JSON_BYTES:
            raise SettingsError(f"{path} is larger than {_MAX_JSON_BYTES} bytes")
        value = json.loads(path.read_bytes())
    except (OSError, ValueError, RecursionError) as error:
        raise SettingsError(f"{path} cannot be read: {error}") from error
    if not isinstance(value, dict):
        raise SettingsError(f"{path} is not a JSON object")
    return value
