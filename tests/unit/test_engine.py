"""What is the transformers engine's own; tests/engines holds it to what all engines owe."""

from __future__ import annotations

import asyncio

import numpy as np
import pytest
import torch
from policies import make_policy
from transformers import AutoModelForCausalLM

from echo2p2p.data.trajectory import Sampling
from echo2p2p.errors import EngineError, OutOfMemory
from echo2p2p.rollout.transformers_engine import TransformersEngine, plan_batches
from echo2p2p.weights.snapshot import Snapshot, from_state_dict

PROMPTS = [[5, 6, 7], [8], [9, 10, 11, 12, 13, 14], [3, 4]]
GREEDY = Sampling(temperature=0.0, max_new_tokens=8)
SAMPLED = Sampling(temperature=0.8, max_new_tokens=8)


def weights_of(folder) -> tuple[torch.nn.Module, Snapshot]:
    model = AutoModelForCausalLM.from_pretrained(folder)
    return model, from_state_dict(model.state_dict())


@pytest.fixture
def folder(tmp_path):
    return make_policy(tmp_path / "one")


@pytest.fixture
async def engine(folder):
    engine = TransformersEngine(folder, threads=1)
    yield engine
    await engine.close()


def flat(results):
    return [(c.tokens, c.finish) for completions in results for c in completions]


@pytest.mark.parametrize("max_batch_tokens", [1, 25, 65536])
async def test_a_padded_batch_says_what_each_prompt_alone_says(folder, max_batch_tokens):
    engine = TransformersEngine(folder, threads=1, max_batch_tokens=max_batch_tokens)
    await engine.install(weights_of(folder)[1], 0)
    together = await engine.generate(PROMPTS, n_samples=2, sampling=GREEDY, seed=0)
    for prompt, completions in zip(PROMPTS, together, strict=True):
        [alone] = await engine.generate([prompt], n_samples=2, sampling=GREEDY, seed=0)
        assert flat([completions]) == flat([alone])
        for a, b in zip(completions, alone, strict=True):
            np.testing.assert_allclose(a.logprobs, b.logprobs, atol=1e-5)
    await engine.close()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
async def test_an_engine_without_a_dtype_takes_that_of_the_first_snapshot_and_keeps_it(folder, dtype):
    model, _ = weights_of(folder)
    published = from_state_dict(model.to(dtype).state_dict())
    other = from_state_dict(model.to({torch.float32: torch.bfloat16}.get(dtype, torch.float32)).state_dict())
    adopting, told = TransformersEngine(folder, threads=1), TransformersEngine(folder, threads=1, dtype=dtype)
    answers = []
    for engine in (adopting, told):
        assert await engine.install(published, 0) == published.fingerprint()
        answers.append(await engine.generate(PROMPTS, n_samples=2, sampling=SAMPLED, seed=0))
        with pytest.raises(EngineError, match="dtype"):
            await engine.install(other, 1)
        await engine.close()
    for one, two in zip(*answers, strict=True):
        for a, b in zip(one, two, strict=True):
            assert a.tokens == b.tokens
            assert np.array_equal(a.logprobs, b.logprobs)


def harmed(state, how):
    name = "model.layers.1.mlp.up_proj.weight"
    if how == "missing":
        del state[name]
    elif how == "extra":
        state["model.more.weight"] = torch.zeros(3)
    elif how == "shape":
        state[name] = state[name][:-1]
    elif how == "transposed":
        state[name] = state[name].T.contiguous()
    elif how == "dtype":
        state[name] = state[name].bfloat16()
    elif how == "untied":
        state["lm_head.weight"] = torch.zeros_like(state["lm_head.weight"])
    return state


@pytest.mark.parametrize("how", ["missing", "extra", "shape", "transposed", "dtype", "untied"])
async def test_a_snapshot_that_does_not_fit_leaves_the_old_version_whole(engine, folder, how):
    model, snapshot = weights_of(folder)
    await engine.install(snapshot, 3)
    before = flat(await engine.generate(PROMPTS, n_samples=2, sampling=SAMPLED, seed=0))
    with torch.no_grad():
        state = {name: tensor + 1 for name, tensor in model.state_dict().items()}
    bad = from_state_dict(harmed(state, how))
    with pytest.raises(EngineError):
        await engine.install(bad, 4)
    assert engine.version == 3
    assert flat(await engine.generate(PROMPTS, n_samples=2, sampling=SAMPLED, seed=0)) == before
    assert await engine.install(snapshot, 5) == snapshot.fingerprint()


async def test_nothing_is_generated_before_the_first_install(engine, folder):
    with pytest.raises(EngineError, match="no policy version"):
        await engine.generate(PROMPTS, n_samples=1, sampling=GREEDY, seed=0)
    bad = from_state_dict({"a": torch.zeros(1)})
    with pytest.raises(EngineError):
        await engine.install(bad, 0)
    assert engine.version == -1


@pytest.mark.parametrize(
    "error",
    [torch.OutOfMemoryError("out of memory"), MemoryError(), RuntimeError("can't allocate memory: 1 B")],
)
async def test_running_out_of_memory_is_named_and_survived(engine, folder, monkeypatch, error):
    await engine.install(weights_of(folder)[1], 0)

    def fail(*_, **__):
        raise error

    with monkeypatch.context() as patch:
        patch.setattr("echo2p2p.rollout.transformers_engine.decode", fail)
        with pytest.raises(OutOfMemory, match="4 prompts"):
            await engine.generate(PROMPTS, n_samples=1, sampling=GREEDY, seed=0)
    assert await engine.generate(PROMPTS, n_samples=1, sampling=GREEDY, seed=0)


