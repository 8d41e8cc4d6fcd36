"""What Linux offers, without root, against code that should compute and do nothing else.

Runs in a process of its own that is started by path: nothing but the standard library, and no threads. Each measure
is taken where kernel and container allow it, and named by :func:`confine` where not; none of them needs another.

* A process stands in front of the one that computes, and ends it with all that it has started, wherever it went, as
  soon as the node says so or is gone. Namespaces for processes, network, shared memory and users.
* No new privileges, no capabilities, no files written, no core dumps; memory, open files and processes are limited.
* Landlock: only the interpreter, its packages, the system's libraries and what is named may be read; no TCP, no
  signals to processes outside, no looking into them.

Not covered: UDP where there is no network namespace, and unix sockets that have a path; what lies in the folders that
may be read; processor time of what it starts, so that many processes which all fork may keep the one in front from
seeing them where it has to count; holes in the kernel.
"""

from __future__ import annotations

import ctypes
import os
import resource
import select
import signal
import struct
import sys
import time
from collections.abc import Iterable, Sequence
from contextlib import suppress
from pathlib import Path

_NEWUSER, _NEWNET, _NEWPID, _NEWIPC = 0x10000000, 0x40000000, 0x20000000, 0x08000000
_PR_SET_PDEATHSIG, _PR_SET_NO_NEW_PRIVS, _PR_SET_CHILD_SUBREAPER = 1, 38, 36
_CAPABILITIES_V3 = 0x20080522

_MAX_OPEN_FILES = 256
_MAX_PROCESSES = 128
"""Held by the kernel, which counts threads too, where there is a namespace for users and the node is not root.
Elsewhere it would count all that the user runs, or nothing: the process in front looks, and ends them all."""
_LOOK_S, _LOOK_SHARE = 0.1, 0.02
"""Seconds between two looks, but more where looking would take more than that share of a core."""
_ENDING_S = 5.0

_CREATE_RULESET, _ADD_RULE, _RESTRICT_SELF = 444, 445, 446
_ABI_ONLY, _PATH_BENEATH = 1, 1
_FILE_RIGHTS_BY_ABI = {1: 13, 2: 14, 3: 15, 4: 15}
_FILE_RIGHTS = 16
_EXECUTE, _WRITE_FILE, _READ_FILE, _READ_DIR = 1, 2, 4, 8
_TCP, _OUTSIDE = 3, 3  # bind and connect; abstract unix sockets and signals
_READ = _EXECUTE | _READ_FILE | _READ_DIR
_SYSTEM = (
    "/usr",
    "/bin",
    "/lib",
    "/lib32",
    "/lib64",
    "/etc/ld.so.cache",
    "/etc/localtime",
    "/proc/cpuinfo",
    "/proc/meminfo",
    "/proc/self",
    "/sys/devices/system/cpu",
)
_DEVICES = ("/dev/null", "/dev/zero", "/dev/random", "/dev/urandom")

_libc = ctypes.CDLL(None, use_errno=True)


def confine(
    lifeline: int, hand_over: int, *, readable: Sequence[str], home: str, memory_bytes: int
) -> list[str]:
    """Fork, and return in the child, confined; this process stays outside and watches over it until both end.

    Args:
        lifeline: a pipe's end to read from; the child is ended when its other end is closed.
        hand_over: a file descriptor that only the child keeps.
        readable: files and folders that may be read besides the interpreter's.
        home: a folder that may also be changed.
        memory_bytes: address space of a process.

    Returns:
        What could not be had, in words; empty where everything could.
    """
    missing = []
    is_root = os.geteuid() == 0
    own_users = _unshare(_NEWUSER | _NEWPID | _NEWNET | _NEWIPC)
    own_processes = own_users
    if not own_users:
        own_users = _unshare(_NEWUSER | _NEWNET)
        missing.append("a namespace for processes" if own_users else "namespaces for processes and network")
    _libc.prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    _fork_watched(lifeline, hand_over, own_processes, counts=is_root or not own_users)
    if own_users:
        _limit(resource.RLIMIT_NPROC, _MAX_PROCESSES)
    for what, most in (
        (resource.RLIMIT_AS, memory_bytes),
        (resource.RLIMIT_FSIZE, 0),
        (resource.RLIMIT_CORE, 0),
        (resource.RLIMIT_NOFILE, _MAX_OPEN_FILES),
    ):
        _limit(what, most)
    if _libc.prctl(_PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) != 0:
        missing.append("no new privileges")
    if not _restrict_files([*_SYSTEM, *_packages(), *readable], home):
        missing.append("limits on what may be read (Landlock)")
    if not _drop_capabilities():
        missing.append("no capabilities")
    return missing


def _unshare(flags: int) -> bool:
    return bool(_libc.unshare(flags) == 0)


def _limit(what: int, most: int) -> None:
    _, hard = resource.getrlimit(what)
    allowed = most if hard == resource.RLIM_INFINITY else min(most, hard)
    resource.setrlimit(what, (allowed, allowed))


# --- the process in front ---------------------------------------------------------------------------------


def _fork_watched(lifeline: int, hand_over: int, own_processes: bool, *, counts: bool) -> None:
    """Returns in the child; the other process never does."""
    woken, wake = os.pipe()
    os.set_blocking(wake, False)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    signal.set_wakeup_fd(wake)
    child = os.fork()
    if child == 0:
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        for fd in (woken, wake, lifeline):
            os.close(fd)
        _libc.prctl(_PR_SET_PDEATHSIG, int(signal.SIGKILL), 0, 0, 0)
        return
    os.close(hand_over)
    _leave_as(_watch(child, lifeline, woken, own_processes, counts=counts))


