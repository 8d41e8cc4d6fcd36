"""Rewards that are anybody's code: what they can do to the process that asks, and what they cannot."""

from __future__ import annotations

import os
import textwrap
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from echo2p2p.data.chosen import build, choose
from echo2p2p.data.episode import score_sample
from echo2p2p.data.sandbox import Sandbox, SandboxLimits, file_digest
from echo2p2p.data.scoring import TaskScorer
from echo2p2p.data.task import make_task
from echo2p2p.data.tokens import PolicyTokenizer
from echo2p2p.data.trajectory import Trajectory, pack_logprobs
from echo2p2p.errors import RewardFailed, SettingsError
from echo2p2p.parts import SEED_POLICY
from echo2p2p.settings import TaskSettings

LIMITS = SandboxLimits(call_s=0.5, start_s=30, memory_bytes=2**29)
REWARDS = """
import os, socket, sys, time
calls = 0
def score(prompt, completion, answer):
    global calls
    calls += 1
    if completion == "raise":
        raise ValueError("no such thing")
    if completion == "die":
        os._exit(3)
    if completion == "hang":
        while True:
            pass
    if completion == "text":
        return "many"
    if completion == "nan":
        return float("nan")
    if completion == "eat":
        return len(bytearray(2**30))
    if completion == "write at home":
        with open("out", "w") as file:
            file.write("x" * 10)
    if completion == "calls":
        return calls
    if completion == "pid":
        return os.getpid()
    if completion == "deep":
        os.write(int(sys.argv[1]), b"[" * 60000 + b"\\n")
    if completion == "huge":
        os.write(int(sys.argv[1]), b'1 {"value": 1' + b"0" * 400 + b"}\\n")
        time.sleep(9)
    if completion == "texts":
        return ["a", "b"]
    if completion == "print":
        print("a line that nobody reads", flush=True)
    return float(completion == answer)
"""


@pytest.fixture
def sandbox(tmp_path):
    path = tmp_path / "rewards.py"
    path.write_text(REWARDS)
    made = Sandbox(f"{path}:score", LIMITS)
    yield made
    made.close()


def test_a_reward_is_computed_in_another_process_that_stays(sandbox):
    assert sandbox.call("p", "right", "right") == 1.0
    assert sandbox.call("p", "print", "right") == 0.0
    pid = sandbox.call("p", "pid", "")
    assert pid != os.getpid()
    assert sandbox.call("p", "pid", "") == pid
    assert sandbox.call("p", "calls", "") == 5


@pytest.mark.parametrize(
    ("completion", "says"),
    [
        ("raise", "ValueError: no such thing"),
        ("die", "exit code 3"),
        ("hang", "did not answer within 0.5 s"),
        ("text", "no finite number"),
        ("nan", "no finite number"),
        ("eat", "MemoryError"),
        ("write at home", "File too large"),
        ("deep", "ended"),
    ],
)
def test_whatever_a_reward_does_is_that_call_s_error_alone(sandbox, completion, says):
    with pytest.raises(RewardFailed, match=says):
        sandbox.call("p", completion, "right")
    assert sandbox.call("p", "right", "right") == 1.0


def test_an_integer_that_no_float_can_hold_is_no_reward(sandbox):
    with pytest.raises(RewardFailed, match="no finite number"):
        sandbox.call("p", "huge", "right")


def test_a_file_without_an_end_is_read_no_further_than_allowed(tmp_path):
    path = tmp_path / "rewards.py"
    path.write_bytes(bytes(100))
    with pytest.raises(SettingsError, match="larger than 99"):
        file_digest(path, 99)
    with pytest.raises(SettingsError, match="larger than 10 bytes"):
        file_digest(Path("/proc/self/environ"), 10)  # which says that it has none


def test_no_process_and_no_folder_is_left_behind(sandbox):
    sandbox.call("p", "pid", "")
    pid = sandbox._processes[-1]._process.pid
    assert Path(sandbox._home).is_dir()
    sandbox.close()
    assert not Path(sandbox._home).exists()
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)
    with pytest.raises(RewardFailed, match="closed"):
        sandbox.call("p", "right", "right")


def test_a_file_that_cannot_be_used_is_refused_before_the_run(tmp_path):
    path = tmp_path / "broken.py"
    path.write_text("import nothing_of_that_name\n")
    with pytest.raises(SettingsError, match="nothing_of_that_name"):
        Sandbox(f"{path}:score", LIMITS).start()
    path.write_text("score = 3\n")
    with pytest.raises(SettingsError, match="not a function"):
        Sandbox(f"{path}:score", LIMITS).start()
    with pytest.raises(SettingsError, match="there is no file"):
        Sandbox(f"{tmp_path}/none.py:score", LIMITS)
    with pytest.raises(SettingsError, match="path and a function"):
        Sandbox("rewards.py", LIMITS)


