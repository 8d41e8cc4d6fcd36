import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from echo2p2p.errors import UnsoundWeights
from echo2p2p.weights.gate import GateLimits, check
from echo2p2p.weights.snapshot import DTYPE_BYTES, Snapshot, from_state_dict

FLOATS = ["float32", "bfloat16", "float16", "float64"]
FP8 = ["float8_e4m3fn", "float8_e5m2"]


def policy(dtype: str = "float32", seed: int = 0) -> dict[str, torch.Tensor]:
    rng = torch.Generator().manual_seed(seed)
    kind = getattr(torch, dtype)
    return {
        "bias": torch.zeros(7, dtype=kind),
        "gain": torch.ones(32, dtype=kind),
        "table": torch.arange(5),
        "w": (torch.randn(40, 50, generator=rng) * 0.02).to(kind),
    }


def poisoned(dtype: str, name: str, at: int, value: float) -> Snapshot:
    state = policy(dtype)
    state[name].view(-1)[at] = value
    return from_state_dict(state)


@settings(max_examples=100, deadline=None)
@given(st.sampled_from(FLOATS), st.sampled_from(["bias", "gain", "w"]), st.data())
def test_one_bad_element_of_any_tensor_is_refused(dtype: str, name: str, data: st.DataObject) -> None:
    at = data.draw(st.integers(0, policy()[name].numel() - 1))
    huge = 6e4 if dtype == "float16" else 1e30
    value = data.draw(st.sampled_from([float("nan"), float("inf"), -float("inf"), huge, -huge]))
    bad = poisoned(dtype, name, at, value)
    with pytest.raises(UnsoundWeights, match=name):
        check(bad, from_state_dict(policy(dtype)))
    if not np.isfinite(value):
        with pytest.raises(UnsoundWeights, match=name):
            check(bad)


@pytest.mark.parametrize("dtype", FP8)
def test_eight_bit_floats_are_looked_into_too(dtype: str) -> None:
    state = {"w": torch.ones(100).to(getattr(torch, dtype))}
    good = from_state_dict(state)
    check(good, good)
    raw = bytearray(good.data)
    raw[50] = 0x7F
    with pytest.raises(UnsoundWeights, match="finite"):
        check(Snapshot(good.layout, raw))


@settings(max_examples=100, deadline=None)
@given(st.sampled_from(FLOATS), st.integers(0, 2**32), st.floats(1e-6, 1e-2))
def test_steps_as_training_makes_them_pass(dtype: str, seed: int, rate: float) -> None:
    rng = torch.Generator().manual_seed(seed)
    before, after = policy(dtype), policy(dtype)
    for name in ("bias", "gain", "w"):
        # As Adam: every element by about the learning rate, also where it starts at zero.
        sign = torch.randint(0, 2, after[name].shape, generator=rng) * 2 - 1
        after[name] = (after[name].double() + rate * sign).to(after[name].dtype)
    assert check(from_state_dict(after), from_state_dict(before)).change <= 10


def test_the_limit_lies_where_it_says() -> None:
    base = from_state_dict({"w": torch.ones(1000)})
    assert check(from_state_dict({"w": torch.full((1000,), 10.9)}), base).change == pytest.approx(9.9)
    far = from_state_dict({"w": torch.full((1000,), 11.1)})
    with pytest.raises(UnsoundWeights, match=r"10\.1 times"):
        check(far, base)
    check(far, base, GateLimits(max_change=0))


@pytest.mark.parametrize("dtype", [d for d in DTYPE_BYTES if "float" not in d])
def test_integers_pass_whatever_they_hold(dtype: str) -> None:
    kind = getattr(torch, dtype)
    size = DTYPE_BYTES[dtype] * 8
    one = from_state_dict({"t": torch.zeros(size, dtype=torch.uint8).view(kind)})
    other = from_state_dict({"t": torch.ones(size, dtype=torch.uint8).view(kind)})
    check(other, one)


def test_new_and_reshaped_tensors_need_only_be_finite() -> None:
    base = from_state_dict({"a": torch.ones(4), "b": torch.ones(4), "none": torch.ones(0)})
    check(
        from_state_dict({"a": torch.full((2, 2), 1e9), "c": torch.full((4,), 1e9), "none": torch.ones(0)}),
        base,
    )


def test_a_tensor_longer_than_a_block_is_seen_to_its_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("echo2p2p.weights.gate.BLOCK_ELEMENTS", 64)
    base = from_state_dict({"w": torch.ones(1000)})
    for at in (0, 63, 64, 999):
        state = torch.ones(1000)
        state[at] = float("nan")
        with pytest.raises(UnsoundWeights, match="finite"):
            check(from_state_dict({"w": state}), base)
    assert check(from_state_dict({"w": torch.full((1000,), 3.0)}), base).change == pytest.approx(2.0)
