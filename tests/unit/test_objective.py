"""The objective, against numbers worked out by hand."""

from __future__ import annotations

import json
import math
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from trl_figures import BUDGET, CAP, CASES, make_batch

from echo2p2p.learning.objective import (
    Objective,
    balance_loss,
    balance_targets,
    batch_divisor,
    batch_sum,
    chosen_logprobs,
    group_advantages,
    k3,
    token_loss,
)

TRL = json.loads((Path(__file__).parent / "trl_figures.json").read_text())["figures"]


def loss_of(*, new, advantage, old=0.5, sampler=0.5, reference=None, **options):
    """The loss, its parts and its gradient for one token with these probabilities."""
    logprob = torch.tensor([math.log(new)], requires_grad=True)
    result = token_loss(
        logprob,
        old_logprobs=torch.tensor([math.log(old)]),
        sampler_logprobs=torch.tensor([math.log(sampler)]),
        advantages=torch.tensor([advantage]),
        where=torch.tensor([[True]]),
        objective=Objective(**{"importance_cap": 10.0, **options}),
        reference_logprobs=None if reference is None else torch.tensor([math.log(reference)]),
    )
    result.loss.sum().backward()
    return result, logprob.grad.item()


def losses_of(ratios, advantages, **options):
    """The parts of the loss where π_θ = π_old and ``ratios`` are π_old/π_sampler: a list for each sequence."""
    flat = torch.tensor([math.log(ratio) for sequence in ratios for ratio in sequence])
    width = max(map(len, ratios))
    return token_loss(
        torch.zeros_like(flat),
        old_logprobs=torch.zeros_like(flat),
        sampler_logprobs=-flat,
        advantages=torch.tensor(advantages).repeat_interleave(torch.tensor([len(r) for r in ratios])),
        where=torch.tensor([[place < len(sequence) for place in range(width)] for sequence in ratios]),
        objective=Objective(**options),
    )


def test_advantages_are_rewards_less_their_mean_over_their_deviation():
    assert group_advantages(torch.tensor([1.0, 0.0, 0.0, 0.0])).tolist() == pytest.approx(
        [0.75 / math.sqrt(0.1875), *[-0.25 / math.sqrt(0.1875)] * 3]
    )
    assert group_advantages(torch.tensor([1.0, 0.0, 0.0, 0.0]), scale_by_std=False).tolist() == [
        0.75,
        -0.25,
        -0.25,
        -0.25,
    ]


@pytest.mark.parametrize("rewards", [[0.0, 0.0, 0.0], [1.0, 1.0], [0.3], [0.1] * 7])
def test_a_group_of_equal_rewards_teaches_exactly_nothing(rewards):
    assert group_advantages(torch.tensor(rewards)).tolist() == [0.0] * len(rewards)


def test_on_policy_the_loss_is_the_negated_advantage_and_so_is_its_gradient():
    result, gradient = loss_of(new=0.5, advantage=2.0)
    assert result.loss.item() == pytest.approx(-2.0)
    assert gradient == pytest.approx(-2.0)


@pytest.mark.parametrize(
    ("new", "advantage", "expected", "gradient"),
    [
        (0.6, 1.0, -1.2, -1.2),  # r = 1.2, inside
        (0.7, 1.0, -1.28, 0.0),  # r = 1.4, raised enough
        (0.3, 1.0, -0.6, -0.6),  # r = 0.6, fallen: free to come back
        (0.3, -1.0, 0.8, 0.0),  # r = 0.6, lowered enough
        (0.7, -1.0, 1.4, 1.4),  # r = 1.4, risen: free to come back
    ],
)
def test_the_clip_is_pessimistic_on_both_sides(new, advantage, expected, gradient):
    result, got = loss_of(new=new, advantage=advantage)
    assert result.loss.item() == pytest.approx(expected)
    assert got == pytest.approx(gradient)
    assert result.clipped.item() == (gradient == 0.0)


@pytest.mark.parametrize(
    ("sampler", "weight", "truncated"),
    [(0.5, 1.0, False), (0.25, 2.0, False), (0.1, 3.0, True), (1.0, 0.5, False)],
)
def test_the_importance_weight_is_truncated_at_c_and_scales_the_gradient(sampler, weight, truncated):
    result, gradient = loss_of(new=0.5, sampler=sampler, advantage=1.0, importance_cap=3.0)
    assert result.weight.item() == pytest.approx(weight)
    assert result.truncated.item() is truncated
    assert gradient == pytest.approx(-weight)


