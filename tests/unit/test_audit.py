"""The audit: who is found out by what the policy says of its tokens, and that nobody else is."""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch
from policies import EOS, make_policy

from echo2p2p.data.policy import build_model
from echo2p2p.data.trajectory import Group, Trajectory, pack_logprobs
from echo2p2p.learning.audit import ENOUGH_TOKENS, NEW_TOKENS, Auditor, Reading
from echo2p2p.learning.packed import packed_inputs
from echo2p2p.learning.replay import Entry
from echo2p2p.learning.trainer import GRPOTrainer, TrainerSettings

GROUPS, SAMPLES, TOKENS = 60, 8, 10
TEMPERATURE = 0.8
PROMPT = [3, 1, 4]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return make_policy(tmp_path_factory.mktemp("policy"))


@pytest.fixture(scope="module")
def learner(folder):
    """A trainer that is a few updates ahead of the policy in ``folder``."""
    trainer = GRPOTrainer(folder, TrainerSettings(learning_rate=5e-4, temperature=TEMPERATURE, threads=1))
    groups = sampled(model_of(folder), seed=99)[:8]
    for _ in range(3):
        trainer.train(groups)
    return trainer


def model_of(folder):
    return build_model(folder, dtype=torch.float32, device="cpu", weights=True)


@torch.no_grad()
def sampled(model, *, seed, drawn_at=TEMPERATURE, said_by=None, ends=False) -> list[Group]:
    """Groups drawn from ``model`` at a temperature, with what ``said_by`` (it) says of them at TEMPERATURE.

    Args:
        ends: every completion is cut by a stop token that was not drawn, and claimed to be likely.
    """
    dice = torch.Generator().manual_seed(seed)
    ids = torch.tensor([PROMPT] * (GROUPS * SAMPLES))
    for _ in range(TOKENS):
        logits = model(ids).logits[:, -1] / drawn_at
        ids = torch.cat([ids, torch.multinomial(logits.softmax(-1), 1, generator=dice)], dim=1)
    if ends:
        ids[:, -1] = EOS
    logprobs = ((said_by or model)(ids).logits[:, len(PROMPT) - 1 : -1] / TEMPERATURE).log_softmax(-1)
    said = logprobs.gather(-1, ids[:, len(PROMPT) :, None])[..., 0].numpy()
    if ends:
        said[:, -1] = -0.1
    rewards = np.random.default_rng(seed).random(len(ids))
    samples = [
        Trajectory(
            completion=row.tolist(),
            logprobs=pack_logprobs(own),
            version_min=0,
            version_max=0,
            reward=float(reward),
            finish="length",
        )
        for row, own, reward in zip(ids[:, len(PROMPT) :], said, rewards, strict=True)
    ]
    return [
        Group(index=index, prompt=PROMPT, samples=samples[index * SAMPLES : (index + 1) * SAMPLES])
        for index in range(GROUPS)
    ]


def verdicts(learner, workers):
    """Who is found out if the learner reads all groups of ``workers``, by name."""
    auditor = Auditor(share=1.0, dice=random.Random(0))
    found = {}
    for at in range(0, GROUPS, 10):
        batch = [Entry(group, name) for name, groups in workers.items() for group in groups[at : at + 10]]
        found |= auditor.judge(batch, learner.read([entry.group for entry in batch]))
    return found


def honest(folder, count=3):
    return {f"honest {number}": sampled(model_of(folder), seed=number) for number in range(count)}


def test_tokens_of_an_older_version_are_what_they_are_said_to_be(folder, learner):
    readings = sum(learner.read(sampled(model_of(folder), seed=7)), Reading())
    assert readings.distance / readings.tokens > 1e-3  # the learner has moved
    assert verdicts(learner, honest(folder)) == {}


def test_rounding_of_another_engine_accuses_nobody(folder, learner):
    coarse = model_of(folder).bfloat16().float()
    workers = honest(folder) | {"coarse": sampled(coarse, seed=5)}
    assert verdicts(learner, workers) == {}