def _watch(child: int, lifeline: int, woken: int, own_processes: bool, *, counts: bool) -> int:
    """Until the child has ended, by itself, because the node wants it, or for having started too many; how it left.

    Nothing of it stays.
    """
    code, look_at = None, time.monotonic()
    while code is None:
        wait_s = max(0.0, look_at - time.monotonic()) if counts else None
        ready, _, _ = select.select([lifeline, woken], [], [], wait_s)
        if woken in ready:
            os.read(woken, 4096)
            code = _reap(child)
        if lifeline in ready:
            break
        began = time.monotonic()
        if counts and began >= look_at:
            if _count_below(os.getpid()) > _MAX_PROCESSES:
                break
            looked = time.monotonic()
            look_at = looked + max(_LOOK_S, (looked - began) / _LOOK_SHARE)
    if own_processes:
        # Whoever is the first of its processes takes all the others with it.
        if code is None:
            os.kill(child, signal.SIGKILL)
            code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        return code
    deadline = time.monotonic() + _ENDING_S
    while time.monotonic() < deadline:
        # Orphans become this process's own children: round by round everything below it goes. The number of one that
        # is not its own could be somebody else's by now.
        for pid in _children().get(os.getpid(), ()):
            with suppress(ProcessLookupError, PermissionError):
                os.kill(pid, signal.SIGKILL)
        ended = _reap(child)
        code = ended if code is None else code
        if os.getpid() not in _children():
            break
        time.sleep(0.001)
    return -signal.SIGKILL if code is None else code


def _reap(child: int) -> int | None:
    """Take note of all that ended; the exit code of ``child`` if it was among them."""
    code = None
    with suppress(ChildProcessError):
        while (ended := os.waitpid(-1, os.WNOHANG))[0]:
            if ended[0] == child:
                code = os.waitstatus_to_exitcode(ended[1])
    return code


def _children() -> dict[int, list[int]]:
    """Of every process that is seen from here, by its number."""
    found: dict[int, list[int]] = {}
    for folder in Path("/proc").iterdir():
        with suppress(OSError, ValueError, IndexError):
            parent = int((folder / "stat").read_text().rpartition(")")[2].split()[1])
            found.setdefault(parent, []).append(int(folder.name))
    return found


def _count_below(pid: int) -> int:
    children, below = _children(), [pid]
    for each in below:
        below += children.get(each, ())
    return len(below) - 1


def _leave_as(code: int) -> None:
    """End as the child did, so that the node sees no difference."""
    _limit(resource.RLIMIT_CORE, 0)
    if code < 0:
        with suppress(OSError, ValueError):
            signal.signal(-code, signal.SIG_DFL)
        os.kill(os.getpid(), -code)
    os._exit(max(0, code))


# --- files and capabilities -----------------------------------------------------------------------------


def _packages() -> list[str]:
    """The interpreter, and what is installed for it."""
    found = [sys.prefix, sys.base_prefix, *os.environ.get("LD_LIBRARY_PATH", "").split(":")]
    for entry in map(Path, sys.path):
        if entry.is_dir() and not any(entry.is_relative_to(root) for root in (sys.prefix, sys.base_prefix)):
            # An editable package: its source and no neighbours, of which there may be run folders with keys.
            found += [
                str(each)
                for each in entry.iterdir()
                if (each / "__init__.py").is_file() or each.suffix in (".py", ".so")
            ]
    return [path for path in found if path]


def _restrict_files(readable: Iterable[str], home: str) -> bool:
    """Whether Landlock takes all files away but ``readable``, ``home`` and the usual devices."""
    abi = _libc.syscall(_CREATE_RULESET, None, 0, _ABI_ONLY)
    if abi < 1:
        return False
    rights = (1 << _FILE_RIGHTS_BY_ABI.get(abi, _FILE_RIGHTS)) - 1
    handled = struct.pack("=QQQ", rights, _TCP if abi >= 4 else 0, _OUTSIDE if abi >= 6 else 0)
    rules = _libc.syscall(_CREATE_RULESET, handled, len(handled), 0)
    if rules < 0:
        return False
    try:
        for path, wanted in (
            *((path, _READ) for path in readable),
            *((path, _READ_FILE | _WRITE_FILE) for path in _DEVICES),
            *((str(entry), _READ_DIR) for entry in sys.path if Path(entry).is_dir()),
            (home, rights & ~_EXECUTE),
        ):
            with suppress(FileNotFoundError, NotADirectoryError, PermissionError):
                _allow(rules, path, wanted)
        return bool(_libc.syscall(_RESTRICT_SELF, rules, 0) == 0)
    finally:
        os.close(rules)


def _allow(rules: int, path: str, wanted: int) -> None:
    fd = os.open(path, os.O_PATH | os.O_CLOEXEC)
    try:
        if not Path(path).is_dir():
            wanted &= _EXECUTE | _READ_FILE | _WRITE_FILE
        _libc.syscall(_ADD_RULE, rules, _PATH_BENEATH, struct.pack("=Qi", wanted, fd), 0)
    finally:
        os.close(fd)


def _drop_capabilities() -> bool:
    header = struct.pack("=Ii", _CAPABILITIES_V3, 0)
    return bool(_libc.capset(header, bytes(24)) == 0)
