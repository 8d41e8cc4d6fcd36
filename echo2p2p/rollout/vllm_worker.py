"""What vLLM's own processes run for :mod:`echo2p2p.rollout.vllm_engine`: weights in, weights out, log-probabilities.

vLLM imports this module in each of its workers, before it builds the model, and makes :class:`WorkerExtension` a base
of its worker class; the engine calls the methods by ``collective_rpc``. Importing it therefore changes the process:

* It ends when the process that started the engine does, whatever ended that.
* The CPU build keeps linear weights as they are, instead of packed copies that no later version would reach.
* Models get the adapter that :mod:`echo2p2p.rollout.vllm_adapter` finds in their configuration.
"""

from __future__ import annotations

import os
import select
import signal
import threading
from bisect import bisect_right
from collections.abc import Sequence
from typing import Any

import msgspec
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from echo2p2p.rollout.places import Piece, Place
from echo2p2p.rollout.shared_memory import Segment, map_segment
from echo2p2p.rollout.vllm_process import OWNER
from echo2p2p.weights.snapshot import Layout

_BITS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_REORDERED = ("FusedMoE", "MLAAttention")
"""Layers that compute with reordered copies of their weights, made when these were first loaded."""


class WorkerExtension:
    """Methods of every vLLM worker. Errors reach the engine as text."""

    rank: int
    model_runner: Any
    vllm_config: Any
    _echo2p2p_places: list[list[Place]]
    _echo2p2p_parameters: list[Tensor]

    @torch.inference_mode()
    def echo2p2p_open(self, layouts: list[bytes]) -> bytes:
        """Find out where this worker keeps the words of the snapshots that together are its weights.

        Args:
            layouts: msgpack of a :class:`echo2p2p.weights.snapshot.Layout` each; the other methods count them.

        Returns:
            msgpack: (places for each, whether log-probabilities are over the whole vocabulary under top_p too).

        Raises:
            RuntimeError: the model does something with its weights that cannot be repeated for one version after
                the other, or read back.
        """
        model: nn.Module = self.model_runner.get_model()
        for name, module in model.named_modules():
            if any(kind in type(module).__name__ for kind in _REORDERED):
                raise RuntimeError(f"{name} ({type(module).__name__}) computes with reordered weights")
        if self.vllm_config.model_config.quantization:
            raise RuntimeError("the policy is quantised")
        parameters = dict(model.named_parameters())
        if packed := [name for name, each in parameters.items() if not each.numel()]:
            raise RuntimeError(f"vLLM has packed {packed[0]} ({len(packed)} weights)")
        self._echo2p2p_parameters = _storages(model)
        self._echo2p2p_places = [
            _places(model, msgspec.msgpack.decode(layout, type=Layout), self._echo2p2p_parameters)
            for layout in layouts
        ]
        held = {place.parameter for places in self._echo2p2p_places for place in places}
        for name, parameter in parameters.items():
            if _number(self._echo2p2p_parameters, parameter) not in held:
                raise RuntimeError(f"nothing in a snapshot belongs into {name}")
        return msgspec.msgpack.encode((self._echo2p2p_places, _report_whole_vocabulary(self.model_runner)))

    @torch.inference_mode()
    def echo2p2p_write(self, part: int, segment: bytes, pieces: list[bytes]) -> None:
        """Write this rank's ``pieces`` (msgpack of a list of :class:`Piece`, one a rank) from shared memory.

        Args:
            part: which of the layouts their places are of.
            segment: msgpack of a :class:`Segment`.
        """
        memory = _shared(segment)
        for piece in msgspec.msgpack.decode(pieces[self.rank], type=list[Piece]):
            place = self._echo2p2p_places[part][piece.place]
            target = self._words(place)
            if not place.lies_in_order:
                [(_, count, byte)] = piece.runs
                target.copy_(_slice(memory, byte, count, target.dtype).reshape(place.shape))
                continue
            flat = target.reshape(-1)
            if piece.count:
                at = _slice(memory, piece.at, piece.count, torch.int64).to(flat.device)
                words = _slice(memory, piece.words, piece.count, flat.dtype).to(flat.device)
                flat.scatter_(0, at, words)
            for start, count, byte in piece.runs:
                flat[start : start + count].copy_(_slice(memory, byte, count, flat.dtype))
        self._wait()

    @torch.inference_mode()
    def echo2p2p_read(self, part: int, segment: bytes, starts: list[int], first: int, last: int) -> None:
        """Copy this rank's places of tensors ``first`` … ``last - 1`` into shared memory, from byte ``starts[rank]``.

        They follow each other in the order in which :meth:`echo2p2p_open` named them, each on a multiple of 8 bytes.
        ``part`` and ``segment`` are as for :meth:`echo2p2p_write`.
        """
        memory, byte = _shared(segment), starts[self.rank]
        for place in self._echo2p2p_places[part]:
            if first <= place.tensor < last:
                source = self._words(place)
                target = _slice(memory, byte, place.n_words, source.dtype)
                target.copy_(source.reshape(-1))
                byte += -(-target.nbytes // 8) * 8
        self._wait()

    def _words(self, place: Place) -> Tensor:
        storage = self._echo2p2p_parameters[place.parameter]
        return torch.as_strided(storage, place.shape, place.steps, place.at)

    def _wait(self) -> None:
        if torch.cuda.is_available():
            torch.cuda.synchronize()


class _Recorder(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Takes down which words of ``source`` are copied where, instead of copying them."""

    def __init__(self, source: Tensor, layout: Layout, parameters: list[Tensor]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._source = source.untyped_storage().data_ptr()
        self._layout = layout
        self._offsets = [spec.offset for spec in layout.tensors]
        self._parameters = parameters
        self.places: list[Place] = []
        self.problem = ""

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func is torch.ops.aten.copy_.default and _number(self._parameters, args[0]) is not None:
            self._take(args[0], args[1])
            return args[0]
        return func(*args, **(kwargs or {}))

    def _take(self, target: Tensor, source: Tensor) -> None:
        byte = source.storage_offset() * source.element_size()
        tensor = bisect_right(self._offsets, byte) - 1
        if source.untyped_storage().data_ptr() != self._source:
            self.problem = "a weight is computed from those of the snapshot"
        elif source.dtype != target.dtype or source.shape != target.shape:
            name = self._layout.tensors[tensor].name
            self.problem = (
                f"{name} is {source.dtype} {tuple(source.shape)}, "
                f"the engine's {target.dtype} {tuple(target.shape)}"
            )
        else:
            kept = [index for index, size in enumerate(source.shape) if size != 1]
            shape = tuple(source.shape[index] for index in kept)
            parameter = _number(self._parameters, target)
            self.places.append(
                Place(
                    tensor,
                    shape,
                    (byte - self._offsets[tensor]) // source.element_size(),
                    tuple(source.stride(index) for index in kept),
                    -1 if parameter is None else parameter,
                    int(target.storage_offset()),
                    tuple(target.stride(index) for index in kept),
                )
            )


def _places(model: Any, layout: Layout, parameters: list[Tensor]) -> list[Place]:
    """Run vLLM's weight loaders on weights that are nowhere in memory, and see what goes where."""
    source = torch.empty(max(layout.nbytes, 1), dtype=torch.uint8)  # never touched, so never backed by pages
    weights: dict[str, Tensor] = {}
    for spec in layout.tensors:
        raw = source[spec.offset : spec.offset + spec.nbytes]
        weights[spec.name] = raw.view(getattr(torch, spec.dtype)).reshape(spec.shape)
    for alias, target in layout.aliases.items():
        weights[alias] = weights[target]
    recorder = _Recorder(source, layout, parameters)
    with recorder:
        model.load_weights(iter(weights.items()))
    if recorder.problem:
        raise RuntimeError(recorder.problem)
    return recorder.places


def _storages(model: nn.Module) -> list[Tensor]:
    """Every parameter and buffer as the words of its whole storage, tied ones once."""
    found: dict[int, Tensor] = {}
    for tensor in (*model.parameters(), *model.buffers()):
        storage = tensor.untyped_storage()
        if storage.nbytes() and storage.data_ptr() not in found:
            bits = torch.empty(0, dtype=_BITS[tensor.element_size()], device=tensor.device)
            found[storage.data_ptr()] = bits.set_(storage)
    return list(found.values())


def _number(storages: Sequence[Tensor], tensor: Tensor) -> int | None:
    pointer = tensor.untyped_storage().data_ptr()
    return next((n for n, each in enumerate(storages) if each.untyped_storage().data_ptr() == pointer), None)


class _WholeVocabulary(nn.Module):
    """vLLM's sampler after the temperature, with log-probabilities as they are before top_p cuts the tail off."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self._inner = inner

    def forward(self, logits: Tensor, generators: Any, k: Any, p: Any, **further: Any) -> tuple[Tensor, Any]:
        logprobs = logits.log_softmax(dim=-1, dtype=torch.float32)
        sampled, _ = self._inner(logits, generators, k, p, **further)
        return sampled, logprobs


def _report_whole_vocabulary(model_runner: Any) -> bool:
    sampler = getattr(model_runner, "sampler", None)
    inner = getattr(sampler, "topk_topp_sampler", None)
    if sampler is None or not isinstance(inner, nn.Module):
        return False
    if not isinstance(inner, _WholeVocabulary):
        sampler.topk_topp_sampler = _WholeVocabulary(inner)
    return True


def _shared(segment: bytes) -> Tensor:
    """The engine's shared memory as bytes. Raises EngineError: it is not there, or not what the engine named."""
    named = msgspec.msgpack.decode(segment, type=Segment)
    memory = map_segment(named, owner=int(os.environ[OWNER]))
    if not memory:
        return torch.empty(0, dtype=torch.uint8)
    # No explicit close: the mapping goes with the last tensor that looks into it.
    return torch.frombuffer(memory, dtype=torch.uint8)


def _slice(memory: Tensor, byte: int, count: int, dtype: torch.dtype) -> Tensor:
    return memory[byte : byte + count * dtype.itemsize].view(dtype)


def _end_with(owner: int) -> None:
    """End this process, and the one between, as soon as ``owner`` is gone."""
    try:
        handle = os.pidfd_open(owner)
    except ProcessLookupError:
        os._exit(1)

    def wait() -> None:
        select.select([handle], [], [])
        if os.getppid() not in (owner, 1):
            os.kill(os.getppid(), signal.SIGKILL)
        os._exit(1)

    threading.Thread(target=wait, name="echo2p2p-owner", daemon=True).start()


def _keep_weights_unpacked() -> None:
    from vllm.model_executor.layers import utils
    from vllm.platforms import current_platform

    def plain(layer: Any, remove_weight: bool = False) -> None:  # noqa: ARG001 - vLLM's signature
        layer.cpu_linear = nn.functional.linear

    if current_platform.is_cpu():
        utils.dispatch_cpu_unquantized_gemm = plain


if OWNER in os.environ:
    from echo2p2p.rollout.vllm_adapter import adapt_models

    _end_with(int(os.environ[OWNER]))
    _keep_weights_unpacked()
    adapt_models()
