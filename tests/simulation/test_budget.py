"""A budget in total: what is spent never exceeds it, and the run ends in good order."""

import pytest

from echo2p2p.errors import BudgetSpent
from echo2p2p.layering import load
from echo2p2p.simulation.swarm import SimulatedRun, WorkerModel, simulate
from echo2p2p.swarm.memory import MemorySwarm
from echo2p2p.swarm.virtual_time import run_virtual
from echo2p2p.telemetry.events import read_events


def settings_for(budget_usd, *overrides):
    return load(
        overrides=[
            "learner.prompts_per_step=8",
            "learner.samples_per_prompt=4",
            "learner.max_new_tokens=400",
            "learner.steps=100000",
            "learner.min_workers=4",
            "provisioning.t_train_prior_s=10",
            "weights.chunk_kib=16",
            f"provisioning.budget_usd={budget_usd}",
            *overrides,
        ]
    )


def played(tmp_path, budget_usd, *, price_per_hour=5.0, duration_s=7200):
    """The run, how it ended, and its last event."""

    async def main():
        async with MemorySwarm(seed=1, default_delay_s=0.05) as swarm:
            run = SimulatedRun(swarm, settings_for(budget_usd), t_train_s=10, events=tmp_path / "e.jsonl")
            pool = [WorkerModel(price_per_hour, 150.0) for _ in range(4)]
            end = None
            try:
                await simulate(run, pool, duration_s=duration_s)
            except* BudgetSpent as group:
                end = group.exceptions[0]
            return run, end

    run, end = run_virtual(main)
    (finished,) = [e for e in read_events(tmp_path / "e.jsonl") if e["event"] == "run_finished"]
    return run, end, finished


@pytest.mark.parametrize(("budget_usd", "used"), [(0.001, 0), (0.01, 0.1), (0.1, 0.3), (1.0, 0.9)])
def test_a_budget_is_used_but_never_exceeded_and_the_run_says_so(tmp_path, budget_usd, used):
    run, end, finished = played(tmp_path, budget_usd)
    assert isinstance(end, BudgetSpent)
    assert end.exit_code == 8
    assert "the budget is spent" in str(end)
    assert used * budget_usd <= finished["spend_usd"] <= budget_usd
    assert not finished["finished"]
    assert run.trainer.checkpoints[-1].step == finished["steps"]


def test_what_was_leased_when_the_money_ran_short_is_delivered(tmp_path):
    played(tmp_path, 1.0)
    events = list(read_events(tmp_path / "e.jsonl"))
    last = [e for e in events if e["event"] == "step"][-1]
    assert last["dropped"].get("lease expired", 0) == 0
    assert last["leased"] == 0


def test_workers_that_cost_nothing_spend_no_budget(tmp_path):
    _, end, finished = played(tmp_path, 0.01, price_per_hour=0.0, duration_s=600)
    assert end is None
    assert finished["spend_usd"] == 0
    assert finished["steps"] > 20
