"""The last layer and the log-probabilities in one: logits exist for a slice of tokens at a time.

With a vocabulary of 150,000 the logits of a micro-batch take more memory than everything else in it. Here they are
made slice by slice; as many as fit into a budget are kept for the backward pass, the others are computed again.
"""

from __future__ import annotations

from typing import Any, cast

import torch
from torch import Tensor

_SLICE_BYTES = 2**27
"""Of float32 logits that exist at a time: large enough for the matrix product, far below any micro-batch."""


def head_logprobs(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    *,
    temperature: float,
    dtype: torch.dtype,
    kept_bytes: int,
) -> tuple[Tensor, Tensor]:
    """Log-probability of each target at the sampling temperature, and the entropy it was drawn at, in nats.

    The same as ``scaled_log_softmax`` of ``hidden @ weight.T``, up to rounding.

    Args:
        hidden: (tokens, width).
        weight: (vocabulary, width), of the last layer.
        targets: int64, (tokens,).
        dtype: that the matrix products are computed in; everything behind them is float32.
        kept_bytes: of logits that may stay in memory until the backward pass.

    Returns:
        float32, (tokens,) each; the entropies carry no gradient.
    """
    arguments = (hidden, weight, targets, temperature or 1.0, dtype, kept_bytes)
    return cast("tuple[Tensor, Tensor]", _Head.apply(*arguments))  # type: ignore[no-untyped-call]


class _Head(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        targets: Tensor,
        temperature: float,
        dtype: torch.dtype,
        kept_bytes: int,
    ) -> tuple[Tensor, Tensor]:
        tokens, vocabulary = len(targets), weight.shape[0]
        step = max(1, _SLICE_BYTES // (4 * vocabulary))
        keep = kept_bytes // (step * vocabulary * dtype.itemsize) if any(ctx.needs_input_grad) else 0
        chosen, entropies, normaliser = torch.empty(3, tokens, device=hidden.device).unbind()
        kept = []
        with torch.autocast(hidden.device.type, enabled=False):
            inputs, matrix = hidden.to(dtype), weight.to(dtype)
            # One buffer for all slices: to take and give back so much memory each time costs as much as to fill it.
            buffer = torch.empty(min(step, tokens), vocabulary, device=hidden.device)
            for number, part in enumerate(_slices(tokens, step)):
                product = inputs[part] @ matrix.T
                if number < keep:
                    kept.append(product)
                logits = _scaled(product, temperature)
                chosen[part] = logits.gather(-1, targets[part, None]).squeeze(-1)
                largest = logits.amax(dim=-1, keepdim=True)
                weights = torch.sub(logits, largest, out=buffer[: len(logits)]).exp_()
                total = weights.sum(dim=-1)
                normaliser[part] = largest.squeeze(-1) + total.log()
                entropies[part] = normaliser[part] - weights.mul_(logits).sum(dim=-1) / total
        chosen -= normaliser
        ctx.save_for_backward(hidden, weight, targets, normaliser, *kept)
        ctx.temperature, ctx.dtype, ctx.step = temperature, dtype, step
        ctx.mark_non_differentiable(entropies)
        return chosen, entropies

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        hidden, weight, targets, normaliser, *kept = ctx.saved_tensors
        hidden_gradient = torch.empty_like(hidden)
        weight_gradient = torch.zeros_like(weight) if ctx.needs_input_grad[1] else None
        with torch.autocast(hidden.device.type, enabled=False):
            inputs, matrix = hidden.to(ctx.dtype), weight.to(ctx.dtype)
            buffer = torch.empty(min(ctx.step, len(targets)), len(weight), device=hidden.device)
            scaled = gradients[0] / ctx.temperature
            for number, part in enumerate(_slices(len(targets), ctx.step)):
                product = kept[number] if number < len(kept) else inputs[part] @ matrix.T
                # d chosen / d logits = one-hot − softmax.
                logits = _scaled(product, ctx.temperature)
                change = torch.sub(logits, normaliser[part, None], out=buffer[: len(logits)]).exp_()
                change *= -scaled[part, None]
                change = change.scatter_add_(-1, targets[part, None], scaled[part, None]).to(ctx.dtype)
                hidden_gradient[part] = (change @ matrix).to(hidden.dtype)
                if weight_gradient is not None:
                    if ctx.dtype == weight.dtype:
                        weight_gradient.addmm_(change.T, inputs[part])
                    else:
                        weight_gradient += change.T @ inputs[part]
        return hidden_gradient, weight_gradient, None, None, None, None


def _slices(tokens: int, step: int) -> list[slice]:
    return [slice(start, min(start + step, tokens)) for start in range(0, tokens, step)]


def _scaled(product: Tensor, temperature: float) -> Tensor:
    """Logits at the temperature, float32: ``product`` itself where that changes nothing."""
    logits = product.float()
    return logits if temperature == 1.0 else logits / temperature
