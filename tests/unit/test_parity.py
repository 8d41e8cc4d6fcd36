"""The parity benchmark: what it says of several trainings, and the training without a swarm that it compares with."""

from __future__ import annotations

import json

import pytest
from scipy import stats

from benchmarks.bands import Run, aligned, band, paired
from benchmarks.colocated import train
from benchmarks.parity import Case, Results, of_swarm
from echo2p2p.data import task
from echo2p2p.data.task import make_task
from echo2p2p.layering import load


def run(seed: int = 0, **curve: float) -> Run:
    return Run(seed, {int(step[1:]): reward for step, reward in curve.items()}, 0.0, 0)


@pytest.mark.parametrize("n", range(2, 17))
def test_a_band_is_students_interval_of_the_mean(n):
    values = [0.1 * i * i % 0.7 for i in range(n)]
    low, high = stats.t.interval(0.95, n - 1, loc=sum(values) / n, scale=stats.sem(values))
    found = band(values)
    assert (found.low, found.high) == pytest.approx((low, high), rel=1e-3, abs=1e-4)
    assert found.mean in found
    assert high + 0.1 not in found


@pytest.mark.parametrize("n", [0, 1, 17])
def test_no_band_is_made_up_for_too_few_or_too_many_values(n):
    with pytest.raises(ValueError, match="a band of"):
        band([0.5] * n)


def test_curves_are_aligned_on_the_steps_that_all_of_them_have():
    steps, bands = aligned([run(s0=0.2, s10=0.4, s20=0.6), run(s0=0.4, s20=0.8, s25=0.9)])
    assert steps == [0, 20]
    assert [b.mean for b in bands] == pytest.approx([0.3, 0.7])


def test_trainings_are_paired_by_seed():
    one = [run(seed, s5=0.1 * seed) for seed in (1, 2, 3)]
    other = [run(seed, s5=0.5) for seed in (3, 2, 7)]
    assert paired(one, other) == pytest.approx([-0.3, -0.2])


def test_the_height_of_a_curve_weighs_its_steps_by_their_distance():
    assert run(s0=0.0, s10=1.0, s40=1.0).over_training == pytest.approx((5 + 30) / 40)


def test_a_swarms_curve_and_the_age_of_its_tokens_come_from_the_learners_events(tmp_path):
    events = [
        {"event": "eval", "step": 0, "reward": 0.2},
        {"event": "step", "step": 1, "staleness_hist": {"0": 30}},
        {"event": "step", "step": 2, "staleness_hist": {"1": 10, "2": 20}},
        {"event": "eval", "step": 2, "reward": 0.4},
    ]
    (tmp_path / "events.jsonl").write_text("".join(json.dumps(event) + "\n" for event in events))
    assert of_swarm(tmp_path, 4) == Run(4, {0: 0.2, 2: 0.4}, staleness_mean=50 / 60, staleness_max=2)


def test_a_finished_training_is_found_again(tmp_path):
    case, kept = Case("swarm", 3, 1), run(1, s0=0.25, s20=0.5)
    Results(tmp_path).keep(case, kept)
    assert Results(tmp_path).find(case) == kept
    assert Results(tmp_path).of("swarm", 3, range(4)) == [kept]


class Sevens:
    """The prompts of another task, and a reward that is quickly learned: the share of the digit 7."""

    name = "sevens"

    def __init__(self, seed, options):
        self.prompt = make_task("strings", seed=seed, options=options).prompt

    def answer(self, index, split="train"):
        return "77777"

    def reward(self, index, completion, split="train"):
        return completion.count("7") / max(5, len(completion))


@pytest.fixture(autouse=True)
def sevens(monkeypatch):
    monkeypatch.setitem(task._REGISTRY, "sevens", Sevens)


def settings(**learner: object):
    small = {
        "steps": 8,
        "prompts_per_step": 8,
        "samples_per_prompt": 8,
        "max_new_tokens": 6,
        "eval_prompts": 16,
        "threads": 1,
        "optimizer.learning_rate": 1e-3,
    } | learner
    return load((), ["task.name=sevens", *(f"learner.{key}={value}" for key, value in small.items())])


async def test_one_process_learns():
    trained = await train(settings())
    assert list(trained.curve) == [0, 8]
    assert trained.final > trained.curve[0] + 0.2
    assert (trained.staleness_mean, trained.staleness_max) == (0, 0)


async def test_one_process_computes_the_same_bits_again_and_others_where_its_batches_are_older():
    few = settings(steps=3, eval_every=1)
    once, again, older = await train(few), await train(few), await train(few, lag=2)
    assert once == again
    assert list(once.curve) == [0, 1, 2, 3]
    # Steps 0, 1 and 2 were trained on version 0, about as many tokens each.
    assert older.staleness_max == 2
    assert older.staleness_mean == pytest.approx(1, abs=0.2)
    assert older.curve[1] == once.curve[1]
    assert older.curve != once.curve