def test_a_file_that_changed_during_the_run_scores_nothing(sandbox):
    sandbox.path.write_text("def score(*_): return 1.0\n")
    with pytest.raises(RewardFailed, match="has changed"):
        sandbox.call("p", "right", "right")


def settings(tmp_path, body="return float(len(completion))", name="rewards.py", **more):
    path = tmp_path / name
    path.write_text(textwrap.dedent(f"def score(prompt, completion, answer):\n    {body}\n"))
    return TaskSettings(reward=f"{path}:score", reward_timeout_s=5, **more)


def test_a_reward_of_one_s_own_takes_the_place_of_the_task_s(tmp_path):
    own = settings(tmp_path)
    spec, task = choose(own)
    try:
        assert spec.reward == "score"
        assert spec.pins.keys() == {"reward"}
        assert task.prompt(0) == make_task("strings").prompt(0)
        assert task.reward(0, "abc") == 3.0
    finally:
        task.close()


def test_a_worker_runs_only_the_reward_that_its_owner_named_and_only_the_learner_s(tmp_path):
    own = settings(tmp_path)
    spec, task = choose(own)
    task.close()
    with pytest.raises(SettingsError, match="has not been told to run"):
        build(spec, TaskSettings())
    other = settings(tmp_path, "return 1.0", name="other.py")
    with pytest.raises(SettingsError, match="the learner's reward of task strings is"):
        build(spec, other)
    built = build(spec, own)
    assert built.reward(0, "abc") == 3.0
    built.close()


def test_a_worker_with_a_reward_of_its_own_uses_it_only_where_the_run_does(tmp_path):
    spec, _ = choose(TaskSettings())
    task = build(spec, settings(tmp_path))
    assert task.reward(0, task.answer(0)) == 1.0


def test_a_task_by_import_path_needs_both_sides_to_name_it(tmp_path, monkeypatch):
    (tmp_path / "plugged.py").write_text(
        "class Ones:\n"
        "    name = 'ones'\n"
        "    def __init__(self, seed, options): pass\n"
        "    def prompt(self, index, split='train'): return '1'\n"
        "    def answer(self, index, split='train'): return '1'\n"
        "    def reward(self, index, completion, split='train'): return float(completion == '1')\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    own = TaskSettings(name="plugged:Ones")
    spec, task = choose(own)
    assert task.reward(0, "1") == 1.0
    assert build(spec, own).name == "ones"
    with pytest.raises(SettingsError, match="has not been told to run"):
        build(spec, TaskSettings())
    with pytest.raises(SettingsError, match="cannot be imported"):
        choose(TaskSettings(name="plugged:Twos"))


def test_a_reward_that_fails_counts_as_nothing_and_is_marked(tmp_path):
    _, task = choose(settings(tmp_path, "return 1 / 0"))
    tokenizer = PolicyTokenizer(SEED_POLICY)
    scorer = TaskScorer(task, tokenizer, len(tokenizer))
    sample = Trajectory([5, 6], pack_logprobs([-1, -1]), 0, 0, 0.0, "stop")
    try:
        assert score_sample(sample, scorer, 0) == (0.0, True)
    finally:
        scorer.close()


def test_a_call_after_a_hang_is_not_slower_than_a_start(sandbox):
    with pytest.raises(RewardFailed):
        sandbox.call("p", "hang", "")
    started = time.monotonic()
    sandbox.call("p", "right", "right")
    assert time.monotonic() - started < LIMITS.start_s


def test_calls_go_on_beside_one_that_hangs(sandbox):
    with ThreadPoolExecutor(1) as pool:
        hanging = pool.submit(sandbox.call, "p", "hang", "")
        while sandbox._idle.qsize() == LIMITS.processes:
            os.sched_yield()
        sandbox.call("p", "right", "right")  # starts another process
        assert not hanging.done()
        with pytest.raises(RewardFailed, match="did not answer"):
            hanging.result()


def test_whoever_s_call_ended_a_process_waits_for_the_next_one(sandbox):
    with pytest.raises(RewardFailed, match="exit code 3"):
        sandbox.call("p", "die", "")
    assert sum(process.runs for process in sandbox._processes) == 1


def test_texts_come_as_texts_and_nothing_else_does(sandbox):
    assert sandbox.ask("p", "texts", "", seconds=1) == ["a", "b"]
    with pytest.raises(RewardFailed, match="no texts"):
        sandbox.ask("p", "right", "", seconds=1)
    with pytest.raises(RewardFailed, match="no finite number"):
        sandbox.call("p", "texts", "")