def test_the_kl_term_pulls_towards_the_reference_and_is_not_importance_weighted():
    result, gradient = loss_of(new=0.5, sampler=0.25, advantage=0.0, reference=0.25, kl_beta=0.1)
    assert result.reference_kl.item() == pytest.approx(0.5 - 1 - math.log(0.5))
    assert result.loss.item() == pytest.approx(0.1 * (0.5 - 1 - math.log(0.5)))
    assert gradient == pytest.approx(0.1 * (1 - 0.5))


def test_k3_is_an_unbiased_estimate_of_the_divergence():
    p, q = torch.tensor([0.7, 0.2, 0.1]), torch.tensor([0.3, 0.3, 0.4])
    estimate = (p * k3(q.log() - p.log())).sum()
    assert estimate.item() == pytest.approx((p * (p / q).log()).sum().item(), abs=1e-6)


def test_entropy_of_a_uniform_distribution_is_the_log_of_its_size():
    logprobs, entropies = chosen_logprobs(torch.zeros(2, 8), torch.tensor([0, 7]), 1.0)
    assert entropies.tolist() == pytest.approx([math.log(8)] * 2)
    assert logprobs.tolist() == pytest.approx([-math.log(8)] * 2)


def test_the_temperature_divides_the_logits_and_0_stands_for_1():
    logits, targets = torch.tensor([[2.0, 0.0]]), torch.tensor([0])
    for temperature, scaled in ((0.5, 4.0), (1.0, 2.0), (0.0, 2.0)):
        logprobs, _ = chosen_logprobs(logits, targets, temperature)
        assert logprobs.item() == pytest.approx(-math.log1p(math.exp(-scaled)), abs=1e-6)


def test_slices_of_a_large_vocabulary_give_the_same_values_and_gradients(monkeypatch):
    torch.manual_seed(0)
    values, targets = torch.randn(7, 5), torch.randint(0, 5, (7,))
    results = []
    for elements in (2**20, 10, 1):
        monkeypatch.setattr("echo2p2p.learning.objective._SLICE_ELEMENTS", elements)
        logits = values.clone().requires_grad_()
        logprobs, entropies = chosen_logprobs(logits, targets, 0.7)
        (logprobs * torch.arange(7)).sum().backward()
        results.append((logprobs.detach(), entropies, logits.grad))
    for other in results[1:]:
        for one, two in zip(results[0], other, strict=True):
            torch.testing.assert_close(one, two)


@pytest.mark.parametrize("name", sorted(CASES))
def test_loss_and_gradient_are_those_of_trl(name):
    """Against the figures of TRL's GRPOTrainer for the same batch."""
    case, figure, batch = CASES[name], TRL[name], make_batch()
    objective = Objective(
        normalisation={"dapo": "token", "grpo": "sequence", "dr_grpo": "constant"}[case["loss_type"]],
        ratio_level=case.get("level", "token"),
        proximal=case.get("old", "learner"),
        importance_cap=CAP,
        mask_measure="product",
        mask_high=case.get("mask_above"),
        kl_beta=case.get("beta", 0.0),
    )
    where = batch["where"]
    logprobs = batch["logprobs"].clone().requires_grad_()
    result = token_loss(
        logprobs[where],
        old_logprobs=batch["old"][where],
        sampler_logprobs=batch["sampler"][where],
        advantages=batch["advantages"][:, None].expand(where.shape)[where],
        where=where,
        objective=objective,
        reference_logprobs=batch["reference"][where] if objective.kl_beta else None,
    )
    divisor = batch_divisor(objective, tokens=int(where.sum()), sequences=len(where), budget=BUDGET)
    loss = batch_sum(result.loss, where, objective) / divisor
    loss.backward()
    assert loss.item() == pytest.approx(figure["loss"], rel=1e-5)
    torch.testing.assert_close(logprobs.grad, torch.tensor(figure["gradient"]), atol=2e-6, rtol=1e-5)
    masked = torch.tensor(figure["masked"])[:, None].expand(where.shape)[where]
    assert torch.equal(result.masked, masked)


