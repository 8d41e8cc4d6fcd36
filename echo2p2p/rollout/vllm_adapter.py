"""Adapters inside vLLM: its linear layers compute ``W x + (α/r) B A x``, A and B being parameters of their own.

So an adapter is written into vLLM, and read back from it, as weights are, and computed as the learner computes it:
beside the base, never merged into it. Runs in vLLM's own processes, before it compiles the model.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import msgspec
import torch
from torch import Tensor, nn
from vllm.config import get_current_vllm_config
from vllm.model_executor.layers.linear import (
    ColumnParallelLinear,
    LinearBase,
    QKVParallelLinear,
    RowParallelLinear,
    UnquantizedLinearMethod,
)
from vllm.model_executor.model_loader.dummy_loader import DummyModelLoader

from echo2p2p.rollout.vllm_process import ADAPTER
from echo2p2p.weights.adapter import AdapterSpec

_SHARDS = {None: 0, "q": 0, "k": 1, "v": 2}
"""vLLM's names for parts of a fused layer; those that are missing are numbers."""


class AdaptedLinearMethod(UnquantizedLinearMethod):  # type: ignore[misc]  # vLLM has no types
    """What a vLLM layer with an adapter computes.

    The layer's ``lora_A`` is (adapted parts, r, in), its ``lora_B`` (out of the adapted parts, r): of this rank.
    """

    def apply(self, layer: Any, x: Tensor, bias: Tensor | None = None) -> Tensor:
        parts = list(super().apply(layer, x, bias).split(layer.lora_sizes, dim=-1))
        down = nn.functional.linear(x, layer.lora_A.flatten(0, 1)).chunk(len(layer.lora_adapted), dim=-1)
        up = layer.lora_B.split([layer.lora_sizes[part] for part in layer.lora_adapted])
        for number, part in enumerate(layer.lora_adapted):
            parts[part] = parts[part] + layer.lora_scale * nn.functional.linear(down[number], up[number])
        return parts[0] if len(parts) == 1 else torch.cat(parts, dim=-1)


def adapt_models() -> None:
    """Give every model that vLLM builds in this process the adapter that its configuration names, if it names one."""
    load: Callable[..., None] = DummyModelLoader.load_weights

    def load_and_adapt(self: Any, model: nn.Module, model_config: Any) -> None:
        load(self, model, model_config)
        named = get_current_vllm_config().additional_config.get(ADAPTER)
        if named is not None:
            add_adapter(model, msgspec.convert(named, AdapterSpec))

    DummyModelLoader.load_weights = load_and_adapt


def add_adapter(model: nn.Module, spec: AdapterSpec) -> None:
    """Give vLLM's ``model`` an adapter that changes nothing yet.

    Raises:
        RuntimeError: a target is no linear layer of the model, or one that cannot have an adapter.
    """
    fused: dict[str, Sequence[str]] = getattr(model, "packed_modules_mapping", {})
    found = set()
    for name, layer in model.named_modules():
        last = name.rpartition(".")[2]
        parts = fused.get(last, [last])
        adapted = [number for number, part in enumerate(parts) if part in spec.targets]
        if not adapted or not isinstance(layer, LinearBase):
            continue
        found |= {parts[number] for number in adapted}
        _adapt(name, layer, len(parts), adapted, spec)
    if missing := sorted(set(spec.targets) - found):
        raise RuntimeError(f"vLLM has no linear layers for {', '.join(missing)}")


def _adapt(name: str, layer: Any, n_parts: int, adapted: list[int], spec: AdapterSpec) -> None:
    weight = layer.weight
    sizes = [weight.shape[0]] if n_parts == 1 else list(layer.output_partition_sizes)
    if type(layer.quant_method) is not UnquantizedLinearMethod or len(sizes) != n_parts:
        raise RuntimeError(f"{name} ({type(layer).__name__}) cannot have an adapter")
    like = {"device": weight.device, "dtype": weight.dtype}
    down = nn.Parameter(torch.zeros(len(adapted), spec.rank, weight.shape[1], **like), requires_grad=False)
    n_rows = sum(sizes[part] for part in adapted)
    up = nn.Parameter(torch.zeros(n_rows, spec.rank, **like), requires_grad=False)
    first_row = {part: sum(sizes[each] for each in adapted if each < part) for part in adapted}

    def load_down(parameter: Tensor, loaded: Tensor, shard: str | int | None = None) -> None:
        width = parameter.shape[2]
        start = layer.tp_rank * width if isinstance(layer, RowParallelLinear) else 0
        place = adapted.index(shard if isinstance(shard, int) else _SHARDS[shard])
        parameter.data[place].copy_(loaded.narrow(1, start, width))

    def load_up(parameter: Tensor, loaded: Tensor, shard: str | int | None = None) -> None:
        part = shard if isinstance(shard, int) else _SHARDS[shard]
        n_rows, rank = sizes[part], layer.tp_rank if isinstance(layer, ColumnParallelLinear) else 0
        if isinstance(layer, QKVParallelLinear) and part:
            rank //= layer.num_kv_head_replicas
        rows = parameter.data.narrow(0, first_row[part], n_rows)
        rows.copy_(loaded.narrow(0, rank * n_rows, n_rows))

    down.weight_loader, up.weight_loader = load_down, load_up  # type: ignore[attr-defined]
    layer.register_parameter("lora_A", down)
    layer.register_parameter("lora_B", up)
    layer.lora_sizes, layer.lora_adapted, layer.lora_scale = sizes, adapted, spec.alpha / spec.rank
    layer.quant_method.__class__ = AdaptedLinearMethod
