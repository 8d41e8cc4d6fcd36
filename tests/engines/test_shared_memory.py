"""Memory shared with vLLM's processes: seen by them, gone with its owner, and never mistaken for something else."""

from __future__ import annotations

import os
import subprocess
import sys

import msgspec
import pytest

from echo2p2p.errors import EngineError
from echo2p2p.rollout.shared_memory import Segment, SharedMemory, map_segment


def refused(segment: Segment, why: str, owner: int | None = None) -> None:
    with pytest.raises(EngineError, match=why) as caught:
        map_segment(segment, owner=os.getpid() if owner is None else owner)
    assert "\n" not in str(caught.value)


def of_file(file: int, nbytes: int) -> Segment:
    """What names an open file of this process as if it were shared memory."""
    return Segment(os.getpid(), file, os.fstat(file).st_ino, nbytes)


def test_another_process_sees_the_bytes_and_writes_them():
    memory = SharedMemory(16)
    memory.view[:5] = b"hello"
    script = (
        "import sys, msgspec; from echo2p2p.rollout.shared_memory import Segment, map_segment\n"
        "segment = msgspec.json.decode(sys.argv[1], type=Segment)\n"
        "mapped = map_segment(segment, owner=segment.owner)\n"
        "mapped[5:11] = mapped[:5] + b'!'"
    )
    named = msgspec.json.encode(memory.segment).decode()
    subprocess.run([sys.executable, "-c", script, named], check=True, timeout=60, env={**os.environ})
    assert bytes(memory.view) == b"hellohello!" + bytes(5)


def test_no_bytes_need_no_memory():
    assert len(SharedMemory(0).view) == 0
    assert map_segment(SharedMemory(0).segment, owner=os.getpid()) == b""


def test_memory_is_gone_with_its_owner():
    memory = SharedMemory(16)
    segment = memory.segment
    del memory
    refused(segment, "gone|something else")


def test_what_took_the_number_of_freed_memory_is_refused():
    """Buckets have equal sizes, so a size alone would not tell: a late write would go over another's bytes."""
    memory = SharedMemory(16)
    segment = memory.segment
    del memory
    other = SharedMemory(16)
    assert other.segment.file == segment.file
    refused(segment, "something else is there")
    assert bytes(other.view) == bytes(16)


@pytest.mark.parametrize("change", [-8, 8, 2**40])
def test_memory_of_another_size_is_refused(change):
    memory = SharedMemory(16)
    refused(msgspec.structs.replace(memory.segment, nbytes=16 + change), "it has 16 bytes")


def test_memory_of_another_process_is_refused():
    memory = SharedMemory(16)
    refused(memory.segment, "the engine's process is", owner=os.getppid())


def test_memory_of_another_user_is_refused(monkeypatch):
    memory = SharedMemory(16)
    me = os.geteuid()
    monkeypatch.setattr(os, "geteuid", lambda: me + 1)
    refused(memory.segment, f"belongs to user {me}")


def test_memory_whose_size_can_change_is_refused():
    file = os.memfd_create("echo2p2p")
    os.ftruncate(file, 16)
    refused(of_file(file, 16), "its size is not fixed")
    os.close(file)


def test_our_memory_cannot_be_shrunk_under_whoever_maps_it():
    memory = SharedMemory(16)
    with pytest.raises(PermissionError):
        os.ftruncate(memory.segment.file, 8)


def test_a_file_of_a_disk_is_refused_and_stays_as_it_is(tmp_path):
    path = tmp_path / "journal"
    path.write_bytes(b"0123456789abcdef")
    with path.open("r+b") as file:
        refused(of_file(file.fileno(), 16), "its size is not fixed")
    assert path.read_bytes() == b"0123456789abcdef"


def test_a_pipe_is_refused_without_being_opened():
    reader, writer = os.pipe()
    refused(of_file(reader, 16), "it has 0 bytes")
    os.close(reader)
    os.close(writer)