@pytest.mark.parametrize(
    ("normalisation", "expected"),
    [
        ("token", (-1.0 * 1 + 2.0 * 3) / 4),  # every token the same
        ("sequence", (-1.0 + 2.0) / 2),  # the long sequence counts no more than the short one
        ("constant", (-1.0 * 1 + 2.0 * 3) / (2 * 10)),  # sums over what they could have been
    ],
)
def test_normalisations_weigh_tokens_sequences_or_neither(normalisation, expected):
    objective = Objective(normalisation=normalisation)
    loss = torch.tensor([-1.0, 2.0, 2.0, 2.0])
    where = torch.tensor([[True, False, False], [True, True, True]])
    divisor = batch_divisor(objective, tokens=4, sequences=2, budget=10)
    assert batch_sum(loss, where, objective).item() / divisor == pytest.approx(expected)


def test_a_ratio_of_the_whole_sequence_is_the_geometric_mean_and_clips_all_its_tokens():
    """Token ratios 2 and 0.5 cancel; 2 and 1 make √2, which is beyond 1 + ε."""
    for second, clipped in ((0.5, False), (1.0, True)):
        logprobs = torch.tensor([math.log(2.0), math.log(second)], requires_grad=True)
        result = token_loss(
            logprobs,
            old_logprobs=torch.zeros(2),
            sampler_logprobs=torch.zeros(2),
            advantages=torch.ones(2),
            where=torch.ones(1, 2, dtype=torch.bool),
            objective=Objective(ratio_level="sequence"),
        )
        result.loss.sum().backward()
        assert result.ratio.tolist() == pytest.approx([math.sqrt(2.0 * second)] * 2)
        assert result.loss.tolist() == pytest.approx([-min(math.sqrt(2.0 * second), 1.28)] * 2)
        assert result.clipped.tolist() == [clipped] * 2
        assert logprobs.grad.tolist() == pytest.approx([0.0 if clipped else -1.0] * 2)


def test_decoupled_the_clip_is_around_the_learner_and_the_sampler_only_a_weight():
    result, gradient = loss_of(new=0.5, old=0.5, sampler=0.25, advantage=1.0)
    assert (result.ratio.item(), result.weight.item()) == pytest.approx((1.0, 2.0))
    assert not result.clipped
    assert gradient == pytest.approx(-2.0)


def test_coupled_the_clip_is_around_the_sampler_and_there_is_no_weight():
    result, gradient = loss_of(new=0.5, old=0.5, sampler=0.25, advantage=1.0, proximal="sampler")
    assert (result.ratio.item(), result.weight.item()) == pytest.approx((2.0, 1.0))
    assert result.clipped
    assert result.loss.item() == pytest.approx(-1.28)
    assert gradient == 0.0


@pytest.mark.parametrize("proximal", ["learner", "sampler"])
def test_a_sampler_that_lies_about_its_log_probabilities_makes_no_infinite_loss(proximal):
    logprob = torch.tensor([-0.1], requires_grad=True)
    result = token_loss(
        logprob,
        old_logprobs=torch.tensor([-0.1]),
        sampler_logprobs=torch.tensor([-100.0]),
        advantages=torch.tensor([-1.0]),
        where=torch.tensor([[True]]),
        objective=Objective(importance_cap=3.0, proximal=proximal),
    )
    result.loss.sum().backward()
    assert result.loss.item() == pytest.approx(3.0)
    assert logprob.grad.item() == pytest.approx(3.0 if proximal == "learner" else 0.0)


@pytest.mark.parametrize(
    ("options", "masked"),
    [
        ({}, [False, False, False]),
        ({"mask_high": 1.9}, [True, False, False]),  # geometric means: 2, √2 and 0.5
        ({"mask_high": 1.4}, [True, True, False]),
        ({"mask_low": 0.6}, [False, False, True]),
        ({"mask_high": 3.0, "mask_measure": "product"}, [True, False, False]),  # products: 4, 2 and 0.5
        ({"mask_low": 0.4, "mask_measure": "product"}, [False, False, False]),
    ],
)
def test_a_sequence_whose_mismatch_is_out_of_bounds_is_left_out_whole(options, masked):
    result = losses_of([[2.0, 2.0], [2.0, 1.0], [0.5]], [1.0, 1.0, 1.0], importance_cap=10.0, **options)
    expected = [masked[0]] * 2 + [masked[1]] * 2 + [masked[2]]
    assert result.masked.tolist() == expected
    whole = [2.0, 2.0, 2.0, 1.0, 0.5]
    assert result.weight.tolist() == pytest.approx(
        [0.0 if out else ratio for out, ratio in zip(expected, whole, strict=True)]
    )
    assert result.loss.tolist() == pytest.approx([-weight for weight in result.weight.tolist()])


