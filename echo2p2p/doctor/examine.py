"""All checks in order: the quick ones here, the others in child processes with deadlines."""

from __future__ import annotations

import asyncio
import contextlib
import re
import sys
import threading
from collections.abc import Callable, Sequence
from pathlib import Path

import msgspec

from echo2p2p.doctor import machine
from echo2p2p.doctor.finding import Finding, failure, warning
from echo2p2p.doctor.probe import Order
from echo2p2p.parts import SEED_POLICY
from echo2p2p.settings import Settings
from echo2p2p.telemetry.text import clean

QUICK_S = 10.0
DEADLINE_S = 120.0
VLLM_DEADLINE_S = 600.0
"""vLLM compiles the policy when it starts, for minutes if it is large."""
SETTLE_S = 2.0
MAX_LINE_BYTES = 65_536
TAIL_BYTES = 2000
_CAUSE = re.compile(rb"\b(\w*(?:Error|Exception): [^\n]+)\n")
"""How the last line of a traceback reads, whatever a logger has put before it."""

Tell = Callable[[Finding], None]


async def examine(settings: Settings, *, deadline_s: float | None = None, tell: Tell) -> list[Finding]:
    """Everything that a stranger needs before joining, checked one after another.

    Args:
        settings: whose addresses, run folder, policy and engine are looked at; the seed policy if they name none.
        deadline_s: for each child process, which is ended if it is late. None: ``VLLM_DEADLINE_S`` for the engine
            if that is vLLM, else ``DEADLINE_S``.
        tell: called with every finding as it comes.
    """
    found: list[Finding] = []

    def note(finding: Finding) -> None:
        found.append(finding)
        tell(finding)

    for name, check in _quick(settings).items():
        note(await asyncio.to_thread(within, name, check))
    order = Order(
        str(settings.policy.path or SEED_POLICY),
        settings.worker.model_dump(mode="json"),
        settings.swarm.initial_peers,
        settings.swarm.host_maddrs,
        settings.swarm.announce_maddrs,
    )
    usual_s = VLLM_DEADLINE_S if settings.worker.engine == "vllm" else DEADLINE_S
    await in_child("policy", order, last="engine", deadline_s=deadline_s or usual_s, tell=note)
    await in_child("network", order, last="loopback", deadline_s=deadline_s or DEADLINE_S, tell=note)
    if not settings.swarm.initial_peers:
        note(
            warning(
                "bootstrap peers",
                "none was named, so none was tried",
                "--initial-peers, as you were given it",
            )
        )
    return found


def _quick(settings: Settings) -> dict[str, Callable[[], Finding]]:
    nbytes = machine.policy_bytes(settings.policy.path or SEED_POLICY)
    weights = settings.weights
    return {
        "python": machine.python,
        "packages": machine.packages,
        "vllm": lambda: machine.vllm(settings.worker.engine),
        "memory": lambda: machine.memory(nbytes),
        "disk": lambda: machine.disk(
            settings.run_dir or Path("runs"),
            policy_bytes=nbytes,
            keep_versions=weights.keep_versions,
            max_store_bytes=weights.max_store_gib * 2**30,
        ),
        "open files": machine.files,
        "clock": machine.clock,
        "ports": lambda: machine.ports(settings.swarm.host_maddrs),
    }


def within(name: str, check: Callable[[], Finding], deadline_s: float = QUICK_S) -> Finding:
    """``check()``, or a failure once ``deadline_s`` is over: a disk that hangs must not hang the doctor."""
    answers: list[Finding] = []
    thread = threading.Thread(target=lambda: answers.append(check()), daemon=True)
    thread.start()
    thread.join(deadline_s)
    return answers[0] if answers else failure(name, f"no answer within {deadline_s:g} s", "see what hangs")


async def in_child(
    what: str,
    order: Order,
    *,
    last: str,
    deadline_s: float,
    tell: Tell,
    command: Sequence[str] = (sys.executable, "-m", "echo2p2p.doctor.probe"),
) -> None:
    """Run one half of the probe, and tell its findings as they come.

    Args:
        what: policy or network.
        last: the check that it ends with; without a failure before it, its absence is one. If it fails, it is told
            with the first error that the child, or a process of it, has printed: vLLM gives no other reasons.
    """
    child = await asyncio.create_subprocess_exec(
        *command,
        what,
        msgspec.json.encode(order).decode(),
        stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
        limit=MAX_LINE_BYTES,
    )
    assert child.stdout is not None
    assert child.stderr is not None
    tail = asyncio.ensure_future(_tail(child.stderr))
    complete = late = False
    failed: Finding | None = None
    try:
        async with asyncio.timeout(deadline_s):
            async for line in child.stdout:
                finding = msgspec.json.decode(line, type=Finding)
                complete |= finding.check == last or finding.state == "failure"
                if finding.check == last and finding.state == "failure":
                    failed = finding
                else:
                    tell(finding)
            await child.wait()
    except TimeoutError:
        late = True
    finally:
        with contextlib.suppress(ProcessLookupError):
            child.kill()
        await child.wait()
        said, cause = await _settled(tail)
    if failed is not None:
        told = f"{failed.says}: {cause}" if cause and cause not in failed.says else failed.says
        tell(msgspec.structs.replace(failed, says=told))
    if late:
        tell(failure(what, f"not done within {deadline_s:g} s", "try again with a longer --deadline"))
    elif not complete:
        why = clean(said[-1] if said else "without a word", 300)
        tell(failure(what, f"the check ended with exit code {child.returncode}: {why}", "see the message"))


async def _settled(tail: asyncio.Future[tuple[list[str], str]]) -> tuple[list[str], str]:
    """What the child said last; nothing if a process that it left behind keeps the stream open."""
    try:
        return await asyncio.wait_for(tail, SETTLE_S)
    except TimeoutError:
        return [], ""


async def _tail(stream: asyncio.StreamReader) -> tuple[list[str], str]:
    """The last lines of a stream, read to its end, and the first error in it."""
    data, cause = b"", ""
    while chunk := await stream.read(65_536):
        data += chunk
        if not cause and (found := _CAUSE.search(data)):
            cause = clean(found[1].decode(errors="replace"), 300)
        data = data[-TAIL_BYTES:]
    return [line for line in data.decode(errors="replace").splitlines() if line.strip()], cause


def exit_code(found: Sequence[Finding]) -> int:
    """0 if nothing failed, else the code of the first failure."""
    return next((finding.exit_code for finding in found if finding.state == "failure"), 0)
