"""A worker that sends what it has not drawn: the learner finds it out, turns it away, and goes on with the others."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
from policies import make_text_policy
from small_swarm import settings, train

from echo2p2p.rollout.transformers_engine import TransformersEngine
from echo2p2p.telemetry.story import tell


class Hurried(TransformersEngine):
    """Says of every token that it was about as likely as any other."""

    async def generate(self, prompts, **wanted):
        made = await super().generate(prompts, **wanted)
        return [
            [dataclasses.replace(one, logprobs=np.full(len(one.tokens), -3.0, np.float32)) for one in each]
            for each in made
        ]


@pytest.mark.parametrize("liars", [0, 1])
async def test_a_worker_with_made_up_log_probabilities_is_turned_away(tmp_path, caplog, liars):
    folder = make_text_policy(tmp_path / "policy")
    chosen = settings(
        {"name": "arithmetic"},
        provisioning={"t_train_prior_s": 0.1, "persistence_s": 1000},  # all three are needed, to the end
        max_new_tokens=24,
        steps=24,
        prompts_per_step=6,
        min_workers=3,
    )
    events = await train(
        folder,
        chosen,
        tmp_path / "events.jsonl",
        workers=3,
        engine_of=lambda number: Hurried if number < liars else TransformersEngine,
    )
    found = [event for event in events if event["event"] == "found_out"]
    assert len(found) == liars
    assert [event["step"] for event in events if event["event"] == "step"] == list(range(1, 25))
    left = {event["worker"]: event["reason"] for event in events if event["event"] == "worker_left"}
    for event in found:
        assert "not those of its tokens" in event["reason"]
        assert left[event["worker"]] == event["reason"]
        assert "is turned away: its log-probabilities" in tell(event)
        assert f"worker {event['worker']} is turned away" in caplog.text
