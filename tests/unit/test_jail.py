"""A reward that means harm: what it may not read, whom it may not reach, and that nothing of it stays."""

from __future__ import annotations

import logging
import os
import signal
import subprocess
import sys
import textwrap
import time
from contextlib import suppress
from pathlib import Path

import pytest

from echo2p2p.data import sandbox_process
from echo2p2p.data.sandbox import Sandbox, SandboxLimits
from echo2p2p.errors import RewardFailed

LIMITS = SandboxLimits(call_s=0.5, start_s=30, processes=1)
HARM = """
import os, signal, socket, subprocess, time

def score(what, argument, _):
    if what == "read":
        return len(open(argument).read())
    if what == "list":
        return len(os.listdir(argument))
    if what == "kill":
        os.kill(int(argument), signal.SIGKILL)
    if what == "dial":
        socket.create_connection(("127.0.0.1", int(argument)), timeout=0.5)
    if what == "escape":
        for _ in range(3):
            if os.fork() == 0:
                os.setsid()
                if os.fork():
                    os._exit(0)
                signal.signal(signal.SIGTERM, signal.SIG_IGN)
                time.sleep(600)
        if argument == "hang":
            time.sleep(600)
    if what == "flood":
        for _ in range(int(argument)):
            if os.fork() == 0:
                time.sleep(600)
        time.sleep(600)
    if what == "run":
        return float(subprocess.run(["/bin/echo", "3"], capture_output=True, text=True).stdout)
    if what == "forge":
        for fd in map(int, os.listdir("/proc/self/fd")):
            try:
                socket.socket(fileno=os.dup(fd)).send(argument.encode())
            except OSError:
                pass
    if what == "dig":
        for _ in range(2000):
            os.mkdir("deep")
            os.chdir("deep")
    return float(argument) if what == "say" else 0
"""
WITHOUT = """
import importlib.util
spec = importlib.util.spec_from_file_location("sandbox_child", {child!r})
child = importlib.util.module_from_spec(spec)
spec.loader.exec_module(child)
load = child.load
child.__file__ = {child!r}

def load_without(path):
    module = load(path)
    for name in {names!r}:
        if hasattr(module, name):
            setattr(module, name, lambda *_: False)
    return module

child.load = load_without
child.main()
"""


@pytest.fixture
def reward(tmp_path):
    path = tmp_path / "harm.py"
    path.write_text(HARM)
    (tmp_path / "identity.key").write_text("secret")
    return path


@pytest.fixture
def sandbox(reward):
    made = Sandbox(f"{reward}:score", LIMITS)
    yield made
    made.close()


@pytest.fixture
def machine_without(tmp_path, monkeypatch):
    """Makes the machine one where some of the jail's functions find nothing."""

    def without(*names):
        child = tmp_path / "child.py"
        child.write_text(WITHOUT.format(child=str(sandbox_process._CHILD), names=names))
        monkeypatch.setattr(sandbox_process, "_CHILD", child)
        monkeypatch.setattr(sandbox_process, "_told", set())

    return without


def left_of(sandbox):
    """Processes that were started for it, by what stands in their command line."""
    found = []
    for folder in Path("/proc").iterdir():
        try:
            if sandbox._home in (folder / "cmdline").read_text():
                found.append(int(folder.name))
        except (OSError, ValueError):
            continue
    return found


def wait_for_escaped(sandbox):
    """Its orphans take a moment: between two forks, one that is listed may have left before it is looked at."""
    deadline = time.monotonic() + 10
    while len(left_of(sandbox)) <= 2:
        assert time.monotonic() < deadline, "nothing has escaped"
        time.sleep(0.01)


def refused(sandbox, *arguments):
    with pytest.raises(RewardFailed) as raised:
        sandbox.call(*arguments, "")
    return raised.value.message


def test_the_key_beside_it_and_the_node_s_environment_cannot_be_read(sandbox, reward):
    for path in (reward.with_name("identity.key"), f"/proc/{os.getpid()}/environ", "/etc/passwd"):
        assert "Permission denied" in refused(sandbox, "read", str(path))
    assert "Permission denied" in refused(sandbox, "list", str(Path.home()))


