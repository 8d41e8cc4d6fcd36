"""Whether a swarm learns as well as one process, and how old rollouts may be before it doesn't.

``python -m benchmarks.parity [--quick] [--run-dir FOLDER] [--pictures FOLDER]``

The demo's task, policy and settings, a fixed number of steps, several seeds; a seed decides prompts, held-out prompts
and sampling. Three questions, each with a baseline in the same run:

* co-located against decoupled: one process (``benchmarks/colocated.py``) against the demo's swarm, six processes
  on real hivemind, at S = 3;
* the swarm at S = 1, 3, 6 and 11, with the staleness that its trained tokens really had;
* the one process with every batch a fixed number of versions old, at the demo's learning rate and at ``FAST`` times
  it: what staleness does, whatever the timing.

Each finished training is a file in the run folder and is not repeated there: a benchmark that was interrupted, or in
which a swarm failed, goes on. Other load makes it slower, and changes how old the swarm's rollouts are, but not what
one process computes.

The last line on stdout is one JSON object: ``colocated``, ``decoupled`` and ``staleness`` (``swarm`` by S, ``lag``
and ``lag_fast`` by versions). Each set of trainings has ``finals`` by seed, their ``mean`` with ``low`` and ``high``
of the 95 % interval by Student's t, ``over_training`` (mean height of the curve) likewise, the ``curve``, and the
staleness of trained tokens. ``decoupled`` also says whether its mean is inside the co-located interval (``inside``),
and what it is less the co-located one, seed by seed (``difference``).
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import shutil
import sys
import time
from collections.abc import Iterable, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from benchmarks.bands import Run, aligned, band, paired
from benchmarks.colocated import train_in_process
from benchmarks.nodes import say
from echo2p2p.demo import SETTINGS, run_demo
from echo2p2p.errors import Echo2p2pError
from echo2p2p.layering import load
from echo2p2p.settings import Settings
from echo2p2p.telemetry.events import read_events

FAST = 3
"""At so many times the demo's learning rate a policy moves far in a few versions."""
SWARM_DEADLINE_S = 1500.0


@dataclass(frozen=True)
class Case:
    """One training.

    Attributes:
        kind: ``swarm``, or ``lag`` and ``lag_fast`` in one process.
        knob: S of a swarm, or the versions that every batch is old.
    """

    kind: str
    knob: int
    seed: int

    def __str__(self) -> str:
        return f"{self.kind}-{self.knob}-seed-{self.seed}"


@dataclass(frozen=True)
class Plan:
    """What is trained. The first ``few`` seeds answer what needs no narrow band."""

    seeds: int
    few: int
    steps: int
    fast_steps: int
    windows: tuple[int, ...]
    lags: tuple[int, ...]

    def cases(self) -> list[Case]:
        """The comparison first, then the rest; the swarm's trainings after those that need no swarm."""
        seeds, few = range(self.seeds), range(self.few)
        return [
            *(Case("lag", 0, seed) for seed in seeds),
            *(Case("lag", lag, seed) for lag in self.lags if lag for seed in few),
            *(Case("lag_fast", lag, seed) for lag in self.lags for seed in few),
            *(Case("swarm", COMPARED, seed) for seed in seeds),
            *(Case("swarm", window, seed) for window in self.windows if window != COMPARED for seed in few),
        ]


COMPARED = 3
"""S of the swarm that is compared with one process: the default."""
FULL = Plan(seeds=5, few=3, steps=120, fast_steps=60, windows=(1, 3, 6, 11), lags=(0, 1, 3, 6, 11))
QUICK = Plan(seeds=2, few=2, steps=30, fast_steps=20, windows=(3,), lags=(0, 11))


def overrides(case: Case, plan: Plan) -> list[str]:
    """The demo's settings as ``case`` has them."""
    steps = plan.fast_steps if case.kind == "lag_fast" else plan.steps
    changed = [
        f"seed={case.seed}",
        f"task.seed={case.seed}",
        f"learner.steps={steps}",
        "learner.eval_every=10",
        "learner.eval_prompts=256",
        "learner.stop_at_reward=2.0",  # nothing earns that: all take the same number of steps
    ]
    if case.kind == "swarm":
        changed.append(f"learner.staleness={case.knob}")
    if case.kind == "lag_fast":
        rate = load([SETTINGS]).learner.optimizer.learning_rate
        changed.append(f"learner.optimizer.learning_rate={FAST * rate!r}")
    return changed


def of_swarm(folder: Path, seed: int) -> Run:
    """What a learner's events say of its training."""
    curve: dict[int, float] = {}
    tokens = aged = oldest = 0
    for event in read_events(folder / "events.jsonl"):
        if event["event"] == "eval":
            curve[event["step"]] = event["reward"]
        elif event["event"] == "step":
            ages = {int(age): n for age, n in event["staleness_hist"].items()}
            tokens += sum(ages.values())
            aged += sum(age * n for age, n in ages.items())
            oldest = max(oldest, *ages)
    return Run(seed, curve, staleness_mean=aged / tokens, staleness_max=oldest)


