"""The inference engine on vLLM: continuous batching on GPUs, tensor-parallel; versions are written over each other.

vLLM runs in processes of its own; prompts and tokens pass over its queues, weights over memory that is shared with
them, a bucket at a time, never over a disk. It starts with the first version, in the dtype of that. If versions are
adapters, the base comes from the policy folder, and vLLM computes both side by side.

Guarantees:

* What is installed is what vLLM computes with: words are written to and read back from its own parameters, where its
  own weight loaders would put them; a model of which that does not hold for every word is refused.
* A fingerprint is of the version, read back. An adapter's base is read back as well, once whenever vLLM has started
  and before it generates; nothing writes it afterwards.
* Generation stands still for the write alone. Every cache of the version before is dropped before it goes on.
* If vLLM's processes end, they are started again with the version that they held; after ``RESTARTS_S`` in vain, or
  without anything generated in between, the engine is lost.
* Nothing is left when this process ends, however it does: no process, no thread, no file.
"""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, TypeVar

import numpy as np
from torch import nn

from echo2p2p.data.policy import DTYPES, build_model, eos_token_ids, load_config, max_positions
from echo2p2p.data.trajectory import Sampling
from echo2p2p.errors import EngineError, EngineLost, Interrupted, OutOfMemory
from echo2p2p.rollout.engine import Completion, Swap, check_prompts
from echo2p2p.rollout.vllm_process import (
    Prepared,
    VLLMProcess,
    launch,
    open_process,
    require_vllm,
    shut_down,
)
from echo2p2p.settings import VLLMSettings
from echo2p2p.weights.adapter import AdapterSpec, check_base
from echo2p2p.weights.snapshot import Layout, Snapshot, from_state_dict

log = logging.getLogger("echo2p2p.worker")

T = TypeVar("T")

RESTARTS_S = (1.0, 10.0, 60.0)
"""Seconds between the end of vLLM's processes and each attempt to start them again."""

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
    base: Snapshot | None = None
    prepared: Prepared | None = None


