"""Tasks of other libraries and of files of one's own."""

from __future__ import annotations

import json
import sys
import threading
from importlib.metadata import PackageNotFoundError

import pytest

from echo2p2p.data.chosen import build, choose
from echo2p2p.data.graders import is_code
from echo2p2p.data.reasoning import _tagged
from echo2p2p.data.task import HELD_OUT, TRAIN, make_task
from echo2p2p.data.work import Stage, TaskSpec
from echo2p2p.errors import SettingsError
from echo2p2p.settings import TaskSettings


@pytest.fixture(scope="module")
def knights():
    task = make_task("reasoning-gym", seed=3, options={"dataset": "knights_knaves", "n_people": 2})
    yield task
    task.close()


def test_reasoning_gym_scores_its_own_answer_in_full(knights):
    for index in range(3):
        answer = knights.answer(index)
        assert knights.reward(index, f"Let me see. {answer}") == 1.0
        assert knights.reward(index, "nobody knows") == 0.0
        assert knights.reward(index, "<answer>nobody</answer>") < 0.5


def test_a_reasoning_prompt_is_a_pure_function_of_seed_and_index_and_its_splits_are_disjoint(knights):
    again = make_task("reasoning-gym", seed=3, options={"dataset": "knights_knaves", "n_people": 2})
    other = make_task("reasoning-gym", seed=4, options={"dataset": "knights_knaves", "n_people": 2})
    train = [knights.prompt(i, TRAIN) for i in range(60)]
    assert train == [again.prompt(i, TRAIN) for i in reversed(range(60))][::-1]
    assert train != [other.prompt(i, TRAIN) for i in range(60)]
    assert not set(train) & {knights.prompt(i, HELD_OUT) for i in range(60)}
    for task in (again, other):
        task.close()


@pytest.mark.parametrize("dataset", ["sokoban", "countdown"])
def test_other_data_sets_are_a_matter_of_one_option(dataset):
    task = make_task("reasoning-gym", options={"dataset": dataset, "extract": "whole"})
    try:
        assert task.reward(0, task.answer(0)) == 1.0
    finally:
        task.close()


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"dataset": "knights"}, "there is no data set 'knights'"),
        ({"dataset": "knights_knaves", "people": 2}, "people"),
        (
            {"dataset": "knights_knaves", "n_people": -1},
            "with n_people = -1: reasoning raised AssertionError",
        ),
    ],
)
def test_what_reasoning_gym_does_not_have_is_said_at_once(options, says):
    with pytest.raises(SettingsError, match=says):
        make_task("reasoning-gym", options=options)


def test_another_release_of_the_library_is_refused():
    spec, task = choose(TaskSettings(name="reasoning-gym"))
    task.close()
    old = type(spec)(spec.name, spec.seed, spec.options, pins={"reasoning-gym": "0.0.1"})
    with pytest.raises(SettingsError, match=r"the learner's reasoning-gym of task reasoning-gym is 0\.0\.1"):
        build(old, TaskSettings())


def test_environments_without_their_library_say_what_to_install(monkeypatch):
    def missing(name):
        raise PackageNotFoundError(name)

    monkeypatch.setattr("echo2p2p.data.environments.version", missing)
    with pytest.raises(
        SettingsError, match=r"needs the library verifiers \(pip install 'echo2p2p\[verifiers\]'\)"
    ):
        make_task("verifiers", options={"environment": "wordle"})


def test_a_release_of_the_library_without_such_environments_is_named(monkeypatch):
    monkeypatch.setattr("echo2p2p.data.environments.version", lambda name: "0.4.0")
    with pytest.raises(SettingsError, match=r"needs a release <0\.4,>=0\.3 of the library, this is 0\.4\.0"):
        make_task("verifiers", options={"environment": "wordle"})


@pytest.mark.parametrize(
    "own",
    [
        TaskSettings(),
        TaskSettings(name="verifiers", options={"environment": "crossword"}),
        TaskSettings(name="verifiers", options={"environment": "wordle", "words": "/etc/passwd"}),
        TaskSettings(
            name="verifiers", options={"environment": "wordle"}, stages=({"start": 8, "options": {}},)
        ),
    ],
)
def test_a_worker_runs_no_environment_that_it_has_not_been_told_to_run(own):
    asked = TaskSpec("verifiers", 0, {"environment": "wordle"})
    with pytest.raises(SettingsError, match="code that this worker has not been told to run"):
        build(asked, own)


