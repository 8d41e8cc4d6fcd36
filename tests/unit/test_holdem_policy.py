"""Hold'em against a frozen policy: whole hands, what is trained of them, and what the two players see."""

from __future__ import annotations

import asyncio
import shutil
from dataclasses import replace

import pytest
import torch
from policies import make_text_policy

from echo2p2p.data.chosen import build, choose
from echo2p2p.data.holdem_opponents import Rules, Seen
from echo2p2p.data.policy import load_config
from echo2p2p.data.scoring import TaskScorer
from echo2p2p.data.task import TRAIN, make_task
from echo2p2p.data.tokens import PolicyTokenizer
from echo2p2p.data.trajectory import Sampling
from echo2p2p.errors import SettingsError
from echo2p2p.learning.admission import check_contents
from echo2p2p.learning.batching import collate, rows_of
from echo2p2p.learning.trainer import GRPOTrainer, TrainerSettings
from echo2p2p.rollout.episodes import roll_out
from echo2p2p.rollout.transformers_engine import TransformersEngine
from echo2p2p.settings import TaskSettings

BUDGET = 600
HANDS = 4


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """The policy that learns."""
    return make_text_policy(tmp_path_factory.mktemp("policy"), seed=0)


@pytest.fixture(scope="module")
def frozen(tmp_path_factory):
    """The one opposite."""
    return make_text_policy(tmp_path_factory.mktemp("frozen"), seed=1)


def options(frozen, **more):
    return {"opponent": "policy", "path": str(frozen), "turns": 4, "turn_tokens": 4, "stack": 10, **more}


@pytest.fixture(scope="module")
def task(frozen):
    return make_task("holdem", seed=7, options=options(frozen))


async def test_hands_against_a_frozen_policy_are_rolled_out_and_replayed_and_only_own_tokens_are_trained(
    folder, frozen, task
):
    tokenizer = PolicyTokenizer(folder)
    scorer = TaskScorer(task, tokenizer, int(load_config(folder).vocab_size))
    engine = TransformersEngine(folder, threads=1)
    await engine.install(GRPOTrainer(folder, TrainerSettings(threads=1)).snapshot(), 0)
    groups = await roll_out(
        engine,
        scorer,
        range(HANDS),
        n_samples=4,
        sampling=Sampling(max_new_tokens=BUDGET),
        seed=0,
        offload=asyncio.to_thread,
    )
    await engine.close()
    assert any(len(sample.turns) > 1 for group in groups for sample in group.samples)
    of_learner = TaskScorer(
        make_task("holdem", seed=7, options=options(frozen)), tokenizer, scorer.vocab_size
    )
    for group in groups:
        assert group.prompt == tokenizer.encode_prompt(task.prompt(group.index))
        assert check_contents(group, scorer=of_learner, n_samples=4, max_new_tokens=BUDGET) == group
        for sample in group.samples:
            spans = sample.spans()
            own = {place for start, end in spans[::2] for place in range(start, end)}
            assert {place for place, trained in enumerate(sample.trained()) if trained} == own
            for start, end in spans[1::2]:
                assert tokenizer.decode_completion(sample.completion[start:end]).startswith("\n")
    rows = rows_of(groups, scale_by_std=False)
    own_tokens = [
        token
        for group in groups
        for sample in group.samples
        for start, end in sample.spans()[::2]
        for token in sample.completion[start:end]
    ]
    assert collate(rows, torch.device("cpu"), padded=True).targets.tolist() == own_tokens


def test_a_hand_is_a_function_of_seed_and_deal_and_of_who_sits_opposite(folder, frozen, task):
    again = make_task("holdem", seed=7, options=options(frozen))
    hands = [(i, ["call"] * n) for i in range(12) for n in (1, 2)]
    said = [task.respond(i, actions) for i, actions in hands]
    assert said == [again.respond(i, actions) for i, actions in reversed(hands)][::-1]
    other = make_task("holdem", seed=7, options=options(folder))
    assert said != [other.respond(i, actions) for i, actions in hands]
    assert [task._deal(i, TRAIN) for i in range(12)] == [other._deal(i, TRAIN) for i in range(12)]


def test_a_frozen_policy_makes_moves_and_nothing_else(task):
    words = set()
    for index in range(16):
        for own in ("call", "raise 6"):
            actions = []
            while len(actions) < 4:
                actions.append(own)
                said = task.respond(index, actions)
                if said is None:
                    break
                words |= {part.split(".")[0].split()[0] for part in said.split("Opponent: ")[1:]}
            assert -10 <= task.episode_reward(index, actions) <= 10
    assert words <= {"fold", "check", "call", "raise"}
    assert {"call", "check"} <= words  # a fold ends the hand, and nobody is told of it


def test_each_player_is_told_its_own_cards_and_never_the_other_s():
    heard: list[Seen] = []

    class Listening(Rules):
        def move(self, seen, dice):
            heard.append(seen)
            return "call"

    task = replace(make_task("holdem", seed=3), opponent=Listening("caller"))
    for index in range(6):
        prompt = task.prompt(index)
        heard.clear()
        deal = task._deal(index, TRAIN)
        own, other = (" ".join(deal.cards[2 * seat : 2 * seat + 2]) for seat in (deal.seat, 1 - deal.seat))
        task.respond(index, ["call", "raise 8"])
        assert f"You have {own}" in prompt
        assert other not in prompt
        for seen in heard:
            first, *rest = seen.talk
            assert first[0] == "user"
            assert f"You have {other}" in first[1]
            assert not any(own in content for _, content in seen.talk)
            assert [role for role, _ in rest] == ["assistant", "user"] * (len(rest) // 2)
            assert seen.talk[-1][1].endswith(".\n")
        assert any("Opponent: raise 8." in content for _, content in heard[-1].talk)


def test_learner_and_workers_need_the_same_opponent_wherever_it_lies(folder, frozen, tmp_path):
    spec, _ = choose(TaskSettings(name="holdem", options=options(frozen)))
    copy = shutil.copytree(frozen, tmp_path / "copy")
    built = build(spec, TaskSettings(options={"path": str(copy)}))
    assert built.pins == spec.pins
    with pytest.raises(SettingsError, match="the learner's opponent of task holdem is"):
        build(spec, TaskSettings(options={"path": str(folder)}))
    with pytest.raises(SettingsError, match="needs a file, and this worker has not been told which"):
        build(spec, TaskSettings())


@pytest.mark.parametrize(
    ("asked", "says"),
    [
        ({"opponent": "policy"}, "needs the option path"),
        ({"opponent": "policy", "path": "/nowhere"}, "there is no folder /nowhere"),
        ({"opponent": "tight", "path": "/nowhere"}, "takes no path"),
        ({"opponent": "shark"}, "allowed: caller, tight, wild, policy"),
    ],
)
def test_an_opponent_that_cannot_play_is_said_at_once(asked, says):
    with pytest.raises(SettingsError, match=says):
        make_task("holdem", options=asked)
