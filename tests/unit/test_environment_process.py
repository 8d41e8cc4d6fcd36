"""The process of an environment, with a stand-in for the library's side."""

from __future__ import annotations

import subprocess
import threading
import time
from pathlib import Path

import pytest

from echo2p2p.data import environments
from echo2p2p.data.environments import EnvironmentProcess
from echo2p2p.errors import RewardFailed

CHILD = """
import json, pathlib, socket, subprocess, sys

channel = socket.socket(fileno=int(sys.argv[1]))
if pathlib.Path(__file__).with_name("hang").exists():
    channel.recv(1)
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


def test_one_that_is_closed_while_it_starts_again_is_not_waited_for(process, tmp_path, monkeypatch):
    with pytest.raises(RewardFailed):
        process.call("any")  # it ends, and the next call starts it
    (tmp_path / "hang").touch()
    closing, starting = threading.Event(), threading.Event()
    started, popen, lock = [], subprocess.Popen, process._lock

    class Lock:
        def __enter__(self):
            if starting.is_set():
                closing.set()
            lock.acquire()

        def __exit__(self, *_):
            lock.release()

    def start(*arguments, **options):
        started.append(popen(*arguments, **options))
        starting.set()
        assert closing.wait(10)  # close() has looked for a process by now, and found none
        return started[0]

    monkeypatch.setattr(process, "_lock", Lock())
    monkeypatch.setattr(subprocess, "Popen", start)
    monkeypatch.setattr(environments, "_START_S", 20)
    failed = []

    def call():
        try:
            process.call("any")
        except RewardFailed as error:
            failed.append(error.message)

    caller = threading.Thread(target=call)
    caller.start()
    assert starting.wait(10)
    began = time.monotonic()
    process.close()
    caller.join()
    assert time.monotonic() - began < 10
    assert failed == ["the environment's process is closed"]
    assert started[0].returncode is not None
