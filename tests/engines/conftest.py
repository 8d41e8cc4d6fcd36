"""The engines that are held to the protocol: transformers everywhere, vLLM where it is installed.

An engine lives for the whole session, since vLLM takes seconds to start; tests install what they need. Those marked
``every_layout`` are about where weights lie, and run for untied policies and for two ranks as well.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest
import pytest_asyncio
import torch
from engine_bench import HAS_VLLM, SHAPE, Bench, Policy, build
from engine_swarm import Swarm
from policies import make_policy
from transformers import AutoModelForCausalLM

from echo2p2p.weights.snapshot import from_state_dict

KINDS = [("transformers", True), *([("vllm", True)] if HAS_VLLM else [])]
LAYOUTS = [("transformers", False), *([("vllm", False), ("vllm, two ranks", True)] if HAS_VLLM else [])]


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "bench" in metafunc.fixturenames:
        kinds = KINDS + (LAYOUTS if metafunc.definition.get_closest_marker("every_layout") else [])
        ids = [f"{kind}-{'tied' if tied else 'untied'}" for kind, tied in kinds]
        metafunc.parametrize("bench", kinds, ids=ids, indirect=True, scope="session")


@pytest_asyncio.fixture(scope="session", loop_scope="session")
async def bench(request, tmp_path_factory) -> AsyncIterator[Bench]:
    kind, tied = request.param
    policies = []
    for seed in (1, 2):
        folder = make_policy(tmp_path_factory.mktemp("policy"), seed=seed, tied=tied, **SHAPE)
        model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
        policies.append(Policy(model, from_state_dict(model.state_dict())))
    engine = build(kind, folder)
    yield Bench(kind, engine, *policies, again=lambda: build(kind, folder))
    await engine.close()


@pytest.fixture
def swarm(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Swarm]:
    """The commands of a run, with the ``SETTINGS`` of the module that asks."""
    group = Swarm(tmp_path, request.module.SETTINGS)
    yield group
    group.close()