@pytest.fixture
def questions(tmp_path):
    path = tmp_path / "questions.jsonl"
    rows = [{"q": f"What is {i} / 2?", "a": f"\\frac{{{i}}}{{2}}"} for i in range(64)]
    path.write_text("\n".join(map(json.dumps, rows)) + "\n\n")
    return path


def options(path, **more):
    return {"path": str(path), "question": "q", "answer": "a", **more}


def test_math_verify_sees_through_the_form_of_an_answer(questions):
    task = make_task("jsonl", options=options(questions))
    try:
        number = int(task.prompt(0).split()[2])
        assert task.reward(0, f"That is \\boxed{{{number / 2}}}.") == 1.0
        assert task.reward(0, f"$\\frac{{{number}}}{{2}}$") == 1.0
        assert task.reward(0, f"That is \\boxed{{{number}.25}}.") == 0.0
        assert task.reward(0, "") == 0.0
    finally:
        task.close()


def test_every_question_is_asked_once_an_epoch_and_is_in_one_split(questions):
    task = make_task("jsonl", seed=1, options=options(questions, score="exact", template="Q: {question}"))
    train = [task.prompt(i) for i in range(200)]
    n = next(i for i in range(1, 200) if len(set(train[: i + 1])) <= i)
    assert len(set(train)) == n
    assert set(train[n : 2 * n]) == set(train[:n])
    assert train[n : 2 * n] != train[:n]
    assert not set(train) & {task.prompt(i, HELD_OUT) for i in range(20)}
    assert task.prompt(0).startswith("Q: What is")
    assert task.reward(0, f"so\n{task.answer(0)}") == 1.0


def test_a_worker_needs_the_learner_s_file_wherever_it_lies(questions, tmp_path):
    spec, _ = choose(TaskSettings(name="jsonl", options=options(questions, score="exact")))
    copy = tmp_path / "elsewhere.jsonl"
    copy.write_bytes(questions.read_bytes())
    own = TaskSettings(options={"path": str(copy)})
    questions.unlink()
    assert build(spec, own).answer(0)
    with copy.open("a") as file:
        file.write('{"q": "one more", "a": "1"}\n')
    with pytest.raises(SettingsError, match="the learner's path of task jsonl is"):
        build(spec, own)


def test_a_file_that_is_no_json_is_named_without_its_bytes(tmp_path):
    path = tmp_path / "rows.parquet"
    path.write_bytes(b"PAR1\x15\xec\n")
    with pytest.raises(SettingsError, match=r"rows\.parquet, line 1 is no JSON \(.*'dataset' reads parquet"):
        choose(TaskSettings(name="jsonl", options=options(path, score="exact")))
    path.write_text('{"q": "1+1"}\n')
    with pytest.raises(SettingsError, match="line 1: no object with"):
        choose(TaskSettings(name="jsonl", options=options(path, score="exact")))


def test_a_worker_opens_no_file_that_only_the_learner_names(questions):
    spec, _ = choose(TaskSettings(name="jsonl", options=options(questions, score="exact")))
    staged = TaskSpec("jsonl", 0, {}, stages=[Stage(8, dict(spec.options))], pins=spec.pins)
    for asked in (spec, staged):
        with pytest.raises(SettingsError, match="needs a file, and this worker has not been told which"):
            build(asked, TaskSettings())


def test_a_learner_cannot_have_a_worker_s_files_read_into_prompts(tmp_path):
    secret = tmp_path / "secret.txt"
    secret.write_text("\n".join(["password", "swordfish", "correcthorse"]))
    asked = TaskSpec("reasoning-gym", 0, {"dataset": "spell_backward", "data_file": str(secret)})
    with pytest.raises(SettingsError, match="data_file of reasoning-gym names a file"):
        build(asked, TaskSettings())


def test_a_line_that_is_no_question_is_named(questions):
    with questions.open("a") as file:
        file.write('{"q": "no answer"}\n')
    with pytest.raises(SettingsError, match="line 66"):
        make_task("jsonl", options=options(questions))


