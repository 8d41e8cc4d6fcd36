"""Tasks are pure, stable for ever, disjoint between splits, and strict about their options."""

from __future__ import annotations

import pytest

from echo2p2p.data.chosen import build, choose
from echo2p2p.data.draw import score
from echo2p2p.data.task import HELD_OUT, TRAIN, make_task, names
from echo2p2p.errors import SettingsError
from echo2p2p.settings import TaskSettings

ALL = [
    ("strings", {"kind": "reverse"}),
    ("strings", {"kind": "sort", "alphabet": "letters", "length": 4}),
    ("strings", {"kind": "copy", "style": "sentence"}),
    ("arithmetic", {}),
    ("arithmetic", {"operation": "subtract", "digits": 3}),
    ("arithmetic", {"operation": "multiply", "style": "sentence"}),
]


def test_both_families_are_known_by_name():
    assert {"strings", "arithmetic"} <= set(names())


@pytest.mark.parametrize(("name", "options"), ALL)
def test_a_task_is_a_pure_function_of_seed_split_and_index(name, options):
    one, two = make_task(name, seed=3, options=options), make_task(name, seed=3, options=options)
    other = make_task(name, seed=4, options=options)
    for split in (TRAIN, HELD_OUT):
        prompts = [one.prompt(i, split) for i in range(50)]
        assert prompts == [two.prompt(i, split) for i in reversed(range(50))][::-1]
        assert prompts != [other.prompt(i, split) for i in range(50)]
        assert len(set(prompts)) > 40


@pytest.mark.parametrize(("name", "options"), ALL)
def test_the_answer_earns_the_full_reward_and_nothing_else_does(name, options):
    task = make_task(name, seed=1, options=options)
    for index in range(20):
        answer = task.answer(index)
        assert task.reward(index, answer) == 1.0
        assert task.reward(index, f" {answer}\n") == 1.0
        for wrong in (answer + "0", answer[:-1], "", "\ud800", answer * 1000):
            assert task.reward(index, wrong) == 0.0


def test_prompts_never_change_between_releases():
    """Checkpoints hold prompt indices: these texts are a promise."""
    assert make_task("strings", seed=0).prompt(0) == "r46996="
    assert make_task("strings", seed=0).prompt(1, HELD_OUT) == "r12423="
    assert make_task("arithmetic", seed=0).prompt(0) == "12+38="


@pytest.mark.parametrize(
    ("name", "options"), [("strings", {"length": 3}), ("arithmetic", {"digits": 1}), ("arithmetic", {})]
)
def test_no_held_out_prompt_is_ever_trained(name, options):
    task = make_task(name, seed=9, options=options)
    train = {task.prompt(i, TRAIN) for i in range(1000)}
    held_out = {task.prompt(i, HELD_OUT) for i in range(1000)}
    assert train
    assert held_out
    assert not train & held_out


@pytest.mark.parametrize(
    ("options", "prompt", "answer"),
    [
        ({"kind": "reverse"}, "r46996=", "69964"),
        ({"kind": "sort"}, "s46996=", "46699"),
        ({"kind": "copy"}, "c46996=", "46996"),
        (
            {"kind": "reverse", "style": "sentence"},
            "Write the string 46996 backwards. Answer with the result only.",
            "69964",
        ),
    ],
)
def test_the_kinds_of_strings(options, prompt, answer):
    task = make_task("strings", seed=0, options=options)
    assert (task.prompt(0), task.answer(0)) == (prompt, answer)


@pytest.mark.parametrize(("operation", "answer"), [("add", "50"), ("subtract", "-70"), ("multiply", "2720")])
def test_the_operations_of_arithmetic(operation, answer):
    assert make_task("arithmetic", seed=0, options={"operation": operation}).answer(0) == answer


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("strings", {"kind": "shuffle"}),
        ("strings", {"length": 1}),
        ("strings", {"length": 257}),
        ("strings", {"length": "5"}),
        ("strings", {"length": True}),
        ("strings", {"lenght": 5}),
        ("strings", {"partial": 1}),
        ("arithmetic", {"operation": "divide"}),
        ("arithmetic", {"digits": 0}),
        ("arithmetic", {"digits": 2.0}),
        ("nothing", {}),
    ],
)
def test_a_bad_option_is_refused(name, options):
    with pytest.raises(SettingsError):
        make_task(name, options=options)


def test_an_unknown_split_is_refused():
    with pytest.raises(SettingsError, match="split"):
        make_task("strings").prompt(0, "test")


@pytest.mark.parametrize(
    ("completion", "expected"),
    [("123", 1.0), ("12", 2 / 3), ("1234", 3 / 4), ("321", 1 / 3), ("", 0.0), ("123123", 0.5)],
)
def test_partial_pay_counts_right_places_and_never_rewards_length(completion, expected):
    assert score(completion, "123", partial=True) == pytest.approx(expected)


def test_a_curriculum_changes_options_with_the_index_and_is_judged_by_its_last_stage():
    own = TaskSettings(
        options={"length": 3},
        stages=[{"start": 10, "options": {"length": 5}}, {"start": 20, "options": {"length": 8}}],
    )
    spec, task = choose(own)
    assert [len(task.answer(index)) for index in (0, 9, 10, 19, 20, 10**6)] == [3, 3, 5, 5, 8, 8]
    assert [len(task.answer(index, HELD_OUT)) for index in (0, 15)] == [8, 8]
    assert task.reward(12, task.answer(12)) == 1.0
    assert build(spec, TaskSettings()).prompt(25) == task.prompt(25)


def test_a_curriculum_of_episodes_keeps_each_stage_s_own_number_of_turns():
    own = TaskSettings(name="sokoban", options={"turns": 2}, stages=[{"start": 5, "options": {"turns": 6}}])
    _, task = choose(own)
    assert task.max_turns == 6
    assert task.respond(0, [""]) is not None
    assert task.respond(0, ["", ""]) is None
    assert task.respond(5, ["", ""]) is not None


def test_stages_out_of_order_are_refused():
    with pytest.raises(SettingsError, match="does not ascend"):
        choose(TaskSettings(stages=[{"start": 9}, {"start": 3}]))
