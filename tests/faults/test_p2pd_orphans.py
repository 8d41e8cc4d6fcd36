"""However a node's process ends, its p2pd is gone soon after, and the next node of that identity starts."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from echo2p2p.swarm.hivemind.daemon import NodeFolder
from echo2p2p.swarm.identity import Identity

NODE = """
import asyncio, sys
from pathlib import Path
from echo2p2p.swarm.hivemind import HivemindNetwork

async def main():
    network = await HivemindNetwork.join(Path(sys.argv[1]))
    print("up", flush=True)
    if sys.argv[2] == "crash":
        import os
        os.abort()
    await asyncio.sleep(60)

asyncio.run(main())
"""


def start_node(identity: Path, *, then: str = "wait") -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-W", "ignore", "-c", NODE, str(identity), then],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    )


def p2pds_of(identity: Path) -> list[psutil.Process]:
    return [
        process
        for process in psutil.process_iter()
        if _cmdline(process)[:1] and f"-id={identity}" in _cmdline(process)
    ]


def _cmdline(process: psutil.Process) -> list[str]:
    try:
        return process.cmdline()
    except psutil.Error:
        return []


def assert_gone_within(identity: Path, limit_s: float) -> None:
    deadline = time.monotonic() + limit_s
    while p2pds_of(identity) and time.monotonic() < deadline:
        time.sleep(0.05)
    left = p2pds_of(identity)
    for process in left:
        process.kill()
    assert not left


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux ties a child's life to its parent's")
@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGTERM, signal.SIGINT])
def test_no_p2pd_survives_a_node_that_is_killed(tmp_path: Path, how: signal.Signals) -> None:
    identity = tmp_path / "identity"
    with start_node(identity) as node:
        assert node.stdout is not None
        assert node.stdout.readline() == "up\n"
        assert len(p2pds_of(identity)) == 1
        node.send_signal(how)
        node.wait(10)
    assert_gone_within(identity, 5)
    with start_node(identity) as node:  # the sockets and the lock that the killed one left are no obstacle
        assert node.stdout is not None
        assert node.stdout.readline() == "up\n"
        node.kill()
        node.wait(10)
    assert_gone_within(identity, 5)
    NodeFolder(Identity.load_or_create(identity).peer_id).release()


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux ties a child's life to its parent's")
def test_no_p2pd_survives_a_node_that_crashes(tmp_path: Path) -> None:
    identity = tmp_path / "identity"
    with start_node(identity, then="crash") as node:
        assert node.wait(30) == -signal.SIGABRT
    assert_gone_within(identity, 5)
    NodeFolder(Identity.load_or_create(identity).peer_id).release()
