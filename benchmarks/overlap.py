"""The learner's bubble ratio against the number of workers, around the minimum that the capacity model predicts.

    python -m benchmarks.overlap [--quick] [--picture docs/images/overlap.png] [--run-dir DIR]

Real processes on one machine: a bootstrap peer, six workers with the transformers engine, each on its own daemon,
and the learner. Workers are held to a known rate (``worker.limit_tokens_per_s``), steps to a known time: the learner
takes its real step of a small policy and sleeps for what is left of T_train, so that it all needs less than a core.

* For S = 2, 3, 4, 6 and κ = max(1, S − 1): one and two workers fewer than the predicted minimum asks for, and the
  number that the learner chooses itself (γ = 1.1), which may let it wait for 2 % of the time at most.
* With the learner's uplink cut until a broadcast takes 0.7 steps: the number that it chooses for S = 3.
* With a broadcast of 1.5 steps: several κ for S = 3 and S = 4, with four workers each.

The predictions are made from what was measured beside the bubble: T_train, T_bcast and the workers' rates. A point
with a rate or a T_train off by more than 5 %, or during which the learner's loop stood still for 0.3 s, is disturbed
(the machine was busy with something else): it is measured again, at most three times in all, and marked if in vain.

The last line on stdout is one JSON object, ``overlap``:

* ``points``: of each its settings, measured and predicted bubble ratio, and the predicted minimum;
  ``paper_workers`` is the minimum by the paper's formula, whose workers stand still while a version travels;
* ``bubble_at_target``: the largest bubble ratio with the workers that the learner chose;
* ``agrees``: below the minimum the learner waits, with its own choice at most 2 %, and every measured bubble ratio is
  within 0.05 of the predicted one. Disturbed points don't count.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from collections import Counter
from contextlib import nullcontext
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import fmean, median
from typing import Any

from benchmarks.nodes import say
from benchmarks.overlap_swarm import Measured, Swarm
from echo2p2p import demo
from echo2p2p.cli.table import print_table
from echo2p2p.provisioning.capacity import mu_min, mu_min_standing, step_s
from echo2p2p.settings import LearnerSettings

WORKERS = 6
T_TRAIN_S = 1.5
ROLLOUTS = 96
LEAST_WORKERS = 3.4
"""So many workers generate what the learner consumes."""
GAMMA = 1.1
TARGET_BUBBLE = 0.02
TOLERANCE = 0.05
DISTURBED = 0.05
LONGEST_STALL_S = 0.3
TRIES = 3
DEADLINE_S = 90.0
BROADCAST_S = 0.15
"""T_bcast over loopback until it has been measured."""
SNAPSHOT_MBIT = 13.0
"""What the seed policy's weights have, with the 5 % of the learner's uplink that they may not fill."""


@dataclass(frozen=True)
class Setting:
    """What a point is run with.

    Attributes:
        workers: None for the learner's own choice.
        broadcast_steps: T_bcast in steps that the learner's uplink is cut for; 0 for all that loopback has.
    """

    staleness: int
    kappa: int
    workers: int | None
    broadcast_steps: float = 0.0

    @property
    def upload_mbit(self) -> float:
        return SNAPSHOT_MBIT / (self.broadcast_steps * T_TRAIN_S - BROADCAST_S)


@dataclass(frozen=True)
class Point:
    """What came of it. Rates in rollouts a second, ratios as parts of one."""

    staleness: int
    kappa: int
    workers: int
    chosen: bool
    broadcast_steps: float
    steps: int
    bubble: float
    predicted_bubble: float
    predicted_workers: float | None
    paper_workers: float | None
    t_train_s: float
    t_bcast_s: float
    rate: float
    staleness_max: int
    dropped: int
    stalled_s: float
    disturbed: bool


def settings_of(quick: bool) -> list[Setting]:
    def kappa(staleness: int) -> int:
        return LearnerSettings(staleness=staleness).publication_period

    if quick:
        return [Setting(3, 2, 2), Setting(3, 2, 3), Setting(3, 2, None)]
    return [
        *(Setting(s, k, 4, 1.5) for s, k in ((3, 2), (4, 2), (4, 3), (4, 4))),
        Setting(3, 2, None, 0.7),
        *(Setting(s, kappa(s), n) for s in (3, 2, 4, 6) for n in (2, 3, None)),
    ]


def run(swarm: Swarm, setting: Setting, t_bcast_s: float) -> Point:
    """Measure one point over whole publication periods, after a warm-up."""
    periods = max(2, round(10 / setting.kappa))
    overrides: dict[str, object] = {
        "learner.staleness": setting.staleness,
        "learner.kappa": setting.kappa,
        "provisioning.gamma": GAMMA,
        "provisioning.t_bcast_prior_s": t_bcast_s,
    }
    if setting.workers is not None:
        # Everybody asks for $1/h, and no fewer are wanted than the cap pays for.
        overrides["provisioning.price_cap_per_hour"] = setting.workers
    if setting.broadcast_steps:
        overrides |= {"learner.upload_mbit": setting.upload_mbit, "weights.max_patch_share": 0}
    found = swarm.measure(
        overrides, warmup=setting.kappa + 3, steps=periods * setting.kappa, deadline_s=DEADLINE_S
    )
    if not found.steps:
        raise SystemExit(
            f"{setting}: no more than the {len(found.warmup)} steps of the warm-up in {DEADLINE_S:.0f} s"
        )
    return point_of(setting, found, swarm.rate, t_bcast_s)


def point_of(setting: Setting, found: Measured, rate: float, t_bcast_s: float) -> Point:
    steps = found.steps
    idle_s, train_s = (sum(step[key] for step in steps) for key in ("t_idle_s", "t_train_s"))
    workers, with_them = Counter(step["active"] for step in steps).most_common(1)[0]
    if found.broadcasts:
        t_bcast_s = median(event["t_bcast_s"] for event in found.broadcasts)
    t_train_s = train_s / len(steps)
    measured_rate = fmean(step["mu_pool"] / step["active"] for step in steps if step["active"])
    model = {"kappa": setting.kappa, "rollouts": ROLLOUTS, "t_train_s": t_train_s, "t_bcast_s": t_bcast_s}
    needed = mu_min(staleness=setting.staleness, **model) / measured_rate
    paper = mu_min_standing(**model) / measured_rate
    predicted_s = step_s(staleness=setting.staleness, mu_pool=workers * measured_rate, **model)
    return Point(
        staleness=setting.staleness,
        kappa=setting.kappa,
        workers=workers,
        chosen=setting.workers is None,
        broadcast_steps=setting.broadcast_steps,
        steps=len(steps),
        bubble=idle_s / (idle_s + train_s),
        predicted_bubble=1 - t_train_s / predicted_s,
        predicted_workers=_finite(needed),
        paper_workers=_finite(paper),
        t_train_s=t_train_s,
        t_bcast_s=t_bcast_s,
        rate=measured_rate,
        staleness_max=max(step["staleness_max"] for step in steps),
        dropped=sum(steps[-1]["dropped"].values()) - sum(steps[0]["dropped"].values()),
        stalled_s=found.stalled_s,
        disturbed=with_them < len(steps)
        or found.stalled_s > LONGEST_STALL_S
        or abs(measured_rate / rate - 1) > DISTURBED
        or abs(t_train_s / T_TRAIN_S - 1) > DISTURBED,
    )


def agreement(points: list[Point]) -> tuple[float | None, bool]:
    """The largest bubble ratio of the learner's own choices, and whether prediction and measurement agree."""
    clean = [point for point in points if not point.disturbed]
    at_target = [point.bubble for point in clean if point.chosen]
    waits = [
        point.bubble > TARGET_BUBBLE
        for point in clean
        if point.predicted_workers is None or point.workers < point.predicted_workers
    ]
    close = [abs(point.bubble - point.predicted_bubble) <= TOLERANCE for point in clean]
    worst = max(at_target, default=None)
    return worst, worst is not None and worst <= TARGET_BUBBLE and all(waits) and all(close)


