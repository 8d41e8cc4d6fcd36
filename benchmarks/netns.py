"""Hosts in network namespaces of this machine, each on a link of known rate.

Every host has its own namespace and one veth to a bridge in a namespace of its own. tbf shapes both
directions: the host's end its uplink, the bridge's end its downlink. Needs root, ``ip`` and ``tc``.

What a run leaves behind because it was killed is cleared away by the next one: names carry the pid of the
process that made them.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import psutil

_PREFIX = "echo2p2p-bench-"
_PORT = 7077
_BURST_S = 0.005
"""The bucket holds this much of the rate: short enough that the average is honest within a second."""
_MIN_BURST_BYTES = 68 * 1024
"""But never less than the largest packet that the kernel hands down in one piece (64 KiB and headers): tbf cuts
what does not fit into its bucket into frames, which cost the machine a third more than everything else of a
transfer, and are no more honest: frames are charged alike either way."""
_QUEUE_MS = 100


class ShapingError(RuntimeError):
    """This machine cannot shape a network; the message says what it lacks."""


@dataclass(frozen=True)
class Host:
    """One namespace. Rates in Mbit/s."""

    namespace: str
    address: str
    up_mbit: float
    down_mbit: float

    def command(self, *argv: str) -> list[str]:
        """``argv``, to be run on this host; the process that it starts is the host's own, no wrapper's."""
        return ["ip", "netns", "exec", self.namespace, *argv]


@contextlib.contextmanager
def shaped_hosts(rates_mbit: Sequence[tuple[float, float]]) -> Iterator[list[Host]]:
    """Hosts with the given (uplink, downlink), until the block is left; then all their processes are ended.

    Raises:
        ShapingError: not root, or ``ip`` or ``tc`` is missing or refused.
    """
    if os.geteuid() != 0:
        raise ShapingError("shaping a network needs root")
    for tool in ("ip", "tc"):
        if shutil.which(tool) is None:
            raise ShapingError(f"shaping a network needs `{tool}` (Debian: apt install iproute2)")
    _clear_leftovers()
    prefix = f"{_PREFIX}{os.getpid()}-"
    try:
        yield _build(prefix, rates_mbit)
    finally:
        _remove([name for name in _namespaces() if name.startswith(prefix)])


def measure_mbit(source: Host, target: Host, seconds: float = 2.0) -> float:
    """The rate of one raw TCP transfer of about ``seconds``, in Mbit/s of payload."""
    nbytes = int(min(source.up_mbit, target.down_mbit) * 1e6 / 8 * seconds)
    receiver = subprocess.Popen(
        target.command(sys.executable, "-c", _RECEIVE, target.address, str(_PORT), str(nbytes)),
        stdout=subprocess.PIPE,
        text=True,
    )
    assert receiver.stdout is not None
    try:
        receiver.stdout.readline()
        sender = source.command(sys.executable, "-c", _SEND, target.address, str(_PORT), str(nbytes))
        subprocess.run(sender, check=True, timeout=10 * seconds + 10)
        taken_s = float(receiver.communicate(timeout=10 * seconds + 10)[0])
    finally:
        receiver.kill()
        receiver.wait()
    return nbytes * 8 / 1e6 / taken_s


def processes(host: Host) -> list[int]:
    """The ids of all processes on ``host``."""
    return _pids(host.namespace)


def cpu_seconds(hosts: Sequence[Host]) -> float:
    """Processor seconds that all processes on ``hosts`` have used so far."""
    total = 0.0
    for pid in [pid for host in hosts for pid in processes(host)]:
        with contextlib.suppress(psutil.Error):
            times = psutil.Process(pid).cpu_times()
            total += times.user + times.system
    return total


_RECEIVE = """
import socket, sys, time
server = socket.create_server((sys.argv[1], int(sys.argv[2])))
print("listening", flush=True)
server.settimeout(30)
connection, _ = server.accept()
connection.settimeout(30)
missing, started = int(sys.argv[3]), time.monotonic()
while missing > 0:
    missing -= len(connection.recv(65536)) or sys.exit("cut off")
print(time.monotonic() - started)
"""
_SEND = """
import socket, sys
with socket.create_connection((sys.argv[1], int(sys.argv[2])), timeout=30) as connection:
    connection.sendall(bytes(int(sys.argv[3])))
"""


def _build(prefix: str, rates_mbit: Sequence[tuple[float, float]]) -> list[Host]:
    hub = prefix + "hub"
    _ip("netns", "add", hub)
    _ip("-n", hub, "link", "add", "br0", "type", "bridge")
    _ip("-n", hub, "link", "set", "br0", "up")
    hosts = []
    for at, (up_mbit, down_mbit) in enumerate(rates_mbit):
        host = Host(f"{prefix}{at}", f"10.88.{at // 250}.{at % 250 + 1}", up_mbit, down_mbit)
        _ip("netns", "add", host.namespace)
        _ip(
            "-n",
            hub,
            "link",
            "add",
            f"v{at}",
            "type",
            "veth",
            "peer",
            "name",
            "eth0",
            "netns",
            host.namespace,
        )
        _ip("-n", hub, "link", "set", f"v{at}", "master", "br0", "up")
        _ip("-n", host.namespace, "link", "set", "lo", "up")
        _ip("-n", host.namespace, "addr", "add", f"{host.address}/16", "dev", "eth0")
        _ip("-n", host.namespace, "link", "set", "eth0", "up")
        _shape(host.namespace, "eth0", up_mbit)
        _shape(hub, f"v{at}", down_mbit)
        hosts.append(host)
    return hosts


def _shape(namespace: str, device: str, mbit: float) -> None:
    burst_bytes = max(_MIN_BURST_BYTES, int(mbit * 1e6 / 8 * _BURST_S))
    _run(
        *("tc", "-n", namespace, "qdisc", "add", "dev", device, "root", "tbf"),
        *("rate", f"{int(mbit * 1000)}kbit", "burst", str(burst_bytes), "latency", f"{_QUEUE_MS}ms"),
    )


def _namespaces() -> list[str]:
    listed = _run("ip", "netns", "list").splitlines()
    return [line.split()[0] for line in listed if line.startswith(_PREFIX)]


def _clear_leftovers() -> None:
    """Remove the namespaces of runs whose process is gone."""
    names = _namespaces()
    owners = {name: int(name.removeprefix(_PREFIX).split("-")[0]) for name in names}
    _remove([name for name, pid in owners.items() if not _lives(pid)])


def _lives(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def _remove(names: Sequence[str]) -> None:
    for signal_number in (signal.SIGTERM, signal.SIGKILL):
        deadline = time.monotonic() + 5
        pids = [pid for name in names for pid in _pids(name)]
        for pid in pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal_number)
        while any(_pids(name) for name in names) and time.monotonic() < deadline:
            time.sleep(0.1)
    for name in names:
        _ip("netns", "delete", name)


def _pids(namespace: str) -> list[int]:
    return [int(pid) for pid in _run("ip", "netns", "pids", namespace).split()]


def _ip(*arguments: str) -> None:
    _run("ip", *arguments)


def _run(*argv: str) -> str:
    done = subprocess.run(argv, capture_output=True, text=True, timeout=30, check=False)
    if done.returncode:
        raise ShapingError(f"`{' '.join(argv)}` failed: {done.stderr.strip()}")
    return done.stdout