def test_a_data_set_that_runs_code_runs_it_in_the_sandbox_alone(monkeypatch):
    ran = []
    monkeypatch.setattr("builtins.exec", lambda *_: ran.append("exec"))
    task = make_task("reasoning-gym", options={"dataset": "codeio"})
    try:
        assert "reference code snippet" in task.prompt(0)
        assert task.reward(0, task.answer(0)) == 1.0
        assert "reasoning_gym.code.codeio" not in sys.modules
    finally:
        task.close()
    assert ran == []


QUEENS = {"dataset": "n_queens", "n": 4, "min_remove": 1, "max_remove": 2}


@pytest.mark.parametrize("options", [QUEENS, {"dataset": "countdown"}])
def test_an_answer_that_is_code_is_not_run(options, tmp_path):
    """It could read and send files, or decide what the answers after it are worth."""
    out = tmp_path / "out"
    task = make_task("reasoning-gym", options=options)
    try:
        for code in (
            f"open({str(out)!r}, 'w')",
            f"__import__('os').system('touch {out}')",
            "__import__('os').write(4, b'{\"value\": 1.0}\\n')",
            "__import__('os')._exit(3)",
            "exit(chr(51))",
        ):
            assert task.reward(0, f"<answer>{code}</answer>") < 0.1
        assert task.reward(0, task.answer(0)) == 1.0
    finally:
        task.close()
    assert not out.exists()


@pytest.mark.parametrize(
    "answer",
    ["(5 + 3)*8 - 2/4", "x**2/2 + log(x) + C", "exp(2*x)*sin(x)", "0.5*x", "Abs(x) + max(1, 2)", "sqrt(2)"],
)
def test_a_formula_is_no_code(answer):
    assert not is_code(answer)


def test_an_option_with_which_no_question_ends_is_named_and_no_worker_hangs(monkeypatch):
    monkeypatch.setattr("echo2p2p.data.reasoning.PROMPT_S", 0.5)
    spec = TaskSpec("reasoning-gym", 0, {"dataset": "n_queens", "n": 12, "min_remove": 1, "max_remove": 2})
    with pytest.raises(
        SettingsError, match=r"'n_queens' with .*n = 12.* did not answer within 0\.5 s"
    ) as raised:
        build(spec, TaskSettings())
    assert raised.value.exit_code == 3


def test_a_task_that_is_not_ready_in_time_is_named_with_its_options(monkeypatch):
    class Slow:
        name = "slow"

        def __init__(self, seed, options):
            pass

        def prompt(self, index, split=TRAIN):
            for_ever.wait()
            return "?"

    for_ever = threading.Event()
    monkeypatch.setattr("echo2p2p.data.chosen.BUILD_S", 0.05)
    monkeypatch.setattr("echo2p2p.data.chosen.make_task", lambda name, *, seed, options: Slow(seed, options))
    with pytest.raises(SettingsError, match=r"the task sokoban was not ready within 0\.05 s with width = 16"):
        build(TaskSpec("sokoban", 0, {"width": 16}), TaskSettings())
    for_ever.set()


def test_a_task_that_raises_on_its_first_prompt_is_refused_at_the_start(monkeypatch):
    class Broken:
        name = "broken"

        def prompt(self, index, split=TRAIN):
            raise ZeroDivisionError("no")

    monkeypatch.setattr("echo2p2p.data.chosen.make_task", lambda name, *, seed, options: Broken())
    with pytest.raises(SettingsError, match="cannot make its first prompts: ZeroDivisionError"):
        build(TaskSpec("broken", 0, {}), TaskSettings())


@pytest.mark.parametrize(
    ("completion", "given"),
    [
        ("<answer>1</answer> no: <answer> 2 </answer>.", "2"),
        ("<answer>1</answer> and more</answer>", "1"),
        ("<answer>1", None),
        ("1</answer>", None),
        ("<answer>" * 100_000, None),
        ("<answer>" * 100_000 + "3</answer>", "3"),
    ],
)
def test_the_last_tags_are_found_in_one_pass(completion, given):
    assert _tagged(completion) == given
