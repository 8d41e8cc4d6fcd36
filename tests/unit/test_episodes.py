"""Episodes of several turns: what is trained of them, what a worker may not change, and how the loss sees it."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import msgspec
import numpy as np
import pytest
import torch
from policies import EOS, make_groups, make_policy, make_text_policy

from echo2p2p.data.conversation import Conversation
from echo2p2p.data.episode import is_replayed
from echo2p2p.data.policy import load_config
from echo2p2p.data.scoring import TaskScorer
from echo2p2p.data.task import make_task
from echo2p2p.data.tokens import PolicyTokenizer
from echo2p2p.data.trajectory import Group, Sampling, Trajectory, pack_logprobs
from echo2p2p.errors import RewardFailed, SettingsError, TaskError
from echo2p2p.learning.admission import Refusal, check_contents
from echo2p2p.learning.batching import collate, rows_of
from echo2p2p.learning.trainer import GRPOTrainer, TrainerSettings
from echo2p2p.rollout.episodes import roll_out
from echo2p2p.rollout.following import check_same_files
from echo2p2p.rollout.transformers_engine import TransformersEngine

SETTINGS = TrainerSettings(learning_rate=1e-3, threads=1)
BUDGET = 240
N_SAMPLES = 4
SOKOBAN = {"width": 3, "height": 3, "scramble": 3, "turns": 3, "turn_tokens": 8, "partial": True}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return make_text_policy(tmp_path_factory.mktemp("policy"))


def scorer_of(folder, name, options):
    return TaskScorer(
        make_task(name, options=options), PolicyTokenizer(folder), int(load_config(folder).vocab_size)
    )


async def rolled_out(folder, scorer, *, indices=range(3), snapshot=None, seed=0, budget=BUDGET):
    """Groups from a fresh engine that holds ``snapshot``."""
    engine = TransformersEngine(folder, threads=1)
    try:
        await engine.install(snapshot or GRPOTrainer(folder, SETTINGS).snapshot(), 0)
        return await roll_out(
            engine,
            scorer,
            indices,
            n_samples=N_SAMPLES,
            sampling=Sampling(max_new_tokens=budget),
            seed=seed,
            offload=asyncio.to_thread,
        )
    finally:
        await engine.close()


@pytest.fixture(scope="module")
def episode(folder):
    """An honest group of Sokoban, of which the first sample has several turns, and its scorer."""
    scorer = scorer_of(folder, "sokoban", SOKOBAN)
    groups = asyncio.run(rolled_out(folder, scorer))
    return next(group for group in groups if len(group.samples[0].turns) > 1), scorer


def check(group, scorer, budget=BUDGET):
    return check_contents(group, scorer=scorer, n_samples=N_SAMPLES, max_new_tokens=budget)


def with_first(group, **changes):
    first, *rest = group.samples
    return msgspec.structs.replace(group, samples=[msgspec.structs.replace(first, **changes), *rest])


def test_an_honest_episode_is_taken_as_it_is(episode):
    group, scorer = episode
    assert check(group, scorer) == group
    sample = group.samples[0]
    assert sum(sample.turns) == len(sample.completion)
    assert all(length <= 8 for length in sample.turns[::2])
    assert sample.n_trained == sum(sample.turns[::2]) == int(sample.trained().sum())
    assert np.all(sample.logprob_array()[~sample.trained()] == 0)


def test_an_environment_that_said_something_else_is_refused(episode):
    group, scorer = episode
    sample = group.samples[0]
    place = sample.turns[0]
    completion = list(sample.completion)
    completion[place] = 5 if completion[place] != 5 else 6
    assert check(with_first(group, completion=completion), scorer) is Refusal.TURNS


def test_an_episode_that_was_cut_short_is_refused(episode):
    """A worker could drop every episode that it expects to lose."""
    group, scorer = episode
    sample = group.samples[0]
    end = sample.turns[0]
    short = {"completion": sample.completion[:end], "logprobs": sample.logprobs[: 4 * end]}
    assert check(with_first(group, **short, turns=sample.turns[:1]), scorer) is Refusal.TURNS
    assert check(with_first(group, **short, turns=[]), scorer) is Refusal.TURNS


def test_an_environment_s_tokens_cannot_be_passed_off_as_the_model_s(episode):
    group, scorer = episode
    sample = group.samples[0]
    assert check(with_first(group, turns=[]), scorer) is Refusal.TURNS
    moved = [sample.turns[0] - 1, sample.turns[1] + 1, *sample.turns[2:]]
    if moved[0]:
        assert check(with_first(group, turns=moved), scorer) in (Refusal.TURNS, Refusal.LOGPROBS)
    assert check(with_first(group, turns=sample.turns[:-1]), scorer) is Refusal.LOGPROBS


def test_log_probabilities_stand_only_where_something_was_sampled(episode):
    group, scorer = episode
    sample = group.samples[0]
    logprobs = sample.logprob_array().copy()
    logprobs[sample.turns[0]] = -1.0
    assert check(with_first(group, logprobs=pack_logprobs(logprobs)), scorer) is Refusal.LOGPROBS


def test_a_task_of_one_turn_has_no_others(folder):
    scorer = scorer_of(folder, "strings", {})
    sample = Trajectory([5, 6, 7], pack_logprobs([-1, 0, -1]), 0, 0, 0.0, "stop", turns=[1, 1, 1])
    assert not is_replayed(sample, scorer, 0, budget=9)
    assert is_replayed(msgspec.structs.replace(sample, turns=[]), scorer, 0, budget=9)


async def test_an_episode_ends_where_a_whole_turn_no_longer_fits(folder, episode):
    scorer = episode[1]
    for budget in (8, 60):
        for group in await rolled_out(folder, scorer, budget=budget):
            assert all(len(sample.completion) <= budget for sample in group.samples)
            assert check(group, scorer, budget) == group
            if budget == 8:
                assert all(len(sample.turns) == 1 for sample in group.samples)


async def test_a_reward_that_cannot_be_computed_is_a_mark_and_no_lie(folder):
    class Failing(TaskScorer):
        def reward(self, index, completion, split="train"):
            raise RewardFailed("no")

    scorer = scorer_of(folder, "strings", {})
    failing = Failing(make_task("strings"), PolicyTokenizer(folder), scorer.vocab_size)
    [group] = await rolled_out(folder, failing, indices=[0], budget=4)
    assert all(sample.failed and sample.reward == 0 for sample in group.samples)
    checked = check(group, scorer, 4)
    assert not any(sample.failed for sample in checked.samples)
    [honest] = await rolled_out(folder, scorer, indices=[0], budget=4)
    assert all(sample.failed and sample.reward == 0 for sample in check(honest, failing, 4).samples)


class Mute:
    """An environment that has nothing to say where it should, once at the beginning and once later."""

    name, max_turns, turn_tokens = "mute", 3, 8

    def prompt(self, index, split="train"):
        return "" if index == 5 else "go"

    def respond(self, index, actions, split="train"):
        return "" if index == 6 else "on"

    def answer(self, index, split="train"):
        return ""

    def reward(self, index, completion, split="train"):
        return 0.0

    def episode_reward(self, index, actions, split="train"):
        return 0.0


def test_text_that_makes_no_tokens_is_the_task_s_failure_and_ends_nobody(folder):
    tokenizer = PolicyTokenizer(folder)
    scorer = TaskScorer(Mute(), tokenizer, len(tokenizer))
    turn = [tokenizer.encode_text("a")]
    assert scorer.respond(4, turn)
    with pytest.raises(TaskError, match=r"prompt 5: .*no tokens of the prompt"):
        scorer.prompt_tokens(5)
    with pytest.raises(TaskError, match=r"prompt 6: .*no tokens of the turn"):
        scorer.respond(6, turn)


# --- from text to tokens -------------------------------------------------------------------------------

CHAT = (
    "{% for m in messages %}<{{ m.role }}>{{ m.content }}{{ eos_token }}{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)


def test_what_an_environment_says_is_wrapped_as_the_template_wraps_a_user_s_turn(tmp_path):
    folder = make_text_policy(tmp_path / "policy")
    (folder / "chat_template.jinja").write_text(CHAT)
    chat, plain = PolicyTokenizer(folder, chat_template=True), PolicyTokenizer(folder)
    [letter] = plain.encode_prompt("a")
    wrapped = plain.encode_prompt("<user>go on")
    assert chat.encode_prompt("go on")[: len(wrapped)] == wrapped
    whole = chat.encode_turn("go on", after=letter)
    assert whole[: len(wrapped) + 1] == [EOS, *wrapped]
    assert chat.decode_completion(whole).endswith("<assistant>")
    assert chat.encode_turn("go on", after=EOS) == whole[1:]  # an end that was sampled is not said again
    assert plain.encode_turn("go on", after=letter) == plain.encode_prompt("go on")
    with pytest.raises(SettingsError):
        plain.encode_turn("", after=letter)


def test_of_a_conversation_the_template_wraps_every_message(tmp_path):
    folder = make_text_policy(tmp_path / "policy")
    (folder / "chat_template.jinja").write_text(CHAT)
    chat, plain = PolicyTokenizer(folder, chat_template=True), PolicyTokenizer(folder)
    talk = Conversation([("system", "be brief"), ("user", "go on")])
    ends = (f"<{role}>{content}" for role, content in talk.messages)
    spelled = [token for text in ends for token in (*plain.encode_prompt(text), EOS)]
    assert chat.encode_prompt(talk)[: len(spelled)] == spelled
    assert plain.encode_prompt(talk) == plain.encode_prompt("be brief\n\ngo on")
    (folder / "chat_template.jinja").write_text("{{ raise_exception('no system here') }}")
    with pytest.raises(SettingsError, match="refuses a prompt of system, user: no system here"):
        PolicyTokenizer(folder, chat_template=True).encode_prompt(talk)


def test_a_turn_s_last_letter_takes_nothing_from_what_the_environment_says(tmp_path):
    folder = make_text_policy(tmp_path / "policy")
    (folder / "chat_template.jinja").write_text(CHAT.replace("{{ eos_token }}", "a then"))
    chat = PolicyTokenizer(folder, chat_template=True)
    one, other = (PolicyTokenizer(folder).encode_prompt(letter)[-1] for letter in "ab")
    assert chat.encode_turn("go on", after=one) == chat.encode_turn("go on", after=other)


def test_a_version_with_another_chat_template_is_not_rolled_out():
    held = {"config.json": b"{}", "chat_template.jinja": b"one"}
    check_same_files(held, dict(held))
    with pytest.raises(SettingsError, match=r"chat_template\.jinja has changed"):
        check_same_files(held, {**held, "chat_template.jinja": b"two"})
    with pytest.raises(SettingsError, match=r"tokenizer\.json has changed"):
        check_same_files(held, {**held, "tokenizer.json": b"{}"})


# --- what is trained -----------------------------------------------------------------------------------


def with_turns(group: Group) -> Group:
    """``group`` with an environment's two tokens put into every completion, after its first token."""
    samples = []
    for sample in group.samples:
        tokens, logprobs = sample.completion, sample.logprob_array()
        if len(tokens) > 1:
            sample = msgspec.structs.replace(
                sample,
                completion=[tokens[0], 7, 8, *tokens[1:]],
                logprobs=pack_logprobs([logprobs[0], 0, 0, *logprobs[1:]]),
                turns=[1, 2, len(tokens) - 1],
            )
        samples.append(sample)
    return msgspec.structs.replace(group, samples=samples)


