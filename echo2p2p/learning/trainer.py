"""The GRPO trainer: groups in, the next policy version out.

One call of :meth:`GRPOTrainer.train` makes one policy version. Given the same state and groups it computes
the same bits on the same machine, so a resumed run continues exactly where its checkpoint was taken. An
update whose loss or gradient is not finite changes nothing and ends the step.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import groupby
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from echo2p2p.data.policy import DTYPES, build_model, is_out_of_memory
from echo2p2p.data.trajectory import Group
from echo2p2p.errors import OutOfMemory, SettingsError, VerificationError
from echo2p2p.learning.audit import Reading
from echo2p2p.learning.batching import MicroBatch, Row, rows_of
from echo2p2p.learning.forward import PolicyForward
from echo2p2p.learning.metrics import StepMetrics, StepTally
from echo2p2p.learning.objective import (
    Objective,
    TokenLoss,
    balance_loss,
    balance_targets,
    batch_divisor,
    batch_sum,
    token_loss,
)
from echo2p2p.learning.ranks import Ranks, fill, gathered, whole
from echo2p2p.learning.reading import read_groups
from echo2p2p.weights.adapter import AdapterSpec, adapter_state, add_adapter
from echo2p2p.weights.snapshot import Snapshot, fingerprint_of, from_state_dict


@dataclass(frozen=True)
class AdapterSettings:
    """``rank``, ``alpha`` and ``targets`` of :class:`echo2p2p.weights.adapter.AdapterSpec`."""

    rank: int
    alpha: float
    targets: tuple[str, ...]


@dataclass(frozen=True)
class TrainerSettings:
    """How a policy is trained.

    Attributes:
        objective: what is minimised.
        learning_rate, betas, eps, weight_decay: AdamW's.
        warmup_steps: the learning rate rises linearly over so many steps, then stays.
        max_grad_norm: gradients are scaled down to this norm.
        updates_per_step: optimizer updates in one step; the groups are split among them. Above 1 the clip
            matters, and one more forward pass is spent on π_θ_old.
        temperature: at which completions were sampled.
        max_completion_tokens: what a completion may have at most: the budget of constant normalisation.
        micro_batch_tokens: token places in one forward and backward pass.
        logit_bytes: of a micro-batch's logits that are kept for the backward pass; the others are computed twice.
        compute_dtype: ``float32`` or ``bfloat16`` (autocast); weights and optimizer stay float32.
        publish_dtype: of snapshots, and so of the workers' engines.
        gradient_checkpointing: compute activations twice to keep fewer.
        adapter: train an adapter of this kind and leave the policy's weights alone; None trains all of them.
        device: ``cpu``, ``cuda``, …
        threads: torch's threads for a step on the CPU; None leaves torch's own choice.
    """

    objective: Objective = field(default_factory=Objective)
    learning_rate: float = 1e-6
    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = 1e-8
    weight_decay: float = 0.0
    warmup_steps: int = 0
    max_grad_norm: float = 1.0
    updates_per_step: int = 1
    temperature: float = 1.0
    max_completion_tokens: int = 256
    micro_batch_tokens: int = 16384
    logit_bytes: int = 2**30
    compute_dtype: str = "float32"
    publish_dtype: str = "float32"
    gradient_checkpointing: bool = False
    adapter: AdapterSettings | None = None
    device: str = "cpu"
    threads: int | None = None


@dataclass(frozen=True)
class TrainerState:
    """Everything a trainer is: ``tensors`` by name (copies, on the CPU) and ``counters`` by name."""

    tensors: dict[str, Tensor]
    counters: dict[str, int]


class GRPOTrainer:
    """Trains one policy. Not thread-safe: one call at a time; every call blocks.

    Args:
        policy_dir: the policy folder, with its first weights.
        ranks: of the processes that train it together; each calls the same methods in the same order, and what
            they return counts on rank 0. None for one process.

    Raises:
        SettingsError: the folder is no usable policy, a dtype is unknown, or the objective contradicts itself.
    """

    def __init__(self, policy_dir: Path, settings: TrainerSettings, ranks: Ranks | None = None) -> None:
        for name in (settings.compute_dtype, settings.publish_dtype):
            if name not in DTYPES:
                raise SettingsError(f"dtype {name!r} is unknown", hint=f"one of {', '.join(DTYPES)}")
        if settings.objective.is_balance and settings.objective.kl_beta:
            raise SettingsError(
                "trajectory balance has no KL term: its target holds π_ref already",
                hint="set kl_beta to 0 and choose balance_beta",
            )
        self.settings = settings
        self._ranks = ranks
        self._model = self._load(policy_dir)
        self.adapter = self._add_adapter()
        """What the versions are adapters of; None if they are whole policies."""
        if self.adapter is None:
            self._model.requires_grad_(True)
        self._policy = self._forward(self._model)
        self._reference = None
        if settings.objective.needs_reference:
            self._reference = self._forward(self._load(policy_dir))
        if settings.gradient_checkpointing:
            _checkpoint_gradients(self._model)
        if ranks is not None:
            for forward in filter(None, (self._policy, self._reference)):
                ranks.shard(forward.model)
        self._parameters = {name: p for name, p in self._model.named_parameters() if p.requires_grad}
        self._optimizer = torch.optim.AdamW(
            self._parameters.values(),
            lr=settings.learning_rate,
            betas=settings.betas,
            eps=settings.eps,
            weight_decay=settings.weight_decay,
            fused=True,
        )
        self.steps = 0
        """Steps taken, skipped ones included: the policy version that the trainer holds."""
        self.updates = 0
        """Optimizer updates made."""
        self.non_finite_steps = 0
        """Steps skipped for a loss or gradient that was not finite."""

    def train(self, groups: Sequence[Group]) -> StepMetrics:
        """Take one step on ``groups`` (at least one).

        Raises:
            OutOfMemory: a micro-batch does not fit; the step does not count, and the state is unchanged if it
                was the step's first update.
        """
        self._prepare_thread()
        tally = StepTally(groups, rows_of(groups, scale_by_std=self.settings.objective.scale_by_std))
        try:
            skipped = self._update_all(tally)
        except (RuntimeError, MemoryError) as error:
            if not is_out_of_memory(error):
                raise
            self._optimizer.zero_grad(set_to_none=True)
            raise OutOfMemory(
                "a training step did not fit into memory", hint="lower micro_batch_tokens"
            ) from error
        if self._ranks is not None:
            tally.add_up(self._ranks)
        self.non_finite_steps += skipped == "non-finite"
        metrics = tally.metrics(
            skipped, learning_rate=self._learning_rate(), non_finite_steps=self.non_finite_steps
        )
        self.steps += 1
        return metrics

    @torch.no_grad()
    def snapshot(self) -> Snapshot:
        """The policy as it is now, in ``publish_dtype``; later steps leave it alone."""
        state = self._model.state_dict(keep_vars=True)
        if self.adapter is not None:
            state = {name: tensor for name, tensor in state.items() if name in self._parameters}
        dtype = DTYPES[self.settings.publish_dtype]
        return from_state_dict(gathered(state, dtype, keep=self._leads))

    def read(self, groups: Sequence[Group]) -> list[Reading]:
        """What the audit wants to know of each group, by the policy as it is now. Raises OutOfMemory."""
        self._prepare_thread()
        try:
            return read_groups(self._policy, groups)
        except (RuntimeError, MemoryError) as error:
            if self._ranks is not None or not is_out_of_memory(error):
                raise  # the other ranks wait for this one
            raise OutOfMemory("groups to be read did not fit into memory") from error

    @torch.no_grad()
    def logprobs(self, groups: Sequence[Group]) -> list[list[Tensor]]:
        """log π_θ of every sampled token at the sampling temperature: one float32 tensor a sample."""
        self._prepare_thread()
        rows = rows_of(groups, scale_by_std=self.settings.objective.scale_by_std)
        by_row = self._policy.of_rows(rows)
        found = iter([by_row[id(row)] for row in rows])
        return [[next(found).cpu() for _ in group.samples] for group in groups]

    def state(self) -> TrainerState:
        """A copy of everything that :meth:`load_state` needs to go on bit by bit."""
        tensors: dict[str, Tensor] = {}
        for name, parameter in self._parameters.items():
            tensors[f"policy.{name}"] = parameter
            for key, value in self._optimizer.state.get(parameter, {}).items():
                tensors[f"optimizer.{key}.{name}"] = value
        counters = {"steps": self.steps, "updates": self.updates, "non_finite_steps": self.non_finite_steps}
        copies = {}
        for name, tensor in tensors.items():
            full = whole(tensor)
            if self._leads:
                copies[name] = full.cpu().clone()
        return TrainerState(copies, counters)

    def load_state(self, state: TrainerState) -> None:
        """Become what :meth:`state` described. Nothing is changed unless all of it fits.

        Raises:
            VerificationError: it is not the state of a trainer of this policy.
        """
        self.check_state(state)
        with torch.no_grad():
            for name, parameter in self._parameters.items():
                fill(parameter, state.tensors[f"policy.{name}"])
        self._optimizer.state.clear()
        for name, parameter in self._parameters.items():
            if f"optimizer.step.{name}" in state.tensors:
                moments = {"exp_avg": torch.empty_like(parameter), "exp_avg_sq": torch.empty_like(parameter)}
                for key, moment in moments.items():
                    fill(moment, state.tensors[f"optimizer.{key}.{name}"])
                # Fused, AdamW counts on the parameter's device.
                step = state.tensors[f"optimizer.step.{name}"].to(parameter.device, copy=True)
                self._optimizer.state[parameter] = {"step": step, **moments}
        self.steps = state.counters["steps"]
        self.updates = state.counters["updates"]
        self.non_finite_steps = state.counters["non_finite_steps"]

    def close(self) -> None:
        """Let go of whatever else trains with it; it is not used any more."""

    def check_state(self, state: TrainerState) -> None:
        """Raises VerificationError if ``state`` is not one of a trainer of this policy."""
        _check_same_layout(self._layout(state.counters), state)

    def blank_state(self, counters: dict[str, int]) -> TrainerState:
        """A state with ``counters`` and no particular values: what a rank loads whose part comes from rank 0."""
        tensors = {
            name: torch.empty(tensor.shape, dtype=tensor.dtype)
            for name, tensor in self._layout(counters).items()
        }
        for name, tensor in tensors.items():
            if name.startswith("optimizer.step."):
                # The one kind that every rank has whole: how often its parameter was updated.
                tensor.fill_(counters["updates"])
        return TrainerState(tensors, counters)

    def _layout(self, counters: dict[str, int]) -> dict[str, Tensor]:
        """A tensor of the right shape and dtype for every name of a state."""
        expected: dict[str, Tensor] = {f"policy.{name}": p for name, p in self._parameters.items()}
        if counters.get("updates", 0):
            for name, parameter in self._parameters.items():
                expected[f"optimizer.exp_avg.{name}"] = expected[f"optimizer.exp_avg_sq.{name}"] = parameter
                expected[f"optimizer.step.{name}"] = torch.zeros(())
        return expected

    def _update_all(self, tally: StepTally) -> str:
        objective = self.settings.objective
        rows = tally.rows if objective.needs_reference else [row for row in tally.rows if row.advantage]
        if not rows:
            return "no signal"
        n_updates = min(self.settings.updates_per_step, len(rows))
        fixed = _Fixed()
        if objective.is_balance:
            rows, fixed = self._with_balance_targets(rows)
        elif n_updates > 1:
            fixed = _Fixed(old=self._policy.of_rows(rows))
        divisor = batch_divisor(
            objective,
            tokens=tally.tokens,
            sequences=len(tally.rows),
            budget=self.settings.max_completion_tokens,
        )
        # Strided, so that every update sees samples of every group.
        for part in range(n_updates):
            if not self._update(rows[part::n_updates], fixed, tally, divisor / n_updates):
                return "non-finite"
        return ""

    def _with_balance_targets(self, rows: Sequence[Row]) -> tuple[list[Row], _Fixed]:
        """``rows``, which are whole groups in order, with their targets, and what these follow from."""
        assert self._reference is not None
        old = self._policy.of_rows(rows)
        reference = self._reference.of_rows(rows)
        aimed: list[Row] = []
        for _, group in groupby(rows, key=lambda row: row.group):
            members = list(group)
            targets = balance_targets(
                torch.stack([old[id(row)].sum() for row in members]),
                torch.stack([reference[id(row)].sum() for row in members]),
                torch.tensor([row.reward for row in members], device=self._device),
                self.settings.objective.balance_beta,
            ).tolist()
            aimed += [replace(row, balance_target=to) for row, to in zip(members, targets, strict=True)]
        pairs = list(zip(rows, aimed, strict=True))
        return aimed, _Fixed(
            old={id(new): old[id(row)] for row, new in pairs},
            reference={id(new): reference[id(row)] for row, new in pairs},
        )

    def _update(self, rows: Sequence[Row], fixed: _Fixed, tally: StepTally, divisor: float) -> bool:
        """One optimizer update on ``rows``; False, and nothing changed, if loss or gradient is not finite."""
        self._optimizer.zero_grad(set_to_none=True)
        finite = True
        used_tokens = 0
        for packed, batch, counts in self._shares(rows):
            logprobs, entropies = self._policy(batch)
            result = self._loss(
                batch,
                logprobs,
                old_logprobs=_of(packed, fixed.old) if fixed.old else logprobs.detach(),
                reference_logprobs=_of(packed, fixed.reference)
                if fixed.reference
                else self._reference_logprobs(batch),
            )
            loss = batch_sum(result.loss, batch.where, self.settings.objective) / divisor
            finite = finite and bool(torch.isfinite(loss))
            if not finite and self._ranks is None:
                break
            # Gradients are averaged over the ranks, while the parts of a loss add up.
            (loss * (counts * self._size)).backward()  # type: ignore[no-untyped-call]
            if not counts or not finite:
                continue
            tally.add(result, entropies, float(loss.detach()))
            moving = ~result.masked
            if not self.settings.objective.is_balance:
                moving &= batch.advantages != 0
            used_tokens += int(moving.sum())
        norm = nn.utils.clip_grad_norm_(self._parameters.values(), self.settings.max_grad_norm)
        tally.grad_norm = float(whole(norm))
        if self._ranks is not None:
            finite = not self._ranks.largest([not finite])[0]
        if not finite or not math.isfinite(tally.grad_norm):
            self._optimizer.zero_grad(set_to_none=True)
            return False
        for param_group in self._optimizer.param_groups:
            param_group["lr"] = self._learning_rate()
        self._optimizer.step()
        self._optimizer.zero_grad(set_to_none=True)
        self.updates += 1
        tally.used_tokens += used_tokens
        return True

    def _shares(self, rows: Sequence[Row]) -> Iterator[tuple[list[Row], MicroBatch, bool]]:
        """This rank's micro-batches of ``rows``, and whether they count: all ranks run the model equally often."""
        if self._ranks is None:
            for packed, batch in self._policy.micro_batches(rows):
                yield packed, batch, True
            return
        by_length = sorted(rows, key=lambda row: -row.length)
        own = by_length[self._ranks.rank :: self._ranks.size]
        mine = list(self._policy.micro_batches(own or by_length[-1:]))
        for number in range(int(self._ranks.largest([len(mine)])[0])):
            yield *mine[min(number, len(mine) - 1)], number < len(mine) and bool(own)

    def _loss(
        self, batch: MicroBatch, logprobs: Tensor, *, old_logprobs: Tensor, reference_logprobs: Tensor | None
    ) -> TokenLoss:
        if self.settings.objective.is_balance and reference_logprobs is not None:
            return balance_loss(
                logprobs,
                old_logprobs=old_logprobs,
                sampler_logprobs=batch.sampler_logprobs,
                reference_logprobs=reference_logprobs,
                targets=batch.balance_targets,
                where=batch.where,
            )
        return token_loss(
            logprobs,
            old_logprobs=old_logprobs,
            sampler_logprobs=batch.sampler_logprobs,
            advantages=batch.advantages,
            where=batch.where,
            objective=self.settings.objective,
            reference_logprobs=reference_logprobs,
        )

    @torch.no_grad()
    def _reference_logprobs(self, batch: MicroBatch) -> Tensor | None:
        return None if self._reference is None else self._reference(batch)[0]

    def _learning_rate(self) -> float:
        warmup = self.settings.warmup_steps
        return self.settings.learning_rate * (min(1.0, (self.steps + 1) / warmup) if warmup else 1.0)

    @property
    def _size(self) -> int:
        return 1 if self._ranks is None else self._ranks.size

    @property
    def _leads(self) -> bool:
        return self._ranks is None or self._ranks.rank == 0

    @property
    def _device(self) -> torch.device:
        return next(iter(self._parameters.values())).device

    def _load(self, policy_dir: Path) -> nn.Module:
        settings = self.settings
        # Where it is spread over several processes, each layer goes to its device as it is cut.
        device = settings.device if self._ranks is None else "cpu"
        if settings.adapter is None:
            return build_model(policy_dir, dtype=torch.float32, device=device, weights=True)
        # A base has the bits that the engines have: what is never trained needs no more.
        published = DTYPES[settings.publish_dtype]
        model = build_model(policy_dir, dtype=published, device=device, weights=True)
        return model if settings.compute_dtype == settings.publish_dtype else model.float()

    def _add_adapter(self) -> AdapterSpec | None:
        settings, wanted = self.settings, self.settings.adapter
        if wanted is None:
            return None
        base = fingerprint_of(
            gathered(self._model.state_dict(keep_vars=True), DTYPES[settings.publish_dtype], keep=True)
        )
        spec = AdapterSpec(wanted.rank, wanted.alpha, wanted.targets, settings.publish_dtype, base)
        add_adapter(self._model, spec, dtype=torch.float32)
        trained = adapter_state(self._model)
        for name, parameter in self._model.named_parameters():
            parameter.requires_grad_(name in trained)
        return spec

    def _forward(self, model: nn.Module) -> PolicyForward:
        return PolicyForward(
            model,
            temperature=self.settings.temperature,
            compute_dtype=DTYPES[self.settings.compute_dtype],
            micro_batch_tokens=self.settings.micro_batch_tokens,
            logit_bytes=self.settings.logit_bytes,
        )

    def _prepare_thread(self) -> None:
        # A thread's own, and the caller may use any thread.
        if self.settings.threads is not None:
            torch.set_num_threads(self.settings.threads)


