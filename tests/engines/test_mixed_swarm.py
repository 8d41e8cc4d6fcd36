"""One run, one worker on transformers and one on vLLM: whoever sampled, the learner finds its own probabilities."""

from __future__ import annotations

import signal
from collections import defaultdict

import numpy as np
import psutil
import pytest
import torch
from engine_bench import HAS_VLLM

from echo2p2p.data.policy import build_model, scaled_log_softmax
from echo2p2p.learning.journal import read
from echo2p2p.weights.export import export_version

SETTINGS = """
name = "mixed"
[swarm]
host_maddrs = ["/ip4/127.0.0.1/tcp/0"]
use_relay = false
[task]
options = { kind = "reverse", length = 5 }
[learner]
staleness = 1
kappa = 1
steps = 100000
prompts_per_step = 16
samples_per_prompt = 16
max_new_tokens = 6
threads = 1
min_workers = 2
lease_s = 20
beat_period_s = 1
eval_prompts = 64
keep_journal = true
[learner.optimizer]
learning_rate = 6e-5
scale_by_std = false
[provisioning]
t_train_prior_s = 0.2
gamma = 10            # both workers are wanted throughout
[worker]
threads = 1
batch_groups = 4
limit_tokens_per_s = 1500
[worker.vllm]
eager = true
kv_cache_gib = 0.03
max_sequences = 64
[weights]
chunk_kib = 64
max_patch_share = 1
keep_versions = 1000  # the learner's store has all of them at the end
"""


class Policies:
    """The published versions of a run, as plain transformers computes them."""

    def __init__(self, folder):
        self.folder = folder
        self.models = {}

    def differences(self, version, group):
        """x = log π_version − log π_sampler of every token of ``group``."""
        if version not in self.models:
            target = self.folder / f"version-{version}"
            export_version(self.folder / "learner" / "store", version, target)
            self.models[version] = build_model(target, dtype=None, device="cpu", weights=True)
        found = []
        for sample in group.samples:
            ids = torch.tensor([group.prompt + sample.completion])
            with torch.no_grad():
                logits = self.models[version](ids).logits[0, len(group.prompt) - 1 : -1]
            ours = scaled_log_softmax(logits, 1.0)[torch.arange(len(sample.completion)), sample.completion]
            found.append(ours.numpy() - sample.logprob_array())
        return np.concatenate(found)


def kl(differences):
    """k3, as ``mismatch_kl`` of a step."""
    return float(np.mean(np.expm1(differences) - differences))


if HAS_VLLM:

    @pytest.mark.timeout(600)
    def test_both_engines_sample_from_the_policy_that_the_learner_trains(swarm):
        door = swarm.line(swarm.start("bootstrap", "--run-dir", "bootstrap"))
        learner = swarm.start("learner", "--run-dir", "learner", *door)
        join = swarm.line(learner)[1:]
        workers = {
            engine: swarm.start(*join, "--run-dir", engine, "--set", f'worker.engine="{engine}"')
            for engine in ("transformers", "vllm")
        }
        swarm.wait("several versions in vLLM", lambda: swarm.patched("vllm") >= 8)

        # vLLM dies, and the worker goes on with another one.
        killed = [
            child
            for child in psutil.Process(workers["vllm"].pid).children(recursive=True)
            if "EngineCore" in " ".join(child.cmdline())
        ]
        assert killed
        for child in killed:
            child.kill()
        seen = len(swarm.events("vllm", "generated"))
        swarm.wait("vLLM to come back", lambda: len(swarm.events("vllm", "generated")) >= seen + 8)
        swarm.wait("the steps", lambda: len(swarm.events("learner", "step")) >= 80)
        learner.send_signal(signal.SIGINT)
        assert learner.wait(timeout=60) == 130

        rewards = [event["reward_mean"] for event in swarm.events("learner", "step")]
        assert np.mean(rewards[-10:]) > np.mean(rewards[:10]) + 0.05
        trained = read(swarm.folder / "learner" / "journal").batches
        policies = Policies(swarm.folder)
        by_learner, by_engine = defaultdict(list), defaultdict(list)
        for version in list(trained)[:: len(trained) // 8]:
            for entry in trained[version]:
                by_learner[entry.worker].append(policies.differences(version, entry.group))
                by_engine[entry.worker].append(policies.differences(entry.group.version, entry.group))
        for engine in workers:
            assert swarm.patched(engine) >= 8
            [peer] = {event["peer"] for event in swarm.events(engine, "installed")}
            assert len(by_learner[peer]) >= 16
            # As the learner sees it, which has moved on by up to S versions; and what is the engine's own.
            stale, own = (kl(np.concatenate(each[peer])) for each in (by_learner, by_engine))
            print(f"{engine}: mismatch KL {stale:.1e}, under the version that sampled {own:.1e}")
            assert stale < 1e-3
            assert own < 1e-8
