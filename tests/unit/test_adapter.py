"""Adapters: a run trains and publishes a few matrices, and everybody computes the same policy with them."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import msgspec
import pytest
import torch
from architectures import make_architecture
from policies import make_groups
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from echo2p2p.data.policy import DTYPES, build_model
from echo2p2p.data.trajectory import Group, Sampling, Trajectory, pack_logprobs
from echo2p2p.errors import SettingsError, VerificationError
from echo2p2p.learning.trainer import AdapterSettings, GRPOTrainer, TrainerSettings
from echo2p2p.rollout.transformers_engine import TransformersEngine
from echo2p2p.settings import Settings
from echo2p2p.swarm.memory import MemorySwarm
from echo2p2p.swarm.virtual_time import run_virtual
from echo2p2p.weights.adapter import ADAPTER_FILE, AdapterSpec, decode_spec, merge
from echo2p2p.weights.export import export_version
from echo2p2p.weights.patch import apply, encode
from echo2p2p.weights.publisher import WeightPublisher
from echo2p2p.weights.store import DiskStore

TARGETS = ("q_proj", "v_proj", "down_proj")
SETTINGS = TrainerSettings(
    learning_rate=3e-2, threads=1, adapter=AdapterSettings(rank=2, alpha=8, targets=TARGETS)
)
PROMPTS = [[5, 6, 7], [8, 2, 3, 4, 9], [9, 10]]


def trained(folder: Path, **changes: object) -> GRPOTrainer:
    trainer = GRPOTrainer(folder, replace(SETTINGS, **changes))
    trainer.train(make_groups(0))
    return trainer


def merged(folder: Path, trainer: GRPOTrainer) -> torch.nn.Module:
    """A plain model of the trainer's policy."""
    spec = trainer.adapter
    base = build_model(folder, dtype=DTYPES[spec.dtype], device="cpu", weights=True)
    snapshot = merge(base, trainer.snapshot(), spec)
    base.load_state_dict(snapshot.state_dict())
    return base


