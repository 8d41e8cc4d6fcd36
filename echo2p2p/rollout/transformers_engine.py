"""The inference engine on plain transformers: for CPUs, small policies and machines without vLLM.

Guarantees: completions and log-probabilities depend on nothing but policy, prompts, sampling and seed; an
install is checked whole before the first byte is touched, and is undone if it fails; all that generates or writes
weights runs on one thread of the engine's own, so the caller's loop never stalls, and calls queue in order. Versions
are staged and read back on a second thread, beside generation.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import torch

from echo2p2p.data.policy import (
    DTYPES,
    build_model,
    eos_token_ids,
    load_config,
    max_positions,
    vocabulary_size,
)
from echo2p2p.data.trajectory import Sampling
from echo2p2p.errors import EngineError
from echo2p2p.rollout.decoding import Rows, decode
from echo2p2p.rollout.engine import Completion, Swap, check_prompts
from echo2p2p.rollout.installed_weights import InstalledWeights, memory_errors
from echo2p2p.weights.adapter import AdapterSpec, adapter_state, add_adapter, check_base
from echo2p2p.weights.snapshot import Snapshot

T = TypeVar("T")


@dataclass(frozen=True)
class Batch:
    """Prompts that are decoded together: ``prompts[i]`` is an index, ``counts[i]`` its number of samples."""

    prompts: list[int]
    counts: list[int]


class TransformersEngine:
    """:class:`echo2p2p.rollout.engine.InferenceEngine` on a transformers model.

    Args:
        policy_dir: the policy folder; it needs no weights.
        device: ``cpu``, ``cuda``, ``cuda:1``, …
        dtype: what weights are held and computed in; a snapshot of another dtype is refused. None takes the
            dtype of the first snapshot, which is what the learner publishes in.
        threads: torch's threads for this engine's compute on the CPU; None leaves torch's own choice.
        max_batch_tokens: at most so many token places (rows × longest row) are decoded at once.
        attention: ``sdpa`` or ``eager``.
        adapter: versions are adapters of this kind; the folder then needs the base's weights, and the dtype is
            the adapter's.

    Raises:
        SettingsError: the folder is no usable policy, or its weights are not the base of ``adapter``.
    """

    def __init__(
        self,
        policy_dir: Path,
        *,
        device: str = "cpu",
        dtype: torch.dtype | None = None,
        threads: int | None = None,
        max_batch_tokens: int = 65536,
        attention: str = "sdpa",
        adapter: AdapterSpec | None = None,
    ) -> None:
        if adapter is not None:
            dtype = DTYPES[adapter.dtype]
        self._model = build_model(
            policy_dir, dtype=dtype, device=device, weights=adapter is not None, attention=attention
        )
        if adapter is None:
            self._weights = InstalledWeights(self._model, adopts_dtype=dtype is None)
        else:
            check_base(self._model, adapter)
            add_adapter(self._model, adapter)
            self._weights = InstalledWeights(self._model, adopts_dtype=False, published=adapter_state)
        self._eos = eos_token_ids(policy_dir)
        self._vocabulary = vocabulary_size(self._model)
        self._max_positions = max_positions(load_config(policy_dir))
        self._max_batch_tokens = max_batch_tokens
        self._closing = threading.Event()
        self._thread, self._beside = (
            ThreadPoolExecutor(1, thread_name_prefix=name, initializer=_prepare_thread, initargs=(n_threads,))
            for name, n_threads in (("engine", threads), ("engine-beside", 1))
        )

    @property
    def overlaps(self) -> bool:
        return False

    @property
    def version(self) -> int:
        return self._weights.version

    async def generate(
        self, prompts: Sequence[Sequence[int]], *, n_samples: int, sampling: Sampling, seed: int
    ) -> list[list[Completion]]:
        """Sample ``n_samples`` completions of every prompt; see the protocol.

        Log-probabilities are those of :func:`echo2p2p.data.policy.scaled_log_softmax`: at the sampling
        temperature, over the whole vocabulary also where ``top_p`` narrowed the choice. If the caller is
        cancelled, decoding stops at the next token.
        """
        check_prompts(
            prompts,
            sampling,
            version=self.version,
            vocabulary=self._vocabulary,
            max_tokens=self._max_positions,
            limit="policy's {} positions",
        )
        cancelled = threading.Event()

        def aborted() -> bool:
            return cancelled.is_set() or self._closing.is_set()

        try:
            return await self._run(lambda: self._generate(prompts, n_samples, sampling, seed, aborted))
        except asyncio.CancelledError:
            cancelled.set()
            raise

    async def stage(self, snapshot: Snapshot, version: int) -> Swap:
        """Get ``version`` ready beside generation; see the protocol. The swap writes only what changed."""
        staged = await self._run(lambda: self._weights.stage(snapshot, version), self._beside)

        async def swap() -> None:
            await self._run(lambda: self._weights.swap(staged))

        return swap

    async def fingerprint(self) -> str:
        """Of what the model really holds; see the protocol."""
        return await self._run(self._weights.read_back, self._beside)

    async def install(self, snapshot: Snapshot, version: int) -> str:
        """Write all of ``version``; see the protocol. Once begun it is finished, whoever gives up waiting."""
        return await self._run(lambda: self._weights.install(snapshot, version))

    async def close(self) -> None:
        """End the engine's threads and free its model. A decode under way stops at its next token."""
        self._closing.set()
        for thread in (self._thread, self._beside):
            await asyncio.to_thread(thread.shutdown, wait=True, cancel_futures=True)
        self._weights.release()
        self._model = torch.nn.Module()
        if torch.cuda.is_available():
            torch.cuda.empty_cache()

    async def _run(self, work: Callable[[], T], thread: ThreadPoolExecutor | None = None) -> T:
        try:
            future = asyncio.get_running_loop().run_in_executor(thread or self._thread, work)
        except RuntimeError as error:
            raise EngineError("the engine is closed") from error
        return await future

    def _generate(
        self,
        prompts: Sequence[Sequence[int]],
        n_samples: int,
        sampling: Sampling,
        seed: int,
        aborted: Callable[[], bool],
    ) -> list[list[Completion]]:
        device = self._weights.device
        generator = torch.Generator(device).manual_seed(seed)
        results: list[list[Completion]] = [[] for _ in prompts]
        lengths = [len(prompt) for prompt in prompts]
        with memory_errors(f"{len(prompts)} prompts × {n_samples} samples"), torch.inference_mode():
            for batch in plan_batches(lengths, n_samples, sampling.max_new_tokens, self._max_batch_tokens):
                rows = decode(
                    self._model,
                    [prompts[index] for index in batch.prompts],
                    batch.counts,
                    sampling=sampling,
                    eos=self._eos,
                    generator=generator,
                    aborted=aborted,
                )
                self._collect(rows, batch, results)
        return results

    def _collect(self, rows: Rows, batch: Batch, results: list[list[Completion]]) -> None:
        tokens, logprobs = rows.tokens.cpu().tolist(), rows.logprobs.cpu().numpy()
        lengths, stopped = rows.lengths.cpu().tolist(), rows.stopped.cpu().tolist()
        owners = [
            index for index, count in zip(batch.prompts, batch.counts, strict=True) for _ in range(count)
        ]
        for row, (owner, length) in enumerate(zip(owners, lengths, strict=True)):
            results[owner].append(
                Completion(
                    tokens=tokens[row][:length],
                    logprobs=logprobs[row, :length].copy(),
                    version_min=self.version,
                    version_max=self.version,
                    finish="stop" if stopped[row] else "length",
                )
            )


def plan_batches(lengths: Sequence[int], n_samples: int, max_new: int, max_tokens: int) -> Iterator[Batch]:
    """Split the work into batches of at most ``max_tokens`` token places, similar lengths together.

    A batch has at least one row, however long. Samples of one prompt share a batch, and so its prefill,
    unless they are too many for one.
    """
    prompts: list[int] = []
    counts: list[int] = []
    # Longest first: the first batch is the largest, so memory that does not suffice shows at once.
    for index in sorted(range(len(lengths)), key=lambda i: (-lengths[i], i)):
        left = n_samples
        while left:
            width = max([lengths[index] + max_new, *(lengths[i] + max_new for i in prompts[:1])])
            room = max(1, max_tokens // width) - sum(counts)
            if room <= 0 or (counts and room < min(left, max_tokens // width)):
                yield Batch(prompts, counts)
                prompts, counts = [], []
                continue
            take = min(left, room)
            prompts.append(index)
            counts.append(take)
            left -= take
    if prompts:
        yield Batch(prompts, counts)


def _prepare_thread(threads: int | None) -> None:
    # Denormals slow a CPU by orders of magnitude, and the flag is a thread's own.
    torch.set_flush_denormal(True)
    if threads is not None:
        torch.set_num_threads(threads)
