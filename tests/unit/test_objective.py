"""The objective, against numbers worked out by hand."""

from __future__ import annotations

import math

import pytest
import torch

from echo2p2p.learning.objective import chosen_logprobs, group_advantages, k3, token_loss


def loss_of(*, new, advantage, old=0.5, sampler=0.5, importance_cap=10.0, reference=None, beta=0.0):
    """The loss, its parts and its gradient for one token with these probabilities."""
    logprob = torch.tensor([math.log(new)], requires_grad=True)
    result = token_loss(
        logprob,
        old_logprobs=torch.tensor([math.log(old)]),
        sampler_logprobs=torch.tensor([math.log(sampler)]),
        advantages=torch.tensor([advantage]),
        clip_low=0.2,
        clip_high=0.28,
        importance_cap=importance_cap,
        reference_logprobs=None if reference is None else torch.tensor([math.log(reference)]),
        kl_beta=beta,
    )
    result.loss.sum().backward()
    return result, logprob.grad.item()


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
    result, gradient = loss_of(new=0.5, sampler=0.25, advantage=0.0, reference=0.25, beta=0.1)
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