def _finite(value: float) -> float | None:
    return value if value < float("inf") else None


def _print(points: list[Point]) -> None:
    print_table(
        [
            "S",
            "κ",
            "workers",
            "minimum",
            "paper's",
            "bubble",
            "predicted",
            "T_train",
            "T_bcast",
            "rate",
            "oldest",
            "",
        ],
        [
            [
                point.staleness,
                point.kappa,
                f"{point.workers}{' (chosen)' if point.chosen else ''}",
                "∞" if point.predicted_workers is None else f"{point.predicted_workers:.2f}",
                "∞" if point.paper_workers is None else f"{point.paper_workers:.2f}",
                f"{point.bubble:.1%}",
                f"{point.predicted_bubble:.1%}",
                f"{point.t_train_s:.2f} s",
                f"{point.t_bcast_s:.2f} s",
                f"{point.rate:.1f}/s",
                point.staleness_max,
                "disturbed" if point.disturbed else "",
            ]
            for point in points
        ],
        empty="",
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="S = 3 only, about three minutes")
    parser.add_argument("--picture", type=Path, help="where the picture goes (PNG)")
    parser.add_argument("--run-dir", type=Path, help="keep the run folders here")
    options = parser.parse_args()
    started = time.monotonic()
    points: list[Point] = []
    place: Any = nullcontext(options.run_dir) if options.run_dir else tempfile.TemporaryDirectory()
    with place as folder, demo.processes(Path(folder)) as group:
        swarm = Swarm(
            Path(folder),
            group,
            workers=WORKERS,
            rate=ROLLOUTS / T_TRAIN_S / LEAST_WORKERS,
            rollouts=ROLLOUTS,
            t_train_s=T_TRAIN_S,
        )
        say(f"{WORKERS} workers start")
        # In its first life the workers build their engines.
        swarm.measure({"learner.staleness": 3}, warmup=2, steps=1, deadline_s=DEADLINE_S)
        waiting = [(setting, TRIES) for setting in settings_of(options.quick)]
        while waiting:
            setting, tries = waiting.pop(0)
            point = run(swarm, setting, setting.broadcast_steps * T_TRAIN_S or BROADCAST_S)
            if point.disturbed and tries > 1:
                waiting.append((setting, tries - 1))
            else:
                points.append(point)
            say(
                f"{time.monotonic() - started:.0f} s: S = {point.staleness}, κ = {point.kappa}, "
                f"{point.workers} workers: bubble {point.bubble:.1%}, predicted {point.predicted_bubble:.1%}"
                f"{', disturbed' if point.disturbed else ''}"
            )
    points.sort(key=lambda p: (p.broadcast_steps, p.staleness, p.kappa, p.chosen, p.workers))
    if options.picture:
        from benchmarks.overlap_picture import draw

        draw([asdict(point) for point in points], ROLLOUTS, options.picture)
    bubble_at_target, agrees = agreement(points)
    _print(points)
    print(
        json.dumps(
            {
                "overlap": {
                    "points": [asdict(point) for point in points],
                    "bubble_at_target": bubble_at_target,
                    "agrees": agrees,
                },
                "seconds": time.monotonic() - started,
            }
        )
    )
    sys.stdout.flush()


if __name__ == "__main__":
    main()
