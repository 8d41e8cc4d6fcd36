"""A policy's weights as one flat buffer, bit for bit, and the layout that says which bytes are which tensor.

Guarantees:

* A snapshot has the bits of the state dict that it was made from, in every dtype: nothing is cast.
* One state dict has one layout: tensors sorted by name, each on the next 64-byte boundary, gaps zero, tied
  tensors stored once. So equal weights give equal bytes, and equal bytes an equal fingerprint.
* A layout that came from elsewhere is valid only if it is exactly the one that its tensors determine.

torch is imported inside the functions that touch tensors, so that reading a manifest does not need it.
"""

from __future__ import annotations

import re
import warnings
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Annotated

import msgspec
from blake3 import blake3
from msgspec import Meta

from echo2p2p.errors import ManifestError

if TYPE_CHECKING:
    import torch

ALIGNMENT = 64
"""Every tensor starts on a multiple of this many bytes, so any dtype can be viewed in place."""
MAX_TENSORS = 10_000
MAX_SNAPSHOT_BYTES = 2**50

DTYPE_BYTES = {
    "bool": 1,
    "uint8": 1,
    "int8": 1,
    "float8_e4m3fn": 1,
    "float8_e4m3fnuz": 1,
    "float8_e5m2": 1,
    "float8_e5m2fnuz": 1,
    "float8_e8m0fnu": 1,
    "uint16": 2,
    "int16": 2,
    "float16": 2,
    "bfloat16": 2,
    "uint32": 4,
    "int32": 4,
    "float32": 4,
    "uint64": 8,
    "int64": 8,
    "float64": 8,
}
"""The dtypes that travel, by torch's name, with the bytes of one element."""

_DOMAIN = b"echo2p2p/1/snapshot"
_NAME = re.compile(r"[A-Za-z0-9._-]{1,256}\Z")
_encoder = msgspec.msgpack.Encoder(order="deterministic")

Size = Annotated[int, Meta(ge=0, le=MAX_SNAPSHOT_BYTES)]


class TensorSpec(msgspec.Struct, frozen=True):
    """Where one tensor lies. ``offset`` and ``nbytes`` in bytes; ``dtype`` a key of ``DTYPE_BYTES``."""

    name: Annotated[str, Meta(min_length=1, max_length=256)]
    dtype: Annotated[str, Meta(max_length=32)]
    shape: Annotated[tuple[Size, ...], Meta(max_length=16)]
    offset: Size
    nbytes: Size


class Layout(msgspec.Struct, frozen=True):
    """All tensors of a snapshot, sorted by name, and its aliases: tied names → the name that is stored."""

    tensors: Annotated[tuple[TensorSpec, ...], Meta(max_length=MAX_TENSORS)]
    aliases: dict[str, str]

    @property
    def nbytes(self) -> int:
        """Bytes of the whole snapshot: the end of its last tensor."""
        return self.tensors[-1].offset + self.tensors[-1].nbytes if self.tensors else 0

    def canonical_bytes(self) -> bytes:
        """The one encoding of this layout, as it goes into the fingerprint."""
        return _encoder.encode(self)

    def validate(self) -> None:
        """Check that every name, dtype, size and offset is what it must be.

        Raises:
            ManifestError: it names the tensor and what is wrong with it.
        """
        if len(self.tensors) + len(self.aliases) > MAX_TENSORS:
            raise ManifestError(f"more than {MAX_TENSORS} tensors in one layout")
        end = 0
        previous = ""
        for spec in self.tensors:
            _check_name(spec.name)
            if spec.name <= previous:
                raise ManifestError(f"tensor {spec.name} is out of order or named twice")
            if spec.dtype not in DTYPE_BYTES:
                raise ManifestError(f"tensor {spec.name} has the unknown dtype {spec.dtype[:32]!r}")
            if spec.nbytes != _nbytes(spec.dtype, spec.shape) or spec.offset != _align(end):
                raise ManifestError(f"tensor {spec.name} does not lie where its size puts it")
            end = spec.offset + spec.nbytes
            if end > MAX_SNAPSHOT_BYTES:
                raise ManifestError(f"tensor {spec.name} ends past {MAX_SNAPSHOT_BYTES} bytes")
            previous = spec.name
        names = {spec.name for spec in self.tensors}
        if list(self.aliases) != sorted(self.aliases):
            raise ManifestError("the aliases of a layout are out of order")
        for alias, target in self.aliases.items():
            _check_name(alias)
            if alias in names or target not in names:
                raise ManifestError(f"alias {alias} hides a tensor or points to none")


