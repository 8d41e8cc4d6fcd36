"""A learner that is killed at random moments: the run ends as if nothing had happened.

``ECHO2P2P_TEST_KILLS=50 pytest tests/faults/test_learner_kill.py`` kills it fifty times in each mode; that takes half
an hour.
"""

import asyncio
import os
import random
import signal
import time

import msgspec
import psutil
import pytest
import torch
from processes import Processes

from echo2p2p.layering import load
from echo2p2p.learning.checkpoint import load_latest
from echo2p2p.learning.journal import read
from echo2p2p.learning.state import LearnerState
from echo2p2p.learning.training import ThreadTrainer
from echo2p2p.parts import load_policy
from echo2p2p.telemetry.events import read_events

KILLS = int(os.environ.get("ECHO2P2P_TEST_KILLS", "2"))
MODES = ["async", "sequential"] if "ECHO2P2P_TEST_KILLS" in os.environ else ["async"]
STEPS_A_LIFE = 10
GROUPS = 4
UP_WITHIN_S = 10.0
"""Of the learner's processor time: on a machine that does nothing else, that is about the time on the clock."""

SETTINGS = f"""
name = "spark"
[swarm]
host_maddrs = ["/ip4/127.0.0.1/tcp/0"]
use_relay = false
record_ttl_s = 30
[task]
options = {{ kind = "reverse", length = 5, partial = true }}
[learner]
steps = {STEPS_A_LIFE * (KILLS + 1)}
prompts_per_step = {GROUPS}
samples_per_prompt = 4
max_new_tokens = 8
threads = 1
eval_prompts = 4
beat_period_s = 1
keep_journal = true
[learner.optimizer]
learning_rate = 1e-4
[provisioning]
t_train_prior_s = 0.2
[worker]
threads = 1
[weights]
chunk_kib = 64
"""


class Run(Processes):
    """A bootstrap peer, a worker, and a learner that dies again and again."""

    def __init__(self, folder, mode):
        super().__init__(folder, SETTINGS.replace("[learner]\n", f'[learner]\nmode = "{mode}"\n', 1))

    def start_learner(self, door):
        resume = ["--resume", "latest"] if any((self.folder / "learner/checkpoints").glob("step-*")) else []
        return self.start("learner", "--run-dir", "learner", *resume, *door)

    def events(self, kind, role="learner"):
        path = self.folder / role / "events.jsonl"
        return [e for e in read_events(path) if e["event"] == kind] if path.exists() else []

    def wait(self, condition, what, timeout_s=100):
        deadline = time.monotonic() + timeout_s
        while not condition():
            assert time.monotonic() < deadline, f"waited {timeout_s} s for {what}"
            time.sleep(0.02)


@pytest.fixture
def start_run(tmp_path):
    runs = []

    def start(mode):
        runs.append(Run(tmp_path, mode))
        return runs[-1]

    yield start
    for run in runs:
        run.close()


@pytest.mark.timeout(180 + 60 * KILLS)
@pytest.mark.parametrize("mode", MODES)
def test_a_learner_that_is_killed_at_random_moments_ends_as_an_undisturbed_one(start_run, mode):
    rng = random.Random(mode)
    run = start_run(mode)
    door = run.line(run.start("bootstrap", "--run-dir", "bootstrap"))
    learner = run.start_learner(door)
    run.start(*run.line(learner)[1:], "--run-dir", "worker")
    for _ in range(KILLS):
        seen = len(run.events("step"))
        run.wait(lambda n=seen: len(run.events("step")) >= n + 3, "training to go on")
        time.sleep(rng.uniform(0, 0.5))
        learner.send_signal(signal.SIGKILL)
        learner.wait()
        lives = len(run.events("run_started"))
        learner = run.start_learner(door)
        run.wait(lambda n=lives: len(run.events("run_started")) > n, "the learner to be up again")
        spent = psutil.Process(learner.pid).cpu_times()
        assert spent.user + spent.system < UP_WITHIN_S
        run.line(learner)
    assert learner.wait(timeout=100) == 0
    check(run, mode)


def check(run, mode):
    settings = load([run.settings])
    steps = settings.learner.steps
    checkpoint, _ = load_latest(run.folder / "learner/checkpoints")
    books = msgspec.msgpack.decode(checkpoint.learner_state, type=LearnerState)
    journal = read(run.folder / "learner/journal")

    # Each prompt index is trained once, and in the end there are as many as there were places.
    trained = [entry.group.index for batch in journal.batches.values() for entry in batch]
    assert list(journal.batches) == list(range(steps))
    assert len(trained) == len(set(trained)) == steps * GROUPS
    assert set(trained) == set(range(books.frontier)) | set(books.beyond)
    if mode == "sequential":
        assert set(trained) == set(range(steps * GROUPS))
    for version, batch in journal.batches.items():
        assert min(entry.group.version for entry in batch) >= version - settings.learner.staleness

    # What a worker was told is accepted is trained, waits, or fell out of the window and was counted.
    accepted = run.events("verdicts", "worker")[-1]["accepted"]
    assert accepted <= len(trained) + len(journal.waiting) + books.dropped.get("left the window", 0)

    # No version number has two digests.
    fingerprints = {(e["version"], e["fingerprint"]) for e in run.events("ready")}
    assert len(fingerprints) == len({version for version, _ in fingerprints})

    # The weights are those of a run that was trained on the same batches and never disturbed, bit for bit.
    _, _, trainer, _ = load_policy(settings, None)
    undisturbed = ThreadTrainer(trainer, run.folder / "none", keep=1)
    for batch in journal.batches.values():
        asyncio.run(undisturbed.train([entry.group for entry in batch]))
    _, state = asyncio.run(undisturbed.capture())
    undisturbed.close()
    assert state.counters == checkpoint.trainer.counters
    assert all(
        torch.equal(tensor, checkpoint.trainer.tensors[name]) for name, tensor in state.tensors.items()
    )
