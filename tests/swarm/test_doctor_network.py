"""The doctor on this machine, with a real p2pd, a bootstrap peer that answers and one that does not."""

import json
import subprocess
import sys

import pytest
from processes import Processes

SETTINGS = """
[swarm]
host_maddrs = ["/ip4/127.0.0.1/tcp/0"]
use_relay = false
"""
NOBODY = "/ip4/127.0.0.1/tcp/9/p2p/12D3KooWLYdTyB4sXWDgi2bL1bf3619zA4W1rpf8Fp2qnCzAbYLP"


@pytest.fixture
def processes(tmp_path):
    group = Processes(tmp_path, SETTINGS)
    yield group
    group.close()


@pytest.mark.timeout(240)
def test_the_doctor_measures_the_network_and_names_a_peer_that_does_not_answer(processes):
    door = processes.line(processes.start("bootstrap", "--run-dir", "door"))
    addresses = f"{door[1]},{NOBODY}"
    done = subprocess.run(
        [
            sys.executable,
            "-m",
            "echo2p2p",
            "doctor",
            "-c",
            "settings.toml",
            "--initial-peers",
            addresses,
            "--json",
        ],
        capture_output=True,
        text=True,
        timeout=200,
        cwd=processes.folder,
    )
    found = {finding["check"]: finding for finding in json.loads(done.stdout)}
    assert done.returncode == 4, done.stderr
    assert {name for name, finding in found.items() if finding["state"] == "failure"} == {
        f"bootstrap peer …{NOBODY[-6:]}"
    }
    assert found["engine"]["state"] == "ok"
    assert found["p2pd"]["state"] == "ok"
    assert "Mbit/s" in found["loopback"]["says"]
    answered = found[f"bootstrap peer …{door[1][-6:]}"]
    assert answered["state"] == "ok"
    assert " ms" in answered["says"]
    assert not (processes.folder / "runs").exists()
