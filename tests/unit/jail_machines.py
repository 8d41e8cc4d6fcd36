"""What machines give the jail without root: what this one does, and poorer ones that it can play.

Many containers refuse namespaces, older kernels have no Landlock, or one that knows nothing of TCP and signals.
"""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path

PROBE = """
import ctypes, json, os
libc = ctypes.CDLL(None)
USERS, NETWORK, PROCESSES, SHARED_MEMORY = 0x10000000, 0x40000000, 0x20000000, 0x08000000

def may_unshare(flags):
    child = os.fork()
    if child == 0:
        os._exit(libc.unshare(flags) != 0)
    return os.waitpid(child, 0)[1] == 0

[permitted] = [line.split()[1] for line in open("/proc/self/status") if line.startswith("CapPrm")]
print(json.dumps({
    "processes": may_unshare(USERS | PROCESSES | NETWORK | SHARED_MEMORY),
    "network": may_unshare(USERS | NETWORK),
    "landlock": max(0, libc.syscall(444, None, 0, 1)),
    "node_has_capabilities": int(permitted, 16) > 0,
}))
"""

TAKEN = {
    "process namespaces": (
        {"processes": False},
        "unshare = jail._unshare; jail._unshare = lambda flags: not flags & jail._NEWPID and unshare(flags)",
    ),
    "namespaces": ({"processes": False, "network": False}, "jail._unshare = lambda flags: False"),
    "Landlock": ({"landlock": 0}, "jail._restrict_files = lambda *_: False"),
    "Landlock since 5.13": (
        {"landlock": 1},
        """
class Old:
    def __getattr__(self, name):
        return getattr(libc, name)
    def syscall(self, *arguments):
        found = libc.syscall(*arguments)
        return min(1, found) if arguments == (jail._CREATE_RULESET, None, 0, jail._ABI_ONLY) else found
libc, jail._libc = jail._libc, Old()
""",
    ),
    "dropping capabilities": ({"drops_capabilities": False}, "jail._drop_capabilities = lambda: False"),
}
"""By name: what a machine has at most once that is taken from it, and how the jail comes to find no more."""

MACHINES: list[tuple[str, ...]] = [
    (),
    ("process namespaces",),
    ("namespaces",),
    ("Landlock",),
    ("namespaces", "Landlock since 5.13"),
    ("namespaces", "Landlock"),
    ("namespaces", "Landlock", "dropping capabilities"),
]
"""This one, and what is taken from the others."""

CHILD = """
import importlib.util
spec = importlib.util.spec_from_file_location("sandbox_child", {child!r})
child = importlib.util.module_from_spec(spec)
spec.loader.exec_module(child)
load = child.load

def load_poorer(path):
    module = load(path)
    if path.name == "jail.py":
        for code in {codes!r}:
            exec(code, {{"jail": module}})
    return module

child.load = load_poorer
child.main()
"""


@dataclass(frozen=True)
class Machine:
    """What the jail has there.

    Attributes:
        processes: namespaces for processes, together with all others.
        network: namespaces for users and network.
        landlock: its version, from 4 on with TCP, from 6 on with signals; 0: there is none.
        node_has_capabilities: so whoever has none may not look into the node.
        drops_capabilities: a process may give up its own; everywhere but on machines that are played.
    """

    processes: bool
    network: bool
    landlock: int
    node_has_capabilities: bool
    drops_capabilities: bool

    @property
    def lacks(self) -> list[str]:
        """In the words of the warning."""
        namespaces = "a namespace for processes" if self.network else "namespaces for processes and network"
        return [
            *([] if self.processes else [namespaces]),
            *([] if self.landlock else ["limits on what may be read (Landlock)"]),
            *([] if self.drops_capabilities else ["no capabilities"]),
        ]

    def without(self, names: tuple[str, ...]) -> Machine:
        found = asdict(self)
        for name in names:
            for what, most in TAKEN[name][0].items():
                found[what] = min(found[what], most)
        return Machine(**found)


@cache
def this_machine() -> Machine:
    """Asked of the kernel itself: a jail that finds less than there is must not pass for a poor machine."""
    said = subprocess.run([sys.executable, "-I", "-c", PROBE], check=True, capture_output=True, text=True)
    return Machine(**json.loads(said.stdout), drops_capabilities=True)


def poorer_child(child: Path, names: tuple[str, ...]) -> str:
    """The source of what plays ``child`` on a machine from which ``names`` were taken."""
    return CHILD.format(child=str(child), codes=[TAKEN[name][1] for name in names])
