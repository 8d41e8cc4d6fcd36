"""The capacity model against the real learner and workers: when the learner waits, and for how long."""

import json

import pytest

from echo2p2p.provisioning.capacity import step_s
from echo2p2p.simulation.play import play
from echo2p2p.simulation.scenario import Scenario, load_scenario

T_TRAIN_S = 1000.0
ROLLOUTS = 96
TOKENS = 8
UPLINK_MBIT = 1000.0


def scenario(staleness, kappa, *, workers, consumed_by, broadcast_steps=0.1, **worker):
    """``workers`` of which ``consumed_by`` generate what the learner trains on."""
    tokens_per_s = ROLLOUTS / T_TRAIN_S / consumed_by * TOKENS
    tree = load_scenario("echo2").model_dump()
    tree.update(duration_s=25 * T_TRAIN_S, warmup_steps=8, rules={})
    tree["policy"].update(
        nbytes=int(UPLINK_MBIT * 1e6 / 8 * 0.95 * broadcast_steps * T_TRAIN_S),
        install_s=1,
        chunks=32,
        chunk_kib=256,
    )
    tree["learner"].update(t_train_s=T_TRAIN_S, upload_mbit=UPLINK_MBIT)
    tree["completions"].update(mean_tokens=TOKENS, max_tokens=TOKENS, tail="fixed", tokens_each=1)
    tree["workers"][0].update(
        count=workers, tokens_per_s=tokens_per_s, upload_mbit=2000, download_mbit=4000, price_per_hour=1
    )
    tree["learner"]["settings"] = {
        "learner": {
            "staleness": staleness,
            "kappa": kappa,
            "prompts_per_step": ROLLOUTS // 2,
            "samples_per_prompt": 2,
            "min_workers": workers,
            "lease_s": 5000,
            "beat_period_s": 60,
        },
        # All of them work: the number is given, not chosen.
        "provisioning": {
            "gamma": 10,
            "margin": 1e6,
            "t_train_prior_s": T_TRAIN_S,
            "t_bcast_prior_s": broadcast_steps * T_TRAIN_S,
        },
        "worker": {"batch_groups": 1, **worker},
    }
    return Scenario(**tree)


@pytest.mark.parametrize(
    ("staleness", "kappa", "workers", "broadcast_steps"),
    [(3, 2, 4, 0.5), (3, 2, 5, 0.5), (4, 2, 5, 1.5), (4, 3, 5, 1.5), (3, 2, 5, 1.5)],
)
def test_the_learner_waits_as_long_as_the_model_says(staleness, kappa, workers, broadcast_steps):
    outcome = play(
        scenario(staleness, kappa, workers=workers, consumed_by=4.3, broadcast_steps=broadcast_steps)
    )
    predicted_s = step_s(
        kappa=kappa,
        staleness=staleness,
        rollouts=ROLLOUTS,
        t_train_s=T_TRAIN_S,
        t_bcast_s=outcome.t_bcast_s,
        mu_pool=ROLLOUTS / T_TRAIN_S * workers / 4.3,
    )
    assert outcome.bubble_ratio == pytest.approx(1 - T_TRAIN_S / predicted_s, abs=0.02)
    assert not outcome.broken


@pytest.mark.parametrize(("broadcast_steps", "least"), [(1.5, 16), (2.5, 10)])
def test_versions_that_are_due_before_the_last_one_has_arrived_do_not_stop_the_run(broadcast_steps, least):
    slow = scenario(3, 1, workers=5, consumed_by=4.3, broadcast_steps=broadcast_steps).model_dump()
    outcome = play(Scenario(**slow | {"duration_s": 22 * T_TRAIN_S}))
    assert outcome.steps >= least
    assert not outcome.broken


def test_of_a_worker_that_is_held_to_a_rate_the_learner_measures_that_rate(tmp_path):
    held = ROLLOUTS / T_TRAIN_S / 2
    tree = scenario(3, 2, workers=4, consumed_by=0.02, limit_tokens_per_s=held * TOKENS).model_dump()
    tree["duration_s"] = 12 * T_TRAIN_S
    play(Scenario(**tree), events=tmp_path / "events.jsonl")
    events = [json.loads(line) for line in (tmp_path / "events.jsonl").read_text().splitlines()]
    last = [event for event in events if event["event"] == "step"][-1]
    assert last["mu_pool"] / last["active"] == pytest.approx(held, rel=0.05)
