"""Whether weights are fit to be published, or to be installed: finite, and not blown up. Pure: no I/O, no clock.

A tensor of the new weights passes if every element of it is finite, and if

    RMS(new − base) ≤ max_change · max(RMS(base), floor)

where base is the tensor of that name in the weights published last. The floor is the median RMS of the base's
tensors (those that are all zero left out), or ``change_floor`` where that is larger: a tensor that starts at
zero, a bias or an adapter, may grow to the size that tensors of this policy have. One update of Adam moves an
element by about the learning rate, thousands of times less than the rule allows, so it stops explosions and
nothing else. Integers and booleans always pass, as do changes of tensors that the base does not have in the
same shape.

It works in blocks: some 60 MiB beside the two snapshots, however large they are.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from statistics import median
from typing import TYPE_CHECKING

from echo2p2p.errors import UnsoundWeights
from echo2p2p.weights.snapshot import Snapshot, TensorSpec

if TYPE_CHECKING:
    import torch

BLOCK_ELEMENTS = 2**20

_INTEGERS = frozenset({"bool", "uint8", "int8", "uint16", "int16", "uint32", "int32", "uint64", "int64"})


@dataclass(frozen=True)
class GateLimits:
    """How much may change from one published version to the next.

    Attributes:
        max_change: in multiples of the RMS of the base tensor; 0 leaves only the check that all is finite.
        change_floor: no tensor counts with a smaller RMS than this, whatever the policy's others have.
    """

    max_change: float = 10.0
    change_floor: float = 1e-3


@dataclass(frozen=True)
class Passed:
    """What the gate saw: the largest relative change and whose it was; 0 and empty if there was no base."""

    change: float
    tensor: str


DEFAULT_GATE = GateLimits()


def check(new: Snapshot, base: Snapshot | None = None, limits: GateLimits = DEFAULT_GATE) -> Passed:
    """Let ``new`` through, or say what is wrong with it. Blocks.

    Args:
        base: the weights published last; None to check only that all is finite.

    Raises:
        UnsoundWeights: it names the tensor, and what it holds or how far it went.
    """
    known = (
        {} if base is None or limits.max_change <= 0 else {spec.name: spec for spec in base.layout.tensors}
    )
    changes: list[tuple[str, float, float]] = []
    for spec in new.layout.tensors:
        if spec.dtype in _INTEGERS:
            continue
        old = known.get(spec.name)
        if base is None or old is None or (old.dtype, old.shape) != (spec.dtype, spec.shape):
            _check_finite(new, spec)
        elif spec.nbytes:
            changes.append((spec.name, *_rms(new, spec, base, old)))
    floor = max(limits.change_floor, median([size for _, _, size in changes if size > 0] or [0.0]))
    relative = [(change / max(size, floor), name) for name, change, size in changes]
    worst, name = max(relative, default=(0.0, ""))
    if worst > limits.max_change:
        raise UnsoundWeights(
            f"tensor {name} changed by {worst:.3g} times its size, {limits.max_change:g} times are allowed",
            hint="lower the learning rate or the gradient norm; weights.max_change sets the limit",
        )
    return Passed(worst, name)


def _check_finite(snapshot: Snapshot, spec: TensorSpec) -> None:
    for block in _blocks(snapshot, spec):
        _check_block(block, spec.name)


def _rms(new: Snapshot, spec: TensorSpec, base: Snapshot, old: TensorSpec) -> tuple[float, float]:
    """(RMS of the change, RMS of the base) of one tensor, which is checked to be finite on the way."""
    change = size = 0.0
    for block, before in zip(_blocks(new, spec), _blocks(base, old), strict=True):
        _check_block(block, spec.name)
        size += _square(before)
        change += _square(block - before)
    n = math.prod(spec.shape)
    return math.sqrt(change / n), math.sqrt(size / n)


def _check_block(block: torch.Tensor, name: str) -> None:
    # The largest magnitude is NaN if any element is, and infinite if any is.
    if not math.isfinite(float(block.abs().amax())):
        raise UnsoundWeights(
            f"tensor {name} is not finite",
            hint="the policy has diverged: lower the learning rate or the gradient norm",
        )


def _square(block: torch.Tensor) -> float:
    import torch

    square = float(torch.dot(block, block))
    # 1e30 squared is infinite in float32; that is rare, and float64 takes four times as long.
    return (
        square if math.isfinite(square) else float(torch.linalg.vector_norm(block, dtype=torch.float64)) ** 2
    )


def _blocks(snapshot: Snapshot, spec: TensorSpec) -> Iterator[torch.Tensor]:
    """The elements of one tensor, ``BLOCK_ELEMENTS`` at a time, in float32 or wider; the parts are views or new."""
    import torch

    if not spec.nbytes:
        return
    dtype: torch.dtype = getattr(torch, spec.dtype)
    wide = torch.float64 if spec.dtype == "float64" else torch.float32
    step = BLOCK_ELEMENTS * dtype.itemsize
    end = spec.offset + spec.nbytes
    for start in range(spec.offset, end, step):
        raw = torch.frombuffer(bytearray(snapshot.data[start : min(start + step, end)]), dtype=torch.uint8)
        yield raw.view(dtype).to(wide)