class VLLMEngine:
    """:class:`echo2p2p.rollout.engine.InferenceEngine` on vLLM. Any number of :meth:`generate` may run at once, also
    while a version is swapped in.

    Args:
        policy_dir: the policy folder; it needs no tokenizer, and no weights unless there is an ``adapter``.
        in_flight: what a swap does to requests that are being generated.
        device: ``cpu`` or ``cuda``; a vLLM build knows only one of them.
        threads: of a CPU's compute, for each rank; None leaves it to vLLM.
        restarts_s: seconds before each attempt to bring vLLM back.
        adapter: versions are adapters of this kind, and the folder has their base.

    Raises:
        SettingsError: the folder is no usable policy, its weights are not the base of ``adapter``, or vLLM is not
            installed.
    """

    def __init__(
        self,
        policy_dir: Path,
        options: VLLMSettings,
        *,
        in_flight: InFlight = "wait",
        device: str = "cpu",
        threads: int | None = None,
        restarts_s: Sequence[float] = RESTARTS_S,
        adapter: AdapterSpec | None = None,
    ) -> None:
        require_vllm()
        config = load_config(policy_dir)
        if adapter is not None:
            _build_base(policy_dir, adapter)
        self._folder = policy_dir
        self._options = options
        self._in_flight: InFlight = in_flight
        self._device = device
        self._threads = threads
        self._restarts_s = restarts_s
        self._adapter = adapter
        self._restarts = 0
        self._eos = sorted(eos_token_ids(policy_dir))
        self._vocabulary = int(config.vocab_size)
        self._max_positions = min(max_positions(config), options.max_sequence_tokens or 2**31)
        self._running: VLLMProcess | None = None
        self._life = asyncio.Lock()
        self._weights = asyncio.Lock()
        self._snapshot: Snapshot | None = None
        self._version = -1
        self._requests = 0
        self._closed = asyncio.Event()

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
            Interrupted: a swap ended the requests, or vLLM's processes did.
            EngineError: also if vLLM cannot sample at this temperature.
            EngineLost: they do so again and again.
        """
        running = await self._alive()
        self._check(running, prompts, sampling)
        seeds = random.Random(seed)
        parameters = [self._parameters(n_samples, sampling, seeds.getrandbits(62)) for _ in prompts]
        requests = [
            asyncio.ensure_future(self._request(running, prompt, each))
            for prompt, each in zip(prompts, parameters, strict=True)
        ]
        try:
            done = await asyncio.gather(*requests)
            self._restarts = 0
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
        staged = _Staged(snapshot, version)
        if base is not None:
            prepared = await asyncio.to_thread(running.prepare, base, snapshot)
            staged = _Staged(snapshot, version, base, prepared)

        async def swap() -> None:
            await self._swap(staged, prove=False)

        return swap

    async def fingerprint(self) -> str:
        """Of what vLLM's parameters really hold; see the protocol."""
        async with self._weights:
            return await self._surviving(VLLMProcess.read_back)

    async def install(self, snapshot: Snapshot, version: int) -> str:
        """Write all of ``version``; see the protocol."""
        await self._started(snapshot, version)
        return await self._swap(_Staged(snapshot, version), prove=True)

    async def close(self) -> None:
        """End vLLM and its processes; requests under way fail."""
        self._closed.set()
        async with self._life:
            running, self._running = self._running, None
            if running is not None:
                await asyncio.to_thread(running.shut_down)
        self._snapshot = None

    # --- one request ----------------------------------------------------------------------------------

    def _check(self, running: VLLMProcess, prompts: Sequence[Sequence[int]], sampling: Sampling) -> None:
        check_prompts(
            prompts,
            sampling,
            version=self._version,
            vocabulary=self._vocabulary,
            max_tokens=self._max_positions,
            limit="{} that the engine allows",
        )
        if sampling.temperature and not _LOWEST <= sampling.temperature <= _HIGHEST:
            raise EngineError(
                f"vLLM cannot sample at temperature {sampling.temperature:g}",
                hint=f"0, or {_LOWEST} to {_HIGHEST}",
            )
        if sampling.top_p < 1 and not running.whole_vocabulary:
            raise EngineError(
                "this vLLM reports log-probabilities of the nucleus only", hint="use learner.top_p = 1"
            )

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
        try:
            final = await running.generate(prompt, parameters, f"{id(self)}-{self._requests}")
        except (EngineError, OutOfMemory) as error:
            if running.is_dead:
                raise Interrupted("vLLM's processes have ended", hint="they are started again") from error
            raise
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
        expected = await asyncio.to_thread(staged.snapshot.fingerprint) if prove else ""

        async def whole() -> str:
            async with self._weights:
                return await self._surviving(lambda running: self._swap_in(running, staged, expected))

        return await asyncio.shield(asyncio.ensure_future(whole()))

    async def _swap_in(self, running: VLLMProcess, staged: _Staged, expected: str) -> str:
        """Without ``expected``, the fingerprint, nothing is proven."""
        held = ""
        async with self._paused(running):
            done = False
            try:
                if staged.prepared is not None and staged.base is self._snapshot:
                    await running.write(staged.prepared)
                else:
                    await running.write_all(staged.snapshot)
                held = await running.read_back() if expected else ""
                # No token of the new version may see what the old one has computed.
                done = held == expected and await running.drop_caches()
            finally:
                if not done and self._snapshot is not None and not running.is_dead:
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
        await running.pause(self._in_flight)
        try:
            yield
        finally:
            if not running.is_dead:
                await running.resume()

    # --- vLLM itself ----------------------------------------------------------------------------------

    async def _alive(self) -> VLLMProcess:
        """vLLM, brought back if its processes have ended. Raises EngineError, EngineLost."""
        if self._closed.is_set():
            raise EngineError("the engine is closed")
        async with self._life:
            if self._running is None:
                raise EngineError("no policy version is installed", hint="install a snapshot first")
            while self._running.is_dead:
                await self._bring_back(self._running)
            return self._running

    async def _surviving(self, work: Callable[[VLLMProcess], Awaitable[T]]) -> T:
        """``work``, begun anew if vLLM's processes end meanwhile."""
        while True:
            running = await self._alive()
            try:
                return await work(running)
            except EngineError:
                if not running.is_dead:
                    raise

    async def _bring_back(self, dead: VLLMProcess) -> None:
        """One attempt. Raises EngineLost: there were too many without anything generated in between."""
        if self._restarts >= len(self._restarts_s):
            raise EngineLost(
                f"vLLM's processes have ended {self._restarts + 1} times in a row",
                hint="see what they said; if it is memory, lower worker.vllm.memory_share or max_sequences",
            )
        wait_s = self._restarts_s[self._restarts]
        self._restarts += 1
        log.error(
            "vLLM's processes have ended; attempt %d of %d to start them again in %.0f s",
            self._restarts,
            len(self._restarts_s),
            wait_s,
        )
        await asyncio.to_thread(dead.shut_down)
        with suppress(TimeoutError):
            await asyncio.wait_for(self._closed.wait(), wait_s)
            raise EngineError("the engine is closed")
        try:
            self._running = await self._launched(dead.layout)
        except (EngineError, OutOfMemory) as error:
            log.error("vLLM could not be started again: %s", error)
            return
        log.warning("vLLM runs again, with version %d", self._version)

    async def _started(self, snapshot: Snapshot, version: int) -> VLLMProcess:
        """vLLM, started for ``snapshot`` if need be. Raises EngineError: it runs, and the snapshot does not fit."""
        if self._closed.is_set():
            raise EngineError("the engine is closed")
        async with self._life:
            if self._running is None:
                self._running = await self._launched(snapshot.layout)
        running = await self._alive()
        if snapshot.layout != running.layout:
            raise EngineError(
                f"version {version} has other tensors than the engine was started with",
                hint="start the worker again",
            )
        return running

    async def _launched(self, layout: Layout) -> VLLMProcess:
        """vLLM, just started, holding the version that was swapped in last, if there is one."""
        llm = await asyncio.to_thread(
            launch,
            self._folder,
            self._options,
            adapter=self._adapter,
            dtype=_dtype_of(layout) if self._adapter is None else self._adapter.dtype,
            max_positions=self._max_positions,
            device=self._device,
            threads=self._threads,
        )
        complete = False
        try:
            running = await self._opened(llm, layout)
            if self._snapshot is not None:
                await _put(running, self._snapshot, f"version {self._version}")
            complete = True
        finally:
            if not complete:
                await asyncio.to_thread(shut_down, llm)
        return running

    async def _opened(self, llm: Any, layout: Layout) -> VLLMProcess:
        """vLLM as the keeper of versions; the base of adapters, if that is what they are, is in it."""
        if self._adapter is None:
            [running] = await open_process(llm, [layout])
            return running
        model = await asyncio.to_thread(_build_base, self._folder, self._adapter)
        base = await asyncio.to_thread(from_state_dict, model.state_dict())
        keeper, running = await open_process(llm, [base.layout, layout])
        await _put(keeper, base, "the base")
        return running


async def _put(running: VLLMProcess, snapshot: Snapshot, what: str) -> None:
    """Write all of ``snapshot``; nothing is generated yet. Raises EngineError: vLLM then holds something else."""
    await running.write_all(snapshot)
    if await running.read_back() != await asyncio.to_thread(snapshot.fingerprint):
        raise EngineError(f"vLLM does not hold {what} as it was written")


def _dtype_of(layout: Layout) -> str:
    """What all weights are in. Raises EngineError: that is not one dtype."""
    dtypes = {spec.dtype for spec in layout.tensors if "float" in spec.dtype}
    if len(dtypes) != 1:
        raise EngineError(f"a snapshot in {', '.join(sorted(dtypes)) or 'no float'} fits no engine")
    return dtypes.pop()


def _build_base(folder: Path, adapter: AdapterSpec) -> nn.Module:
    """The model that ``adapter`` belongs to, from a policy folder. Raises SettingsError: the folder has another."""
    model = build_model(folder, dtype=DTYPES[adapter.dtype], device="cpu", weights=True)
    check_base(model, adapter)
    return model
