"""One step at a time: what moves the policy, what must not, and what survives a restart bit by bit."""

from __future__ import annotations

import json
from dataclasses import replace

import msgspec
import pytest
import torch
from policies import EOS, make_groups, make_policy

from echo2p2p.data.trajectory import pack_logprobs
from echo2p2p.errors import OutOfMemory, SettingsError, VerificationError
from echo2p2p.learning.checkpoint import Checkpoint, folder_of, load, save
from echo2p2p.learning.journal import Journal, read
from echo2p2p.learning.objective import Objective
from echo2p2p.learning.replay import Entry
from echo2p2p.learning.trainer import GRPOTrainer, TrainerSettings, TrainerState

SETTINGS = TrainerSettings(learning_rate=1e-3, threads=1)


@pytest.fixture
def policy(tmp_path):
    return make_policy(tmp_path / "policy")


def with_trajectories(groups, **changes):
    """``groups`` with ``changes`` in every trajectory."""
    return [
        msgspec.structs.replace(
            group, samples=[msgspec.structs.replace(sample, **changes) for sample in group.samples]
        )
        for group in groups
    ]


def assert_same(one: TrainerState, two: TrainerState) -> None:
    assert one.counters == two.counters
    assert one.tensors.keys() == two.tensors.keys()
    assert all(torch.equal(tensor, two.tensors[name]) for name, tensor in one.tensors.items())


def test_a_step_makes_rewarded_completions_likelier_and_others_less_likely(policy):
    trainer = GRPOTrainer(policy, SETTINGS)
    groups = make_groups(0)
    before = trainer.logprobs(groups)
    for _ in range(5):
        trainer.train(groups)
    after = trainer.logprobs(groups)
    gain = [
        [float((a - b).sum()) for a, b in zip(x, y, strict=True)] for x, y in zip(after, before, strict=True)
    ]
    good = sum(row[1] + row[3] for row in gain)
    bad = sum(row[0] + row[2] for row in gain)
    assert good > 0 > bad


def test_log_probabilities_are_those_of_a_plain_forward_pass_at_the_temperature(policy):
    trainer = GRPOTrainer(policy, replace(SETTINGS, temperature=0.7, micro_batch_tokens=20))
    groups = make_groups(1)
    found = trainer.logprobs(groups)
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(policy)
    for group, by_sample in zip(groups, found, strict=True):
        for sample, logprobs in zip(group.samples, by_sample, strict=True):
            ids = torch.tensor([group.prompt + sample.completion])
            with torch.no_grad():
                expected = torch.log_softmax(model(ids).logits[0, len(group.prompt) - 1 : -1] / 0.7, -1)
            expected = expected[torch.arange(len(sample.completion)), sample.completion]
            torch.testing.assert_close(logprobs, expected, atol=1e-5, rtol=0)


@pytest.mark.parametrize(
    "objective",
    [
        Objective(),
        Objective(normalisation="sequence", ratio_level="sequence"),
        Objective(normalisation="constant", scale_by_std=False),
        Objective(proximal="sampler", mask_high=1.5),
        Objective(kind="trajectory-balance"),
    ],
)
def test_micro_batches_change_nothing_but_memory(policy, objective):
    settings = replace(SETTINGS, objective=objective)
    whole = GRPOTrainer(policy, settings)
    split = GRPOTrainer(policy, replace(settings, micro_batch_tokens=12))
    groups = make_groups(2)
    one, two = whole.train(groups), split.train(groups)
    one_state, two_state = whole.state().tensors, split.state().tensors
    for name in one_state:
        if name.startswith("optimizer.exp_avg."):  # a tenth of the gradient, after one update
            torch.testing.assert_close(one_state[name], two_state[name], atol=1e-6, rtol=1e-3)
    assert one.loss == pytest.approx(two.loss, abs=1e-5, rel=1e-5)
    assert one.grad_norm == pytest.approx(two.grad_norm, rel=1e-4)
    assert one.entropy == pytest.approx(two.entropy, rel=1e-5)


