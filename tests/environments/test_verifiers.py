"""Environments of the verifiers library, for real. Where it is not installed, there is nothing to test here."""

from __future__ import annotations

import asyncio
from importlib.util import find_spec

import pytest
from policies import make_text_policy

from echo2p2p.data.chosen import build, choose
from echo2p2p.data.conversation import Conversation
from echo2p2p.data.policy import load_config
from echo2p2p.data.scoring import TaskScorer
from echo2p2p.data.task import HELD_OUT, TRAIN, TurnTask, make_task
from echo2p2p.data.tokens import PolicyTokenizer
from echo2p2p.data.trajectory import Sampling
from echo2p2p.errors import RewardFailed, SettingsError
from echo2p2p.learning.admission import Refusal, check_contents
from echo2p2p.learning.trainer import GRPOTrainer, TrainerSettings
from echo2p2p.rollout.episodes import roll_out
from echo2p2p.rollout.transformers_engine import TransformersEngine
from echo2p2p.settings import TaskSettings

NAME = "environments-of-tests"
CHAT = (
    "{% for m in messages %}<{{ m.role }}>{{ m.content }}{{ eos_token }}{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)


def options(kind, **more):
    return {"environment": NAME, "kind": kind, **more}


if find_spec("verifiers") is not None:

    @pytest.fixture(scope="module")
    def single():
        task = make_task("verifiers", seed=3, options=options("single"))
        yield task
        task.close()

    @pytest.fixture(scope="module")
    def several():
        task = make_task("verifiers", seed=3, options=options("several", turn_tokens=6))
        yield task
        task.close()

    def test_an_environment_of_one_turn_is_scored_by_its_rubric(single):
        assert not isinstance(single, TurnTask)
        for index in range(4):
            answer = single.answer(index)
            assert single.prompt(index).messages == (
                ("system", "Answer between tags."),
                ("user", f"{int(answer) - 1} + 1?"),
            )
            assert single.reward(index, f"<answer>{answer}</answer>") == 1.5
            assert single.reward(index, f"<answer>{answer}0</answer>") == 0.5
            assert single.reward(index, answer) < 0.5

    def test_its_rows_to_evaluate_on_are_held_out_and_never_trained_on(single):
        train = {single.prompt(i, TRAIN) for i in range(64)}
        held_out = {single.prompt(i, HELD_OUT) for i in range(8)}
        assert len(train) == 32
        assert len(held_out) == 8
        assert not train & held_out

    def test_without_such_rows_each_is_in_one_split_by_its_content(several):
        train = {several.prompt(i, TRAIN) for i in range(64)}
        held_out = {several.prompt(i, HELD_OUT) for i in range(64)}
        assert len(train) + len(held_out) == 32
        assert not train & held_out

    def test_an_episode_is_a_function_of_index_and_turns_whatever_was_played_before(several):
        assert isinstance(several, TurnTask)
        assert several.max_turns == 5
        for index in range(3):
            played = []
            while True:
                low, high = bounds(several, index, played)
                played.append(str((low + high) // 2))
                if several.respond(index, played) is None:
                    break
            assert len(played) <= 5
            reward = several.episode_reward(index, played)
            assert reward == pytest.approx(1.0 + 0.1 / len(played))
            if len(played) > 1:
                assert several.episode_reward(index, played[:-1]) < 1.0
                assert several.respond(index, played[:-1]) in ("Higher.", "Lower.")
        assert several.respond(0, ["x"]) == "A digit, please."
        assert several.respond(0, ["x"] * 5) is None

    def test_an_environment_that_fails_at_a_turn_ends_the_episode_and_gives_no_reward(several):
        assert several.respond(2, ["crash"]) is None
        with pytest.raises(RewardFailed, match="that was not foreseen"):
            several.episode_reward(2, ["crash"])

    def bounds(task, index, played):
        low, high = 0, 9
        for number, guess in enumerate(played):
            said = task.respond(index, played[: number + 1])
            low, high = (int(guess) + 1, high) if said == "Higher." else (low, int(guess) - 1)
        return low, high

    async def test_the_engine_s_tokens_are_trained_the_environment_s_are_not_and_the_learner_replays_both(
        several, tmp_path
    ):
        folder = make_text_policy(tmp_path / "policy")
        (folder / "chat_template.jinja").write_text(CHAT)
        tokenizer = PolicyTokenizer(folder, chat_template=True)
        scorer = TaskScorer(several, tokenizer, int(load_config(folder).vocab_size))
        engine = TransformersEngine(folder, threads=1)
        await engine.install(GRPOTrainer(folder, TrainerSettings(threads=1)).snapshot(), 0)
        groups = await roll_out(
            engine,
            scorer,
            range(3),
            n_samples=4,
            sampling=Sampling(max_new_tokens=300),
            seed=0,
            offload=asyncio.to_thread,
        )
        await engine.close()
        assert any(len(sample.turns) > 1 for group in groups for sample in group.samples)
        for group in groups:
            assert group.prompt == tokenizer.encode_prompt(several.prompt(group.index))
            assert check_contents(group, scorer=scorer, n_samples=4, max_new_tokens=300) == group
            for sample in group.samples:
                spans = sample.spans()
                turns = [sample.completion[start:end] for start, end in spans]
                assert sample.n_trained == sum(map(len, turns[::2]))
                actions = [tokenizer.decode_completion(turn) for turn in turns[::2]]
                for number, said in enumerate(turns[1::2]):
                    text = several.respond(group.index, actions[: number + 1])
                    assert said == tokenizer.encode_turn(text, after=turns[2 * number][-1])
                assert sample.reward == pytest.approx(several.episode_reward(group.index, actions))
        lying = next(sample for sample in groups[0].samples if len(sample.turns) > 1)
        lying.completion[lying.turns[0]] ^= 1
        assert check_contents(groups[0], scorer=scorer, n_samples=4, max_new_tokens=300) is Refusal.TURNS

    def test_a_worker_needs_the_same_environment_and_must_have_been_told_to_run_it(single):
        single_options = options("single")
        spec, task = choose(TaskSettings(name="verifiers", options=single_options))
        task.close()
        assert set(spec.pins) == {"verifiers", "environment", "rows"}
        for own in (TaskSettings(), TaskSettings(name="verifiers", options=options("several"))):
            with pytest.raises(SettingsError, match="code that this worker has not been told to run"):
                build(spec, own)
        own = TaskSettings(name="verifiers", options=single_options)
        build(spec, own).close()
        other = type(spec)(spec.name, spec.seed, spec.options, pins={**spec.pins, "rows": "0" * 64})
        with pytest.raises(SettingsError, match="the learner's rows of task verifiers is 0000"):
            build(other, own)

    @pytest.mark.parametrize(
        ("asked", "says"),
        [
            (options("group"), "scores the samples of a group by each other"),
            (options("tools"), "calls tools"),
            (options("single", m=1), "unexpected keyword argument 'm'"),
            (options("endless"), "option turns = 0 is not allowed"),
            ({"environment": "nowhere"}, "Could not import 'nowhere' environment"),
            ({}, "needs the option environment"),
        ],
    )
    def test_what_cannot_be_driven_is_said_at_once(asked, says):
        with pytest.raises(SettingsError, match=says):
            make_task("verifiers", options=asked)

    def test_an_environment_that_rewrites_its_conversation_is_refused_when_it_does():
        task = make_task("verifiers", options=options("forgetful", turns=3))
        try:
            assert task.prompt(0) == "Turn 0."
            with pytest.raises(RewardFailed, match="rewrites what was said before"):
                task.respond(0, ["1"])
        finally:
            task.close()

    def test_a_process_that_died_is_started_again_and_says_the_same(several):
        before = several.respond(1, ["x"]), several.prompt(1)
        several._process._process.kill()
        several._process._process.wait()
        with pytest.raises(RewardFailed, match="ended"):
            several.respond(1, ["x"])
        assert (several.respond(1, ["x"]), several.prompt(1)) == before

    def test_the_task_dataset_reads_what_the_datasets_library_writes(tmp_path):
        from datasets import Dataset, DatasetDict

        rows = [{"question": f"{i}?", "answer": str(i), "id": i} for i in range(3000)]
        whole = Dataset.from_list(rows)
        saved = DatasetDict(whole.select(range(2500)).train_test_split(test_size=500, seed=1))
        saved.save_to_disk(tmp_path / "saved", num_shards={"train": 3, "test": 1})
        (tmp_path / "parquet").mkdir()
        for split, part in saved.items():
            part.to_parquet(tmp_path / "parquet" / f"{split}-00000-of-00001.parquet")
        both = [
            make_task("dataset", options={"path": str(tmp_path / folder), "score": "exact"})
            for folder in ("saved", "parquet")
        ]
        assert both[0].pins == both[1].pins
        assert {both[0].answer(i) for i in range(2000)} == set(map(str, saved["train"]["id"]))
        assert {both[0].answer(i, HELD_OUT) for i in range(500)} == set(map(str, saved["test"]["id"]))
        chats = Dataset.from_list(
            [
                {
                    "messages": [
                        {"role": "user", "content": f"{i}?"},
                        {"role": "assistant", "content": f"{i}!"},
                    ]
                }
                for i in range(40)
            ]
        )
        chats.save_to_disk(tmp_path / "chats")
        task = make_task(
            "dataset",
            options={
                "path": str(tmp_path / "chats"),
                "question": "messages",
                "answer": "messages",
                "score": "exact",
            },
        )
        assert isinstance(task.prompt(0), Conversation)
        assert task.answer(0) == task.prompt(0).replace("?", "!")
