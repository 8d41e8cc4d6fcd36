"""The commands as separate processes on real hivemind: join, train, kill, come back, stop, resume, look."""

import json
import signal
import subprocess
import sys
import time

import psutil
import pytest
from processes import Processes

from echo2p2p.telemetry.events import read_events

SETTINGS = """
name = "spark"
[swarm]
host_maddrs = ["/ip4/127.0.0.1/tcp/0"]
use_relay = false
record_ttl_s = 30
[task]
options = { kind = "reverse", length = 5 }
[learner]
steps = 100000
prompts_per_step = 4
samples_per_prompt = 4
max_new_tokens = 8
threads = 1
eval_prompts = 4
min_workers = 2
beat_period_s = 1
[learner.optimizer]
learning_rate = 1e-5
[provisioning]
t_train_prior_s = 0.2
gamma = 10            # both workers are wanted throughout
[worker]
threads = 1
[weights]
chunk_kib = 64
"""

HONEST_REFUSALS = {
    "older than the window",
    "not leased to the sender",
    "already delivered",
    "of a version that the sender has not proved to hold",  # generated before the learner came back
}
HONEST_DROPS = HONEST_REFUSALS | {"left the window", "lease expired", "declined by the worker"}


class Commands(Processes):
    """Processes of one test, and what can be seen of them."""

    def inspect(self, *arguments):
        done = subprocess.run(
            [sys.executable, "-m", "echo2p2p", "inspect", *arguments, "--json"],
            capture_output=True,
            text=True,
            timeout=60,
            cwd=self.folder,
        )
        assert done.returncode == 0, done.stderr
        return json.loads(done.stdout)

    def events(self, kind, run_dir="learner"):
        return [e for e in read_events(self.folder / run_dir / "events.jsonl") if e["event"] == kind]

    def wait(self, condition, what, timeout_s=60):
        deadline = time.monotonic() + timeout_s
        while not (value := condition()):
            assert time.monotonic() < deadline, f"waited {timeout_s} s for {what}"
            time.sleep(0.25)
        return value

    def step(self):
        steps = self.events("step")
        return steps[-1]["step"] if steps else 0

    def wait_steps(self, n):
        goal = self.step() + n
        self.wait(lambda: self.step() >= goal, f"step {goal}")


@pytest.fixture
def commands(tmp_path):
    group = Commands(tmp_path, SETTINGS)
    yield group
    group.close()


