"""The inference engine on vLLM: continuous batching on GPUs, tensor-parallel; versions are written over each other.

vLLM runs in processes of its own; prompts and tokens pass over its queues, weights over memory that is shared with
them, a bucket at a time, never over a disk. It starts with the first version, in the dtype of that.

Guarantees:

* What is installed is what vLLM computes with: words are written to and read back from its own parameters, where its
  own weight loaders would put them; a model of which that does not hold for every word is refused.
* Generation stands still for the write alone. Every cache of the version before is dropped before it goes on.
* Nothing is left when this process ends, however it does: no process, no thread, no file.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np

from echo2p2p.config import VLLMSettings
from echo2p2p.data.policy import eos_token_ids, load_config, max_positions
from echo2p2p.data.trajectory import Sampling
from echo2p2p.errors import EngineError, Interrupted
from echo2p2p.rollout.engine import Completion, Swap
from echo2p2p.rollout.vllm_process import (
    Prepared,
    VLLMProcess,
    launch,
    open_process,
    require_vllm,
    shut_down,
    typed_error,
)
from echo2p2p.weights.snapshot import Snapshot

InFlight = Literal["wait", "keep", "abort"]
"""What a swap does to requests that are being generated: let them finish first; freeze them and let the new version
go on with them, their caches computed again; or end them, so that ``generate`` raises EngineError."""

_LOWEST, _HIGHEST = 0.01, 2.0
"""Temperatures that vLLM samples at as they are; others it changes or refuses."""


@dataclass(frozen=True)
class _Staged:
    """A version, with what turns ``base`` into it; None if all is to be written."""

    snapshot: Snapshot
    version: int
    base: Snapshot | None
    prepared: Prepared | None


class VLLMEngine:
    """:class:`echo2p2p.rollout.engine.InferenceEngine` on vLLM. Any number of :meth:`generate` may run at once, also
    while a version is swapped in.

    Args:
        policy_dir: the policy folder; it needs no weights and no tokenizer.
        in_flight: what a swap does to requests that are being generated.
        device: ``cpu`` or ``cuda``; a vLLM build knows only one of them.
        threads: of a CPU's compute, for each rank; None leaves it to vLLM.

    Raises:
        SettingsError: the folder is no usable policy, or vLLM is not installed.
    """

    def __init__(
        self,
        policy_dir: Path,
        options: VLLMSettings,
        *,
        in_flight: InFlight = "wait",
        device: str = "cpu",
        threads: int | None = None,
    ) -> None:
        require_vllm()
        config = load_config(policy_dir)
        self._folder = policy_dir
        self._options = options
        self._in_flight: InFlight = in_flight
        self._device = device
        self._threads = threads
        self._eos = sorted(eos_token_ids(policy_dir))
        self._vocabulary = int(config.vocab_size)
        self._max_positions = min(max_positions(config), options.max_sequence_tokens or 2**31)
        self._running: VLLMProcess | None = None
        self._starting = asyncio.Lock()
        self._weights = asyncio.Lock()
        self._snapshot: Snapshot | None = None
        self._version = -1
        self._requests = 0
        self._closed = False

    @property
    def overlaps(self) -> bool:
        return True

    @property
    def version(self) -> int:
        return self._version

    async def generate(
        self, prompts: Sequence[Sequence[int]], *, n_samples: int, sampling: Sampling, seed: int
    ) -> list[list[Completion]]:
        """Sample ``n_samples`` completions of every prompt; see the protocol.

        Log-probabilities are over the whole vocabulary at the sampling temperature, as everywhere. A completion
        that a swap froze half-way has tokens, and log-probabilities, of both versions. If the caller is cancelled,
        its requests leave vLLM.

        Raises:
            EngineError: also if vLLM cannot sample at this temperature, or a swap ended the requests.
        """
        running = self._check(prompts, sampling)
        seeds = random.Random(seed)
        parameters = [self._parameters(n_samples, sampling, seeds.getrandbits(62)) for _ in prompts]
        requests = [
            asyncio.ensure_future(self._request(running, prompt, each))
            for prompt, each in zip(prompts, parameters, strict=True)
        ]
        try:
            done = await asyncio.gather(*requests)
            # vLLM samples a greedy prompt no more than once.
            return [completions * (n_samples // len(completions)) for completions in done]
        finally:
            for request in requests:
                request.cancel()
            await asyncio.gather(*requests, return_exceptions=True)

    async def stage(self, snapshot: Snapshot, version: int) -> Swap:
        """Get ``version`` ready beside generation; see the protocol. The first one starts vLLM."""
        running = await self._started(snapshot, version)
        base = self._snapshot
        staged = _Staged(snapshot, version, None, None)
        if base is not None:
            prepared = await asyncio.to_thread(running.prepare, base, snapshot)
            staged = _Staged(snapshot, version, base, prepared)

        async def swap() -> None:
            await self._swap(staged, prove=False)

        return swap

    async def fingerprint(self) -> str:
        """Of what vLLM's parameters really hold; see the protocol."""
        running = self._alive()
        async with self._weights:
            return await running.read_back()

    async def install(self, snapshot: Snapshot, version: int) -> str:
        """Write all of ``version``; see the protocol."""
        await self._started(snapshot, version)
        return await self._swap(_Staged(snapshot, version, None, None), prove=True)

    async def close(self) -> None:
        """End vLLM and its processes; requests under way fail."""
        self._closed = True
        async with self._starting:
            running, self._running = self._running, None
            if running is not None:
                await asyncio.to_thread(running.shut_down)
        self._snapshot = None

    # --- one request ----------------------------------------------------------------------------------

    def _check(self, prompts: Sequence[Sequence[int]], sampling: Sampling) -> VLLMProcess:
        running = self._alive()
        if self._version < 0:
            raise EngineError("no policy version is installed", hint="install a snapshot first")
        if sampling.temperature and not _LOWEST <= sampling.temperature <= _HIGHEST:
            raise EngineError(
                f"vLLM cannot sample at temperature {sampling.temperature:g}",
                hint=f"0, or {_LOWEST} to {_HIGHEST}",
            )
        if sampling.top_p < 1 and not running.whole_vocabulary:
            raise EngineError(
                "this vLLM reports log-probabilities of the nucleus only", hint="use learner.top_p = 1"
            )
        for prompt in prompts:
            if not prompt or not all(0 <= token < self._vocabulary for token in prompt):
                raise EngineError(
                    f"a prompt is empty or has ids outside the vocabulary of {self._vocabulary}"
                )
            if len(prompt) + sampling.max_new_tokens > self._max_positions:
                raise EngineError(
                    f"a prompt of {len(prompt)} tokens and {sampling.max_new_tokens} new ones exceed the "
                    f"{self._max_positions} that the engine allows",
                    hint="lower max_new_tokens",
                )
        return running

    def _parameters(self, n_samples: int, sampling: Sampling, seed: int) -> Any:
        from vllm import SamplingParams
        from vllm.sampling_params import RequestOutputKind

        return SamplingParams(
            n=n_samples if sampling.temperature else 1,
            temperature=sampling.temperature,
            top_p=sampling.top_p if sampling.temperature else 1.0,
            max_tokens=sampling.max_new_tokens,
            seed=seed,
            stop_token_ids=self._eos,
            ignore_eos=True,  # those of the policy are given above, in whichever file they stand
            logprobs=0,
            detokenize=False,
            output_kind=RequestOutputKind.FINAL_ONLY,
        )

    async def _request(
        self, running: VLLMProcess, prompt: Sequence[int], parameters: Any
    ) -> list[Completion]:
        oldest = self._version
        self._requests += 1
        name, final = f"{id(self)}-{self._requests}", None
        try:
            async for output in running.llm.generate(
                {"type": "token", "prompt_token_ids": list(prompt)}, parameters, request_id=name
            ):
                final = output
        except Exception as error:
            raise typed_error(error, "vLLM could not generate") from error
        if final is None:
            raise EngineError("vLLM ended a request without an answer")
        return [self._completion(each, oldest) for each in final.outputs]

    def _completion(self, output: Any, oldest: int) -> Completion:
        tokens = list(output.token_ids)
        if output.finish_reason not in ("stop", "length") or not tokens:
            raise Interrupted(
                "generation was ended for another version", hint="worker.in_flight = keep lets it go on"
            )
        logprobs = np.array(
            [places[token].logprob for token, places in zip(tokens, output.logprobs, strict=True)], np.float32
        )
        if not np.isfinite(logprobs).all():
            raise EngineError("the policy's logits are not finite", hint="wait for the next version")
        return Completion(tokens, logprobs, oldest, self._version, output.finish_reason)

    # --- versions -------------------------------------------------------------------------------------

    async def _swap(self, staged: _Staged, *, prove: bool) -> str:
        """Once begun it is finished, whoever gives up waiting."""
        return await asyncio.shield(asyncio.ensure_future(self._swap_whole(self._alive(), staged, prove)))

    async def _swap_whole(self, running: VLLMProcess, staged: _Staged, prove: bool) -> str:
        held, expected = "", ""
        if prove:
            expected = await asyncio.to_thread(staged.snapshot.fingerprint)
        async with self._weights, self._paused(running):
            done = False
            try:
                if staged.prepared is not None and staged.base is self._snapshot:
                    await running.write(staged.prepared)
                else:
                    await running.write_all(staged.snapshot)
                held = await running.read_back() if prove else ""
                # No token of the new version may see what the old one has computed.
                done = held == expected and await running.llm.reset_prefix_cache(reset_running_requests=True)
            finally:
                if not done and self._snapshot is not None:
                    await running.write_all(self._snapshot)
            if held != expected:
                raise EngineError(
                    f"after installing version {staged.version} vLLM holds {held[:16]}…, not {expected[:16]}…",
                    hint="this machine's memory cannot be trusted",
                )
            if not done:
                raise EngineError("vLLM did not let go of its caches")
            self._snapshot, self._version = staged.snapshot, staged.version
        return held

    @asynccontextmanager
    async def _paused(self, running: VLLMProcess) -> AsyncIterator[None]:
        try:
            await running.llm.pause_generation(mode=self._in_flight, clear_cache=False)
        except Exception as error:
            raise typed_error(error, "vLLM could not be paused") from error
        try:
            yield
        finally:
            await running.llm.resume_generation()

    # --- vLLM itself ----------------------------------------------------------------------------------

    def _alive(self) -> VLLMProcess:
        if self._closed:
            raise EngineError("the engine is closed")
        if self._running is None:
            raise EngineError("no policy version is installed", hint="install a snapshot first")
        if self._running.llm.errored:
            raise EngineError("vLLM's process has ended", hint="start the worker again")
        return self._running

    async def _started(self, snapshot: Snapshot, version: int) -> VLLMProcess:
        """vLLM, started for ``snapshot`` if need be. Raises EngineError: it runs, and the snapshot does not fit."""
        running = await self._start(snapshot)
        if snapshot.layout != running.layout:
            raise EngineError(
                f"version {version} has other tensors than the engine was started with",
                hint="start the worker again",
            )
        return running

    async def _start(self, snapshot: Snapshot) -> VLLMProcess:
        if self._closed:
            raise EngineError("the engine is closed")
        async with self._starting:
            if self._running is not None:
                return self._alive()
            dtypes = {spec.dtype for spec in snapshot.layout.tensors if "float" in spec.dtype}
            if len(dtypes) != 1:
                raise EngineError(f"a snapshot in {', '.join(sorted(dtypes)) or 'no float'} fits no engine")
            [dtype] = dtypes
            llm = await asyncio.to_thread(
                launch,
                self._folder,
                self._options,
                dtype=dtype,
                max_positions=self._max_positions,
                device=self._device,
                threads=self._threads,
            )
            try:
                self._running = await open_process(llm, snapshot.layout)
            finally:
                if self._running is None:
                    await asyncio.to_thread(shut_down, llm)
            return self._running