@pytest.mark.parametrize("name", ["qwen3", "llama", "gemma3"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
async def test_engine_learner_and_merged_policy_agree(tmp_path: Path, name: str, dtype: str) -> None:
    folder = make_architecture(tmp_path / "policy", name)
    trainer = GRPOTrainer(folder, replace(SETTINGS, publish_dtype=dtype, compute_dtype=dtype))
    assert trainer._policy.packs
    first = trainer.snapshot()
    assert {spec.name.rpartition(".")[2] for spec in first.layout.tensors} == {"lora_A", "lora_B"}
    assert first.layout.nbytes < 8 * 1024
    trainer.train(make_groups(0))
    second = trainer.snapshot()
    patched = apply(first, encode(first, second), layout=second.layout)
    engine = TransformersEngine(folder, threads=1, adapter=trainer.adapter)
    try:
        await engine.install(first, 0)
        await (await engine.stage(patched, 1))()
        assert await engine.fingerprint() == second.fingerprint()
        results = await engine.generate(PROMPTS, n_samples=2, sampling=Sampling(max_new_tokens=8), seed=0)
    finally:
        await engine.close()
    groups = [
        Group(
            0, prompt, [Trajectory(c.tokens, pack_logprobs(c.logprobs), 1, 1, 0.0, c.finish) for c in found]
        )
        for prompt, found in zip(PROMPTS, results, strict=True)
    ]
    plain = merged(folder, trainer)
    tolerance = 1e-4 if dtype == "float32" else 0.3
    for group, computed in zip(groups, trainer.logprobs(groups), strict=True):
        for sample, logprobs in zip(group.samples, computed, strict=True):
            with torch.no_grad():
                logits = plain(torch.tensor([group.prompt + sample.completion])).logits[0].float()
            expected = torch.log_softmax(logits[len(group.prompt) - 1 : -1], -1)
            expected = expected[torch.arange(len(sample.completion)), sample.completion]
            sampled = torch.from_numpy(sample.logprob_array().copy())
            torch.testing.assert_close(sampled, logprobs, atol=tolerance, rtol=0)
            torch.testing.assert_close(sampled, expected, atol=tolerance, rtol=0)


def test_training_moves_the_adapter_and_nothing_else(tmp_path: Path) -> None:
    folder = make_architecture(tmp_path / "policy", "smollm")
    trainer = GRPOTrainer(folder, replace(SETTINGS, gradient_checkpointing=True))
    fresh = GRPOTrainer(folder, replace(SETTINGS, adapter=None))
    groups = make_groups(0)
    for one, two in zip(trainer.logprobs(groups), fresh.logprobs(groups), strict=True):
        torch.testing.assert_close(torch.cat(one), torch.cat(two))  # a new adapter changes nothing
    before = {name: tensor.clone() for name, tensor in trainer._model.state_dict().items()}
    metrics = [trainer.train(groups) for _ in range(2)]
    assert all(step.grad_norm > 0 for step in metrics)
    moved = {name for name, tensor in trainer._model.state_dict().items() if not tensor.equal(before[name])}
    assert moved == {spec.name for spec in trainer.snapshot().layout.tensors}


def test_a_resumed_adapter_goes_on_bit_by_bit(tmp_path: Path) -> None:
    folder = make_architecture(tmp_path / "policy", "llama")
    straight, resumed = trained(folder), GRPOTrainer(folder, SETTINGS)
    resumed.load_state(straight.state())
    for trainer in (straight, resumed):
        trainer.train(make_groups(1))
    assert straight.snapshot().fingerprint() == resumed.snapshot().fingerprint()
    with pytest.raises(VerificationError, match="not of this policy"):
        GRPOTrainer(folder, replace(SETTINGS, adapter=None)).load_state(straight.state())


def test_an_adapter_of_another_base_is_refused(tmp_path: Path) -> None:
    spec = trained(make_architecture(tmp_path / "one", "qwen3")).adapter
    other = make_architecture(tmp_path / "other", "qwen3", seed=1)
    with pytest.raises(SettingsError, match=r"policy\.path"):
        TransformersEngine(other, adapter=spec)


def test_a_target_that_no_layer_has_is_named(tmp_path: Path) -> None:
    adapter = AdapterSettings(rank=2, alpha=4, targets=("q_proj", "qkv"))
    with pytest.raises(SettingsError, match="qkv"):
        GRPOTrainer(make_architecture(tmp_path / "policy", "llama"), replace(SETTINGS, adapter=adapter))


@pytest.mark.parametrize(
    "change",
    [
        {"rank": 0},
        {"alpha": -1.0},
        {"targets": []},
        {"dtype": "int8"},
        {"dtype": "float32\n"},
        {"base": "x"},
        {"base": 64 * "a" + "\n"},
        {"more": 1},
    ],
)
def test_a_damaged_adapter_file_is_refused(change: dict[str, object]) -> None:
    good = AdapterSpec(2, 4, TARGETS, "float32", 64 * "a")
    assert decode_spec(good.encoded()) == good
    with pytest.raises(SettingsError, match=r"adapter\.json"):
        decode_spec(json.dumps({**msgspec.to_builtins(good), **change}).encode())


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_an_exported_adapter_is_merged_into_its_base_or_a_folder_for_peft(tmp_path: Path, dtype: str) -> None:
    folder = make_architecture(tmp_path / "policy", "smollm")
    trainer = trained(folder, publish_dtype=dtype)
    spec = trainer.adapter

    async def main() -> None:
        async with MemorySwarm(seed=0) as swarm:
            learner = swarm.add_peer()
            publisher = WeightPublisher(
                learner, f"run@{learner.peer_id}", DiskStore(tmp_path / "store"), keep_versions=2
            )
            await publisher.start()
            assets = {
                "config.json": (folder / "config.json").read_bytes(),
                ADAPTER_FILE: spec.encoded(),
            }
            await publisher.publish(trainer.snapshot(), 0, [], assets)

    run_virtual(main)

    def base(wanted: AdapterSpec) -> torch.nn.Module:
        return build_model(folder, dtype=DTYPES[wanted.dtype], device="cpu", weights=True)

    export_version(tmp_path / "store", 0, tmp_path / "merged", base=base)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "merged", dtype=DTYPES[dtype])
    for name, tensor in merged(folder, trainer).state_dict().items():
        assert loaded.state_dict()[name].equal(tensor)
    export_version(tmp_path / "store", 0, tmp_path / "peft")
    names = load_file(tmp_path / "peft" / "adapter_model.safetensors").keys()
    assert "base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight" in names
    assert json.loads((tmp_path / "peft" / "adapter_config.json").read_text())["r"] == 2


def test_a_worker_puts_the_base_from_its_own_folder_beside_the_pinned_files(tmp_path: Path) -> None:
    from types import SimpleNamespace

    from echo2p2p.data.work import TaskSpec
    from echo2p2p.parts import SEED_POLICY, build_engine, read_assets

    adapter = AdapterSettings(rank=2, alpha=4, targets=("q_proj",))
    trainer = GRPOTrainer(SEED_POLICY, replace(SETTINGS, adapter=adapter))
    run_dir = SimpleNamespace(policy=tmp_path / "policy")
    assets = read_assets(SEED_POLICY, trainer.adapter)
    settings = Settings(policy={"path": SEED_POLICY}, worker={"device": "cpu"})
    for _ in range(2):  # the second time the links are there
        engine, _ = build_engine(settings, run_dir, TaskSpec("strings", 0, {}), assets)
        assert engine.version == -1
    other = Settings(
        policy={"path": make_architecture(tmp_path / "other", "qwen3")}, worker={"device": "cpu"}
    )
    with pytest.raises(SettingsError):
        build_engine(other, run_dir, TaskSpec("strings", 0, {}), assets)
