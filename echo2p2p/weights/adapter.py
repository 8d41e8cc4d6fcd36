"""Low-rank adapters (LoRA, arXiv 2106.09685): a policy that is a frozen base and a small trained rest.

Only the adapter is trained, published, patched and fingerprinted; everybody has the base from elsewhere, and its
fingerprint is pinned in the run. Engine and trainer compute ``W x + (α/r) B A x`` alike, and do not merge: in
bfloat16 a merged weight would swallow every change smaller than half a unit in its last place.
"""

from __future__ import annotations

from typing import Annotated

import msgspec
import torch
from msgspec import Meta
from torch import Tensor, nn

from echo2p2p.errors import SettingsError
from echo2p2p.weights.snapshot import Snapshot, fingerprint_of, from_state_dict

ADAPTER_FILE = "adapter.json"
"""The file of a run that says that its versions are adapters: an :class:`AdapterSpec`, pinned like its config."""
_MAX_BYTES = 65_536
_A, _B = "lora_A", "lora_B"


class AdapterSpec(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What all versions of a run have in common.

    Attributes:
        rank, alpha: r and α.
        targets: last names of the linear layers that have an adapter.
        dtype: which base and adapters are generated with, by torch's name.
        base: fingerprint of the base's weights in ``dtype``, in hex.
    """

    rank: Annotated[int, Meta(ge=1, le=4096)]
    alpha: Annotated[float, Meta(gt=0, le=1e6)]
    targets: Annotated[tuple[Annotated[str, Meta(max_length=128)], ...], Meta(min_length=1, max_length=64)]
    dtype: Annotated[str, Meta(pattern=r"^(float32|bfloat16)\Z")]
    base: Annotated[str, Meta(pattern=r"^[0-9a-f]{64}\Z")]

    def encoded(self) -> bytes:
        """The content of ``ADAPTER_FILE``."""
        return msgspec.json.format(msgspec.json.encode(self))


def decode_spec(content: bytes) -> AdapterSpec:
    """Read ``ADAPTER_FILE``. Raises SettingsError if it is none."""
    try:
        if len(content) > _MAX_BYTES:
            raise SettingsError(f"{ADAPTER_FILE} has {len(content)} bytes")
        return msgspec.json.decode(content, type=AdapterSpec)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise SettingsError(f"{ADAPTER_FILE} cannot be read: {error}") from error


class AdaptedLinear(nn.Linear):
    """A linear layer with an adapter; ``lora_A`` is (r, in), ``lora_B`` (out, r). Made by :func:`add_adapter`."""

    lora_A: nn.Parameter  # noqa: N815 - LoRA's names
    lora_B: nn.Parameter  # noqa: N815
    scale: float

    def forward(self, input: Tensor) -> Tensor:  # noqa: A002 - torch's name
        rest = nn.functional.linear(nn.functional.linear(input, self.lora_A), self.lora_B)
        return super().forward(input) + self.scale * rest


def add_adapter(
    model: nn.Module, spec: AdapterSpec, *, dtype: torch.dtype | None = None, seed: int = 0
) -> None:
    """Give ``model``'s targets a new adapter, which changes nothing yet: B is zero. A is drawn from ``seed``.

    Args:
        dtype: of the adapter; None for the one of ``spec``.

    Raises:
        SettingsError: the model has no linear layer of one of these names.
    """
    rank, dtype = spec.rank, dtype or getattr(torch, spec.dtype)
    generator = torch.Generator().manual_seed(seed)
    found = set()
    for name, module in model.named_modules():
        last = name.rpartition(".")[2]
        if last not in spec.targets or not isinstance(module, nn.Linear):
            continue
        found.add(last)
        out_features, in_features = module.weight.shape
        bound = in_features**-0.5
        drawn = torch.empty(rank, in_features).uniform_(-bound, bound, generator=generator)
        device = module.weight.device
        module.__class__ = AdaptedLinear
        module.register_parameter(_A, nn.Parameter(drawn.to(device, dtype)))
        module.register_parameter(
            _B, nn.Parameter(torch.zeros(out_features, rank, device=device, dtype=dtype))
        )
        module.scale = spec.alpha / rank  # type: ignore[assignment]
    if missing := sorted(set(spec.targets) - found):
        raise SettingsError(
            f"the policy has no linear layers named {', '.join(missing)}",
            hint="name others in policy.lora.targets",
        )


def adapter_state(model: nn.Module) -> dict[str, Tensor]:
    """The adapter's tensors by name: what is published."""
    return {name: tensor for name, tensor in model.state_dict().items() if name.endswith((_A, _B))}


def check_base(model: nn.Module, spec: AdapterSpec) -> None:
    """Raises SettingsError if ``model``, which has no adapter yet, is not the base of ``spec``."""
    found = fingerprint_of(model.state_dict())
    if found != spec.base:
        raise SettingsError(
            f"the base weights here are {found[:16]}…, the run's adapters belong to {spec.base[:16]}…",
            hint="give policy.path the very folder that the learner trains from",
        )


def merge(base: nn.Module, adapter: Snapshot, spec: AdapterSpec) -> Snapshot:
    """The policy as plain weights, in ``spec.dtype``: each target's W + (α/r) B A, computed in float32.

    Args:
        base: without an adapter, in ``spec.dtype``.

    Raises:
        SettingsError: ``base`` is another one, or the adapter does not fit it.
    """
    check_base(base, spec)
    merged, tensors = base.state_dict(), adapter.state_dict()
    for name, down in tensors.items():
        stem, _, last = name.rpartition(".")
        if last != _A:
            continue
        weight, up = merged.get(f"{stem}.weight"), tensors.get(f"{stem}.{_B}")
        if weight is None or up is None or weight.shape != (up.shape[0], down.shape[1]):
            raise SettingsError(f"the adapter's {name} does not fit the base")
        change = (up.float() @ down.float()) * (spec.alpha / spec.rank)
        merged[f"{stem}.weight"] = (weight.float() + change.to(weight.device)).to(getattr(torch, spec.dtype))
    return from_state_dict(merged)


def for_peft(adapter: Snapshot, spec: AdapterSpec) -> tuple[Snapshot, bytes]:
    """The same adapter under the names that the library peft gives its tensors, and its ``adapter_config.json``."""
    renamed = {f"base_model.model.{name}.weight": tensor for name, tensor in adapter.state_dict().items()}
    config = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "r": spec.rank,
        "lora_alpha": spec.alpha,
        "lora_dropout": 0.0,
        "bias": "none",
        "target_modules": list(spec.targets),
        "inference_mode": True,
    }
    return from_state_dict(renamed), msgspec.json.format(msgspec.json.encode(config))
