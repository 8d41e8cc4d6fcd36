import pytest
import torch

from echo2p2p.errors import ManifestError
from echo2p2p.weights.snapshot import (
    DTYPE_BYTES,
    Layout,
    Snapshot,
    TensorSpec,
    fingerprint_of,
    from_state_dict,
)


def same_bits(left: torch.Tensor, right: torch.Tensor) -> bool:
    if left.dtype != right.dtype or left.shape != right.shape:
        return False
    flat = [each.contiguous().reshape(-1) for each in (left, right)]
    return not left.numel() or torch.equal(flat[0].view(torch.uint8), flat[1].view(torch.uint8))


def state() -> dict[str, torch.Tensor]:
    base = torch.randn(6, 10)
    return {
        "transposed": base.t(),
        "strided": base[::2, 1::3],
        "scalar": torch.tensor(3.5, dtype=torch.bfloat16),
        "empty": torch.empty(0, 4),
        "also.empty": torch.empty(3, 0),
        "embed": base,
        "head": base,
        "nan": torch.tensor([float("nan"), -0.0, float("inf")]),
    }


@pytest.mark.parametrize("dtype", sorted(DTYPE_BYTES))
def test_every_dtype_comes_back_bit_for_bit(dtype: str) -> None:
    raw = torch.randint(0, 256, (7 * 3 * DTYPE_BYTES[dtype],), dtype=torch.uint8)
    if dtype == "bool":
        raw %= 2
    tensor = raw.view(getattr(torch, dtype)).reshape(7, 3)
    back = from_state_dict({"odd": torch.ones(1, dtype=torch.uint8), "tensor": tensor}).state_dict()
    assert same_bits(back["tensor"], tensor)


def test_strides_scalars_empties_and_nans_come_back_bit_for_bit() -> None:
    original = state()
    back = from_state_dict(original).state_dict()
    assert back.keys() == original.keys()
    assert all(same_bits(back[name], original[name]) for name in original)


def test_tied_tensors_are_stored_once_and_come_back_tied() -> None:
    snapshot = from_state_dict(state())
    assert snapshot.layout.aliases == {"head": "embed"}
    back = snapshot.state_dict()
    assert back["head"].data_ptr() == back["embed"].data_ptr()


def test_state_dict_is_a_view_of_the_snapshot() -> None:
    buffer = bytearray(8)
    tensor = Snapshot(Layout((TensorSpec("a", "int32", (2,), 0, 8),), {}), buffer).state_dict()["a"]
    buffer[4] = 7
    assert tensor.tolist() == [0, 7]


def test_immutable_bytes_make_a_snapshot_without_a_warning() -> None:
    snapshot = from_state_dict(state())
    assert Snapshot(snapshot.layout, bytes(snapshot.data)).state_dict().keys() == state().keys()


def test_data_cannot_be_written_to() -> None:
    with pytest.raises(TypeError):
        from_state_dict(state()).data[0] = 1


def test_fingerprint_of_live_tensors_equals_that_of_their_snapshot() -> None:
    original = state()
    snapshot = from_state_dict(original)
    assert fingerprint_of(original) == snapshot.fingerprint() == fingerprint_of(snapshot.state_dict())
    assert fingerprint_of({}) == from_state_dict({}).fingerprint()


@pytest.mark.parametrize("change", ["value", "name", "dtype", "shape", "tie"])
def test_fingerprint_tells_any_change(change: str) -> None:
    tensor = torch.arange(6, dtype=torch.int32)
    before = {"a": tensor, "b": tensor.clone()}
    after = {
        "value": {"a": tensor + (tensor == 5), "b": tensor},
        "name": {"a": tensor, "c": tensor.clone()},
        "dtype": {"a": tensor.view(torch.float32), "b": tensor},
        "shape": {"a": tensor.reshape(2, 3), "b": tensor.clone()},
        "tie": {"a": tensor, "b": tensor},
    }[change]
    assert fingerprint_of(before) != fingerprint_of(after)


def test_the_order_of_a_state_dict_does_not_matter() -> None:
    original = state()
    assert fingerprint_of(original) == fingerprint_of(dict(reversed(original.items())))


@pytest.mark.parametrize(
    "tensor",
    [torch.zeros(2, dtype=torch.complex64), torch.zeros(2, device="meta"), torch.eye(2).to_sparse()],
)
def test_tensors_that_cannot_travel_are_refused(tensor: torch.Tensor) -> None:
    with pytest.raises(ManifestError, match="tensor it"):
        from_state_dict({"it": tensor})


@pytest.mark.parametrize("name", ["", "../etc", "a/b", "a\0", "ä", "a" * 257, "a\n", "a b"])
def test_hostile_tensor_names_are_refused(name: str) -> None:
    with pytest.raises(ManifestError):
        Layout((TensorSpec(name, "uint8", (1,), 0, 1),), {}).validate()
    with pytest.raises(ManifestError):
        Layout((TensorSpec("ok", "uint8", (1,), 0, 1),), {name: "ok"}).validate()


def spec(
    name: str = "b", dtype: str = "uint8", shape: tuple[int, ...] = (4,), offset: int = 64, nbytes: int = 4
):
    return TensorSpec(name, dtype, shape, offset, nbytes)


@pytest.mark.parametrize(
    "second",
    [
        spec(offset=0),
        spec(offset=32),
        spec(offset=128),
        spec(nbytes=5),
        spec(nbytes=0),
        spec(dtype="float32"),
        spec(dtype="object"),
        spec(shape=(2**50, 2**50), nbytes=2**50),
        spec(shape=(2**50,), nbytes=2**50),
        spec(name="a"),
        spec(name="A"),
    ],
)
def test_a_layout_other_than_the_one_that_its_tensors_determine_is_refused(second: TensorSpec) -> None:
    first = TensorSpec("a", "uint8", (4,), 0, 4)
    Layout((first, spec()), {"c": "a"}).validate()
    with pytest.raises(ManifestError):
        Layout((first, second), {}).validate()


@pytest.mark.parametrize("aliases", [{"a": "b"}, {"c": "d"}, {"c": "c"}, {"d": "a", "c": "a"}])
def test_aliases_that_hide_or_dangle_or_are_out_of_order_are_refused(aliases: dict[str, str]) -> None:
    with pytest.raises(ManifestError):
        Layout((spec("a", offset=0), spec()), aliases).validate()


def test_too_many_tensors_are_refused() -> None:
    specs = tuple(TensorSpec(f"t{at:05}", "uint8", (0,), 0, 0) for at in range(10_001))
    with pytest.raises(ManifestError, match="10000"):
        Layout(specs, {}).validate()


def test_a_buffer_of_another_size_is_refused() -> None:
    with pytest.raises(ManifestError):
        Snapshot(Layout((spec(offset=0),), {}), b"123")
