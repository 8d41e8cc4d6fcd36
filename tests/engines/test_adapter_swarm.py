"""A run that trains an adapter on episodes, with vLLM as its only engine: base from a folder, versions by swarm."""

from __future__ import annotations

import signal

import pytest
from engine_bench import HAS_VLLM

from echo2p2p.learning.journal import read

SETTINGS = """
name = "adapted"
[swarm]
host_maddrs = ["/ip4/127.0.0.1/tcp/0"]
use_relay = false
[task]
name = "sokoban"
options = { width = 3, height = 3, scramble = 3, turns = 3, turn_tokens = 8, partial = true }
[policy.lora]
rank = 4
[learner]
staleness = 2
kappa = 1
steps = 100000
prompts_per_step = 8
samples_per_prompt = 8
max_new_tokens = 120
threads = 1
min_workers = 1
lease_s = 120
beat_period_s = 1
keep_journal = true
[learner.optimizer]
learning_rate = 3e-4
[provisioning]
t_train_prior_s = 0.2
[worker]
engine = "vllm"
device = "cpu"
threads = 1
batch_groups = 4
[worker.vllm]
eager = true
kv_cache_gib = 0.03
max_sequences = 64
[weights]
chunk_kib = 64
max_patch_share = 1
"""


if HAS_VLLM:

    @pytest.mark.timeout(400)
    def test_vllm_plays_the_episodes_that_an_adapter_is_trained_on(swarm):
        door = swarm.line(swarm.start("bootstrap", "--run-dir", "bootstrap"))
        learner = swarm.start("learner", "--run-dir", "learner", *door)
        swarm.start(*swarm.line(learner)[1:], "--run-dir", "worker")
        swarm.wait("versions in vLLM", lambda: len(swarm.events("worker", "installed")) >= 6, 300)
        swarm.wait("steps", lambda: len(swarm.events("learner", "step")) >= 8)
        learner.send_signal(signal.SIGINT)
        assert learner.wait(timeout=60) == 130

        steps = swarm.events("learner", "step")
        # How far the policy moves in S versions is the run's own affair; without a version between, nothing is left.
        assert max(step["mismatch_kl"] for step in steps) < 0.1
        fresh = [step["mismatch_kl"] for step in steps if step["staleness_max"] == 0]
        assert fresh
        assert max(fresh) < 1e-6
        trained = [
            entry.group
            for batch in read(swarm.folder / "learner" / "journal").batches.values()
            for entry in batch
        ]
        assert any(len(sample.turns) > 1 for group in trained for sample in group.samples)
        assert {group.version for group in trained} != {0}
        assert not swarm.events("learner", "refused")
