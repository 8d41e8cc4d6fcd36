"""How the learner computes log-probabilities: without padding, without all logits at once, to the same figures."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from architectures import ARCHITECTURES, make_architecture
from policies import make_groups

from echo2p2p.learning import forward, head
from echo2p2p.learning.batching import Row, pack, rows_of
from echo2p2p.learning.head import head_logprobs
from echo2p2p.learning.objective import chosen_logprobs
from echo2p2p.learning.trainer import GRPOTrainer, TrainerSettings

SETTINGS = TrainerSettings(learning_rate=1e-3, threads=1)


def gradients(trainer: GRPOTrainer) -> dict[str, torch.Tensor]:
    """A tenth of them, after one step."""
    tensors = trainer.state().tensors
    return {name: tensor for name, tensor in tensors.items() if name.startswith("optimizer.exp_avg.")}


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_packed_sequences_give_the_gradient_of_padded_ones(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    folder = make_architecture(tmp_path / "policy", name)
    packed = GRPOTrainer(folder, replace(SETTINGS, gradient_checkpointing=True, logit_bytes=0))
    monkeypatch.setattr(forward, "use_packing", lambda *_: False)
    monkeypatch.setattr(forward, "_has_plain_head", lambda *_: False)
    padded = GRPOTrainer(folder, SETTINGS)
    assert (packed._policy.packs, padded._policy.packs) == (True, False)
    # Gemma 2 caps its logits, behind the matrix product.
    assert (packed._policy.slices, padded._policy.slices) == (name != "gemma2", False)
    groups = make_groups(2)
    one, two = packed.train(groups), padded.train(groups)
    assert one.loss == pytest.approx(two.loss, abs=1e-5)
    assert one.entropy == pytest.approx(two.entropy, rel=1e-5)
    assert one.grad_norm == pytest.approx(two.grad_norm, rel=1e-4)
    expected = gradients(padded)
    for key, gradient in gradients(packed).items():
        torch.testing.assert_close(gradient, expected[key], atol=2e-6, rtol=2e-3)


@pytest.mark.parametrize("kept", [0, 2 * 7 * 19 * 4, 2**20], ids=["none kept", "some kept", "all kept"])
@pytest.mark.parametrize("temperature", [1.0, 0.6])
def test_the_sliced_head_is_the_whole_one(
    monkeypatch: pytest.MonkeyPatch, temperature: float, kept: int
) -> None:
    monkeypatch.setattr(head, "_SLICE_BYTES", 7 * 19 * 4)
    torch.manual_seed(0)
    hidden, weight = torch.randn(40, 8), torch.randn(19, 8)
    targets, direction = torch.randint(0, 19, (40,)), torch.randn(40)
    results = []
    for sliced in (True, False):
        leaves = [hidden.clone().requires_grad_(), weight.clone().requires_grad_()]
        if sliced:
            found = head_logprobs(
                *leaves, targets, temperature=temperature, dtype=torch.float32, kept_bytes=kept
            )
        else:
            found = chosen_logprobs(leaves[0] @ leaves[1].T, targets, temperature)
        (found[0] * direction).sum().backward()
        results.append([*(each.detach() for each in found), *(leaf.grad for leaf in leaves)])
    for one, two in zip(*results, strict=True):
        torch.testing.assert_close(one, two, atol=2e-5, rtol=1e-4)


def test_logits_that_are_kept_stay_within_their_budget(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(head, "_SLICE_BYTES", 7 * 19 * 4)
    hidden = torch.randn(40, 8).requires_grad_()
    saved: list[int] = []

    def count(tensor: torch.Tensor) -> torch.Tensor:
        if tensor.shape[-1:] == (19,):
            saved.append(tensor.nbytes)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(count, lambda tensor: tensor):
        head_logprobs(
            hidden,
            torch.randn(19, 8),
            torch.zeros(40, dtype=torch.int64),
            temperature=1.0,
            dtype=torch.float32,
            kept_bytes=3 * 7 * 19 * 4 + 5,
        )
    assert sum(saved) == 3 * 7 * 19 * 4


def test_a_model_that_carries_a_state_from_token_to_token_is_not_packed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from transformers.models.qwen3.modeling_qwen3 import Qwen3Model

    plain = Qwen3Model.forward

    def leaks(self, *arguments, **named):
        output = plain(self, *arguments, **named)
        output.last_hidden_state = output.last_hidden_state.cumsum(1)
        return output

    monkeypatch.setattr(Qwen3Model, "forward", leaks)
    trainer = GRPOTrainer(make_architecture(tmp_path / "policy", "qwen3"), SETTINGS)
    assert not trainer._policy.packs
    assert trainer._model.config._attn_implementation == "sdpa"
    assert trainer.train(make_groups(0)).skipped == ""


def test_a_prompt_goes_through_the_model_once_for_all_samples_of_its_group(tmp_path: Path) -> None:
    trainer = GRPOTrainer(make_architecture(tmp_path / "policy", "qwen3"), SETTINGS)
    groups = make_groups(2)
    seen: list[int] = []
    trainer._model.model.layers[0].mlp.register_forward_pre_hook(
        lambda _, inputs: seen.append(inputs[0].shape[1])
    )
    trainer.train(groups)
    completions = sum(len(sample.completion) - 1 for group in groups for sample in group.samples)
    assert seen == [completions + sum(len(group.prompt) for group in groups)]


def test_packs_hold_the_budget_in_tokens_or_in_places() -> None:
    rows = rows_of(make_groups(0, groups=6), scale_by_std=True)
    for padded in (True, False):
        packs = list(pack(rows, 24, padded=padded))
        assert sorted(id(row) for packed in packs for row in packed) == sorted(map(id, rows))
        for packed in packs:
            lengths = [row.length for row in packed]
            prompts = {row.group: len(row.prompt) for row in packed}
            tokens = sum(prompts.values()) + sum(len(row.completion) - 1 for row in packed)
            assert (max(lengths) * len(lengths) if padded else tokens) <= 24
    assert [len(packed) for packed in pack(rows, 1, padded=False)] == [1] * len(rows)


def test_attention_s_copies_of_a_long_prompt_count() -> None:
    logprobs, trained = np.zeros(50, np.float32), np.ones(50, bool)
    rows = [Row([1] * 4000, [2] * 50, logprobs, trained, 0.0, 0.0, 0) for _ in range(64)]
    for packed in pack(rows, 16384, padded=False):
        assert sum(row.length for row in packed) <= 2 * 16384
