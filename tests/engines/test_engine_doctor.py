"""The doctor with vLLM as the engine: seen to its end, and told why where vLLM does not run."""

from __future__ import annotations

import json
import subprocess
import sys

import psutil
import pytest
from engine_bench import HAS_VLLM
from policies import make_policy

SETTINGS = """
[swarm]
host_maddrs = ["/ip4/127.0.0.1/tcp/0"]
use_relay = false
[worker]
engine = "vllm"
device = "cpu"
threads = 1
[worker.vllm]
eager = true
kv_cache_gib = 0.03
"""


def examined(folder, *options):
    (folder / "settings.toml").write_text(SETTINGS)
    command = [sys.executable, "-m", "echo2p2p", "doctor", "-c", "settings.toml", "--json", *options]
    done = subprocess.run(command, capture_output=True, text=True, timeout=280, cwd=folder)
    return done, {finding["check"]: finding for finding in json.loads(done.stdout)}


if HAS_VLLM:
    pytestmark = pytest.mark.timeout(300)

    def test_the_doctor_starts_vllm_and_has_it_generate(tmp_path):
        done, found = examined(tmp_path)
        assert done.returncode == 0, done.stderr
        assert {finding["state"] for finding in found.values()} <= {"ok", "warning"}
        assert "worker.engine is vllm" in found["vllm"]["says"]
        assert "tokens/s" in found["engine"]["says"]
        assert found["loopback"]["state"] == "ok" or "Mbit/s" in found["loopback"]["says"]
        assert not [each for each in psutil.process_iter(["cwd"]) if each.info["cwd"] == str(tmp_path)]

    def test_the_doctor_says_why_vllm_ended(tmp_path):
        """A head of 8 is too small for vLLM's attention on a CPU, which it finds out when it generates."""
        policy = make_policy(tmp_path / "policy", head_dim=8, positions=512)
        done, found = examined(tmp_path, "--policy", str(policy))
        assert done.returncode == 1, done.stderr
        assert "have ended: RuntimeError: Unsupported" in found["engine"]["says"]
        assert "head_dim=8" in found["engine"]["says"]
        assert "started again" not in found["engine"]["hint"]