def test_balance_targets_tilt_the_reference_by_the_reward_and_are_met_on_average():
    """log π_ref + r/β = −1 and 0; log π_θ = −2 and −3; log Ẑ = mean(1, 3) = 2."""
    targets = balance_targets(
        torch.tensor([-2.0, -3.0]), torch.tensor([-1.0, -2.0]), torch.tensor([0.0, 1.0]), beta=0.5
    )
    assert targets.tolist() == pytest.approx([-3.0, -2.0])


def test_balance_is_the_squared_residual_of_each_sequence():
    logprobs = torch.tensor([-0.5, -1.5, -3.0], requires_grad=True)  # log π_θ = −2 and −3
    where = torch.tensor([[True, True], [True, False]])
    result = balance_loss(
        logprobs,
        old_logprobs=logprobs.detach(),
        sampler_logprobs=torch.full((3,), -50.0),
        reference_logprobs=torch.zeros(3),
        targets=torch.tensor([-3.0, -2.0]),
        where=where,
    )
    objective = Objective(kind="trajectory-balance", normalisation="token")
    loss = batch_sum(result.loss, where, objective) / batch_divisor(
        objective, tokens=3, sequences=2, budget=10
    )
    loss.backward()
    assert loss.item() == pytest.approx((1.0 + 1.0) / 2)
    assert logprobs.grad.tolist() == pytest.approx([1.0, 1.0, -1.0])  # 2 · residual / sequences


def test_the_gradient_of_balance_is_that_of_kl_regularised_reward_with_the_groups_mean_as_baseline():
    torch.manual_seed(0)
    beta, rewards = 0.2, torch.tensor([1.0, 0.0, 0.5])
    logprobs, reference = -torch.rand(3) * 5, -torch.rand(3) * 5
    targets = balance_targets(logprobs, reference, rewards, beta)
    residual = logprobs - targets
    regularised = rewards - beta * (logprobs - reference)
    torch.testing.assert_close(-beta * residual, regularised - regularised.mean())


OBJECTIVES = [
    Objective(kl_beta=0.1, importance_cap=1.5, **options)
    for options in (
        {},
        {"normalisation": "sequence"},
        {"normalisation": "constant"},
        {"ratio_level": "sequence", "normalisation": "sequence"},
        {"proximal": "sampler"},
        {"mask_high": 1.3, "mask_low": 0.8},
    )
] + [Objective(kind="trajectory-balance")]


@settings(deadline=None, max_examples=40)
@given(
    seed=st.integers(0, 2**31),
    lengths=st.lists(st.integers(1, 6), min_size=2, max_size=9),
    cuts=st.sets(st.integers(1, 8)),
    objective=st.sampled_from(OBJECTIVES),
)
def test_however_a_batch_is_cut_its_gradient_is_the_same(seed, lengths, cuts, objective):
    generator = torch.Generator().manual_seed(seed)
    width = max(lengths)
    where = torch.arange(width)[None, :] < torch.tensor(lengths)[:, None]
    new, old, sampler, reference = (
        (-torch.rand(where.shape, generator=generator, dtype=torch.float64) * 2) for _ in range(4)
    )
    targets = torch.randn(len(lengths), generator=generator, dtype=torch.float64)
    divisor = batch_divisor(objective, tokens=sum(lengths), sequences=len(lengths), budget=8)

    def gradient(bounds):
        leaf = new.clone().requires_grad_()
        for start, end in pairwise(bounds):
            part = where[start:end, : max(lengths[start:end])]

            def tokens(values, start=start, end=end, part=part):
                return values[start:end, : part.shape[1]][part]

            common = {
                "old_logprobs": tokens(old),
                "sampler_logprobs": tokens(sampler),
                "reference_logprobs": tokens(reference),
                "where": part,
            }
            if objective.is_balance:
                result = balance_loss(tokens(leaf), targets=targets[start:end], **common)
            else:
                advantages = tokens(targets[:, None].expand(where.shape))
                result = token_loss(tokens(leaf), advantages=advantages, objective=objective, **common)
            (batch_sum(result.loss, part, objective) / divisor).backward()
        return leaf.grad

    split = [0, *sorted(cut for cut in cuts if cut < len(lengths)), len(lengths)]
    torch.testing.assert_close(gradient(split), gradient([0, len(lengths)]))