class Snapshot:
    """The weights of one policy version.

    Args:
        layout: must be valid (:meth:`Layout.validate`).
        buffer: ``layout.nbytes`` contiguous bytes; the caller must not write to them any more.

    Raises:
        ManifestError: the buffer has another size.
    """

    def __init__(self, layout: Layout, buffer: bytes | bytearray | memoryview) -> None:
        if len(buffer) != layout.nbytes:
            raise ManifestError(f"a layout of {layout.nbytes} bytes does not fit {len(buffer)} bytes")
        self.layout = layout
        self._buffer = buffer

    @property
    def data(self) -> memoryview:
        """All bytes, read-only, in the order of the layout."""
        return memoryview(self._buffer).toreadonly()

    def fingerprint(self) -> str:
        """BLAKE3 over the layout and every byte, in hex: two snapshots with one fingerprint are the same."""
        hasher = fingerprint_hasher(self.layout)
        hasher.update(self._buffer)
        return hasher.hexdigest()

    def state_dict(self) -> dict[str, torch.Tensor]:
        """The tensors by name, aliases included, as views into this snapshot: never write to them."""
        import torch

        base = torch.empty(0, dtype=torch.uint8)
        if self._buffer:
            with warnings.catch_warnings():
                # torch warns that the views of an immutable buffer could be written to.
                warnings.simplefilter("ignore", UserWarning)
                base = torch.frombuffer(self._buffer, dtype=torch.uint8)
        tensors: dict[str, torch.Tensor] = {}
        for spec in self.layout.tensors:
            # An empty tensor may lie past the last byte, where no view can start.
            raw = base[spec.offset : spec.offset + spec.nbytes] if spec.nbytes else base[:0]
            tensors[spec.name] = raw.view(getattr(torch, spec.dtype)).reshape(spec.shape)
        for alias, target in self.layout.aliases.items():
            tensors[alias] = tensors[target]
        return tensors


def from_state_dict(state: Mapping[str, torch.Tensor]) -> Snapshot:
    """Copy ``state`` (any device, any strides) into a snapshot, bit for bit.

    Names that share storage, shape and strides are tied: stored once, under the first name.

    Raises:
        ManifestError: a name, a dtype or a kind of tensor that cannot travel.
    """
    import torch

    layout = layout_of(state)
    buffer = bytearray(layout.nbytes)
    if buffer:
        base = torch.frombuffer(buffer, dtype=torch.uint8)
        for spec in layout.tensors:
            if spec.nbytes:
                base[spec.offset : spec.offset + spec.nbytes].copy_(_raw(state[spec.name]))
    return Snapshot(layout, buffer)


def fingerprint_of(state: Mapping[str, torch.Tensor]) -> str:
    """The fingerprint that a snapshot of ``state`` would have; copies one tensor at a time at most.

    Raises:
        ManifestError: as :func:`from_state_dict`.
    """
    layout = layout_of(state)
    hasher = fingerprint_hasher(layout)
    end = 0
    for spec in layout.tensors:
        hasher.update(bytes(spec.offset - end))
        if spec.nbytes:
            hasher.update(_raw(state[spec.name]).cpu().numpy().data)
        end = spec.offset + spec.nbytes
    return hasher.hexdigest()


def layout_of(state: Mapping[str, torch.Tensor]) -> Layout:
    """The layout that a snapshot of ``state`` has.

    Raises:
        ManifestError: as :func:`from_state_dict`.
    """
    specs: list[TensorSpec] = []
    aliases: dict[str, str] = {}
    first_name: dict[tuple[object, ...], str] = {}
    end = 0
    for name, tensor in _sorted(state):
        dtype = str(tensor.dtype).removeprefix("torch.")
        if dtype not in DTYPE_BYTES or tensor.is_meta or tensor.is_sparse or tensor.is_quantized:
            raise ManifestError(f"tensor {name} ({dtype}, {tensor.layout}) cannot travel in a snapshot")
        if tensor.numel():
            key = (
                tensor.device,
                tensor.data_ptr(),
                tensor.dtype,
                tuple(tensor.shape),
                tuple(tensor.stride()),
            )
            if key in first_name:
                aliases[name] = first_name[key]
                continue
            first_name[key] = name
        shape = tuple(tensor.shape)
        spec = TensorSpec(name, dtype, shape, _align(end), _nbytes(dtype, shape))
        specs.append(spec)
        end = spec.offset + spec.nbytes
    layout = Layout(tuple(specs), aliases)
    layout.validate()
    return layout


def _sorted(state: Mapping[str, torch.Tensor]) -> Iterator[tuple[str, torch.Tensor]]:
    for name in sorted(state):
        yield name, state[name].detach()


def _raw(tensor: torch.Tensor) -> torch.Tensor:
    """The bytes of ``tensor`` as uint8, shape (nbytes,), on its own device."""
    import torch

    # Flattened first: a tensor without dimensions cannot be viewed as another dtype.
    return tensor.detach().contiguous().reshape(-1).view(torch.uint8)


def fingerprint_hasher(layout: Layout) -> blake3:
    """What, fed all bytes of a snapshot in their order, has its fingerprint as ``hexdigest()``."""
    head = layout.canonical_bytes()
    hasher = blake3(_DOMAIN, max_threads=1)
    hasher.update(b"\0" + len(head).to_bytes(8, "big") + head)
    return hasher


def _check_name(name: str) -> None:
    if not _NAME.match(name):
        raise ManifestError(f"{name[:64]!r} is not a valid tensor name")


def _nbytes(dtype: str, shape: tuple[int, ...]) -> int:
    total = DTYPE_BYTES[dtype]
    for size in shape:
        total *= size
    return total


def _align(offset: int) -> int:
    return -(-offset // ALIGNMENT) * ALIGNMENT
