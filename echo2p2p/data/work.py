"""What a worker and the learner say to each other over a work session.

A worker dials the learner and keeps one stream open; nobody needs to reach the worker, so it may stand
behind a NAT. The learner leases groups of prompts on it, the worker sends finished groups back, and every
group gets a verdict. Durations are durations, never clock times.

A session::

    worker → Join                              learner → Welcome | Goodbye
    learner → Activate, Head, Lease …          worker → Ready, Submit, Beat …
    learner → Verdict per group, Standby       either side ends the stream
"""

from __future__ import annotations

from typing import Annotated

import msgspec
from msgspec import Meta

from echo2p2p.data.trajectory import Group, Sampling
from echo2p2p.swarm.messages import PROTOCOL_VERSION
from echo2p2p.swarm.records import NonNegative, TaskName, Version

WORK_PROTOCOL = "work"
MAX_ARRIVALS = 64
"""Moments of its fetch that a worker reports."""
MIN_ARRIVALS = 8
SHARED_ARRIVALS = 2048
"""As many for all members of a version together, unless :data:`MIN_ARRIVALS` for each are more."""
MAX_SOURCES = 4096

Count = Annotated[int, Meta(ge=0, le=2**53)]
Text = Annotated[str, Meta(max_length=512)]
Fingerprint = Annotated[str, Meta(pattern=r"^[0-9a-f]{64}\Z")]


class Stage(msgspec.Struct, frozen=True):
    """From prompt ``start`` on, these task options are others."""

    start: Count
    options: dict[str, str | int | float | bool]


class TaskSpec(msgspec.Struct, frozen=True):
    """Which task the run trains on; enough to build it with :func:`echo2p2p.data.chosen.build`.

    Attributes:
        name: of a registered task, or ``module:Factory``.
        stages: of the curriculum, after the first, for which ``options`` alone hold.
        reward: the function of the reward of one's own; empty for the task's.
        chat_template: whether prompts are wrapped with the tokenizer's chat template.
        pins: what both sides must hold alike, such as the digest of a file or the release of a library, by its name.
    """

    name: TaskName
    seed: Count
    options: dict[str, str | int | float | bool]
    stages: Annotated[list[Stage], Meta(max_length=64)] = []
    reward: Annotated[str, Meta(max_length=128)] = ""
    chat_template: bool = False
    pins: dict[Annotated[str, Meta(max_length=64)], Annotated[str, Meta(max_length=128)]] = {}


# --- worker → learner -------------------------------------------------------------------------------


class Join(msgspec.Struct, frozen=True, tag="join"):
    """First message of a session.

    ``advert`` is the worker's sealed advert, as it stands in the table; ``version`` and ``fingerprint`` are of the
    weights that it holds from an earlier session (−1 and empty: none).
    """

    run: Annotated[str, Meta(max_length=130)]
    protocol: Count
    advert: Annotated[bytes, Meta(max_length=4096)]
    version: Version
    fingerprint: Annotated[str, Meta(pattern=r"^([0-9a-f]{64})?\Z")]


class Advertise(msgspec.Struct, frozen=True, tag="advertise"):
    """The worker's advert has changed (a new price, a new speed)."""

    advert: Annotated[bytes, Meta(max_length=4096)]


class Ready(msgspec.Struct, frozen=True, tag="ready"):
    """The worker has installed ``version``, has read it back, and generates with it.

    ``bytes_from_learner`` and ``bytes_from_peers`` are chunk bytes fetched for this version; ``fetch_s`` is
    from its announcement to the last chunk, ``pause_s`` how long generation stood still for the swap.

    ``arrivals`` and ``sources`` are for pictures alone: milliseconds since the announcement with the bytes from
    the learner and from peers by then; and the bytes from each member, in the order of the manifest.
    """

    version: Version
    fingerprint: Fingerprint
    bytes_from_learner: Count
    bytes_from_peers: Count
    fetch_s: NonNegative
    pause_s: NonNegative
    arrivals: Annotated[list[tuple[Count, Count, Count]], Meta(max_length=MAX_ARRIVALS)] = []
    sources: Annotated[list[Count], Meta(max_length=MAX_SOURCES)] = []


def arrivals_reported(n_members: int) -> int:
    """How many moments each of ``n_members`` reports, so that the log of a large swarm stays small."""
    return max(MIN_ARRIVALS, min(MAX_ARRIVALS, SHARED_ARRIVALS // max(1, n_members)))


class Submit(msgspec.Struct, frozen=True, tag="submit"):
    """One finished group of a lease."""

    lease: Count
    group: Group


class Decline(msgspec.Struct, frozen=True, tag="decline"):
    """The worker will not finish these prompts of a lease; they may go to somebody else at once."""

    lease: Count
    indices: Annotated[list[Count], Meta(max_length=65536)]
    reason: Text


class Beat(msgspec.Struct, frozen=True, tag="beat"):
    """A sign of life. ``queued`` counts groups that are leased and not yet submitted."""

    version: Version
    queued: Count


FromWorker = Join | Advertise | Ready | Submit | Decline | Beat


# --- learner → worker -------------------------------------------------------------------------------


class Welcome(msgspec.Struct, frozen=True, tag="welcome"):
    """The session stands.

    ``beat_period_s``: send a sign of life at least this often. ``version``: the version that the learner takes
    this worker to hold, −1 if it does not know the weights that the worker named: then they count for nothing.
    """

    task: TaskSpec
    version: Version
    beat_period_s: Annotated[float, Meta(gt=0, le=3600)]


class Goodbye(msgspec.Struct, frozen=True, tag="goodbye"):
    """The session ends. ``retry`` says whether it makes sense to come back; ``protocol`` is the learner's."""

    reason: Text
    retry: bool
    protocol: Count = PROTOCOL_VERSION


class Activate(msgspec.Struct, frozen=True, tag="activate"):
    """The worker is paid from now on: it follows new versions, and leases will come."""


class Standby(msgspec.Struct, frozen=True, tag="standby"):
    """The worker is no longer paid. It may finish its leases and then waits."""


class Alive(msgspec.Struct, frozen=True, tag="alive"):
    """Answers a beat: the learner is there, even if it has no work for this worker."""


class Head(msgspec.Struct, frozen=True, tag="head"):
    """The newest published version: the learner's sealed manifest record."""

    record: Annotated[bytes, Meta(max_length=4096)]


class Lease(msgspec.Struct, frozen=True, tag="lease"):
    """Prompts to roll out.

    Attributes:
        indices: prompt indices; one group each.
        n_samples: samples a prompt.
        min_version: the oldest policy version that may generate them.
        duration_s: how long they are this worker's alone, from receipt.
    """

    lease: Count
    indices: Annotated[list[Count], Meta(min_length=1, max_length=65536)]
    n_samples: Annotated[int, Meta(ge=1, le=4096)]
    sampling: Sampling
    min_version: Version
    duration_s: Annotated[float, Meta(gt=0, le=86400)]


class Verdict(msgspec.Struct, frozen=True, tag="verdict"):
    """What became of a submitted group; ``reason`` is empty if it was accepted."""

    lease: Count
    index: Count
    reason: Text


FromLearner = Welcome | Goodbye | Activate | Standby | Alive | Head | Lease | Verdict
