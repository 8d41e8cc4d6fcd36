"""Attention for sequences that lie one behind the other in a single row, with the prompts that they share there once.

Nothing in the model is padding, and nothing but attention is computed twice: what a token is by itself and what came
before it make its hidden states, and both are the same for a prompt however it is continued. The model sees one long
row with position ids that begin anew at each prompt and go on from its end at each of its continuations, so only
attention has to know what belongs together. It is computed for each prompt with each of its continuations, those of
one length at once: SDPA, which is flash attention where the device has it, or by hand where scores are capped
(Gemma 2), which SDPA cannot do.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn
from transformers import AttentionInterface

PACKED = "echo2p2p_packed"
"""Name of this attention among those of transformers; it takes the argument ``packed_lengths`` of the model."""

_KNOWN_LAYERS = {"full_attention", "sliding_attention"}
"""What can be cut between two tokens. A layer with a state (Mamba, linear attention) would carry it across."""
_PROBE = (((3, 1, 4, 1), ((5, 9, 2), (6,), ())), ((6, 5), ((3,),)), ((5, 8), ((9, 7, 9), (3, 2, 3))))
TOLERANCE = {torch.float32: 1e-3, torch.bfloat16: 5e-2}
"""Of logits, by what they are computed in: what another order of sums explains."""

Bundle: TypeAlias = tuple[Sequence[int], Sequence[Sequence[int]]]
"""The tokens of a prompt, and of each of its continuations, which may have none."""


def attend(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,  # noqa: ARG001 - transformers' signature; packed rows have no mask
    *,
    packed_lengths: Sequence[Sequence[int]],
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    **_: Any,
) -> tuple[Tensor, None]:
    """Causal attention within each of the sequences: a prompt and one of its continuations.

    Args:
        query: (1, heads, tokens, head size); ``key`` and ``value`` with fewer heads where these are shared.
        packed_lengths: tokens of each prompt and of each of its continuations, in order; all add up to ``tokens``.
        sliding_window: a token sees itself and so many less one before it; None for all.
        softcap: scores are held below this by a tanh.

    Returns:
        (1, tokens, heads, head size), as transformers expects it.
    """
    shared = int(getattr(module, "num_key_value_groups", 1))
    cut = [length for bundle in packed_lengths for length in bundle]
    pieces = [_pieces(each, cut, times) for each, times in ((query, 1), (key, shared), (value, shared))]
    found: dict[int, Tensor] = {}
    for numbers in _by_length(packed_lengths):
        shape = (len(numbers) // 2, -1, query.shape[1])
        q, k, v = (
            torch.cat([own[number] for number in numbers]).reshape(*shape, own[0].shape[-1]).transpose(1, 2)
            for own in pieces
        )
        attended = _attend(q, k, v, scaling, sliding_window, softcap).transpose(1, 2).flatten(0, 1)
        parts = torch.split(attended, [cut[number] for number in numbers])
        for number, part in zip(numbers, parts, strict=True):
            found.setdefault(number, part)  # a prompt's is the same in all of its sequences
    return torch.cat([found[number] for number in range(len(cut))])[None], None


def _pieces(tensor: Tensor, cut: list[int], times: int) -> tuple[Tensor, ...]:
    """``tensor``, (1, heads, tokens, size), as (tokens, heads, ``times``, size) for each of ``cut``."""
    return torch.split(tensor[0].transpose(0, 1)[:, :, None].expand(-1, -1, times, -1), cut)


def _by_length(bundles: Sequence[Sequence[int]]) -> list[list[int]]:
    """The pieces of all sequences of one length, one sequence behind the other: the prompt's, the continuation's."""
    found: dict[int, list[int]] = {}
    first = 0
    for prompt, *continuations in bundles:
        for number, length in enumerate(continuations, first + 1):
            found.setdefault(prompt + length, []).extend((first, number))
        first += 1 + len(continuations)
    return list(found.values())


def _attend(
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


def packed_inputs(bundles: Sequence[Bundle], device: torch.device) -> dict[str, Any]:
    """What a model that packs is called with: ``input_ids`` and ``position_ids``, (1, tokens), and the lengths."""
    ids: list[int] = []
    positions: list[int] = []
    for prompt, continuations in bundles:
        ids.extend(prompt)
        positions.extend(range(len(prompt)))
        for continuation in continuations:
            ids.extend(continuation)
            positions.extend(range(len(prompt), len(prompt) + len(continuation)))
    return {
        "input_ids": torch.tensor([ids], device=device),
        "position_ids": torch.tensor([positions], device=device),
        "packed_lengths": tuple((len(prompt), *map(len, rest)) for prompt, rest in bundles),
    }


@torch.no_grad()
def use_packing(model: Any, device: torch.device) -> bool:
    """Give ``model`` the packed attention, if with it every sequence gets the logits that it gets alone.

    That is tried on six short sequences with three prompts. Returns False, and leaves the model as it was, for
    architectures whose layers carry something from token to token, whose attention cannot be replaced, or that fail
    the trial.
    """
    config = model.config.get_text_config()
    if not set(getattr(config, "layer_types", None) or ()) <= _KNOWN_LAYERS:
        return False
    if getattr(model, "_is_stateful", False) or not getattr(model, "_supports_attention_backend", False):
        return False
    size = model.get_input_embeddings().weight.shape[0]
    probe: list[Bundle] = [
        ([token % size for token in prompt], [[token % size for token in each] for each in rest])
        for prompt, rest in _PROBE
    ]
    expected = torch.cat([_alone(model, bundle, device) for bundle in probe])
    usual = config._attn_implementation  # noqa: SLF001 - its setter refuses names for Gemma 2, whose eager it replaces
    config._attn_implementation = PACKED  # noqa: SLF001
    try:
        packed = model(**packed_inputs(probe, device), use_cache=False).logits[0]
        tolerance = TOLERANCE[packed.dtype]
        same = torch.allclose(packed, expected, atol=tolerance, rtol=tolerance)
    except (TypeError, ValueError, RuntimeError, KeyError):
        same = False
    if not same:
        config._attn_implementation = usual  # noqa: SLF001
    return same


def _alone(model: Any, bundle: Bundle, device: torch.device) -> Tensor:
    """The logits that ``bundle`` should get packed: of the prompt, and of each continuation behind it."""
    prompt, continuations = bundle
    logits = [
        model(input_ids=torch.tensor([[*prompt, *each]], device=device), use_cache=False).logits[0]
        for each in continuations
    ]
    return torch.cat([logits[0][: len(prompt)], *(each[len(prompt) :] for each in logits)])