def test_gradient_checkpointing_computes_twice_and_changes_nothing_else(policy):
    config = json.loads((policy / "config.json").read_text())
    (policy / "config.json").write_text(json.dumps({**config, "attention_dropout": 0.5}))
    plain = GRPOTrainer(policy, SETTINGS)
    frugal = GRPOTrainer(policy, replace(SETTINGS, gradient_checkpointing=True))
    passes = []
    frugal._model.model.layers[0].mlp.register_forward_pre_hook(lambda *_: passes.append(1))
    one, two = plain.train(make_groups(2)), frugal.train(make_groups(2))
    assert len(passes) == 2
    assert one.loss == pytest.approx(two.loss, abs=1e-6)
    assert one.grad_norm == pytest.approx(two.grad_norm, rel=1e-5)


def test_the_loss_is_a_mean_over_all_tokens_of_the_batch(policy):
    """Token-mean: a group without signal adds its tokens to the denominator, and costs no compute."""
    groups = make_groups(3)
    idle = with_trajectories(make_groups(4), reward=1.0)
    alone = GRPOTrainer(policy, SETTINGS).train(groups)
    together = GRPOTrainer(policy, SETTINGS).train([*groups, *idle])
    assert together.trained_groups == 3
    assert together.trained_tokens == alone.tokens
    assert together.loss == pytest.approx(alone.loss * alone.tokens / together.tokens, rel=1e-4)


@pytest.mark.parametrize("normalisation", ["sequence", "constant"])
def test_groups_without_signal_count_in_every_normaliser(policy, normalisation):
    settings = replace(SETTINGS, objective=Objective(normalisation=normalisation))
    groups = make_groups(3)
    alone = GRPOTrainer(policy, settings).train(groups)
    together = GRPOTrainer(policy, settings).train([*groups, *with_trajectories(make_groups(4), reward=0.1)])
    assert (together.groups, together.trained_groups) == (6, 3)
    assert together.wasted_tokens == together.tokens - alone.tokens
    assert together.loss == pytest.approx(alone.loss / 2, rel=1e-4)


def test_with_a_reference_groups_without_signal_are_held_to_it(policy):
    groups = with_trajectories(make_groups(0), reward=1.0)
    trainer = GRPOTrainer(policy, replace(SETTINGS, objective=Objective(kl_beta=0.1)))
    metrics = trainer.train(groups)
    assert (metrics.skipped, metrics.trained_groups) == ("", 0)
    assert (metrics.trained_tokens, metrics.wasted_tokens) == (metrics.tokens, metrics.tokens)


def test_balance_moves_the_policy_towards_the_reference_tilted_by_the_reward(policy):
    """Random log-probabilities of the sampler do not matter: it learns from anybody's samples."""
    settings = replace(SETTINGS, objective=Objective(kind="trajectory-balance", balance_beta=0.5))
    trainer = GRPOTrainer(policy, settings)
    groups = make_groups(0)
    metrics = [trainer.train(groups) for _ in range(60)]
    assert metrics[0].loss == pytest.approx(1.0, rel=1e-4)  # (r − mean r)/β = ±1 while π_θ = π_ref
    assert metrics[-1].loss < 0.1
    assert metrics[0].wasted_tokens == 0


def test_balance_takes_no_kl_term(policy):
    with pytest.raises(SettingsError, match="balance_beta"):
        GRPOTrainer(policy, replace(SETTINGS, objective=Objective(kind="trajectory-balance", kl_beta=0.1)))


def test_masked_sequences_are_counted_and_move_nothing(policy):
    trainer = GRPOTrainer(
        policy, replace(SETTINGS, objective=Objective(mask_high=1.000001, mask_low=0.999999))
    )
    before = trainer.snapshot().fingerprint()
    metrics = trainer.train(make_groups(0))
    assert metrics.masked_fraction == 1.0
    assert metrics.wasted_tokens == metrics.tokens
    assert trainer.snapshot().fingerprint() == before


def test_without_any_signal_the_policy_stays_and_the_step_counts(policy):
    trainer = GRPOTrainer(policy, SETTINGS)
    trainer.train(make_groups(0))
    before = trainer.snapshot().fingerprint()
    metrics = trainer.train(with_trajectories(make_groups(1), reward=0.0))
    assert metrics.skipped == "no signal"
    assert (trainer.steps, trainer.updates) == (2, 1)
    assert trainer.snapshot().fingerprint() == before