@pytest.mark.timeout(300)
def test_a_swarm_of_commands_survives_a_killed_worker_and_a_restarted_learner(commands):
    bootstrap = commands.start("bootstrap", "--run-dir", "bootstrap")
    door = commands.line(bootstrap)
    learner = commands.start("learner", "--run-dir", "learner", *door)
    join = commands.line(learner)[1:]
    run = join[2]

    def start_worker(number):
        return commands.start(*join, "--run-dir", f"worker-{number}", "--price", f"0.{number}")

    workers = [start_worker(1), start_worker(2)]
    commands.wait(lambda: commands.step() >= 6, "the first steps")

    # What a person sees.
    listed = commands.inspect("workers", *door)
    assert len(listed) == 2
    assert {w["state"] for w in listed} == {"active"}
    assert {w["price_per_hour"] for w in listed} == {0.1, 0.2}
    assert sum(w["accepted"] for w in listed) > 0
    assert {w["mu_source"] for w in listed} <= {"measured", "assumed"}
    facts = commands.inspect("learner", *door)
    assert facts["run"] == run
    assert facts["workers"] == 2
    assert set(facts["dropped"]) <= HONEST_DROPS
    manifest = commands.inspect("manifest", *door)
    assert manifest["signature"] == "verified"
    assert set(manifest["members"]) <= {w["peer"] for w in listed}
    assert commands.inspect("record", "echo2p2p/1/runs", *door)[0]["body"]["run"] == run
    peers = [listed["peer"] for listed in commands.inspect("peers", *door)]
    assert len(peers) >= 1
    assert len(peers) == len(set(peers))

    # A worker is killed: training goes on, and whoever looks is told.
    joined = {e["worker"]: e["price_per_hour"] for e in commands.events("worker_joined")}
    first = next(peer for peer, price in joined.items() if price == 0.1)
    children = psutil.Process(workers[0].pid).children(recursive=True)
    workers[0].send_signal(signal.SIGKILL)
    commands.wait(lambda: commands.events("worker_left"), "the learner to notice")
    commands.wait_steps(6)
    states = {w["peer"]: w["state"] for w in commands.inspect("workers", *door)}
    assert states[first] == "gone"
    assert list(states.values()).count("active") == 1
    commands.wait(
        lambda: not any(child.is_running() for child in children), "p2pd of the killed worker to end"
    )

    # It comes back, as itself, and catches up.
    seen = len(commands.events("ready"))
    start_worker(1)
    commands.wait(
        lambda: any(e["worker"] == first for e in commands.events("ready")[seen:]), "the worker to catch up"
    )

    # The learner stops and resumes: it goes on where it was, and the workers find it again.
    learner.send_signal(signal.SIGINT)
    assert learner.wait(timeout=30) == 130
    stopped_at = commands.step()
    sessions = len(commands.events("worker_joined"))
    again = commands.start("learner", "--run-dir", "learner", "--resume", "latest", *door)
    assert commands.line(again)[1:3] == join[:2]
    commands.wait(
        lambda: len(commands.events("worker_joined")) >= sessions + 2, "the workers to come back", 90
    )
    commands.wait(lambda: commands.step() >= stopped_at + 4, "training to go on")
    steps = [e["step"] for e in commands.events("step")]
    assert steps == list(range(1, len(steps) + 1))
    assert max(e["staleness_max"] for e in commands.events("step")) <= 3
    # Work that was leased by the learner's first life is refused, and nothing is ever refused for its contents.
    assert {e["reason"] for e in commands.events("refused")} <= HONEST_REFUSALS

    # Any version that is held can be exported, by learner and worker alike.
    for holder in ("learner", "worker-2"):
        target = commands.folder / f"export-{holder}"
        done = subprocess.run(
            [sys.executable, "-m", "echo2p2p", "export", "latest", str(target), "--run-dir", holder],
            capture_output=True,
            text=True,
            timeout=60,
            cwd=commands.folder,
        )
        assert done.returncode == 0, done.stderr
        assert (target / "model.safetensors").is_file()

    family = [p for process in commands.processes for p in _family(process)]
    commands.close()
    assert not [p for p in family if p.is_running() and p.status() != psutil.STATUS_ZOMBIE]


def _family(process):
    if process.poll() is not None:
        return []
    parent = psutil.Process(process.pid)
    return [parent, *parent.children(recursive=True)]


def test_a_learner_does_not_overwrite_an_earlier_run(commands):
    (commands.folder / "learner/checkpoints/step-000000000003").mkdir(parents=True)
    learner = commands.start("learner", "--run-dir", "learner")
    assert learner.wait(timeout=60) == 3
    assert "--resume latest" in (commands.folder / "0.log").read_text()


def test_a_worker_that_finds_nobody_says_so_and_leaves_with_4(commands):
    nobody = "/ip4/127.0.0.1/tcp/9/p2p/12D3KooWLYdTyB4sXWDgi2bL1bf3619zA4W1rpf8Fp2qnCzAbYLP"
    worker = commands.start(
        "worker",
        "--run",
        "spark@12D3KooWLYdTyB4sXWDgi2bL1bf3619zA4W1rpf8Fp2qnCzAbYLP",
        "--initial-peers",
        nobody,
        "--set",
        "swarm.startup_timeout_s=3",
        "--run-dir",
        "worker",
    )
    assert worker.wait(timeout=60) == 4
    log = (commands.folder / "0.log").read_text()
    assert nobody.split("/")[4] in log
    assert "Traceback" not in log
