"""Every architecture goes the whole way: trained, published, patched, installed, generated with, exported."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from architectures import ARCHITECTURES, make_architecture
from policies import make_groups
from transformers import AutoModelForCausalLM

from echo2p2p.data.trajectory import Group, Sampling, Trajectory, pack_logprobs
from echo2p2p.learning.trainer import GRPOTrainer, TrainerSettings
from echo2p2p.rollout.transformers_engine import TransformersEngine
from echo2p2p.weights.export import write_folder
from echo2p2p.weights.patch import apply, encode
from echo2p2p.weights.snapshot import fingerprint_of

PROMPTS = [[5, 6, 7, 3, 9, 11], [8, 4], [9, 10, 11, 12, 13, 14, 2, 3, 4], [3, 4, 5]]
SETTINGS = TrainerSettings(learning_rate=1e-2, threads=1, temperature=0.8, micro_batch_tokens=64)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("name", ARCHITECTURES)
async def test_a_version_is_the_same_policy_everywhere(tmp_path: Path, name: str, dtype: str) -> None:
    folder = make_architecture(tmp_path / "policy", name)
    trainer = GRPOTrainer(folder, replace(SETTINGS, publish_dtype=dtype))
    first = trainer.snapshot()
    engine = TransformersEngine(folder, threads=1)
    try:
        assert await engine.install(first, 0) == first.fingerprint()
        trainer.train(make_groups(0))
        second = trainer.snapshot()
        assert second.fingerprint() != first.fingerprint()
        patched = apply(first, encode(first, second), layout=second.layout)
        assert patched.fingerprint() == second.fingerprint()
        await (await engine.stage(patched, 1))()
        assert await engine.fingerprint() == second.fingerprint()
        sampling = Sampling(temperature=SETTINGS.temperature, max_new_tokens=8)
        rollouts = await engine.generate(PROMPTS, n_samples=3, sampling=sampling, seed=1)
    finally:
        await engine.close()
    exported = tmp_path / "exported"
    write_folder(exported, second, {"config.json": (folder / "config.json").read_bytes()})
    loaded = AutoModelForCausalLM.from_pretrained(exported, dtype=getattr(torch, dtype))
    assert fingerprint_of(loaded.state_dict()) == second.fingerprint()

    groups = [
        Group(
            index,
            prompt,
            [
                Trajectory(c.tokens, pack_logprobs(c.logprobs), 1, 1, float(number), c.finish)
                for number, c in enumerate(completions)
            ],
        )
        for index, (prompt, completions) in enumerate(zip(PROMPTS, rollouts, strict=True))
    ]
    # What the engine's words say, computed by the trainer: a policy published in bfloat16 is another policy.
    learner = trainer if dtype == "float32" else GRPOTrainer(exported, replace(SETTINGS, compute_dtype=dtype))
    for group, computed in zip(groups, learner.logprobs(groups), strict=True):
        for sample, logprobs in zip(group.samples, computed, strict=True):
            gap = torch.from_numpy(sample.logprob_array().copy()) - logprobs
            assert float(gap.abs().max()) < (1e-4 if dtype == "float32" else 0.5)