@pytest.mark.parametrize("poison", ["logprobs", "weights"])
def test_a_step_that_is_not_finite_changes_nothing_and_is_counted(policy, poison):
    trainer = GRPOTrainer(policy, SETTINGS)
    groups = make_groups(0)
    trainer.train(groups)
    if poison == "weights":
        state = trainer.state()
        next(iter(state.tensors.values()))[0] = torch.inf
        trainer.load_state(state)
        bad = groups
    else:
        bad = [
            msgspec.structs.replace(
                group,
                samples=[
                    msgspec.structs.replace(s, logprobs=b"\x00\x00\xc0\x7f" * len(s.completion))
                    for s in group.samples
                ],
            )
            for group in groups
        ]
    before = trainer.state()
    metrics = trainer.train(bad)
    assert (metrics.skipped, metrics.non_finite_steps) == ("non-finite", 1)
    assert metrics.wasted_tokens == metrics.tokens
    after = trainer.state()
    assert trainer.non_finite_steps == 1
    assert all(torch.equal(before.tensors[name], after.tensors[name]) for name in before.tensors)


def test_several_updates_a_step_use_the_policy_from_before_the_first(policy):
    trainer = GRPOTrainer(policy, replace(SETTINGS, updates_per_step=3, learning_rate=3e-2))
    metrics = trainer.train(make_groups(0))
    assert trainer.updates == 3
    assert metrics.trained_tokens == metrics.tokens
    assert metrics.clipped_fraction > 0


def test_the_reference_holds_the_policy_back(policy):
    groups = make_groups(0)
    distance = {}
    for beta in (0.01, 10.0):
        trainer = GRPOTrainer(policy, replace(SETTINGS, objective=Objective(kl_beta=beta)))
        first = trainer.train(groups)
        assert first.reference_kl == pytest.approx(0.0, abs=1e-6)
        for _ in range(10):
            distance[beta] = trainer.train(groups).reference_kl
    assert distance[10.0] < distance[0.01] / 2


def test_a_resumed_trainer_goes_on_bit_by_bit(policy, tmp_path):
    settings = replace(SETTINGS, warmup_steps=3, weight_decay=0.1)
    straight, first, second = (GRPOTrainer(policy, settings) for _ in range(3))
    for step in range(4):
        straight.train(make_groups(step))
    first.train(make_groups(0))
    first.train(make_groups(1))
    second.load_state(load(save(tmp_path / "run", Checkpoint(2, first.state(), b""), keep=1)).trainer)
    assert_same(first.state(), second.state())
    second.train(make_groups(2))
    second.train(make_groups(3))
    assert_same(straight.state(), second.state())
    assert straight.snapshot().fingerprint() == second.snapshot().fingerprint()


def test_a_run_that_is_killed_after_any_step_ends_with_the_same_bits(policy, tmp_path):
    """Checkpoint, and then the recorded batches since: that is what `--resume` does."""
    settings = replace(SETTINGS, warmup_steps=3, weight_decay=0.1, updates_per_step=2)
    checkpoints, journal = tmp_path / "checkpoints", Journal(tmp_path / "journal", keep=True)
    undisturbed = GRPOTrainer(policy, settings)
    for step in range(6):
        if step % 2 == 0:
            journal.begin(step, durable=step, waiting=[], batches={})
            save(checkpoints, Checkpoint(step, undisturbed.state(), b""), keep=9)
        batch = [
            Entry(msgspec.structs.replace(group, index=8 * step + group.index), "worker")
            for group in make_groups(step)
        ]
        for entry in batch:
            journal.accept(entry)
        journal.draw(step, batch)
        undisturbed.train([entry.group for entry in batch])
    journal.close()
    recorded = read(tmp_path / "journal").batches
    assert list(recorded) == list(range(6))
    for killed_after in range(6):
        # Two lives: the second one has only what is on the disk.
        last = killed_after - killed_after % 2
        resumed = GRPOTrainer(policy, settings)
        resumed.load_state(load(folder_of(checkpoints, last)).trainer)
        for step in range(last, 6):
            resumed.train([entry.group for entry in recorded[step]])
        assert_same(undisturbed.state(), resumed.state())
        assert undisturbed.snapshot().fingerprint() == resumed.snapshot().fingerprint()


