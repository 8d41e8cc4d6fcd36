"""A swarm of known speeds on one machine: real processes and daemons, workers held to a rate, steps held to a time.

The learner is this process. Its trainer takes its real step and sleeps for what is left of T_train, so T_train is
known and costs little. It runs once a point and is resumed with other settings; the workers dial again.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from echo2p2p import demo
from echo2p2p.data.trajectory import Group
from echo2p2p.layering import load
from echo2p2p.swarm.identity import Identity
from echo2p2p.telemetry.events import Event, EventLog

TICK_S = 0.1
SAMPLES = 4
TOKENS = 5
"""Of every rollout: the seed policy ends its answers after five digits, and is cut there."""

SETTINGS = f"""
name = "overlap"
[swarm]
host_maddrs = ["/ip4/127.0.0.1/tcp/0"]
use_relay = false
startup_timeout_s = 300
[task]
name = "strings"
options = {{ kind = "reverse", length = 5 }}
[learner]
steps = 100000
samples_per_prompt = {SAMPLES}
max_new_tokens = {TOKENS}
threads = 1
lease_s = 60
beat_period_s = 2
eval_prompts = 1
eval_samples = 1
journal = false        # a life that begins with a batch takes the wait of its second step for a want of workers
[learner.optimizer]
learning_rate = 1e-6   # the policy stays what it is, so that lengths do
micro_batch_tokens = 2048
[worker]
threads = 1
batch_groups = 2
[weights]
chunk_kib = 64
"""


@dataclass
class Measured:
    """What the learner said of itself during one point.

    Attributes:
        steps: without those of the ``warmup``.
        stalled_s: by how much its loop was late at most during ``steps``: the machine, or we, stood still.
    """

    warmup: list[Event] = field(default_factory=list)
    steps: list[Event] = field(default_factory=list)
    broadcasts: list[Event] = field(default_factory=list)
    stalled_s: float = 0.0


class Swarm:
    """A bootstrap peer and ``workers`` alike, as processes; the learner runs here, once for each point.

    Args:
        rate: rollouts a second of each worker.
        rollouts: R, a multiple of the samples of a prompt.
        t_train_s: what a step takes.
    """

    def __init__(
        self,
        folder: Path,
        group: demo.Processes,
        *,
        workers: int,
        rate: float,
        rollouts: int,
        t_train_s: float,
    ) -> None:
        from echo2p2p.rundir import RunDir

        self.folder = folder
        self.workers = workers
        self.rate = rate
        self.rollouts = rollouts
        self.t_train_s = t_train_s
        self._settings = folder / "overlap.toml"
        self._settings.write_text(SETTINGS, encoding="utf-8")
        self._place = RunDir.open(folder / "learner")
        common = ["--config", str(self._settings)]
        bootstrap = group.start("bootstrap", ["bootstrap", *common, "--run-dir", str(folder / "bootstrap")])
        self._door = group.first_line(bootstrap).split()[1]
        run = f"overlap@{Identity.load_or_create(self._place.identity).peer_id}"
        for number in range(workers):
            group.start(
                f"worker-{number}",
                [
                    *("worker", "--run", run, *common, "--initial-peers", self._door, "--price", "1"),
                    *("--limit-tokens-per-s", str(rate * TOKENS)),
                    *("--run-dir", str(folder / f"worker-{number}")),
                ],
            )
        self._lives = 0

    def measure(
        self, overrides: Mapping[str, object], *, warmup: int, steps: int, deadline_s: float
    ) -> Measured:
        """Run the learner with ``overrides`` for so many steps, or ``deadline_s``; the first ``warmup`` are apart."""
        from echo2p2p.cli.run import run_role
        from echo2p2p.roles import run_learner

        settings = load(
            [self._settings],
            [f"{key}={value}" for key, value in overrides.items()]
            + [
                f"swarm.initial_peers=['{self._door}']",
                f"learner.prompts_per_step={self.rollouts // SAMPLES}",
                f"learner.min_workers={self.workers}",
                f"provisioning.t_train_prior_s={self.t_train_s}",
            ],
        )
        found = Measured()
        resume = "latest" if self._lives else None
        self._lives += 1

        async def one_life(stop: asyncio.Event) -> bool:
            def hear(event: Event) -> None:
                if event["event"] == "step" and not stop.is_set():
                    mine = found.warmup if len(found.warmup) < warmup else found.steps
                    mine.append(event)
                    if len(found.steps) == steps:
                        stop.set()
                elif event["event"] == "broadcast":
                    found.broadcasts.append(event)

            async def watch_the_loop() -> None:
                for _ in range(
                    int(deadline_s / TICK_S)
                ):  # by our own time: whoever stops us for a while stops it
                    due = time.monotonic() + TICK_S
                    await asyncio.sleep(TICK_S)
                    if len(found.warmup) == warmup:
                        found.stalled_s = max(found.stalled_s, time.monotonic() - due)
                stop.set()

            async with asyncio.TaskGroup() as tasks:
                watching = tasks.create_task(watch_the_loop())
                finished = await run_learner(
                    settings,
                    self._place,
                    resume=resume,
                    stop=stop,
                    joined=lambda _: None,
                    watch=lambda events: _heard(events, hear),
                )
                watching.cancel()
            return finished

        with _paced(self.t_train_s):
            run_role(one_life)
        return found


@contextmanager
def _heard(events: EventLog, hear: Callable[[Event], None]) -> Any:
    leave = events.subscribe(hear)
    try:
        yield
    finally:
        leave()


@contextmanager
def _paced(t_train_s: float) -> Any:
    """While it is held, learners that start take ``t_train_s`` for a step."""
    from echo2p2p.learning import training

    real = training.ThreadTrainer

    class Paced(real):  # type: ignore[valid-type, misc]
        async def train(self, groups: Sequence[Group]) -> Mapping[str, Any]:
            ends = time.monotonic() + t_train_s
            metrics: Mapping[str, Any] = await super().train(groups)
            await asyncio.sleep(max(0.0, ends - time.monotonic()))
            return metrics

    training.ThreadTrainer = Paced  # type: ignore[misc]
    try:
        yield
    finally:
        training.ThreadTrainer = real  # type: ignore[misc]
