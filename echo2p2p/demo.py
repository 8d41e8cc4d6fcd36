"""A whole swarm on one machine: a bootstrap peer, a learner and four workers, each a process of its own.

Nothing in it is staged: the processes are the ones that the commands ``bootstrap``, ``learner`` and
``worker`` start, on real hivemind over loopback. The workers differ in the price and the speed that they
announce, and are held to that speed (``worker.limit_tokens_per_s``).

Whatever ends the demo, its processes end with it: they are stopped in order, and if the demo itself is killed
the kernel stops them (Linux).
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import selectors
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from echo2p2p.errors import DeadlineExceeded, Echo2p2pError, SettingsError

SETTINGS = Path(__file__).parent / "demo.toml"
START_TIMEOUT_S = 90.0
STOP_TIMEOUT_S = 25.0
"""Longer than a role may take to put its affairs in order (``cli.run.STOP_GRACE_S``)."""
LOG_TAIL_LINES = 15
_PR_SET_PDEATHSIG = 1


@dataclass(frozen=True)
class DemoWorker:
    """What one worker announces, and is held to."""

    gpu: str
    price_per_hour: float
    tokens_per_s: float


WORKERS = (
    DemoWorker("demo A", 0.20, 6000),
    DemoWorker("demo B", 0.25, 6000),
    DemoWorker("demo C", 0.40, 7800),
    DemoWorker("demo D", 1.60, 9600),
)
"""Per rollout A is the cheapest and D by far the dearest, above what an hour may cost; A, B and C are fast enough."""


@dataclass
class Processes:
    """The processes of one demo, in the order in which they were started."""

    run_dir: Path
    started: list[tuple[str, subprocess.Popen[bytes]]] = field(default_factory=list)

    def start(self, name: str, arguments: Sequence[str], *, show: bool = False) -> subprocess.Popen[bytes]:
        """Start ``echo2p2p <arguments>``; what it says goes to ``<name>.log``, or to our stderr if ``show``."""
        target = Path(os.devnull) if show else self.run_dir / f"{name}.log"
        with target.open("wb") as log:
            process = subprocess.Popen(
                [sys.executable, "-m", "echo2p2p", *arguments],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=None if show else log,
                start_new_session=True,  # Ctrl-C reaches us alone, and we stop them in order
                preexec_fn=_stop_with_parent,  # noqa: PLW1509 - the demo has no threads when it starts them
            )
        self.started.append((name, process))
        return process

    def first_line(self, process: subprocess.Popen[bytes]) -> str:
        """The first line that ``process`` prints on stdout.

        Raises:
            DeadlineExceeded: none within ``START_TIMEOUT_S``.
            Echo2p2pError: it ended before.
        """
        deadline = time.monotonic() + START_TIMEOUT_S
        output = process.stdout
        assert output is not None
        line = b""
        with selectors.DefaultSelector() as selector:
            selector.register(output, selectors.EVENT_READ)
            while not line.endswith(b"\n"):
                if not selector.select(max(0.0, deadline - time.monotonic())):
                    raise DeadlineExceeded(
                        f"the {self._name(process)} did not get ready within {START_TIMEOUT_S:.0f} s"
                    )
                data = os.read(output.fileno(), 65536)
                if not data:
                    process.wait(timeout=STOP_TIMEOUT_S)
                    raise self.failure(process)
                line += data
        return line.decode().splitlines()[0]

    def failure(self, process: subprocess.Popen[bytes]) -> Echo2p2pError:
        """Why a process that should be there is not, with the end of its log."""
        name = self._name(process)
        log = self.run_dir / f"{name}.log"
        tail = log.read_text(errors="replace").splitlines()[-LOG_TAIL_LINES:] if log.exists() else []
        return Echo2p2pError(
            "\n".join([f"the {name} ended with code {process.returncode}", *tail]),
            hint=f"the whole log: {log}" if log.exists() else "",
        )

    def stop(self) -> None:
        """End everything, politely, and after ``STOP_TIMEOUT_S`` by force; the bootstrap peer last."""
        self._end([process for _, process in self.started[1:]])
        self._end([process for _, process in self.started[:1]])
        for _, process in self.started:
            if process.stdout is not None:
                process.stdout.close()

    def _end(self, processes: Sequence[subprocess.Popen[bytes]]) -> None:
        alive = [process for process in processes if process.poll() is None]
        for process in alive:
            with contextlib.suppress(ProcessLookupError):
                process.terminate()
        deadline = time.monotonic() + STOP_TIMEOUT_S
        for process in alive:
            try:
                process.wait(timeout=max(0.1, deadline - time.monotonic()))
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait(timeout=STOP_TIMEOUT_S)

    def _name(self, process: subprocess.Popen[bytes]) -> str:
        return next(name for name, started in self.started if started is process)


@contextlib.contextmanager
def processes(run_dir: Path) -> Iterator[Processes]:
    """A set of processes that end with the block, also when Ctrl-C or SIGTERM ends it."""
    try:
        run_dir.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise SettingsError(f"folder {run_dir} cannot be made: {error.strerror}") from error
    group = Processes(run_dir)
    before = signal.signal(signal.SIGTERM, _raise_interrupt)
    try:
        yield group
    finally:
        # A second Ctrl-C while stopping would leave something behind.
        interrupt = signal.signal(signal.SIGINT, signal.SIG_IGN)
        group.stop()
        signal.signal(signal.SIGINT, interrupt)
        signal.signal(signal.SIGTERM, before)


def run_demo(run_dir: Path, *, overrides: Sequence[str], deadline_s: float) -> None:
    """Start the swarm, wait until the learner is done, stop the rest.

    Args:
        run_dir: the learner's folder, with one for every other process inside, and their logs.
        overrides: further settings, as for ``--set``.

    Raises:
        Echo2p2pError: a process did not come up, or the learner failed; with the end of its log.
        DeadlineExceeded: the learner was not done after ``deadline_s``.
    """
    common = ["--config", str(SETTINGS)]
    for override in overrides:
        common += ["--set", override]
    with processes(run_dir) as group:
        bootstrap = group.start("bootstrap", ["bootstrap", *common, "--run-dir", str(run_dir / "bootstrap")])
        door = group.first_line(bootstrap).split()
        learner = group.start("learner", ["learner", *common, "--run-dir", str(run_dir), *door], show=True)
        join = group.first_line(learner).split()[1:]  # without the program's name
        for number, worker in enumerate(WORKERS, start=1):
            group.start(
                f"worker-{number}",
                [
                    *join,
                    *common,
                    "--run-dir",
                    str(run_dir / f"worker-{number}"),
                    "--gpu",
                    worker.gpu,
                    "--price",
                    str(worker.price_per_hour),
                    "--limit-tokens-per-s",
                    str(worker.tokens_per_s),
                ],
            )
        try:
            learner.wait(timeout=deadline_s)
        except subprocess.TimeoutExpired:
            raise DeadlineExceeded(
                f"the learner was not done after {deadline_s:.0f} s",
                hint=f"its events: {run_dir / 'events.jsonl'}",
            ) from None
        if learner.returncode != 0:
            raise group.failure(learner)


def _stop_with_parent() -> None:
    """In the child: be sent SIGTERM when the demo dies, whatever kills it."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM, 0, 0, 0)


def _raise_interrupt(*_: object) -> None:
    raise KeyboardInterrupt
