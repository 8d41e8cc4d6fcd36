"""Task ``dataset``: folders as the hub has them and as save_to_disk writes them."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pyarrow as pa
import pytest
from pyarrow import parquet

from echo2p2p.data.chosen import build, choose
from echo2p2p.data.conversation import Conversation
from echo2p2p.data.task import HELD_OUT, TRAIN, make_task
from echo2p2p.errors import SettingsError
from echo2p2p.settings import TaskSettings


def table(start: int, stop: int) -> pa.Table:
    rows = range(start, stop)
    return pa.table(
        {
            "id": list(rows),
            "question": [f"What is {i} + 1?" for i in rows],
            "answer": [f"One more than {i}.\n#### {i + 1}" for i in rows],
        }
    )


def save_to_disk(folder: Path, rows: pa.Table, files: int = 2) -> None:
    """As the datasets library lays it out."""
    folder.mkdir(parents=True)
    names = [f"data-{i:05}-of-{files:05}.arrow" for i in range(files)]
    share = -(-len(rows) // files)
    for i, name in enumerate(names):
        with pa.ipc.new_stream(folder / name, rows.schema) as stream:
            stream.write_table(rows.slice(i * share, share), max_chunksize=7)
    (folder / "state.json").write_text(json.dumps({"_data_files": [{"filename": name} for name in names]}))


@pytest.fixture
def hub(tmp_path):
    """Two shards to train on, one to test with, as the hub has them."""
    folder = tmp_path / "hub"
    folder.mkdir()
    parquet.write_table(table(0, 20), folder / "train-00000-of-00002.parquet", row_group_size=6)
    parquet.write_table(table(20, 40), folder / "train-00001-of-00002.parquet")
    parquet.write_table(table(100, 110), folder / "test-00000-of-00001.parquet")
    return folder


def made(path, **options):
    return make_task("dataset", options={"path": str(path), "score": "exact", "after": "####", **options})


def test_a_mark_that_stands_in_no_answer_is_refused_and_one_in_some_is_not(hub, tmp_path):
    with pytest.raises(SettingsError, match="no answer holds the mark '@@@'"):
        made(hub, after="@@@")
    lines = [{"question": f"{i}?", "answer": "#### 7" if i == 3 else " 7"} for i in range(60)]
    file = tmp_path / "some.jsonl"
    file.write_text("".join(json.dumps(line) + "\n" for line in lines))
    wanted = {"path": str(file), "score": "exact"}
    task = make_task("jsonl", options={**wanted, "after": "####"})
    assert {task.answer(i) for i in range(40)} == {"7"}
    with pytest.raises(SettingsError, match="task option after"):
        make_task("jsonl", options={**wanted, "after": "Answer:"})


def test_a_folder_of_parquet_trains_on_its_train_split_and_holds_its_test_split_out(hub):
    task = made(hub)
    train = [task.prompt(i) for i in range(40)]
    assert set(train) == {f"What is {i} + 1?" for i in range(40)}
    assert {task.prompt(i, HELD_OUT) for i in range(10)} == {f"What is {i} + 1?" for i in range(100, 110)}
    number = int(train[3].split()[2])
    assert task.answer(3) == str(number + 1)
    assert task.reward(3, f"so\n{number + 1}") == 1.0
    assert task.reward(3, f"so\n{number}") == 0.0
    again = [task.prompt(i) for i in range(40, 80)]
    assert set(again) == set(train)
    assert again != train


def test_the_same_questions_are_the_same_task_in_whatever_files_they_are(hub, tmp_path):
    saved = tmp_path / "saved"
    save_to_disk(saved / "train", table(0, 40))
    save_to_disk(saved / "test", table(100, 110), files=1)
    (saved / "dataset_dict.json").write_text('{"splits": ["train", "test"]}')
    one, other = made(hub), made(saved)
    assert one.pins == other.pins
    assert [one.prompt(i) for i in range(50)] == [other.prompt(i) for i in range(50)]
    spec, _ = choose(TaskSettings(name="dataset", options={"path": str(hub), "score": "exact"}))
    assert build(spec, TaskSettings(options={"path": str(saved)})).prompt(5)
    save_to_disk(tmp_path / "more" / "train", table(0, 41))
    save_to_disk(tmp_path / "more" / "test", table(100, 110))
    (tmp_path / "more" / "dataset_dict.json").write_text('{"splits": ["train", "test"]}')
    with pytest.raises(SettingsError, match="the learner's questions of task dataset is"):
        build(spec, TaskSettings(options={"path": str(tmp_path / "more")}))
    with pytest.raises(SettingsError, match="needs a file, and this worker has not been told which"):
        build(spec, TaskSettings())


def test_a_prompt_is_a_function_of_seed_and_index(hub):
    options = {"path": str(hub), "score": "exact"}
    one, two, other = (make_task("dataset", seed=seed, options=options) for seed in (1, 1, 2))
    train = [one.prompt(i) for i in range(90)]
    assert train == [two.prompt(i) for i in reversed(range(90))][::-1]
    assert train != [other.prompt(i) for i in range(90)]


def test_a_single_split_is_split_by_content(tmp_path):
    save_to_disk(tmp_path / "one", table(0, 64))
    task = made(tmp_path / "one")
    train = {task.prompt(i, TRAIN) for i in range(64)}
    held_out = {task.prompt(i, HELD_OUT) for i in range(64)}
    assert len(train) + len(held_out) == 64
    assert not train & held_out


def test_what_is_held_out_is_not_trained_on_even_if_both_splits_ask_it(hub):
    parquet.write_table(table(15, 25), hub / "validation.parquet")
    task = made(hub)
    asked = {int(task.prompt(i).split()[2]) for i in range(40)}
    assert asked == {*range(15), *range(25, 40)}
    by_test = made(hub, held_out="test")
    assert len({by_test.prompt(i) for i in range(80)}) == 40


def test_columns_are_a_matter_of_options_and_may_lie_within_others(tmp_path):
    folder = tmp_path / "nested"
    folder.mkdir()
    rows = [
        {
            "prompt": [{"role": "system", "content": "Be brief."}, {"role": "user", "content": f"{i}?"}],
            "reward_model": {"ground_truth": i, "style": "rule"},
        }
        for i in range(30)
    ]
    parquet.write_table(pa.Table.from_pylist(rows), folder / "data.parquet")
    task = made(folder, question="prompt", answer="reward_model.ground_truth", after="")
    prompt = task.prompt(0)
    assert isinstance(prompt, Conversation)
    assert prompt.messages == (("system", "Be brief."), ("user", f"{task.answer(0)}?"))
    assert prompt == f"Be brief.\n\n{task.answer(0)}?"
    with pytest.raises(SettingsError, match="take no template"):
        made(folder, question="prompt", answer="reward_model.ground_truth", template="Q: {question}")
    with pytest.raises(SettingsError, match=r"no field 'reward_model.truth'"):
        made(folder, question="prompt", answer="reward_model.truth")


def test_of_whole_conversations_the_assistant_s_last_message_is_the_answer(tmp_path):
    folder = tmp_path / "chats"
    folder.mkdir()
    turns = [("user", "Hello"), ("assistant", "Hello. What is it?"), ("user", "{}?"), ("assistant", "{}!")]
    rows = [{"messages": [{"role": r, "content": c.format(i)} for r, c in turns]} for i in range(30)]
    parquet.write_table(pa.Table.from_pylist(rows), folder / "data.parquet")
    task = made(folder, question="messages", answer="messages", after="")
    prompt = task.prompt(2)
    assert isinstance(prompt, Conversation)
    assert [role for role, _ in prompt.messages] == ["user", "assistant", "user"]
    assert task.answer(2) == prompt.messages[-1][1].replace("?", "!")


def test_what_cannot_be_used_is_said_in_one_line(hub, tmp_path):
    with pytest.raises(SettingsError, match=r"no column 'problem'; it has id, question, answer \("):
        made(hub, question="problem")
    with pytest.raises(SettingsError, match=r"has no split 'dev' \(it has test, train\)"):
        made(hub, held_out="dev")
    with pytest.raises(SettingsError, match="there is no folder"):
        made(tmp_path / "nowhere")
    (tmp_path / "empty").mkdir()
    with pytest.raises(SettingsError, match="holds no data set"):
        made(tmp_path / "empty")
    parquet.write_table(table(0, 0), tmp_path / "empty" / "train.parquet")
    with pytest.raises(SettingsError, match="is empty"):
        made(tmp_path / "empty")
    (tmp_path / "empty" / "train.parquet").write_bytes(b"PAR1 no more")
    with pytest.raises(SettingsError, match=r"train\.parquet cannot be read"):
        made(tmp_path / "empty")
    holes = pa.table({"question": ["a", "b"], "answer": ["1", None]})
    parquet.write_table(holes, tmp_path / "empty" / "train.parquet")
    with pytest.raises(SettingsError, match=r"row 1: the answer is neither text nor messages but None"):
        made(tmp_path / "empty")


def test_two_data_sets_in_one_folder_are_not_mixed(hub, tmp_path):
    (tmp_path / "both" / "main").mkdir(parents=True)
    hub.rename(tmp_path / "both" / "socratic")
    parquet.write_table(table(0, 5), tmp_path / "both" / "main" / "train.parquet")
    with pytest.raises(SettingsError, match="holds several data sets: main, socratic"):
        made(tmp_path / "both")


def test_a_saved_folder_cannot_lead_out_of_itself(tmp_path):
    save_to_disk(tmp_path / "saved", table(0, 10), files=1)
    (tmp_path / "saved" / "data-00000-of-00001.arrow").rename(tmp_path / "elsewhere.arrow")
    (tmp_path / "saved" / "state.json").write_text('{"_data_files": [{"filename": "../elsewhere.arrow"}]}')
    with pytest.raises(SettingsError, match="there is no file"):
        made(tmp_path / "saved")


def test_a_pipe_and_text_that_is_none_hold_nobody_up(tmp_path):
    os.mkfifo(tmp_path / "train.parquet")
    with pytest.raises(SettingsError, match="holds no data set"):
        make_task("dataset", options={"path": str(tmp_path), "score": "exact"})
    (tmp_path / "train.parquet").unlink()
    offsets, data = pa.py_buffer(bytes(8) + (2).to_bytes(4, "little")), pa.py_buffer(b"\xff\xfe")
    no_text = pa.Array.from_buffers(pa.string(), 2, [None, offsets, data])
    parquet.write_table(pa.table({"question": no_text, "answer": no_text}), tmp_path / "train.parquet")
    with pytest.raises(SettingsError, match="cannot be read"):
        make_task("dataset", options={"path": str(tmp_path), "score": "exact"})


def test_an_empty_question_is_named_before_anybody_asks_it(tmp_path):
    parquet.write_table(pa.table({"question": ["a", ""], "answer": ["1", "2"]}), tmp_path / "train.parquet")
    with pytest.raises(SettingsError, match="row 1: the question is empty"):
        make_task("dataset", options={"path": str(tmp_path), "score": "exact"})


@pytest.mark.parametrize(("question", "said"), [("", "is empty"), ("\ud800", "holds half a character")])
def test_a_line_that_cannot_be_asked_is_named(tmp_path, question, said):
    path = tmp_path / "questions.jsonl"
    path.write_text(json.dumps({"question": question, "answer": "1"}))
    with pytest.raises(SettingsError, match=f"line 1: .* {said}"):
        make_task("jsonl", options={"path": str(path), "score": "exact"})
