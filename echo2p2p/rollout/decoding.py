"""The sampling loop of the transformers engine: batched, cached, left-padded, finished rows dropped.

Every prompt is prefilled once and its cache is then copied for each of its samples. When a quarter of the
rows has ended, they leave the batch and stop costing.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers import DynamicCache

from echo2p2p.data.policy import scaled_log_softmax
from echo2p2p.data.trajectory import Sampling
from echo2p2p.errors import EngineError

_COMPACT_SHARE = 0.25


@dataclass(frozen=True)
class Rows:
    """What was decoded, one row a completion, in the order of the prompts.

    Attributes:
        tokens: int64, (rows, longest); beyond a row's length undefined.
        logprobs: float32, (rows, longest), of the sampled tokens.
        lengths: int64, (rows,), the end-of-sequence token included.
        stopped: bool, (rows,), whether it ended with one.
    """

    tokens: Tensor
    logprobs: Tensor
    lengths: Tensor
    stopped: Tensor


def decode(
    model: nn.Module,
    prompts: Sequence[Sequence[int]],
    counts: Sequence[int],
    *,
    sampling: Sampling,
    eos: frozenset[int],
    generator: torch.Generator,
    aborted: Callable[[], bool],
) -> Rows:
    """Sample ``counts[i]`` completions of ``prompts[i]``. Call it under ``torch.inference_mode``.

    Raises:
        EngineError: ``aborted`` turned true, or the policy's logits are not finite.
    """
    device = generator.device
    ids, mask = _left_pad(prompts, device)
    owners = torch.repeat_interleave(torch.tensor(counts, device=device))
    n_rows, limit = len(owners), sampling.max_new_tokens
    tokens = torch.zeros(n_rows, limit, dtype=torch.long, device=device)
    logprobs = torch.zeros(n_rows, limit, device=device)
    lengths = torch.full((n_rows,), limit, device=device)
    stopped = torch.zeros(n_rows, dtype=torch.bool, device=device)
    eos_ids = torch.tensor(sorted(eos), device=device)

    cache: Any = DynamicCache(config=model.config)
    logits = _forward(model, ids, mask, cache)[owners]
    cache.batch_select_indices(owners)
    if mask is not None:
        mask = mask[owners]
    live = torch.arange(n_rows, device=device)
    ended = torch.zeros(n_rows, dtype=torch.bool, device=device)
    for step in range(limit):
        if aborted():
            raise EngineError("generation was cancelled")
        chosen, chosen_logprobs = sample(logits, sampling, generator)
        tokens[live, step] = chosen
        logprobs[live, step] = chosen_logprobs
        just_ended = torch.isin(chosen, eos_ids) & ~ended
        lengths[live[just_ended]] = step + 1
        stopped[live[just_ended]] = True
        ended |= just_ended
        n_ended = int(ended.sum())
        if n_ended == len(live) or step + 1 == limit:
            break
        if n_ended >= _COMPACT_SHARE * len(live):
            kept = (~ended).nonzero().squeeze(1)
            cache.batch_select_indices(kept)
            live, chosen, ended = live[kept], chosen[kept], ended[kept]
            mask = mask[kept] if mask is not None else None
        if mask is not None:
            mask = torch.cat([mask, mask.new_ones(len(live), 1)], dim=1)
        logits = _forward(model, chosen[:, None], mask, cache)
    return Rows(tokens, logprobs, lengths, stopped)


def sample(logits: Tensor, sampling: Sampling, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Draw one token a row.

    Returns:
        The ids, int64 (rows,), and their log-probabilities before nucleus truncation, float32 (rows,).

    Raises:
        EngineError: a row's logits are no distribution.
    """
    logprobs = scaled_log_softmax(logits, sampling.temperature)
    # A NaN anywhere makes its whole row NaN, and so does +∞; −∞ only rules a token out.
    if bool(torch.isnan(logprobs).any()):
        raise EngineError("the policy's logits are not finite", hint="wait for the next version")
    if sampling.temperature == 0:
        chosen = logprobs.argmax(dim=-1)
    else:
        weights = logprobs.exp()
        if sampling.top_p < 1:
            weights = _nucleus(weights, sampling.top_p)
        # The argmax of p / Exp(1) is distributed as p, whether or not p sums to one.
        noise = torch.empty_like(weights).exponential_(generator=generator)
        chosen = (weights / noise.clamp_min_(torch.finfo(noise.dtype).tiny)).argmax(dim=-1)
    return chosen, logprobs.gather(-1, chosen[:, None]).squeeze(-1)


def _nucleus(weights: Tensor, top_p: float) -> Tensor:
    """Zero all but the smallest set of likeliest tokens whose probabilities sum to ``top_p`` or more."""
    ordered, order = weights.sort(dim=-1, descending=True)
    outside = ordered.cumsum(dim=-1) - ordered >= top_p
    return weights.masked_fill(outside.scatter(-1, order, outside), 0.0)


def _left_pad(prompts: Sequence[Sequence[int]], device: torch.device) -> tuple[Tensor, Tensor | None]:
    """Ids (prompts, longest), and a mask of their real places; None if all are real, which is faster."""
    longest = max(len(prompt) for prompt in prompts)
    ids = torch.tensor([[0] * (longest - len(p)) + list(p) for p in prompts], device=device)
    if all(len(prompt) == longest for prompt in prompts):
        return ids, None
    lengths = torch.tensor([len(prompt) for prompt in prompts], device=device)
    places = torch.arange(longest, device=device)
    return ids, (places >= longest - lengths[:, None]).long()


def _forward(model: nn.Module, ids: Tensor, mask: Tensor | None, cache: Any) -> Tensor:
    """Logits at the last place, (rows, vocabulary); ``cache`` grows by ``ids``."""
    positions = None
    if mask is not None:
        positions = (mask.cumsum(dim=1) - 1).clamp_min(0)[:, -ids.shape[1] :]
    output = model(
        input_ids=ids,
        attention_mask=mask,
        position_ids=positions,
        use_cache=True,
        logits_to_keep=1,
        **{_cache_argument(type(model).forward): cache},
    )
    logits: Tensor = output.logits[:, -1]
    return logits


@functools.cache
def _cache_argument(forward: Callable[..., Any]) -> str:
    """The name of the cache argument: transformers renames ``past_key_values`` to ``cache``."""
    return "cache" if "cache" in inspect.signature(forward).parameters else "past_key_values"