def test_only_the_model_s_tokens_are_targets():
    groups = make_groups(0)
    plain = collate(rows_of(groups, scale_by_std=True), torch.device("cpu"), padded=True)
    turned = collate(
        rows_of(list(map(with_turns, groups)), scale_by_std=True), torch.device("cpu"), padded=True
    )
    for name in ("targets", "sampler_logprobs", "advantages"):
        assert torch.equal(getattr(plain, name), getattr(turned, name))
    assert int(turned.where.sum()) == len(turned.targets)
    assert sum(map(len, [s.completion for g in groups for s in g.samples])) == len(turned.targets)


def test_an_environment_s_tokens_are_conditions_of_what_follows(tmp_path):
    policy = make_policy(tmp_path / "policy")
    trainer = GRPOTrainer(policy, SETTINGS)
    groups = list(map(with_turns, make_groups(1)))
    found = trainer.logprobs(groups)
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(policy)
    for group, by_sample in zip(groups, found, strict=True):
        for sample, logprobs in zip(group.samples, by_sample, strict=True):
            ids = torch.tensor([group.prompt + sample.completion])
            with torch.no_grad():
                all_of_them = torch.log_softmax(model(ids).logits[0, len(group.prompt) - 1 : -1], -1)
            expected = all_of_them[torch.arange(len(sample.completion)), sample.completion]
            torch.testing.assert_close(
                logprobs, expected[torch.from_numpy(sample.trained())], atol=1e-5, rtol=0
            )


def test_micro_batches_of_episodes_change_nothing_but_memory(tmp_path):
    policy = make_policy(tmp_path / "policy")
    groups = list(map(with_turns, make_groups(2)))
    one = GRPOTrainer(policy, SETTINGS).train(groups)
    two = GRPOTrainer(policy, replace(SETTINGS, micro_batch_tokens=12)).train(groups)
    assert one.loss == pytest.approx(two.loss, abs=1e-5, rel=1e-5)
    assert one.grad_norm == pytest.approx(two.grad_norm, rel=1e-4)
    assert one.tokens == sum(group.n_tokens for group in make_groups(2))