async def test_a_closed_engine_says_so(folder):
    engine = TransformersEngine(folder)
    snapshot = weights_of(folder)[1]
    await engine.close()
    with pytest.raises(EngineError, match="closed"):
        await engine.install(snapshot, 0)


@pytest.mark.parametrize(("n_samples", "budget"), [(1, 10), (3, 100), (7, 40), (16, 1), (5, 10**6)])
def test_batches_hold_every_sample_once_and_keep_to_the_budget(n_samples, budget):
    lengths = [3, 9, 1, 4, 9, 2, 7]
    drawn = dict.fromkeys(range(len(lengths)), 0)
    for batch in plan_batches(lengths, n_samples, 4, budget):
        width = max(lengths[index] for index in batch.prompts) + 4
        rows = sum(batch.counts)
        assert rows == 1 or rows * width <= budget
        for index, count in zip(batch.prompts, batch.counts, strict=True):
            drawn[index] += count
    assert set(drawn.values()) == {n_samples}


# --- one version over another, in place -------------------------------------------------------------------


def moved(snapshot: Snapshot, share: float, seed: int) -> Snapshot:
    """``share`` of all words with another last bit, and none in the first norm."""
    rng = np.random.default_rng(seed)
    buffer = bytearray(snapshot.data)
    for spec in snapshot.layout.tensors:
        if spec.name == "model.norm.weight":
            continue
        words = np.frombuffer(buffer, np.uint8)[spec.offset : spec.offset + spec.nbytes].view(
            f"<u{getattr(torch, spec.dtype).itemsize}"
        )
        words[rng.random(words.size) < share] ^= 1
    return Snapshot(snapshot.layout, bytes(buffer))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("share", [0.0, 0.01, 0.5, 1.0])
async def test_a_staged_version_ends_on_the_bits_of_a_whole_one(tmp_path, dtype, tied, share):
    folder = make_policy(tmp_path / "one", tied=tied)
    first = from_state_dict(weights_of(folder)[0].to(dtype).state_dict())
    engine, other = TransformersEngine(folder, threads=1), TransformersEngine(folder, threads=1)
    for version in range(4):
        snapshot = moved(first, share, version)
        swap = await engine.stage(snapshot, version)
        before = engine.version
        assert before == version - 1
        await swap()
        assert engine.version == version
        assert await engine.fingerprint() == snapshot.fingerprint()
        await other.install(snapshot, version)
        answers = [
            await each.generate(PROMPTS, n_samples=2, sampling=SAMPLED, seed=9) for each in (engine, other)
        ]
        assert flat(answers[0]) == flat(answers[1])
    await engine.close()
    await other.close()


async def test_a_swap_writes_nothing_where_nothing_changed(engine, folder):
    """The engine's own copy of a tensor is harmed: only whoever writes everything mends it."""
    first = weights_of(folder)[1]
    await engine.install(first, 0)
    second = moved(first, 0.02, 1)
    swap = await engine.stage(second, 1)
    with torch.inference_mode():
        engine._model.state_dict()["model.norm.weight"].add_(1)
    await swap()
    assert await engine.fingerprint() != second.fingerprint()
    assert await engine.install(second, 1) == second.fingerprint()
    assert await engine.fingerprint() == second.fingerprint()


async def test_weights_that_do_not_lie_in_order_are_swapped_too(engine, folder):
    first = weights_of(folder)[1]
    await engine.install(first, 0)
    layer = engine._model.get_submodule("model.layers.0.mlp.up_proj")
    layer.weight.data = layer.weight.data.T.contiguous().T
    engine._weights._state = engine._model.state_dict()
    assert not layer.weight.is_contiguous()
    second = moved(first, 0.02, 1)
    await (await engine.stage(second, 1))()
    assert await engine.fingerprint() == second.fingerprint()


@pytest.mark.parametrize("how", ["missing", "shape", "dtype", "untied"])
async def test_a_snapshot_that_does_not_fit_is_refused_while_the_old_one_generates(engine, folder, how):
    model, first = weights_of(folder)
    await engine.install(first, 0)
    with pytest.raises(EngineError):
        await engine.stage(from_state_dict(harmed(dict(model.state_dict()), how)), 1)
    assert (engine.version, await engine.fingerprint()) == (0, first.fingerprint())


async def test_a_swap_that_fails_halfway_leaves_the_old_version_whole(engine, folder, monkeypatch):
    first = weights_of(folder)[1]
    await engine.install(first, 0)
    swap = await engine.stage(moved(first, 0.02, 1), 1)
    scatter, calls = torch.Tensor.scatter_, []

    def fail_third(self, *args):
        calls.append(None)
        if len(calls) == 3:
            raise RuntimeError("device lost")
        return scatter(self, *args)

    with monkeypatch.context() as patch:
        patch.setattr(torch.Tensor, "scatter_", fail_third)
        with pytest.raises(EngineError, match="device lost"):
            await swap()
    assert (engine.version, await engine.fingerprint()) == (0, first.fingerprint())


async def test_staging_and_reading_back_do_not_wait_for_generation(engine, folder):
    first = weights_of(folder)[1]
    await engine.install(first, 0)
    long = asyncio.create_task(
        engine.generate(PROMPTS * 400, n_samples=64, sampling=Sampling(max_new_tokens=50), seed=0)
    )
    await asyncio.sleep(0)
    async with asyncio.timeout(10):
        swap = await engine.stage(moved(first, 0.02, 1), 1)
        assert await engine.fingerprint() == first.fingerprint()
    assert not long.done()
    long.cancel()
    with pytest.raises(asyncio.CancelledError):
        await long
    await swap()
    assert engine.version == 1
