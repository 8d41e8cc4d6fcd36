"""One dissemination in detail: when each worker's bytes of one policy version came, and who sent them.

The workers' own reports are all there is to it; a report that makes no sense is left out.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from echo2p2p.errors import SettingsError
from echo2p2p.telemetry.events import Event, read_events
from echo2p2p.telemetry.state import Version
from echo2p2p.telemetry.values import amount, number, whole

MAX_POINTS = 256
"""A longer list of arrivals is no worker's."""


@dataclass(frozen=True)
class Receipt:
    """One worker's fetch; the arrays have the shape (n,), n ≥ 1, and hold cumulative bytes.

    Attributes:
        ready_s: until it was Ready, since the start of the publication; NaN if the log does not say.
        times_s: of the arrivals, since the start of the publication, ascending.
    """

    worker: str
    ready_s: float
    times_s: np.ndarray
    from_learner: np.ndarray
    from_peers: np.ndarray

    @property
    def nbytes(self) -> float:
        return float(self.from_learner[-1] + self.from_peers[-1])


@dataclass(frozen=True)
class Dissemination:
    """How one version travelled.

    Attributes:
        chosen: why it is this version that is shown, in a few words; empty where that goes without saying.
        announced_s: when the workers were told, since the start of the publication.
        t_bcast_s: NaN if it never ended.
        copy_bytes: what a worker needs that holds the version before: the patch, or the whole; NaN: not known.
        receipts: by the time of their last arrival, ascending.
        from_learner: chunk bytes that the learner sent.
        sent: chunk bytes that each worker sent to others; None if the log does not say.
    """

    version: int
    chosen: str
    announced_s: float
    t_bcast_s: float
    copy_bytes: float
    patched: bool
    receipts: tuple[Receipt, ...]
    from_learner: float
    sent: Mapping[str, float] | None

    @property
    def from_peers(self) -> float:
        return sum(float(receipt.from_peers[-1]) for receipt in self.receipts)


def choose_version(versions: Mapping[int, Version], wanted: int | None = None) -> tuple[int, str] | None:
    """Which version to show, and why: ``wanted``, or the one of median T_bcast; None if no log has arrivals.

    Raises:
        SettingsError: there is nothing to show of the version that is wanted.
    """
    shown = [version for version in versions.values() if version.reports]
    if wanted is not None:
        if not any(version.version == wanted for version in shown):
            numbers = sorted(version.version for version in shown)
            raise SettingsError(
                f"the log has no arrivals of version {wanted}",
                hint=f"it has them of {len(numbers)} versions, from {numbers[0]} to {numbers[-1]}"
                if numbers
                else "nor of any other version",
            )
        return wanted, ""
    timed = sorted((v.t_bcast_s, v.version) for v in shown if not math.isnan(v.t_bcast_s))
    if timed:
        which = f"median T_bcast of {len(timed)}" if len(timed) > 1 else ""
        return timed[(len(timed) - 1) // 2][1], which
    return (max(version.version for version in shown), "newest") if shown else None


def read_dissemination(learner: Path, version: int, chosen: str) -> Dissemination | None:
    """``version`` as the learner's log tells it; None if no report in it makes sense.

    Raises:
        SettingsError: the log cannot be read.
    """
    return gather(read_events(learner), version, chosen)


def gather(events: Iterable[Event], version: int, chosen: str) -> Dissemination | None:
    """:func:`read_dissemination` of events that are at hand, in order.

    A learner that is started again may publish the version once more, to few or none: the publication with the
    most reports counts.
    """
    lives: list[list[Event]] = [[]]
    for event in events:
        if event.get("role") != "learner" or whole(event.get("version")) != version:
            continue
        if event["event"] == "published":
            lives.append([])
        if event["event"] in ("published", "ready", "broadcast", "relayed"):
            lives[-1].append(event)
    found = [each for life in lives if (each := _of_one_publication(life, version, chosen)) is not None]
    return max(reversed(found), key=lambda each: len(each.receipts), default=None)


def _of_one_publication(events: list[Event], version: int, chosen: str) -> Dissemination | None:
    by_kind: dict[str, Event] = {event["event"]: event for event in events}
    published, relayed = by_kind.get("published", {}), by_kind.get("relayed")
    announced_s = amount(published.get("prepare_s"))
    receipts: dict[str, Receipt] = {}
    for event in events:
        receipt = _receipt(event, announced_s) if event["event"] == "ready" else None
        if receipt is not None:
            receipts[receipt.worker] = receipt
    if not receipts:
        return None
    patch_bytes = amount(published.get("patch_bytes"))
    from_learner = sum(float(receipt.from_learner[-1]) for receipt in receipts.values())
    return Dissemination(
        version=version,
        chosen=chosen,
        announced_s=announced_s,
        t_bcast_s=number(by_kind.get("broadcast", {}).get("t_bcast_s")),
        copy_bytes=patch_bytes or number(published.get("snapshot_bytes")),
        patched=patch_bytes > 0,
        receipts=tuple(sorted(receipts.values(), key=lambda each: (each.times_s[-1], each.worker))),
        from_learner=from_learner if relayed is None else amount(relayed.get("from_learner")),
        sent=None if relayed is None else _sent(relayed.get("sent")),
    )


def _receipt(event: Event, announced_s: float) -> Receipt | None:
    points = event.get("arrivals")
    if not isinstance(points, list) or not 0 < len(points) <= MAX_POINTS:
        return None
    if not all(isinstance(point, list) and len(point) == 3 for point in points):
        return None
    table = np.array([[number(value) for value in point] for point in points])
    if not np.isfinite(table).all() or (table < 0).any() or (np.diff(table, axis=0) < 0).any():
        return None
    times_s, ready_s = announced_s + table[:, 0] / 1000, number(event.get("after_s"))
    # A worker that says that its bytes came after it was Ready would stretch everybody's axis as it likes.
    if table[-1, 1:].sum() <= 0 or times_s[-1] > 1.1 * ready_s + 1.0:
        return None
    return Receipt(
        worker=str(event.get("worker")),
        ready_s=ready_s,
        times_s=times_s,
        from_learner=table[:, 1],
        from_peers=table[:, 2],
    )


def _sent(value: Any) -> dict[str, float]:
    return {str(peer): amount(nbytes) for peer, nbytes in value.items()} if isinstance(value, dict) else {}
