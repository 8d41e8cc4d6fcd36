"""Several processes that train one policy (FSDP2): what one of them is, and how rank 0 leads the others.

``torchrun --nproc-per-node=N -m echo2p2p learner …`` starts them. Rank 0 is the learner and the only one that the
swarm knows; the others wait for its orders, which travel as messages of msgpack on a group of their own. Weights,
gradients and the optimizer's state are spread over all; no rank but 0 ever holds more than one whole tensor of them.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from datetime import timedelta
from typing import TYPE_CHECKING, Any, Literal, cast

import msgspec
import torch
from torch import Tensor, distributed, nn
from torch.distributed.device_mesh import init_device_mesh

from echo2p2p.data.trajectory import Group

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

_ORDER_TIMEOUT = timedelta(days=7)
"""How long a rank waits for an order: as long as rank 0 may wait for rollouts."""
_STEP_TIMEOUT = timedelta(minutes=30)


def is_started_by_torchrun() -> bool:
    """Whether torchrun started several processes of which this is one."""
    return int(os.environ.get("WORLD_SIZE", "1")) > 1


class Order(msgspec.Struct, frozen=True):
    """What rank 0 has all ranks do, and what they need for it."""

    what: Literal["train", "read", "snapshot", "state", "load", "logprobs", "stop"]
    groups: list[Group] = []
    counters: dict[str, int] = {}


class Ranks:
    """This process among those that train together.

    Args:
        device: of this rank: ``cpu`` (gloo) or ``cuda`` (nccl); the GPU is the one of ``LOCAL_RANK``.

    Raises:
        RuntimeError: torch.distributed cannot be set up from the environment.
    """

    def __init__(self, device: str) -> None:
        kind = device.partition(":")[0]
        self._owner = not distributed.is_initialized()
        if kind == "cuda":
            torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")))
        if self._owner:
            distributed.init_process_group("nccl" if kind == "cuda" else "gloo", timeout=_STEP_TIMEOUT)
        self.rank, self.size = distributed.get_rank(), distributed.get_world_size()
        self._orders = distributed.new_group(backend="gloo", timeout=_ORDER_TIMEOUT)
        self.mesh: DeviceMesh = init_device_mesh(kind, (self.size,))

    def tell(self, order: Order) -> None:
        """On rank 0: give everybody else ``order``."""
        body = torch.frombuffer(bytearray(msgspec.msgpack.encode(order)), dtype=torch.uint8)
        distributed.broadcast(torch.tensor([len(body)]), 0, group=self._orders)
        distributed.broadcast(body, 0, group=self._orders)

    def hear(self) -> Order:
        """On all others: wait for the next one."""
        length = torch.zeros(1, dtype=torch.int64)
        distributed.broadcast(length, 0, group=self._orders)
        body = torch.empty(int(length), dtype=torch.uint8)
        distributed.broadcast(body, 0, group=self._orders)
        return msgspec.msgpack.decode(body.numpy().tobytes(), type=Order)

    def total(self, values: Sequence[float]) -> list[float]:
        """The sum over all ranks of each value."""
        return self._reduced(values, distributed.ReduceOp.SUM)

    def largest(self, values: Sequence[float]) -> list[float]:
        """The largest of all ranks of each value."""
        return self._reduced(values, distributed.ReduceOp.MAX)

    def shard(self, model: nn.Module) -> None:
        """Spread ``model`` over the ranks, layer by layer; from here on they run it together."""
        from torch.distributed.fsdp import fully_shard

        layers = set(getattr(model, "_no_split_modules", None) or ())
        for module in list(model.modules()):
            if type(module).__name__ in layers:
                fully_shard(module, mesh=self.mesh)
        fully_shard(model, mesh=self.mesh)

    def close(self) -> None:
        """Leave the others."""
        if self._owner:
            distributed.destroy_process_group()

    def _reduced(self, values: Sequence[float], operation: Any) -> list[float]:
        tensor = torch.tensor(values, dtype=torch.float64)
        distributed.all_reduce(tensor, operation, group=self._orders)
        return cast("list[float]", tensor.tolist())


def whole(tensor: Tensor) -> Tensor:
    """All of ``tensor``, which may be spread over the ranks; then all of them must ask for it."""
    gather = getattr(tensor, "full_tensor", None)
    return tensor.detach() if gather is None else cast("Tensor", gather()).detach()


def fill(target: Tensor, source: Tensor) -> None:
    """Write ``source``, whole and of rank 0, into ``target``, which may be spread over the ranks."""
    mesh = getattr(target, "device_mesh", None)
    if mesh is None:
        target.copy_(source)
        return
    from torch.distributed.tensor import DTensor, distribute_tensor

    spread = cast("DTensor", target)
    target.copy_(distribute_tensor(source.to(mesh.device_type), mesh, spread.placements))


def gathered(state: Mapping[str, Tensor], dtype: torch.dtype | None, *, keep: bool) -> dict[str, Tensor]:
    """``state`` whole, in ``dtype`` (None: as it is), one tensor at a time; nothing of it unless ``keep``.

    Tied names share one tensor, so that a snapshot sees that they are tied.
    """
    held: dict[int, Tensor] = {}
    found: dict[str, Tensor] = {}
    for name, tensor in state.items():
        if id(tensor) not in held:
            full = whole(tensor)
            if hasattr(tensor, "full_tensor"):
                full = full.cpu()  # one device may have no room for what is spread over several
            if dtype is not None and full.is_floating_point():
                full = full.to(dtype)
            # Only the name is remembered elsewhere: all ranks gather the same tensors in the same order.
            held[id(tensor)] = full if keep else full.new_empty(0)
        found[name] = held[id(tensor)]
    return found if keep else {}
