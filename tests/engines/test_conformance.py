"""What every engine owes to the rest of the system, whichever it is; docs/adding-an-engine.md has it in words."""

from __future__ import annotations

import asyncio

import numpy as np
import psutil
import pytest
import torch
from policies import EOS, VOCABULARY

from echo2p2p.data.policy import scaled_log_softmax
from echo2p2p.data.trajectory import Sampling
from echo2p2p.errors import EngineError
from echo2p2p.weights.snapshot import Snapshot, from_state_dict

pytestmark = [pytest.mark.asyncio(loop_scope="session"), pytest.mark.timeout(300)]

PROMPTS = [[5, 6, 7], [8], [9, 10, 11, 12, 13, 14], [3, 4]]
LONG_PROMPT = [3 + (index * 7) % 16 for index in range(300)]
GREEDY = Sampling(temperature=0.0, max_new_tokens=8)
SAMPLED = Sampling(temperature=0.8, max_new_tokens=8)


def flat(results):
    return [(c.tokens, c.finish) for completions in results for c in completions]


def assert_of_policy(policy, prompt, completion, temperature):
    ids = torch.tensor([prompt + completion.tokens])
    with torch.no_grad():
        logits = policy.model(ids).logits[0, len(prompt) - 1 : -1]
    expected = scaled_log_softmax(logits, temperature)[
        torch.arange(len(completion.tokens)), completion.tokens
    ]
    assert completion.logprobs.dtype == np.float32
    np.testing.assert_allclose(completion.logprobs, expected.numpy(), atol=2e-5)


def moved(snapshot: Snapshot, share: float, seed: int) -> Snapshot:
    """``share`` of all words with another bit in the middle of their mantissa."""
    rng = np.random.default_rng(seed)
    buffer = bytearray(snapshot.data)
    for spec in snapshot.layout.tensors:
        words = np.frombuffer(buffer, np.uint8)[spec.offset : spec.offset + spec.nbytes].view("<u4")
        words[rng.random(words.size) < share] ^= 1 << 20
    return Snapshot(snapshot.layout, bytes(buffer))


@pytest.mark.every_layout
@pytest.mark.parametrize(
    "sampling",
    [SAMPLED, GREEDY, Sampling(max_new_tokens=6), Sampling(temperature=1.3, top_p=0.6, max_new_tokens=5)],
)
async def test_log_probabilities_are_those_of_a_plain_forward_pass(bench, sampling):
    await bench.install(bench.one)
    results = await bench.engine.generate(PROMPTS, n_samples=3, sampling=sampling, seed=1)
    for prompt, completions in zip(PROMPTS, results, strict=True):
        for completion in completions:
            assert_of_policy(bench.one, prompt, completion, sampling.temperature)


async def test_greedy_tokens_are_the_likeliest_ones(bench):
    await bench.install(bench.one)
    results = await bench.engine.generate(PROMPTS, n_samples=1, sampling=GREEDY, seed=1)
    for prompt, [completion] in zip(PROMPTS, results, strict=True):
        ids = torch.tensor([prompt + completion.tokens])
        with torch.no_grad():
            likeliest = bench.one.model(ids).logits[0, len(prompt) - 1 : -1].argmax(-1)
        assert completion.tokens == likeliest.tolist()


async def test_completions_end_at_the_first_end_of_sequence_or_at_the_limit(bench):
    await bench.install(bench.one)
    results = await bench.engine.generate(PROMPTS, n_samples=32, sampling=SAMPLED, seed=2)
    assert [len(completions) for completions in results] == [32] * 4
    seen = set()
    for completion in (c for completions in results for c in completions):
        seen.add(completion.finish)
        assert EOS not in completion.tokens[:-1]
        assert (completion.tokens[-1] == EOS) == (completion.finish == "stop")
        assert completion.finish == "stop" or len(completion.tokens) == 8
        assert len(completion.logprobs) == len(completion.tokens)
        assert (completion.version_min, completion.version_max) == (bench.version, bench.version)
    assert seen == {"stop", "length"}


async def test_the_samples_of_a_prompt_differ_and_a_seed_repeats_them(bench):
    await bench.install(bench.one)
    one, two, other = [
        await bench.engine.generate(PROMPTS, n_samples=6, sampling=SAMPLED, seed=s) for s in (7, 7, 8)
    ]
    assert flat(one) == flat(two)
    assert flat(one) != flat(other)
    for completions in one:
        assert len({tuple(c.tokens) for c in completions}) > 1