def train_swarm(case: Case, plan: Plan, folder: Path) -> Run:
    """The demo as ``case`` has it. Raises Echo2p2pError if it fails, with the end of the log that says why."""
    shutil.rmtree(folder, ignore_errors=True)  # of a benchmark that was interrupted
    run_demo(folder, overrides=overrides(case, plan), deadline_s=SWARM_DEADLINE_S)
    return of_swarm(folder, case.seed)


class Results:
    """Finished trainings, a file each."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        folder.mkdir(parents=True, exist_ok=True)

    def find(self, case: Case) -> Run | None:
        path = self._folder / f"{case}.json"
        if not path.exists():
            return None
        found = json.loads(path.read_text())
        return Run(**found | {"curve": {int(step): reward for step, reward in found["curve"].items()}})

    def keep(self, case: Case, run: Run) -> None:
        whole = self._folder / f"{case}.json"
        part = whole.with_suffix(".part")
        part.write_text(json.dumps(asdict(run)))
        part.replace(whole)
        say(
            f"{case}: reward {run.curve[0]:.3f} → {run.final:.3f}, tokens {run.staleness_mean:.2f} versions old, "
            f"at most {run.staleness_max}"
        )

    def of(self, kind: str, knob: int, seeds: Iterable[int]) -> list[Run]:
        return [run for seed in seeds if (run := self.find(Case(kind, knob, seed))) is not None]


def train_all(plan: Plan, results: Results, folder: Path) -> list[Case]:
    """What is missing: in one process each, two at a time; then swarms, one at a time. Returns what failed."""
    missing = [case for case in plan.cases() if results.find(case) is None]
    say(f"{len(missing)} trainings to go, of {len(plan.cases())}")
    alone = [case for case in missing if case.kind != "swarm"]
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(max_workers=min(2, os.cpu_count() or 1), mp_context=context) as pool:
        futures = {}
        for case in alone:
            settings: Settings = load([SETTINGS], overrides(case, plan))
            futures[pool.submit(train_in_process, settings, case.knob, str(case))] = case
        for future in as_completed(futures):
            results.keep(futures[future], future.result())
    failed = []
    for case in missing:
        if case.kind == "swarm":
            try:
                results.keep(case, train_swarm(case, plan, folder / f"{case}"))
            except Echo2p2pError as error:
                say(f"{case} failed: {error}")
                failed.append(case)
    return failed


def summary(runs: Sequence[Run]) -> dict[str, Any]:
    """What one set of trainings comes to."""
    steps, bands = aligned(runs)
    height = band([run.over_training for run in runs])
    return {
        "finals": {str(run.seed): round(run.final, 4) for run in runs},
        **rounded(asdict(band([run.final for run in runs]))),
        "over_training": rounded(asdict(height)),
        "curve": {
            "steps": steps,
            "mean": [round(b.mean, 4) for b in bands],
            "low": [round(b.low, 4) for b in bands],
            "high": [round(b.high, 4) for b in bands],
        },
        "staleness_mean": round(sum(run.staleness_mean for run in runs) / len(runs), 3),
        "staleness_max": max(run.staleness_max for run in runs),
    }


def rounded(figures: dict[str, float]) -> dict[str, float]:
    return {name: round(value, 4) for name, value in figures.items()}


def figures(plan: Plan, results: Results) -> dict[str, Any]:
    """The benchmark's JSON object."""
    seeds, few = range(plan.seeds), range(plan.few)
    colocated, decoupled = results.of("lag", 0, seeds), results.of("swarm", COMPARED, seeds)
    inside = band([run.final for run in decoupled]).mean in band([run.final for run in colocated])
    return {
        "colocated": summary(colocated),
        "decoupled": summary(decoupled)
        | {"inside": inside, "difference": rounded(asdict(band(paired(decoupled, colocated))))},
        "staleness": {
            "swarm": {str(window): summary(results.of("swarm", window, few)) for window in plan.windows},
            **{
                kind: {str(lag): summary(results.of(kind, lag, few)) for lag in plan.lags}
                for kind in ("lag", "lag_fast")
            },
        },
        "setup": asdict(plan) | {"fast": FAST, "compared": COMPARED},
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--quick", action="store_true", help="few steps and seeds, S = 3 only: does it work?")
    parser.add_argument("--run-dir", type=Path, help="where trainings are kept  [runs/parity-TIME]")
    parser.add_argument("--pictures", type=Path, help="folder for parity.png and staleness.png")
    arguments = parser.parse_args()
    plan = QUICK if arguments.quick else FULL
    folder = arguments.run_dir or Path("runs") / time.strftime("parity-%Y%m%d-%H%M%S")
    results = Results(folder / "quick" if arguments.quick else folder)
    started = time.monotonic()
    failed = train_all(plan, results, folder)
    if failed:
        sys.exit(f"{len(failed)} trainings failed; go on with --run-dir {folder}")
    found = figures(plan, results)
    say(f"done after {time.monotonic() - started:.0f} s; the trainings are in {folder}")
    if arguments.pictures is not None:
        from benchmarks.parity_pictures import draw

        draw(found, arguments.pictures)
    print(json.dumps(found))


if __name__ == "__main__":
    main()
