"""Versions that are adapters, on every engine: base and adapter side by side, as the learner computes them."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import psutil
import pytest
import pytest_asyncio
from engine_bench import HAS_VLLM, SHAPE, build
from policies import make_groups, make_policy

from echo2p2p.data.trajectory import Group, Sampling, Trajectory, pack_logprobs
from echo2p2p.errors import EngineError, SettingsError
from echo2p2p.learning.trainer import AdapterSettings, GRPOTrainer, TrainerSettings
from echo2p2p.rollout.engine import InferenceEngine
from echo2p2p.weights.snapshot import Snapshot

pytestmark = [pytest.mark.asyncio(loop_scope="session"), pytest.mark.timeout(300)]

TARGETS = ("q_proj", "v_proj", "o_proj", "up_proj", "down_proj")
"""Some parts of the layers that vLLM fuses, not all; and layers that it splits over ranks by rows and by columns."""
SETTINGS = TrainerSettings(learning_rate=3e-2, threads=1, adapter=AdapterSettings(2, 8, TARGETS))
PROMPTS = [[5, 6, 7], [8], [9, 10, 11, 12, 13, 14], [3, 4], [3 + index * 7 % 16 for index in range(300)]]
GREEDY = Sampling(temperature=0.0, max_new_tokens=16)
KINDS = ["transformers", *(["vllm", "vllm, two ranks"] if HAS_VLLM else [])]


@dataclass
class Adapted:
    """An engine for the adapters of ``trainer``, and its versions 0 (changes nothing), 1 and 2."""

    kind: str
    engine: InferenceEngine
    trainer: GRPOTrainer
    states: list[Any]
    snapshots: list[Snapshot]
    version: int = field(default=-1)

    async def swap(self, number: int) -> None:
        self.version += 1
        await (await self.engine.stage(self.snapshots[number], self.version))()

    async def greedy(self) -> list[list[int]]:
        done = await self.engine.generate(PROMPTS, n_samples=1, sampling=GREEDY, seed=0)
        return [completion.tokens for [completion] in done]


@pytest_asyncio.fixture(scope="module", loop_scope="session", params=KINDS)
async def adapted(request, tmp_path_factory) -> AsyncIterator[Adapted]:
    folder = make_policy(tmp_path_factory.mktemp("policy"), seed=1, **SHAPE)
    trainer = GRPOTrainer(folder, SETTINGS)
    states, snapshots = [trainer.state()], [trainer.snapshot()]
    for seed in range(2):
        trainer.train(make_groups(seed))
        states.append(trainer.state())
        snapshots.append(trainer.snapshot())
    further = {"restarts_s": (0.1, 0.1)} if request.param.startswith("vllm") else {}
    engine = build(request.param, folder, adapter=trainer.adapter, **further)
    yield Adapted(request.param, engine, trainer, states, snapshots)
    await engine.close()


async def test_a_version_gives_the_same_tokens_whatever_was_swapped_in_between(adapted):
    answers = []
    for number in (1, 2, 1, 0, 1):
        await adapted.swap(number)
        assert await adapted.engine.fingerprint() == adapted.snapshots[number].fingerprint()
        answers.append(await adapted.greedy())
    assert answers[0] == answers[2] == answers[4]
    assert answers[0] != answers[1]
    assert answers[0] != answers[3]


@pytest.mark.parametrize("number", [0, 1, 2])
async def test_the_learner_finds_its_own_probabilities(adapted, number):
    adapted.version += 1
    held = await adapted.engine.install(adapted.snapshots[number], adapted.version)
    assert held == adapted.snapshots[number].fingerprint()
    sampling = Sampling(temperature=1.0, max_new_tokens=16)
    done = await adapted.engine.generate(PROMPTS, n_samples=8, sampling=sampling, seed=3)
    groups = [
        Group(0, prompt, [Trajectory(c.tokens, pack_logprobs(c.logprobs), 0, 0, 0.0, c.finish) for c in each])
        for prompt, each in zip(PROMPTS, done, strict=True)
    ]
    adapted.trainer.load_state(adapted.states[number])
    found = adapted.trainer.logprobs(groups)
    differences = np.concatenate(
        [
            ours.numpy() - sample.logprob_array()
            for group, by_sample in zip(groups, found, strict=True)
            for sample, ours in zip(group.samples, by_sample, strict=True)
        ]
    )
    assert np.abs(differences).max() < 1e-4
    assert np.mean(np.expm1(differences) - differences) < 1e-8  # k3, as ``mismatch_kl`` of a step


async def test_an_adapter_of_another_kind_leaves_the_old_version_whole(adapted, tmp_path):
    await adapted.swap(1)
    before = await adapted.greedy()
    other = AdapterSettings(3, 8, TARGETS)
    folder = make_policy(tmp_path / "policy", seed=1, **SHAPE)
    wider = GRPOTrainer(folder, TrainerSettings(threads=1, adapter=other)).snapshot()
    with pytest.raises(EngineError):
        await adapted.engine.install(wider, adapted.version + 1)
    assert await adapted.engine.fingerprint() == adapted.snapshots[1].fingerprint()
    assert await adapted.greedy() == before


async def test_another_base_is_refused(adapted, tmp_path):
    folder = make_policy(tmp_path / "policy", seed=2, **SHAPE)
    with pytest.raises(SettingsError, match=r"policy\.path"):
        build(adapted.kind, folder, adapter=adapted.trainer.adapter)


if HAS_VLLM:

    async def test_vllm_that_was_killed_has_base_and_adapter_again(adapted, monkeypatch, caplog):
        """Its weights are random when it starts; a base that is not there as it was written is no base."""
        if adapted.kind != "vllm":
            return
        await adapted.swap(2)
        before = await adapted.greedy()
        process = type(adapted.engine._running)
        write_all, skipped = process.write_all, []

        async def skip_first_base(self, snapshot):
            if self.part == 0 and not skipped:
                skipped.append(self)
                return
            await write_all(self, snapshot)

        monkeypatch.setattr(process, "write_all", skip_first_base)
        for child in psutil.Process().children(recursive=True):
            if "resource_tracker" not in " ".join(child.cmdline()):
                child.kill()
        while not adapted.engine._running.is_dead:
            await asyncio.sleep(0.05)
        assert await adapted.engine.fingerprint() == adapted.snapshots[2].fingerprint()
        assert await adapted.greedy() == before
        assert skipped
        assert "does not hold the base" in caplog.text
