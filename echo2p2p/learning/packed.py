"""Attention for sequences that lie one behind the other in a single row: no padding anywhere in the model.

The model sees one long row with position ids that begin anew at each sequence, so only attention has to know where
one sequence ends. It is computed for each by itself: SDPA, which is flash attention where the device has it, or by
hand where scores are capped (Gemma 2), which SDPA cannot do.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface

PACKED = "echo2p2p_packed"
"""Name of this attention among those of transformers; it takes the argument ``packed_lengths`` of the model."""

_KNOWN_LAYERS = {"full_attention", "sliding_attention"}
"""What can be cut between two tokens. A layer with a state (Mamba, linear attention) would carry it across."""
_PROBE = ((3, 1, 4, 1, 5, 9, 2), (6, 5, 3), (5, 8, 9, 7, 9))
TOLERANCE = {torch.float32: 1e-3, torch.bfloat16: 5e-2}
"""Of logits, by what they are computed in: what another order of sums explains."""


def attend(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,  # noqa: ARG001 - transformers' signature; packed rows have no mask
    *,
    packed_lengths: Sequence[int],
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    **_: Any,
) -> tuple[Tensor, None]:
    """Causal attention within each of the sequences.

    Args:
        query: (1, heads, tokens, head size); ``key`` and ``value`` with fewer heads where these are shared.
        packed_lengths: tokens of each sequence, in order; they add up to ``tokens``.
        sliding_window: a token sees itself and so many less one before it; None for all.
        softcap: scores are held below this by a tanh.

    Returns:
        (1, tokens, heads, head size), as transformers expects it.
    """
    shared = int(getattr(module, "num_key_value_groups", 1))
    if shared > 1:
        key, value = (tensor.repeat_interleave(shared, dim=1) for tensor in (key, value))
    cut = list(packed_lengths)
    sequences = zip(*(torch.split(each, cut, dim=2) for each in (query, key, value)), strict=True)
    parts = [_attend_one(q, k, v, scaling, sliding_window, softcap) for q, k, v in sequences]
    return torch.cat(parts, dim=2).transpose(1, 2), None


def _attend_one(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    scaling: float | None,
    window: int | None,
    softcap: float | None,
) -> Tensor:
    length = query.shape[2]
    narrow = window is not None and length > window
    if softcap is None and not narrow:
        return nn.functional.scaled_dot_product_attention(query, key, value, is_causal=True, scale=scaling)
    visible = torch.ones(length, length, dtype=torch.bool, device=query.device).tril()
    if narrow:
        visible = visible.triu(1 - window)  # type: ignore[operator]
    if softcap is None:
        return nn.functional.scaled_dot_product_attention(query, key, value, attn_mask=visible, scale=scaling)
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    scores = softcap * torch.tanh(query @ key.transpose(-1, -2) * scale / softcap)
    scores = scores.masked_fill(~visible, float("-inf"))
    return torch.softmax(scores.float(), dim=-1).to(value.dtype) @ value


AttentionInterface.register(PACKED, attend)


def packed_inputs(sequences: Sequence[Sequence[int]], device: torch.device) -> dict[str, Any]:
    """What a model that packs is called with: ``input_ids`` and ``position_ids``, (1, tokens), and the lengths."""
    flat = [token for sequence in sequences for token in sequence]
    positions = [place for sequence in sequences for place in range(len(sequence))]
    return {
        "input_ids": torch.tensor([flat], device=device),
        "position_ids": torch.tensor([positions], device=device),
        "packed_lengths": tuple(len(sequence) for sequence in sequences),
    }


@torch.no_grad()
def use_packing(model: Any, device: torch.device) -> bool:
    """Give ``model`` the packed attention, if with it every sequence gets the logits that it gets alone.

    That is tried on three short sequences. Returns False, and leaves the model as it was, for architectures whose
    layers carry something from token to token, whose attention cannot be replaced, or that fail the trial.
    """
    config = model.config.get_text_config()
    if not set(getattr(config, "layer_types", None) or ()) <= _KNOWN_LAYERS:
        return False
    if getattr(model, "_is_stateful", False) or not getattr(model, "_supports_attention_backend", False):
        return False
    size = model.get_input_embeddings().weight.shape[0]
    probe = [[token % size for token in sequence] for sequence in _PROBE]
    alone = [model(input_ids=torch.tensor([ids], device=device), use_cache=False).logits[0] for ids in probe]
    usual = config._attn_implementation  # noqa: SLF001 - its setter refuses names for Gemma 2, whose eager it replaces
    config._attn_implementation = PACKED  # noqa: SLF001
    try:
        packed = model(**packed_inputs(probe, device), use_cache=False).logits[0]
        tolerance = TOLERANCE[packed.dtype]
        same = torch.allclose(packed, torch.cat(alone), atol=tolerance, rtol=tolerance)
    except (TypeError, ValueError, RuntimeError, KeyError):
        same = False
    if not same:
        config._attn_implementation = usual  # noqa: SLF001
    return same
