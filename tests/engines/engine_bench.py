"""An engine beside plain transformers models of the policies that fit it."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from echo2p2p.rollout.engine import InferenceEngine
from echo2p2p.rollout.transformers_engine import TransformersEngine
from echo2p2p.settings import VLLMSettings
from echo2p2p.weights.snapshot import Snapshot

SHAPE: dict[str, int] = {"head_dim": 32, "positions": 512}
"""Of the policies here: vLLM has no smaller heads on a CPU, and caches prefixes in blocks of 128 tokens there."""
HAS_VLLM = importlib.util.find_spec("vllm") is not None


@dataclass
class Policy:
    """One of the two policies of an architecture: what plain transformers computes, and what travels."""

    model: Any
    snapshot: Snapshot


@dataclass
class Bench:
    """An engine, and two policies that fit it.

    Attributes:
        version: of the last :meth:`install`; every one gets a number of its own.
    """

    kind: str
    engine: InferenceEngine
    one: Policy
    two: Policy
    again: Callable[[], InferenceEngine] = field(repr=False)
    version: int = -1

    async def install(self, policy: Policy) -> str:
        self.version += 1
        return await self.engine.install(policy.snapshot, self.version)

    async def swap(self, snapshot: Snapshot) -> None:
        self.version += 1
        await (await self.engine.stage(snapshot, self.version))()


def build(kind: str, folder: Path, **further: Any) -> InferenceEngine:
    if kind == "transformers":
        return TransformersEngine(folder, threads=1, **further)
    from echo2p2p.rollout.vllm_engine import VLLMEngine

    options = VLLMSettings(
        eager=True,
        kv_cache_gib=0.03,
        max_sequences=64,
        tensor_parallel=2 if kind == "vllm, two ranks" else 1,
    )
    return VLLMEngine(folder, options, threads=1, **further)