def test_what_is_named_may_be_read_and_programs_run(reward):
    allowed = Sandbox(f"{reward}:score", SandboxLimits(readable=(str(reward.with_name("identity.key")),)))
    try:
        assert allowed.call("read", str(reward.with_name("identity.key")), "") == 6
        assert allowed.call("run", "", "") == 3
    finally:
        allowed.close()


def test_the_node_and_the_network_cannot_be_reached(sandbox):
    assert "ProcessLookupError" in refused(sandbox, "kill", str(os.getpid()))
    assert "Permission denied" in refused(sandbox, "dial", "9")


def test_children_in_sessions_of_their_own_end_with_the_sandbox(sandbox):
    sandbox.call("escape", "", "")
    wait_for_escaped(sandbox)
    sandbox.close()
    assert left_of(sandbox) == []


def test_children_in_sessions_of_their_own_end_with_a_call_that_hangs(sandbox):
    assert "did not answer" in refused(sandbox, "escape", "hang")
    assert len(left_of(sandbox)) == 2  # the next one, and the process in front of it


@pytest.mark.parametrize("names", [("_unshare",), ("_unshare", "_restrict_files", "_drop_capabilities")])
def test_without_namespaces_they_end_as_well(machine_without, reward, names, caplog):
    machine_without(*names)
    sandbox = Sandbox(f"{reward}:score", LIMITS)
    try:
        with caplog.at_level(logging.WARNING):
            assert "did not answer" in refused(sandbox, "escape", "hang")
            sandbox.call("escape", "", "")
        wait_for_escaped(sandbox)
    finally:
        sandbox.close()
    assert left_of(sandbox) == []
    (line,) = [record.message for record in caplog.records]
    assert "namespaces for processes and network" in line
    assert ("Landlock" in line) == ("_restrict_files" in names)


@pytest.mark.parametrize("names", [(), ("_unshare",)])
def test_processes_without_end_end_with_it_whoever_runs_the_node(machine_without, reward, names):
    machine_without(*names)
    sandbox = Sandbox(f"{reward}:score", SandboxLimits(call_s=20, start_s=30, processes=1))
    try:
        said = refused(sandbox, "flood", "200")
    finally:
        sandbox.close()
    # Seen by the process in front, or refused by the kernel.
    assert "SIGKILL" in said or "BlockingIOError" in said
    assert left_of(sandbox) == []


def test_without_landlock_everything_else_still_holds(machine_without, reward):
    machine_without("_restrict_files")
    sandbox = Sandbox(f"{reward}:score", LIMITS)
    try:
        assert "unreachable" in refused(sandbox, "dial", "9")
        assert "Permission denied" in refused(sandbox, "read", f"/proc/{os.getpid()}/environ")
    finally:
        sandbox.close()


def test_nothing_of_it_outlives_a_node_that_is_killed(reward):
    node = subprocess.Popen(
        [
            sys.executable,
            "-c",
            textwrap.dedent(f"""
                from echo2p2p.data.sandbox import Sandbox, SandboxLimits
                sandbox = Sandbox({f"{reward}:score"!r}, SandboxLimits(call_s=60))
                print(sandbox._home, flush=True)
                sandbox.call("escape", "", "")
                print("escaped", flush=True)
                sandbox.call("escape", "hang", "")
            """),
        ],
        stdout=subprocess.PIPE,
        text=True,
    )
    home = node.stdout.readline().strip()
    assert node.stdout.readline().strip() == "escaped"
    started = type("Started", (), {"_home": home})
    wait_for_escaped(started)
    node.send_signal(signal.SIGKILL)
    node.wait()
    node.stdout.close()
    deadline = time.monotonic() + 10
    while left_of(started) and time.monotonic() < deadline:
        os.sched_yield()
    Path(home).rmdir()
    assert left_of(started) == []


@pytest.mark.parametrize("line", ['{"value": 9}\n', '1 {"value": 9}\n'])
def test_what_a_reward_writes_to_the_node_itself_does_not_shift_later_answers(sandbox, line):
    with suppress(RewardFailed):
        sandbox.call("forge", line, "")
    for value in ("5", "6", "7"):
        with suppress(RewardFailed):
            assert sandbox.call("say", value, "") == float(value)
    assert sandbox.call("say", "8", "") == 8


def test_a_home_is_removed_however_deep_it_is(sandbox):
    with suppress(RewardFailed):  # the machine may be slow
        sandbox.call("dig", "", "")
    sandbox.close()
    assert not Path(sandbox._home).exists()