@pytest.mark.parametrize(
    ("lie", "told"),
    [
        ("made up", "not"),
        ("ends", "log-probabilities"),
        ("greedy", "not drawn"),
        ("colder", "not drawn"),
        ("another model", "not drawn"),
        ("colder, and some next to impossible", "not drawn"),
    ],
)
def test_a_lie_is_found_out_and_no_honest_worker_is(folder, learner, tmp_path, lie, told):
    model = model_of(folder)
    if lie == "made up":
        groups = [
            Group(group.index, group.prompt, [_saying(sample, -1.0) for sample in group.samples])
            for group in sampled(model, seed=11)
        ]
    elif lie == "ends":
        groups = sampled(model, seed=11, ends=True)
    elif lie == "another model":
        groups = sampled(model_of(make_policy(tmp_path, seed=1)), seed=11, said_by=model)
    elif lie == "colder, and some next to impossible":
        groups = sampled(model, seed=11, drawn_at=0.7 * TEMPERATURE, said_by=model)
        for group in groups[::3]:
            group.samples[0] = _saying(group.samples[0], -100.0, tokens=1)
    else:
        groups = sampled(model, seed=11, drawn_at=1e-3 if lie == "greedy" else 0.9 * TEMPERATURE)
    found = verdicts(learner, honest(folder) | {"liar": groups})
    assert found.keys() == {"liar"}
    assert told in found["liar"]


def _saying(sample, logprob, *, tokens=None):
    """``sample`` with ``logprob`` for its first ``tokens``, or all."""
    said = sample.logprob_array().copy()
    said[:tokens] = logprob
    return Trajectory(
        completion=sample.completion,
        logprobs=pack_logprobs(said),
        version_min=0,
        version_max=0,
        reward=sample.reward,
        finish=sample.finish,
    )


def off(tokens=ENOUGH_TOKENS):
    return Reading(tokens, ratio=-0.5 * tokens, ratio_squares=0.3 * tokens)


def fine(tokens=ENOUGH_TOKENS):
    return Reading(tokens, ratio_squares=0.1 * tokens, surprise_squares=tokens)


def entries(workers):
    return [Entry(Group(index=0, prompt=PROMPT, samples=[]), worker) for worker in workers]


def judged(**readings):
    auditor = Auditor(share=1.0, dice=random.Random(0))
    return auditor.judge(entries(readings), list(readings.values()))


def test_where_half_of_all_are_at_fault_nobody_is(caplog):
    assert judged(a=off(), b=fine(), c=fine()).keys() == {"a"}
    assert judged(a=off(), b=fine()) == {}
    assert "2 of 3 workers send what the policy would not" not in caplog.text
    assert judged(a=off(), b=off(), c=fine()) == {}
    assert "2 of 3 workers send what the policy would not" in caplog.text


def test_a_few_tokens_judge_nobody():
    assert judged(a=off(ENOUGH_TOKENS - 1), b=fine(), c=fine()) == {}


def test_a_policy_that_has_broken_accuses_nobody():
    broken = Reading(**{**off().__dict__, "distance": 1.0 * ENOUGH_TOKENS})
    far = Reading(**{**fine().__dict__, "distance": 1.0 * ENOUGH_TOKENS})
    assert judged(a=broken, b=far, c=far) == {}


def far(tokens=ENOUGH_TOKENS, reading=off):
    return Reading(**{**reading(tokens).__dict__, "distance": 1.0 * tokens})


@pytest.mark.parametrize("workers", ["lab", "labcdef", "lb"])
def test_a_worker_that_is_read_alone_and_is_far_from_the_policy_has_others_read_as_well(workers):
    auditor = Auditor(share=1.0, dice=random.Random(0))
    batch = entries(workers * 2)
    chosen = batch[:1]
    asked = auditor.witnesses(batch, chosen, [far()])
    assert len(asked) == len({entry.worker for entry in asked} - {"l"}) == min(2, len(workers) - 1)
    for _ in range(2):
        found = auditor.judge([*chosen, *asked], [far(), *(fine() for _ in asked)])
        assert found.keys() == ({"l"} if len(workers) > 2 else set())
    assert auditor.witnesses(batch, chosen, [off()]) == []


