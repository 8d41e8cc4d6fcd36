"""No room in memory is one typed error, wherever it shows."""

from __future__ import annotations

import os

import pytest

from echo2p2p.errors import EngineError, OutOfMemory
from echo2p2p.rollout.shared_memory import SharedMemory
from echo2p2p.rollout.vllm_process import typed_error


@pytest.mark.parametrize(
    "error",
    [
        MemoryError(),
        RuntimeError("Worker failed with error 'CUDA out of memory. Tried to allocate 2 GiB'"),
        RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 1 bytes"),
    ],
)
def test_vllm_out_of_memory_is_told_by_its_words(error):
    assert isinstance(typed_error(error, "vLLM could not write"), OutOfMemory)


def test_another_error_of_vllm_keeps_its_words():
    error = typed_error(ValueError("no such layer"), "vLLM could not open")
    assert isinstance(error, EngineError)
    assert str(error) == "vLLM could not open: no such layer"


def test_shared_memory_that_does_not_fit_is_out_of_memory():
    with pytest.raises(OutOfMemory, match="MB of shared memory"):
        SharedMemory(2**60)


def test_shared_memory_is_seen_through_its_path_and_gone_with_its_owner():
    memory = SharedMemory(16)
    memory.view[:5] = b"hello"
    with open(memory.path, "rb") as file:  # noqa: PTH123 - as another process opens it
        assert file.read() == b"hello" + bytes(11)
    path = memory.path
    del memory
    assert not os.path.exists(path) or "echo2p2p" not in os.readlink(path)  # noqa: PTH110, PTH115


def test_no_bytes_need_no_memory():
    assert len(SharedMemory(0).view) == 0
