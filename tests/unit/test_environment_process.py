"""The process of an environment, with a stand-in for the library's side."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from echo2p2p.data import environments
from echo2p2p.data.environments import EnvironmentProcess

CHILD = """
import json, socket, subprocess, sys

channel = socket.socket(fileno=int(sys.argv[1]))
started = subprocess.Popen(["sleep", "600"])
channel.sendall(json.dumps({"value": {"pid": started.pid}}).encode() + b"\\n")
channel.recv(1)
"""


@pytest.fixture
def process(tmp_path, monkeypatch):
    (tmp_path / "stand_in_child.py").write_text(CHILD)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr(environments, "_CHILD", "stand_in_child")
    return EnvironmentProcess("any", {}, 0)


def is_there(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def test_what_an_environment_has_started_ends_with_it(process):
    pid = process.facts["pid"]
    assert is_there(pid)
    process.close()
    deadline = time.monotonic() + 5
    while is_there(pid) and time.monotonic() < deadline:
        time.sleep(0.01)
    assert not is_there(pid)