def test_a_policy_that_has_broken_is_told_from_a_lone_liar_by_the_others():
    auditor = Auditor(share=1.0, dice=random.Random(0))
    batch = entries("abc")
    asked = auditor.witnesses(batch, batch[:1], [far()])
    assert auditor.judge([batch[0], *asked], [far(), far(), far()]) == {}
    assert auditor.judge(batch, [fine()] * 3) == {}


def test_what_a_broken_policy_says_does_not_spoil_what_a_sound_one_does():
    auditor = Auditor(share=1.0, dice=random.Random(0))
    batch = entries("abc")
    nothing = Reading(ENOUGH_TOKENS, *[float("nan")] * 5)
    assert auditor.judge(batch, [nothing] * 3) == {}
    assert auditor.judge(batch, [off(), fine(), fine()]).keys() == {"a"}


def test_workers_that_have_left_do_not_outvote_those_that_are_there(caplog):
    auditor = Auditor(share=1.0, dice=random.Random(0))
    left = entries("uvwxyz")
    assert auditor.judge(left, [fine(), fine(), fine(), fine(), fine(), fine(10)]) == {}
    assert auditor.judge(entries("abc"), [off()] * 3, present="abc") == {}
    assert "3 of 3 workers send what the policy would not" in caplog.text


def test_a_worker_that_turns_to_lying_is_found_out_by_its_newer_tokens():
    auditor = Auditor(share=1.0, dice=random.Random(0))
    batch = entries("abc")
    for _ in range(1000):
        assert auditor.judge(batch, [fine()] * 3) == {}
    found = [auditor.judge(batch, [off(200), fine(200), fine(200)]) for _ in range(20)]
    assert {"a"} in [set(each) for each in found]


def groups_of(tokens, count):
    """Entries of one worker, each of so many tokens."""
    sample = Trajectory([5] * tokens, pack_logprobs(-np.ones(tokens)), 0, 0, 0.0, "length")
    return [Entry(Group(index=index, prompt=PROMPT, samples=[sample]), "one") for index in range(count)]


@pytest.mark.parametrize("share", [0.0, 0.05, 1.0])
def test_a_share_of_the_groups_is_read_and_the_first_of_every_worker(share):
    auditor = Auditor(share=share, dice=random.Random(3))
    batch = groups_of(100, 1000)
    first = NEW_TOKENS // 100
    chosen = auditor.choose(batch[:10]) + auditor.choose(batch[10:])
    assert chosen[:first] == (batch[:first] if share else [])
    assert len(chosen) == pytest.approx(share * 1000 + first * (share == 0.05), abs=20)


def test_a_slow_worker_keeps_nobody_from_being_found_out():
    assert judged(a=off(), b=fine(1500), c=fine(900)).keys() == {"a"}
    assert judged(a=off(), b=fine(900), c=fine(900)) == {}


def test_the_first_of_several_that_are_at_fault_is_not_judged_by_the_others():
    assert judged(a=off(), b=off(1900), c=fine(1900)) == {}


def test_the_sums_are_those_of_a_plain_forward_pass(folder, learner):
    group = sampled(model_of(folder), seed=4)[0]
    reading = learner.read([group])[0]
    total = Reading()
    for sample, logprobs in zip(group.samples, learner.logprobs([group])[0], strict=True):
        ids = [*PROMPT, *sample.completion]
        with torch.no_grad():
            logits = (
                learner._model(**packed_inputs([(ids, [[]])], torch.device("cpu"))).logits[
                    0, len(PROMPT) - 1 : -1
                ]
                / TEMPERATURE
            )
        entropy = torch.distributions.Categorical(logits=logits).entropy()
        ratio = (logprobs - torch.tensor(sample.logprob_array())).exp()
        surprise = ratio * (-logprobs - entropy)
        total += Reading(
            len(ratio),
            float((ratio - 1).sum()),
            float((ratio - 1).square().sum()),
            float(surprise.sum()),
            float(surprise.square().sum()),
            float((ratio - 1 - ratio.log()).sum()),
            float(surprise.sum()),  # there is no large ratio in these
            float(surprise.square().sum()),
        )
        assert ratio.max() < 7
    for name, value in total.__dict__.items():
        assert getattr(reading, name) == pytest.approx(value, rel=1e-3, abs=1e-3)
