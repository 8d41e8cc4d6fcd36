"""No room in memory is one typed error, wherever it shows."""

from __future__ import annotations

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
