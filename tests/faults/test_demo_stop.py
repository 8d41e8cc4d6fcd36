"""Whatever ends the demo, its processes end with it."""

import os
import signal
import subprocess
import sys
import time

import psutil
import pytest


def start_demo(folder):
    return subprocess.Popen(
        [sys.executable, "-m", "echo2p2p", "demo", "--run-dir", str(folder)],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )


def processes_of(folder):
    """Everything that was started for this demo: its folder is in every command line."""
    found = []
    for process in psutil.process_iter(["cmdline", "status"]):
        named = any(str(folder) in argument for argument in process.info["cmdline"] or [])
        if named and process.info["status"] != psutil.STATUS_ZOMBIE:
            found.append(process)
    return found


def wait(condition, timeout_s, what):
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, f"waited {timeout_s} s for {what}"
        time.sleep(0.1)


def trains(folder):
    events = folder / "events.jsonl"
    return events.exists() and '"event":"step"' in events.read_text()


@pytest.fixture
def folder(tmp_path):
    yield tmp_path / "demo"
    for process in processes_of(tmp_path / "demo"):
        process.kill()


@pytest.mark.parametrize("moment", ["at once", "while it joins", "while it trains"])
def test_ctrl_c_leaves_nothing_running(folder, moment):
    demo = start_demo(folder)
    if moment == "while it joins":
        wait(lambda: len(processes_of(folder)) >= 4, 60, "the first processes")
    elif moment == "while it trains":
        wait(lambda: trains(folder), 90, "the first step")
    else:
        time.sleep(1)
    demo.send_signal(signal.SIGINT)
    assert demo.wait(timeout=30) == 130
    wait(lambda: not processes_of(folder), 5, "the last process to end")


def test_a_killed_demo_takes_its_processes_along(folder):
    demo = start_demo(folder)
    wait(lambda: trains(folder), 90, "the first step")
    os.kill(demo.pid, signal.SIGKILL)
    demo.wait()
    wait(lambda: not processes_of(folder), 30, "the last process to end")
