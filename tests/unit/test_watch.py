"""What the learner says and does beside its training: no flood of warnings, and no reading that ends a run."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from policies import make_groups, make_policy

from echo2p2p.errors import OutOfMemory
from echo2p2p.learning.audit import ENOUGH_TOKENS, Reading
from echo2p2p.learning.replay import Entry
from echo2p2p.learning.trainer import GRPOTrainer, TrainerSettings
from echo2p2p.learning.watch import FAR_KL, Watch
from echo2p2p.settings import LearnerSettings

OFF = Reading(ENOUGH_TOKENS, ratio=-0.5 * ENOUGH_TOKENS, ratio_squares=0.3 * ENOUGH_TOKENS)
FINE = Reading(ENOUGH_TOKENS)


class World:
    """A watch, and what it has others do. ``read`` is what its trainer says."""

    def __init__(self, read=None):
        self.banned, self.discarded, self.told = [], [], []
        self.watch = Watch(
            LearnerSettings(audit_share=1.0),
            trainer=SimpleNamespace(read=read),
            sessions=SimpleNamespace(open=dict.fromkeys("abcd"), ban=lambda *each: self.banned.append(each)),
            dispatcher=SimpleNamespace(discard=self.discarded.append),
            events=SimpleNamespace(emit=lambda kind, **fields: self.told.append((kind, fields["worker"]))),
        )


def entries(workers):
    return [
        Entry(group, worker)
        for group, worker in zip(make_groups(0, groups=len(workers)), workers, strict=True)
    ]


async def test_who_is_found_out_is_banned_and_what_it_sent_is_discarded():
    async def read(groups):
        return [OFF, FINE, FINE][: len(groups)]

    world = World(read)
    await world.watch.before(entries("abc"))
    assert [peer for peer, _ in world.banned] == world.discarded == ["a"]
    assert world.told == [("found_out", "a")]


async def test_groups_that_cannot_be_read_end_no_run_and_are_told_of_once(caplog):
    async def read(_):
        raise OutOfMemory("groups to be read did not fit into memory")

    world = World(read)
    for _ in range(3):
        await world.watch.before(entries("abc"))
    assert caplog.text.count("workers are not audited") == 1
    assert not world.banned


@pytest.mark.parametrize("error", [torch.OutOfMemoryError("out of memory"), MemoryError()])
def test_a_reading_for_which_memory_does_not_suffice_says_so(tmp_path, monkeypatch, error):
    trainer = GRPOTrainer(make_policy(tmp_path), TrainerSettings(threads=1))

    def fail(*_, **__):
        raise error

    monkeypatch.setattr("echo2p2p.learning.reading.k3", fail)
    with pytest.raises(OutOfMemory, match="to be read"):
        trainer.read(make_groups(0))


def test_a_broken_policy_is_told_of_once_until_it_is_back(caplog):
    watch = World().watch
    for step in range(20):
        watch.after(step, {"mismatch_kl": FAR_KL * (1.1 if step % 2 else 0.9)})
    assert caplog.text.count("has probably broken") == 1
    watch.after(20, {"mismatch_kl": 0.01})
    watch.after(21, {"mismatch_kl": FAR_KL * 2})
    assert caplog.text.count("has probably broken") == 2


async def test_a_policy_is_not_called_broken_for_what_one_worker_makes_up(caplog):
    far = Reading(ENOUGH_TOKENS, distance=2.0 * ENOUGH_TOKENS)
    said = [far, FINE, FINE]

    async def read(groups):
        return said[: len(groups)]

    watch = World(read).watch
    await watch.before(entries("abc"))
    watch.after(1, {"mismatch_kl": 1.0})
    assert "has probably broken" not in caplog.text
    said[:] = [far, far, FINE]
    await watch.before(entries("abc"))
    watch.after(2, {"mismatch_kl": 1.0})
    assert caplog.text.count("has probably broken") == 1