async def test_samples_follow_the_policy_and_top_p_cuts_its_tail(bench):
    await bench.install(bench.one)
    with torch.no_grad():
        expected = torch.softmax(bench.one.model(torch.tensor([PROMPTS[0]])).logits[0, -1], -1).numpy()
    n = 2000
    for top_p in (1.0, 0.5):
        sampling = Sampling(temperature=1.0, top_p=top_p, max_new_tokens=1)
        [completions] = await bench.engine.generate([PROMPTS[0]], n_samples=n, sampling=sampling, seed=3)
        counts = np.bincount([c.tokens[0] for c in completions], minlength=VOCABULARY) / n
        target = expected.copy()
        if top_p < 1:
            order = np.argsort(-target)
            inside = order[: int(np.searchsorted(np.cumsum(target[order]), top_p)) + 1]
            target[np.setdiff1d(np.arange(VOCABULARY), inside)] = 0
            target /= target.sum()
            assert set(np.flatnonzero(counts)) <= set(inside)
        assert np.abs(counts - target).max() < 0.05


async def test_prompts_in_a_batch_do_not_see_each_other(bench):
    await bench.install(bench.one)
    together = await bench.engine.generate(PROMPTS, n_samples=1, sampling=GREEDY, seed=0)
    for prompt, [completion] in zip(PROMPTS, together, strict=True):
        [[alone]] = await bench.engine.generate([prompt], n_samples=1, sampling=GREEDY, seed=0)
        assert alone.tokens == completion.tokens
        np.testing.assert_allclose(alone.logprobs, completion.logprobs, atol=2e-5)


