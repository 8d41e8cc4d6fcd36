"""What was accepted and what was drawn is found again after the process died at any byte."""

import errno
import os

import pytest

from echo2p2p.data.trajectory import Group, Trajectory, pack_logprobs
from echo2p2p.learning import journal as module
from echo2p2p.learning.journal import Contents, Journal, read
from echo2p2p.learning.replay import Entry


def entry(index, version=0):
    sample = Trajectory([1, 2], pack_logprobs([-1.0, -0.5]), version, version, 0.5, "stop")
    return Entry(Group(index, [7], [sample, sample]), f"worker {index}", 100 + index)


def begin(journal, version, *, durable=-1, waiting=(), batches=None):
    journal.begin(version, durable=durable, waiting=waiting, batches=batches or {})


def write(folder):
    """Five accepted, two batches of two, one waiting."""
    journal = Journal(folder)
    begin(journal, 0)
    for index in range(4):
        journal.accept(entry(index))
    journal.draw(0, [entry(1), entry(0)])
    journal.accept(entry(4))
    journal.draw(1, [entry(3), entry(2)])
    journal.close()


EXPECTED = Contents({0: [entry(1), entry(0)], 1: [entry(3), entry(2)]}, [entry(4)])


def test_what_was_written_is_found_in_its_order(tmp_path):
    write(tmp_path)
    assert read(tmp_path) == EXPECTED
    assert Journal(tmp_path, resume_from=0).found == EXPECTED


def test_a_journal_that_is_torn_at_any_byte_says_what_came_before_and_is_written_on(tmp_path):
    write(tmp_path)
    (path,) = tmp_path.iterdir()
    data = path.read_bytes()
    accepted = -1
    for length in range(0, len(data), 7):
        path.write_bytes(data[:length])
        journal = Journal(tmp_path, resume_from=0)
        found = {e.group.index for batch in journal.found.batches.values() for e in batch}
        found |= {e.group.index for e in journal.found.waiting}
        assert found == set(range(len(found)))
        assert len(found) >= accepted
        accepted = len(found)
        journal.accept(entry(9))
        journal.close()
        assert entry(9) in read(tmp_path).waiting


def test_a_flipped_byte_ends_the_journal_there(tmp_path):
    write(tmp_path)
    (path,) = tmp_path.iterdir()
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)
    assert set(read(tmp_path).batches) <= {0}


def test_a_segment_holds_all_that_its_checkpoint_needs_and_older_ones_go(tmp_path):
    write(tmp_path)
    journal = Journal(tmp_path, resume_from=0)
    begin(journal, 2, durable=0, waiting=[entry(4)])
    begin(journal, 2, durable=0)  # the same version is captured again
    journal.accept(entry(5))
    begin(journal, 4, durable=2, waiting=[entry(4), entry(5)], batches={4: [entry(6)]})
    assert [path.name for path in sorted(tmp_path.iterdir())] == [
        "groups-000000000002.journal",
        "groups-000000000004.journal",
    ]
    journal.close()
    assert Journal(tmp_path, resume_from=4).found == Contents({4: [entry(6)]}, [entry(4), entry(5)])


def test_a_journal_that_is_kept_tells_the_whole_run(tmp_path):
    journal = Journal(tmp_path, keep=True)
    for version in range(5):
        begin(journal, version, durable=version - 1)
        journal.accept(entry(version, version))
        journal.draw(version, [entry(version, version)])
    journal.close()
    assert read(tmp_path).batches == {version: [entry(version, version)] for version in range(5)}


def test_a_run_that_begins_or_goes_on_under_another_number_begins_anew(tmp_path):
    write(tmp_path)
    assert Journal(tmp_path, resume_from=7).found == Contents()
    assert list(tmp_path.iterdir()) == []
    write(tmp_path)
    assert Journal(tmp_path).found == Contents()


def test_batches_that_do_not_follow_each_other_wait_again(tmp_path):
    journal = Journal(tmp_path)
    begin(journal, 0)
    for index in range(4):
        journal.accept(entry(index))
    journal.draw(0, [entry(0)])
    journal.draw(2, [entry(1)])
    journal.close()
    found = Journal(tmp_path, resume_from=0).found
    assert found.batches == {0: [entry(0)]}
    assert sorted(e.group.index for e in found.waiting) == [1, 2, 3]


def test_of_two_groups_of_one_prompt_the_later_one_counts(tmp_path):
    """The first one fell out of the window and was leased again."""
    journal = Journal(tmp_path)
    begin(journal, 0)
    journal.accept(entry(0, 0))
    journal.accept(entry(0, 5))
    journal.draw(5, [entry(0, 5)])
    journal.close()
    assert read(tmp_path) == Contents({5: [entry(0, 5)]}, [])


@pytest.mark.parametrize("torn", [0, 3])
def test_a_full_disk_ends_a_segment_and_not_the_learner(tmp_path, monkeypatch, torn):
    journal = Journal(tmp_path)
    begin(journal, 0)
    journal.accept(entry(0))
    write_to = os.write

    def full(file, data):
        if torn:
            write_to(file, bytes(data[:torn]))
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(module.os, "write", full)
    journal.accept(entry(1))
    monkeypatch.undo()
    journal.accept(entry(2))  # nothing may follow a gap
    assert read(tmp_path).waiting == [entry(0)]
    begin(journal, 2, waiting=[entry(0), entry(1), entry(2)])
    journal.accept(entry(3))
    journal.close()
    assert Journal(tmp_path, resume_from=2).found.waiting == [entry(i) for i in range(4)]