def test_a_state_of_another_policy_is_refused_and_changes_nothing(policy):
    trainer = GRPOTrainer(policy, SETTINGS)
    trainer.train(make_groups(0))
    before = trainer.state()
    tensors = dict(before.tensors)
    name = next(iter(tensors))
    for wrong in (
        TrainerState({**tensors, name: tensors[name][:-1]}, before.counters),
        TrainerState({**tensors, name: tensors[name].double()}, before.counters),
        TrainerState({key: value for key, value in tensors.items() if key != name}, before.counters),
        TrainerState({**tensors, "policy.more": tensors[name]}, before.counters),
        TrainerState(tensors, {"steps": 1}),
    ):
        with pytest.raises(VerificationError):
            trainer.load_state(wrong)
        assert_same(trainer.state(), before)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_snapshot_is_the_policy_in_the_published_dtype_and_stays(policy, dtype):
    trainer = GRPOTrainer(policy, replace(SETTINGS, publish_dtype=dtype))
    snapshot = trainer.snapshot()
    before = snapshot.fingerprint()
    state = snapshot.state_dict()
    assert {str(tensor.dtype) for tensor in state.values()} == {f"torch.{dtype}"}
    assert state["lm_head.weight"].data_ptr() == state["model.embed_tokens.weight"].data_ptr()
    trainer.train(make_groups(0))
    assert snapshot.fingerprint() == before
    assert trainer.snapshot().fingerprint() != before


@pytest.mark.parametrize(
    "error",
    [torch.OutOfMemoryError("out of memory"), MemoryError(), RuntimeError("can't allocate memory: 1 B")],
)
def test_a_step_that_runs_out_of_memory_does_not_count_and_can_be_taken_again(policy, monkeypatch, error):
    trainer, undisturbed = GRPOTrainer(policy, SETTINGS), GRPOTrainer(policy, SETTINGS)
    groups = make_groups(0)

    def fail(*_, **__):
        raise error

    with monkeypatch.context() as patch:
        patch.setattr("echo2p2p.learning.trainer.token_loss", fail)
        with pytest.raises(OutOfMemory, match="micro_batch_tokens"):
            trainer.train(groups)
    assert trainer.steps == 0
    trainer.train(groups)
    undisturbed.train(groups)
    assert_same(trainer.state(), undisturbed.state())


def test_an_unknown_dtype_is_refused(policy):
    with pytest.raises(SettingsError, match="int4"):
        GRPOTrainer(policy, replace(SETTINGS, publish_dtype="int4"))


def test_a_folder_without_a_policy_is_refused(tmp_path):
    with pytest.raises(SettingsError, match=r"config\.json"):
        GRPOTrainer(tmp_path, SETTINGS)


def test_one_made_up_log_probability_is_not_all_of_a_steps_mismatch(policy):
    trainer = GRPOTrainer(policy, SETTINGS)
    groups = make_groups(1, groups=20)
    honest = trainer.logprobs(groups)
    groups = [
        msgspec.structs.replace(
            group,
            samples=[
                msgspec.structs.replace(sample, logprobs=pack_logprobs(own.numpy()))
                for sample, own in zip(group.samples, said, strict=True)
            ],
        )
        for group, said in zip(groups, honest, strict=True)
    ]
    made_up = groups[0].samples[0].logprob_array().copy()
    made_up[0] = -100.0
    groups[0].samples[0] = msgspec.structs.replace(groups[0].samples[0], logprobs=pack_logprobs(made_up))
    assert trainer.train(groups).mismatch_kl < 0.1


def test_metrics_tell_rewards_lengths_and_counts(policy):
    groups = make_groups(5)
    metrics = GRPOTrainer(policy, SETTINGS).train(groups)
    assert metrics.skipped == ""
    assert metrics.reward_mean == 0.5
    assert metrics.reward_std == 0.5
    assert metrics.tokens == sum(group.n_tokens for group in groups)
    assert metrics.completion_length_mean == metrics.tokens / 12
    assert metrics.weight_max <= SETTINGS.objective.importance_cap
    assert EOS not in (metrics.grad_norm, metrics.entropy)
    assert metrics.mismatch_kl > 0
