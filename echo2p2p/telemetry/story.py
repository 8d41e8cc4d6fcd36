"""One line for a person about one event. The text is cleaned: it can be shown anywhere, after escaping."""

from __future__ import annotations

import math
from collections.abc import Callable

from echo2p2p.telemetry.events import Event
from echo2p2p.telemetry.text import clean, human_seconds, human_usd, short_peer
from echo2p2p.telemetry.values import number


def tell(event: Event) -> str | None:
    """What happened, in one line; None for kinds that are figures rather than news."""
    teller = _TELLERS.get(str(event.get("event")))
    return teller(event) if teller else None


def _run_started(event: Event) -> str:
    resumed = event.get("resumed_from")
    return "run started" if resumed is None else f"run resumed from step {clean(resumed)}"


def _worker_joined(event: Event) -> str:
    price = number(event.get("price_per_hour"))
    at = "" if math.isnan(price) else f" at {human_usd(price)}/h"
    return f"{short_peer(event.get('worker'))} joined: {clean(event.get('gpu') or 'no GPU named')}{at}"


def _worker_left(event: Event) -> str:
    return f"{short_peer(event.get('worker'))} left: {clean(event.get('reason') or 'no reason given', 100)}"


def _activation(event: Event) -> str:
    active = event.get("active")
    count = len(active) if isinstance(active, list) else 0
    workers = "1 active worker" if count == 1 else f"{count} active workers"
    short = "" if event.get("feasible") is not False else "; all together cannot reach the target"
    reason = clean(event.get("reason"), 100)
    return workers + short + (f" ({reason})" if reason else "")


def _step(event: Event) -> str:
    return f"the policy did not move at step {clean(event.get('step'))}: {clean(event.get('skipped'))}"


def _eval(event: Event) -> str:
    reward = number(event.get("reward"))
    return f"held-out reward {reward:.3f} after step {clean(event.get('step'))}"


def _refused(event: Event) -> str:
    return f"refused a group of {short_peer(event.get('worker'))}: {clean(event.get('reason'), 100)}"


def _run_finished(event: Event) -> str:
    how = "stopped" if event.get("finished") is False else "finished"
    return f"run {how} after {clean(event.get('steps'))} steps"


def _events_lost(event: Event) -> str:
    return f"{clean(event.get('count'))} events of {short_peer(event.get('peer'))} could not be written"


def _session(event: Event) -> str:
    state, reason = clean(event.get("state")), clean(event.get("reason"), 200)
    told = {"open": "session with the learner is open", "lost": "no session with the learner, dialling again"}
    return told.get(state, f"session {state}") + (f": {reason}" if reason else "")


def _state(event: Event) -> str:
    told = {
        "active": "active: paid from now on",
        "standby": "on standby, unpaid",
        "stale": "no fresh word of the learner: nothing is rolled out until one comes",
    }
    state = clean(event.get("state"))
    return told.get(state, state)


def _installed(event: Event) -> str:
    fetched = number(event.get("fetch_s"))
    took = "" if math.isnan(fetched) else f", fetched in {human_seconds(fetched)}"
    patches = number(event.get("patches"))
    return f"version {clean(event.get('version'))} installed{took}{_way(patches)}"


def _way(patches: float) -> str:
    if math.isnan(patches):
        return ""
    if patches < 1:
        return ", whole"
    return ", by one patch" if patches == 1 else f", by {patches:.0f} patches"


def _found_out(event: Event) -> str:
    return f"{short_peer(event.get('worker'))} is turned away: {clean(event.get('reason'), 200)}"


def _withheld(event: Event) -> str:
    return f"version {clean(event.get('version'))} is not published: {clean(event.get('reason'), 200)}"


def _rolled_forward(event: Event) -> str:
    good, version = clean(event.get("good_version")), clean(event.get("version"))
    return f"went on from the weights of version {good} as version {version}"


def _disk_full(event: Event) -> str:
    return (
        f"version {clean(event.get('version'))} waits for room on the disk: {clean(event.get('reason'), 200)}"
    )


def _disk_has_room(event: Event) -> str:
    return f"there is room on the disk again after {human_seconds(number(event.get('waited_s')))}"


def _version_refused(event: Event) -> str:
    return f"version {clean(event.get('version'))} is not installed: {clean(event.get('reason'), 200)}"


_TELLERS: dict[str, Callable[[Event], str]] = {
    "run_started": _run_started,
    "worker_joined": _worker_joined,
    "worker_left": _worker_left,
    "activation": _activation,
    "step": _step,
    "eval": _eval,
    "refused": _refused,
    "run_finished": _run_finished,
    "events_lost": _events_lost,
    "session": _session,
    "state": _state,
    "installed": _installed,
    "found_out": _found_out,
    "withheld": _withheld,
    "rolled_forward": _rolled_forward,
    "disk_full": _disk_full,
    "disk_has_room": _disk_has_room,
    "version_refused": _version_refused,
}