@dataclass(frozen=True)
class _Fixed:
    """Log-probabilities that stand still during a step, by the ``id`` of the row; empty where not needed."""

    old: dict[int, Tensor] = field(default_factory=dict)
    reference: dict[int, Tensor] = field(default_factory=dict)


def _of(rows: Sequence[Row], found: dict[int, Tensor]) -> Tensor:
    return torch.cat([found[id(row)] for row in rows])


def _checkpoint_gradients(model: nn.Module) -> None:
    """Turn it on; transformers heeds it only in training mode, which must not bring dropout with it."""
    # transformers 5 renames it.
    name = "activation_checkpointing_enable"
    enable: Any = getattr(model, name if hasattr(model, name) else "gradient_checkpointing_enable")
    enable({"use_reentrant": False})
    model.train()
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
        if hasattr(module, "attention_dropout"):
            module.attention_dropout = 0.0  # type: ignore[assignment]


def _check_same_layout(expected: dict[str, Tensor], state: TrainerState) -> None:
    counters = {"steps", "updates", "non_finite_steps"}
    if state.counters.keys() != counters or expected.keys() != state.tensors.keys():
        odd = sorted(expected.keys() ^ state.tensors.keys()) or sorted(state.counters.keys() ^ counters)
        raise VerificationError(f"the checkpoint is not of this policy: {', '.join(odd[:4])}")
    for name, tensor in state.tensors.items():
        if tensor.shape != expected[name].shape or tensor.dtype != expected[name].dtype:
            raise VerificationError(
                f"the checkpoint is not of this policy: {name} is {tensor.dtype} {tuple(tensor.shape)}"
            )