async def test_long_prompts_of_many_steps_are_sampled_from_the_policy(bench):
    await bench.install(bench.one)
    prompts = [[3 + index % 16, *LONG_PROMPT, 3 + index // 16] for index in range(40)]
    results = await bench.engine.generate(prompts, n_samples=2, sampling=SAMPLED, seed=0)
    for prompt, completions in zip(prompts[::8], results[::8], strict=True):
        for completion in completions:
            assert_of_policy(bench.one, prompt, completion, SAMPLED.temperature)


async def test_calls_may_come_while_others_are_generated(bench):
    await bench.install(bench.one)
    expected = [
        await bench.engine.generate([prompt], n_samples=1, sampling=GREEDY, seed=0) for prompt in PROMPTS
    ]
    at_once = await asyncio.gather(
        *(bench.engine.generate([prompt], n_samples=1, sampling=GREEDY, seed=0) for prompt in PROMPTS)
    )
    assert [flat(each) for each in at_once] == [flat(each) for each in expected]


@pytest.mark.every_layout
async def test_a_version_gives_the_same_tokens_whatever_was_installed_between(bench):
    answers = []
    for policy in (bench.one, bench.two, bench.one):
        assert await bench.install(policy) == policy.snapshot.fingerprint()
        assert bench.engine.version == bench.version
        results = await bench.engine.generate([*PROMPTS, LONG_PROMPT], n_samples=1, sampling=GREEDY, seed=0)
        answers.append(flat(results))
    assert answers[0] == answers[2] != answers[1]


@pytest.mark.every_layout
async def test_no_cache_of_the_old_policy_reaches_the_new_one(bench):
    """The prompt is long enough for whole blocks of it to be cached, and has been seen under the old version."""
    for policy in (bench.one, bench.two):
        await bench.swap(policy.snapshot)
        for _ in range(2):
            [[completion]] = await bench.engine.generate([LONG_PROMPT], n_samples=1, sampling=GREEDY, seed=0)
            assert_of_policy(policy, LONG_PROMPT, completion, 0.0)


@pytest.mark.every_layout
@pytest.mark.parametrize("share", [0.0, 0.01, 0.3, 1.0])
async def test_a_swap_leaves_exactly_the_new_version(bench, share):
    await bench.install(bench.one)
    snapshot = bench.one.snapshot
    for seed in range(2):
        snapshot = moved(snapshot, share, seed)
        await bench.swap(snapshot)
        assert await bench.engine.fingerprint() == snapshot.fingerprint()
    model = type(bench.one.model)(bench.one.model.config).eval()
    model.load_state_dict(snapshot.state_dict())
    [[completion]] = await bench.engine.generate([PROMPTS[2]], n_samples=1, sampling=GREEDY, seed=0)
    assert_of_policy(type(bench.one)(model, snapshot), PROMPTS[2], completion, 0.0)


async def test_what_was_staged_over_other_weights_than_those_held_is_written_whole(bench):
    await bench.install(bench.one)
    first = bench.one.snapshot
    bench.version += 2
    staged_over_first = await bench.engine.stage(moved(first, 0.01, 1), bench.version)
    await (await bench.engine.stage(moved(first, 0.5, 2), bench.version - 1))()
    await staged_over_first()
    assert bench.engine.version == bench.version
    assert await bench.engine.fingerprint() == moved(first, 0.01, 1).fingerprint()


@pytest.mark.every_layout
@pytest.mark.parametrize("how", ["missing", "extra", "shape"])
async def test_a_snapshot_that_does_not_fit_leaves_the_old_version_whole(bench, how):
    await bench.install(bench.one)
    before = flat(await bench.engine.generate(PROMPTS, n_samples=2, sampling=SAMPLED, seed=0))
    state = {name: tensor + 1 for name, tensor in bench.one.model.state_dict().items()}
    name = "model.layers.1.mlp.up_proj.weight"
    if how == "missing":
        del state[name]
    elif how == "extra":
        state["model.more.weight"] = torch.zeros(3)
    else:
        state[name] = state[name][:-1]
    with pytest.raises(EngineError):
        await bench.engine.install(from_state_dict(state), bench.version + 1)
    assert bench.engine.version == bench.version
    assert await bench.engine.fingerprint() == bench.one.snapshot.fingerprint()
    assert flat(await bench.engine.generate(PROMPTS, n_samples=2, sampling=SAMPLED, seed=0)) == before


@pytest.mark.parametrize("prompt", [[], [VOCABULARY], [-1], [2] * 505])
async def test_a_prompt_the_policy_cannot_read_is_refused(bench, prompt):
    await bench.install(bench.one)
    with pytest.raises(EngineError):
        await bench.engine.generate([[2], prompt], n_samples=1, sampling=GREEDY, seed=0)


async def test_a_policy_whose_logits_are_not_finite_generates_nothing(bench):
    state = bench.one.model.state_dict()
    state["model.norm.weight"] = torch.full_like(state["model.norm.weight"], torch.nan)
    bench.version += 1
    await bench.engine.install(from_state_dict(state), bench.version)
    with pytest.raises(EngineError, match="not finite"):
        await bench.engine.generate(PROMPTS, n_samples=1, sampling=GREEDY, seed=0)
    await bench.install(bench.one)
    assert await bench.engine.generate(PROMPTS, n_samples=1, sampling=GREEDY, seed=0)


async def test_a_cancelled_call_stops_and_the_engine_goes_on(bench):
    await bench.install(bench.one)
    expected = flat(await bench.engine.generate(PROMPTS, n_samples=2, sampling=SAMPLED, seed=5))
    huge = asyncio.create_task(
        bench.engine.generate(PROMPTS * 100, n_samples=64, sampling=Sampling(max_new_tokens=50), seed=0)
    )
    await asyncio.sleep(0.2)
    huge.cancel()
    with pytest.raises(asyncio.CancelledError):
        await huge
    async with asyncio.timeout(30):
        assert flat(await bench.engine.generate(PROMPTS, n_samples=2, sampling=SAMPLED, seed=5)) == expected


async def test_the_loop_runs_on_while_the_engine_computes(bench):
    await bench.install(bench.one)
    ticks = 0

    async def tick() -> None:
        nonlocal ticks
        while True:
            ticks += 1
            await asyncio.sleep(0)

    ticking = asyncio.create_task(tick())
    await bench.engine.generate(PROMPTS * 8, n_samples=16, sampling=SAMPLED, seed=0)
    ticking.cancel()
    assert ticks > 10


async def test_a_closed_engine_leaves_nothing_behind_and_says_so(bench):
    def processes():
        return {child.pid for child in psutil.Process().children(recursive=True)}

    before = processes()
    engine = bench.again()
    with pytest.raises(EngineError, match="no policy version"):
        await engine.generate(PROMPTS, n_samples=1, sampling=GREEDY, seed=0)
    assert engine.version == -1
    await engine.install(bench.one.snapshot, 0)
    assert await engine.generate(PROMPTS, n_samples=1, sampling=GREEDY, seed=0)
    await engine.close()
    # multiprocessing keeps one process of its own, which counts what its children share.
    left = [" ".join(psutil.Process(pid).cmdline()) for pid in processes() - before]
    assert [each for each in left if "resource_tracker" not in each] == []
    with pytest.raises(EngineError, match="closed"):
        await engine.install(bench.one.snapshot, 1)
