"""The weights of an engine's model: how one policy version replaces another in place.

A version is staged while the model generates: what differs from the held snapshot is found and moved to the
model's device. The swap, for which generation pauses, then writes no more than that. What the model holds is read
back afterwards, while it generates again.

Guarantees:

* Everything that can be wrong with a snapshot is found before the first byte is written.
* What was staged over other weights than those held is not trusted: then everything is written.
* A swap that fails leaves the old version whole. No swap happens while the weights are read back.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from echo2p2p.data.policy import DTYPES, is_out_of_memory
from echo2p2p.errors import EngineError, OutOfMemory
from echo2p2p.weights.difference import TensorDifference, difference
from echo2p2p.weights.snapshot import Snapshot, fingerprint_of, layout_of

_BITS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
"""What words are moved as, by their bytes: every device can scatter these, and none of them rounds."""


@dataclass(frozen=True)
class _Write:
    """What the pause writes into one tensor.

    Attributes:
        target: the tensor's words, flat; ``words`` go to the indices ``at`` (int64) of it, all on one device.
        copies: (target, source): stretches of the model that are copied from the snapshot.
    """

    target: Tensor
    at: Tensor
    words: Tensor
    copies: tuple[tuple[Tensor, Tensor], ...]


@dataclass(frozen=True)
class Staged:
    """A version that can be swapped in; ``writes`` turn ``base`` into it, and are None if all is to be written."""

    snapshot: Snapshot
    version: int
    base: Snapshot | None
    writes: tuple[_Write, ...] | None


class InstalledWeights:
    """The tensors of one model, and what is known of them.

    :meth:`stage` and :meth:`read_back` may run on a thread of their own while the model generates on another;
    :meth:`swap` and :meth:`install` may not.

    Args:
        adopts_dtype: give the weights the dtype of the first snapshot.
        published: which of the model's tensors are replaced and proven; all of them, or those of its adapter.
    """

    def __init__(
        self,
        model: nn.Module,
        *,
        adopts_dtype: bool,
        published: Callable[[nn.Module], Mapping[str, Tensor]] = nn.Module.state_dict,
    ) -> None:
        self._model = model
        self._published = published
        self._state = published(model)
        self._adopts_dtype = adopts_dtype
        self._snapshot: Snapshot | None = None
        self._version = -1
        self._lock = threading.Lock()

    @property
    def version(self) -> int:
        """The version that was swapped in last; −1 for none."""
        return self._version

    @property
    def device(self) -> torch.device:
        device: torch.device = next(iter(self._state.values())).device
        return device

    def release(self) -> None:
        """Let go of the model and of the held snapshot; nothing can be done with this any more."""
        self._model, self._state, self._snapshot = nn.Module(), {}, None

    def stage(self, snapshot: Snapshot, version: int) -> Staged:
        """Find out what is to be written; touches nothing. The first version is to be written whole.

        Raises:
            EngineError: the snapshot does not fit the model.
            OutOfMemory: the device has no room for what is to be written.
        """
        base = self._snapshot
        if base is None:
            return Staged(snapshot, version, None, None)
        self._check_fit(snapshot, version)
        with memory_errors(f"staging version {version}"):
            incoming = snapshot.state_dict()
            writes = tuple(self._prepared(each, incoming[each.name]) for each in difference(base, snapshot))
        return Staged(snapshot, version, base, writes)

    def swap(self, staged: Staged) -> None:
        """Write ``staged`` into the model.

        Raises:
            EngineError, OutOfMemory: it does not fit or could not be written; the old version is whole.
        """
        self._swap(staged, prove=False)

    def install(self, snapshot: Snapshot, version: int) -> str:
        """Write every tensor, whatever is believed to be there, and return the fingerprint of what then is.

        Raises:
            EngineError, OutOfMemory: as :meth:`swap`, and if that is not the fingerprint of ``snapshot``.
        """
        return self._swap(Staged(snapshot, version, None, None), prove=True)

    @torch.inference_mode()
    def read_back(self) -> str:
        """The fingerprint of what the model holds."""
        with self._lock:
            # Through the model, not through our own references: what generates is what is proven.
            return fingerprint_of(self._published(self._model))

    @torch.inference_mode()
    def _swap(self, staged: Staged, *, prove: bool) -> str:
        snapshot, version = staged.snapshot, staged.version
        in_place = staged.writes is not None and staged.base is self._snapshot
        if not in_place:
            if self._adopts_dtype and self._snapshot is None:
                self._adopt_dtype(snapshot)
            self._check_fit(snapshot, version)
        expected = snapshot.fingerprint() if prove else ""
        held, done = "", False
        with self._lock:
            try:
                with memory_errors(f"installing version {version}"):
                    if in_place and staged.writes is not None:
                        _write(staged.writes)
                    else:
                        self._write_all(snapshot)
                    held = fingerprint_of(self._published(self._model)) if prove else ""
                done = held == expected
            finally:
                if not done and self._snapshot is not None:
                    self._write_all(self._snapshot)
            if not done:
                raise EngineError(
                    f"after installing version {version} the engine holds {held[:16]}…, not {expected[:16]}…",
                    hint="this machine's memory cannot be trusted",
                )
            self._snapshot, self._version = snapshot, version
        return held

    def _prepared(self, change: TensorDifference, new: Tensor) -> _Write:
        held = self._state[change.name]
        bits = _BITS[held.element_size()]
        if not held.is_contiguous():
            # Its words do not lie in the order in which they are counted.
            nothing, at = torch.empty(2, 0, dtype=bits), torch.empty(0, dtype=torch.int64)
            return _Write(nothing[0], at, nothing[1], ((held, new),))
        words, new_words = held.reshape(-1).view(bits), new.reshape(-1).view(bits)
        return _Write(
            words,
            torch.from_numpy(change.at).to(held.device),
            torch.from_numpy(change.words).view(bits).to(held.device),
            tuple((words[start:stop], new_words[start:stop]) for start, stop in change.runs),
        )

    def _write_all(self, snapshot: Snapshot) -> None:
        for name, tensor in snapshot.state_dict().items():
            self._state[name].copy_(tensor)

    def _adopt_dtype(self, snapshot: Snapshot) -> None:
        """Give the weights, and only them, the one dtype of ``snapshot``: rotary tables stay float32."""
        incoming = snapshot.state_dict().values()
        dtypes = {tensor.dtype for tensor in incoming if tensor.is_floating_point()}
        if len(dtypes) == 1 and dtypes <= set(DTYPES.values()):
            [dtype] = dtypes
            for tensor in self._model.state_dict(keep_vars=True).values():
                if tensor.is_floating_point():
                    tensor.data = tensor.data.to(dtype)
            self._state = self._published(self._model)

    def _check_fit(self, snapshot: Snapshot, version: int) -> None:
        incoming = snapshot.state_dict()
        if incoming.keys() != self._state.keys():
            odd = sorted(incoming.keys() ^ self._state.keys())
            raise EngineError(
                f"version {version} has other tensors than the model: {', '.join(odd[:4])} ({len(odd)})"
            )
        for name, tensor in incoming.items():
            mine = self._state[name]
            if tensor.shape != mine.shape or tensor.dtype != mine.dtype:
                raise EngineError(
                    f"version {version}: {name} is {tensor.dtype} {tuple(tensor.shape)}, the model's is "
                    f"{mine.dtype} {tuple(mine.shape)}",
                    hint="give the engine the dtype that the learner publishes in",
                )
        tied = layout_of(self._state).aliases
        if tied != snapshot.layout.aliases:
            odd = sorted(tied.keys() ^ snapshot.layout.aliases.keys()) or sorted(tied)
            raise EngineError(f"version {version} and the model do not tie the same tensors: {odd[:4]}")


def _write(writes: tuple[_Write, ...]) -> None:
    for write in writes:
        write.target.scatter_(0, write.at, write.words)
        for target, source in write.copies:
            target.copy_(source)


@contextmanager
def memory_errors(what: str) -> Iterator[None]:
    """Turn torch's errors into EngineError, or OutOfMemory where there was no room for ``what``."""
    try:
        yield
    except (RuntimeError, MemoryError) as error:
        if not is_out_of_memory(error):
            raise EngineError(f"{what} failed: {error}") from error
        if torch.cuda.is_available():
            torch.cuda.empty_cache()
        raise OutOfMemory(f"{what} did not fit into memory", hint="lower max_batch_tokens") from error
