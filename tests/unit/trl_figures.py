"""One made-up batch, and what TRL computes from it: the figures in ``trl_figures.json``.

The tests read the figures, so they need no TRL. To make them again, with TRL (and accelerate, datasets) at hand:

    python tests/unit/trl_figures.py > tests/unit/trl_figures.json
"""

from __future__ import annotations

import json
from collections import defaultdict
from types import SimpleNamespace

import numpy as np
import torch

BUDGET = 9
"""Tokens that a completion may have: longer than the longest here."""
CAP = 2.0

CASES: dict[str, dict[str, object]] = {
    "token": {"loss_type": "dapo"},
    "sequence": {"loss_type": "grpo"},
    "constant": {"loss_type": "dr_grpo"},
    "kl": {"loss_type": "dapo", "beta": 0.04},
    "gspo": {"loss_type": "grpo", "level": "sequence"},
    "masked": {"loss_type": "grpo", "mask_above": 3.0},
    "coupled": {"loss_type": "dapo", "old": "sampler", "delta": CAP},
}
"""What TRL is asked, by name: its ``loss_type``, ``beta``, ``importance_sampling_level``, ``delta``; the policy that
it takes for the old one, and the bound of its ``sequence_mask`` on top of ``token_truncate``."""


def make_batch() -> dict[str, torch.Tensor]:
    """Five sequences of uneven lengths, (5, 7); the four policies far enough apart for every bound to act."""
    rng = np.random.default_rng(5)
    shape = (5, 7)
    old = -rng.random(shape) * 2 - 0.1
    batch = {
        "old": old,
        "logprobs": old + rng.normal(0, 0.3, shape),
        "sampler": old + rng.normal(0, 0.5, shape),
        "reference": old + rng.normal(0, 0.4, shape),
    }
    made = {name: torch.tensor(values, dtype=torch.float32) for name, values in batch.items()}
    lengths = torch.tensor([7, 2, 5, 1, 4])
    return made | {
        "where": torch.arange(shape[1])[None, :] < lengths[:, None],
        "advantages": torch.tensor([1.2, -0.7, -1.1, 0.9, 0.4]),
    }


def trl_figure(case: dict[str, object]) -> dict[str, object]:
    """Loss, its gradient at every place, and the masked sequences, by ``GRPOTrainer._compute_loss``."""
    from trl.trainer.grpo_trainer import GRPOTrainer

    batch = make_batch()
    logprobs = batch["logprobs"].clone().requires_grad_()
    mask = batch["where"].float()
    diff = (batch["old"] - batch["sampler"]) * mask
    coupled = case.get("old") == "sampler"
    ratio = torch.ones_like(diff) if coupled else diff.exp().clamp(max=CAP)
    product = diff.sum(-1, keepdim=True).exp()
    invalid = product > float(case.get("mask_above", float("inf")))  # type: ignore[arg-type]
    args = SimpleNamespace(delta=case.get("delta"), use_bias_correction_kl=False)
    trainer = SimpleNamespace(
        _get_per_token_logps_and_entropies=lambda *_, **__: (logprobs, torch.zeros_like(mask), None),
        accelerator=SimpleNamespace(
            num_processes=1, gather=lambda x: x, reduce=lambda x, reduction: x, sync_gradients=False
        ),
        model=SimpleNamespace(training=False),
        args=args,
        beta=case.get("beta", 0.0),
        loss_type=case["loss_type"],
        importance_sampling_level=case.get("level", "token"),
        epsilon_low=0.2,
        epsilon_high=0.28,
        max_completion_length=BUDGET,
        current_gradient_accumulation_steps=1,
        aux_loss_enabled=False,
        top_entropy_quantile=1.0,
        off_policy_mask_threshold=None,
        use_vllm=True,
        vllm_importance_sampling_correction=True,
        _entropy_bonus_enabled=False,
        _metrics=defaultdict(lambda: defaultdict(list)),
    )
    inputs = {
        "prompt_ids": torch.zeros(5, 1),
        "prompt_mask": torch.ones(5, 1),
        "completion_ids": torch.zeros_like(mask),
        "completion_mask": mask,
        "advantages": batch["advantages"],
        "old_per_token_logps": batch["sampler"] if coupled else batch["old"],
        "ref_per_token_logps": batch["reference"],
        "importance_sampling_ratio": ratio.masked_fill(invalid, 0.0),
        "num_items_in_batch": mask.sum(),
    }
    loss = GRPOTrainer._compute_loss(trainer, None, inputs)
    loss.backward()
    assert logprobs.grad is not None
    return {
        "loss": loss.item(),
        "gradient": [[round(value, 8) for value in row] for row in logprobs.grad.tolist()],
        "masked": invalid.squeeze(-1).tolist(),
    }


if __name__ == "__main__":
    import trl

    figures = {name: trl_figure(case) for name, case in CASES.items()}
    print(json.dumps({"trl": trl.__version__, "figures": figures}, indent=1))
