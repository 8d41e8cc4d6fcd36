"""A reward that means harm: what it may not read, whom it may not reach, and that nothing of it stays.

Not every machine has what that takes, so each is asked for what it can promise: this one, and poorer ones that it
plays. What this one itself cannot promise is listed after the tests.
"""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import textwrap
import time
from contextlib import suppress
from pathlib import Path

import pytest
from jail_machines import MACHINES, poorer_child, this_machine

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
    if what == "write":
        with open(argument, "w") as file:
            file.write("x" * 10)
    if what == "knows":
        return argument in os.environ
    if what == "kill":
        os.kill(int(argument), signal.SIGKILL)
    if what == "dial":
        socket.create_connection(("127.0.0.1", int(argument)), timeout=0.5)
    if what == "datagram":
        socket.socket(type=socket.SOCK_DGRAM).sendto(b"", ("127.0.0.1", int(argument)))
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
    if what == "leave":
        os._exit(3)
    if what == "dig":
        for _ in range(2000):
            os.mkdir("deep")
            os.chdir("deep")
    return float(argument) if what == "say" else 0
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


@pytest.fixture(
    params=MACHINES, ids=lambda taken: f"without {' and '.join(taken)}" if taken else "this machine"
)
def machine(request, tmp_path, monkeypatch):
    if request.param:
        child = tmp_path / "child.py"
        child.write_text(poorer_child(sandbox_process._CHILD, request.param))
        monkeypatch.setattr(sandbox_process, "_CHILD", child)
    monkeypatch.setattr(sandbox_process, "_told", set())
    return this_machine().without(request.param)


@pytest.fixture
def promises(machine, record_property):
    """Whether the machine promises ``what``, for it ``has`` what that takes."""

    def promises(what, has):
        if not has and machine == this_machine():
            record_property("untested", f"{what} (it lacks {', '.join(machine.lacks)})")
        return has

    return promises


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


def test_only_what_it_was_given_can_be_read(machine, promises, sandbox, reward, caplog):
    if promises("a reward reads no files but those that it was given", machine.landlock > 0):
        for path in (reward.with_name("identity.key"), "/etc/passwd"):
            assert "Permission denied" in refused(sandbox, "read", str(path))
        assert "Permission denied" in refused(sandbox, "list", str(Path.home()))
    else:
        sandbox.call("say", "1", "")
        assert "Landlock" in caplog.text
    if machine.drops_capabilities or not machine.node_has_capabilities:
        locked = reward.with_name("locked")
        locked.touch(mode=0)
        assert "Permission denied" in refused(sandbox, "read", str(locked))


def test_nothing_is_written(machine, promises, sandbox, reward):
    key, new = reward.with_name("identity.key"), reward.with_name("new")
    if promises("a reward makes and empties no files", machine.landlock > 0):
        for path in (key, new):
            assert "Permission denied" in refused(sandbox, "write", str(path))
        assert key.read_text() == "secret"
        assert not new.exists()
    else:
        assert "File too large" in refused(sandbox, "write", str(new))
        assert new.read_text() == ""


def test_the_node_s_environment_cannot_be_read(machine, promises, sandbox, monkeypatch, caplog):
    monkeypatch.setenv("SECRET", "secret")
    assert sandbox.call("knows", "PATH", "") == 1
    assert sandbox.call("knows", "SECRET", "") == 0
    less_than_the_node = machine.node_has_capabilities and machine.drops_capabilities
    if promises(
        "a reward does not look into the node", machine.landlock > 0 or machine.network or less_than_the_node
    ):
        assert "Permission denied" in refused(sandbox, "read", f"/proc/{os.getpid()}/environ")
    else:
        assert "Landlock" in caplog.text


def test_what_is_named_may_be_read_and_programs_run(reward):
    allowed = Sandbox(f"{reward}:score", SandboxLimits(readable=(str(reward.with_name("identity.key")),)))
    try:
        assert allowed.call("read", str(reward.with_name("identity.key")), "") == 6
        assert allowed.call("run", "", "") == 3
    finally:
        allowed.close()


def test_the_node_cannot_be_sent_signals(machine, promises, sandbox, caplog):
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as node:
        if promises("a reward sends the node no signals", machine.processes or machine.landlock >= 6):
            why = "ProcessLookupError" if machine.processes else "PermissionError"
            assert why in refused(sandbox, "kill", str(node.pid))
        else:
            sandbox.call("say", "1", "")
            assert "processes" in caplog.text
        assert node.poll() is None
        node.communicate(b"\n")


def test_the_network_cannot_be_reached(machine, promises, sandbox, caplog):
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = str(server.getsockname()[1])
        if promises("a reward reaches nobody by TCP", machine.network or machine.landlock >= 4):
            why = "Permission denied" if machine.landlock >= 4 else "unreachable"
            assert why in refused(sandbox, "dial", port)
        if promises("a reward reaches nobody by UDP", machine.network):
            assert "unreachable" in refused(sandbox, "datagram", port)
        else:
            sandbox.call("say", "1", "")
            assert "network" in caplog.text


def test_the_node_says_once_what_the_machine_lacks(machine, sandbox, caplog):
    sandbox.call("say", "1", "")
    with suppress(RewardFailed):
        sandbox.call("leave", "", "")
    sandbox.call("say", "1", "")
    lacks = ", ".join(machine.lacks)
    expected = [f"rewards are less confined here, for this machine lacks {lacks}"] if lacks else []
    assert [record.message for record in caplog.records] == expected


def test_children_in_sessions_of_their_own_end_with_a_call_that_hangs_and_with_the_sandbox(machine, sandbox):
    assert "did not answer" in refused(sandbox, "escape", "hang")
    assert len(left_of(sandbox)) == 2  # the next one, and the process in front of it
    sandbox.call("escape", "", "")
    wait_for_escaped(sandbox)
    sandbox.close()
    assert left_of(sandbox) == []


def test_processes_without_end_end_with_it_whoever_runs_the_node(machine, reward):
    sandbox = Sandbox(f"{reward}:score", SandboxLimits(call_s=20, start_s=30, processes=1))
    try:
        said = refused(sandbox, "flood", "200")
    finally:
        sandbox.close()
    # Seen by the process in front, or refused by the kernel.
    assert "SIGKILL" in said or "BlockingIOError" in said
    assert left_of(sandbox) == []


def test_nothing_of_it_outlives_a_node_that_is_killed(machine, reward):
    node = subprocess.Popen(
        [
            sys.executable,
            "-c",
            textwrap.dedent(f"""
                from pathlib import Path
                from echo2p2p.data import sandbox_process
                from echo2p2p.data.sandbox import Sandbox, SandboxLimits
                sandbox_process._CHILD = Path({str(sandbox_process._CHILD)!r})
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
