"""A checkpoint is whole or it is not there."""

from __future__ import annotations

import errno

import pytest
import torch

from echo2p2p.errors import OutOfDisk, VerificationError
from echo2p2p.learning import checkpoint as module
from echo2p2p.learning.checkpoint import Checkpoint, load, load_latest, save
from echo2p2p.learning.trainer import TrainerState

FILES = ("tensors.safetensors", "trainer.json", "learner.bin", "checkpoint.json")


def make(step: int) -> Checkpoint:
    tensors = {"policy.a": torch.full((3, 2), float(step)), "optimizer.step.a": torch.tensor(float(step))}
    counters = {"steps": step, "updates": step, "non_finite_steps": 0}
    return Checkpoint(step, TrainerState(tensors, counters), f"learner {step}".encode())


def assert_same(one: Checkpoint, two: Checkpoint) -> None:
    assert (one.step, one.learner_state, one.trainer.counters) == (
        two.step,
        two.learner_state,
        two.trainer.counters,
    )
    assert one.trainer.tensors.keys() == two.trainer.tensors.keys()
    assert all(torch.equal(t, two.trainer.tensors[name]) for name, t in one.trainer.tensors.items())


def test_what_is_saved_is_loaded(tmp_path):
    folder = save(tmp_path, make(3), keep=2)
    assert_same(load(folder), make(3))
    newest, refused = load_latest(tmp_path)
    assert newest is not None
    assert_same(newest, make(3))
    assert refused == []


def test_an_empty_folder_has_no_checkpoint(tmp_path):
    assert load_latest(tmp_path / "none") == (None, [])


def test_the_newest_are_kept_and_step_order_is_numeric(tmp_path):
    for step in (8, 9, 10, 100):
        save(tmp_path, make(step), keep=2)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step-000000000010", "step-000000000100"]


def test_saving_a_step_again_replaces_it(tmp_path):
    save(tmp_path, make(1), keep=3)
    again = Checkpoint(1, make(2).trainer, b"again")
    assert_same(load(save(tmp_path, again, keep=3)), again)


@pytest.mark.parametrize("name", FILES)
@pytest.mark.parametrize("harm", ["flip", "truncate", "extend", "remove"])
def test_a_harmed_checkpoint_is_refused_and_the_one_before_is_used(tmp_path, name, harm):
    save(tmp_path, make(1), keep=2)
    path = save(tmp_path, make(2), keep=2) / name
    data = path.read_bytes()
    if harm == "remove":
        path.unlink()
    else:
        middle = len(data) // 2
        flipped = data[:middle] + bytes([data[middle] ^ 1]) + data[middle + 1 :]
        path.write_bytes({"flip": flipped, "truncate": data[:-1], "extend": data + b"x"}[harm])
    with pytest.raises(VerificationError):
        load(path.parent)
    newest, refused = load_latest(tmp_path)
    assert newest is not None
    assert_same(newest, make(1))
    assert len(refused) == 1


def test_if_every_checkpoint_is_harmed_the_run_does_not_start_anew(tmp_path):
    (save(tmp_path, make(1), keep=2) / "learner.bin").write_bytes(b"")
    with pytest.raises(VerificationError, match="no checkpoint"):
        load_latest(tmp_path)


def test_a_save_that_dies_at_any_point_leaves_the_old_checkpoint(tmp_path, monkeypatch):
    save(tmp_path, make(1), keep=1)
    for fail_at in range(6):
        calls = iter(range(100))

        def sync(path, fail_at=fail_at, calls=calls):
            if next(calls) == fail_at:
                raise KeyboardInterrupt

        monkeypatch.setattr(module, "_sync", sync)
        with pytest.raises(KeyboardInterrupt):
            save(tmp_path, make(2), keep=1)
        newest, refused = load_latest(tmp_path)
        assert newest is not None
        assert newest.step in (1, 2)
        assert refused == []
    monkeypatch.undo()
    save(tmp_path, make(3), keep=1)
    assert [path.name for path in tmp_path.iterdir()] == ["step-000000000003"]


def test_a_save_that_dies_while_it_replaces_its_own_step_leaves_the_old_one(tmp_path):
    folder = save(tmp_path, make(1), keep=1)
    folder.rename(folder.with_name(folder.name + ".replaced"))
    newest, refused = load_latest(tmp_path)
    assert newest is not None
    assert_same(newest, make(1))
    again = Checkpoint(1, make(2).trainer, b"again")
    for _ in range(2):
        save(tmp_path, again, keep=1)
        newest, refused = load_latest(tmp_path)
        assert newest is not None
        assert_same(newest, again)
        assert refused == []
        assert [path.name for path in tmp_path.iterdir()] == [folder.name]


def test_a_full_disk_is_named_and_older_checkpoints_stay(tmp_path, monkeypatch):
    save(tmp_path, make(1), keep=1)

    def full(*_):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(module, "save_file", full)
    with pytest.raises(OutOfDisk):
        save(tmp_path, make(2), keep=1)
    assert [path.name for path in tmp_path.iterdir()] == ["step-000000000001"]
