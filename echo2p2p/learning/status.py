"""What a learner says of its run: its record in the table, and what it answers when somebody asks how it goes.

But for the record's state, which tells workers that the run is over, nothing depends on it.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Sequence

import msgspec

from echo2p2p._version import __version__
from echo2p2p.errors import SwarmError
from echo2p2p.learning.dispatcher import Dispatcher
from echo2p2p.learning.provisioner import Provisioner
from echo2p2p.learning.sessions import Session
from echo2p2p.provisioning.estimators import RateEstimator
from echo2p2p.settings import Settings
from echo2p2p.swarm.identity import PeerId
from echo2p2p.swarm.messages import protocol_id, receive, send
from echo2p2p.swarm.network import Network, Stream
from echo2p2p.swarm.records import MAX_ADDRESSES, Keys, LearnerRecord

STATUS_PROTOCOL = "status"
MAX_STATUS_BYTES = 4 * 2**20
MAX_WORKERS_LISTED = 10_000
MAX_GONE_KEPT = 256
"""Workers that have left and are still shown to people who look."""


class WorkerStatus(msgspec.Struct, frozen=True):
    """One worker as its learner sees it.

    ``mu`` in rollouts a second; ``mu_source`` says how far to believe it: measured from what was delivered, or a
    prior, announced by the worker or assumed by the learner. ``accepted`` and ``refused`` count groups in the
    present session; ``gone_s`` is how long ago it left, or None while it is there.
    """

    peer: PeerId
    state: str
    version: int
    mu: float
    price_per_hour: float
    accepted: int
    refused: int
    gone_s: float | None = None
    mu_source: str = ""


class RunStatus(msgspec.Struct, frozen=True):
    """A run as its learner sees it.

    ``dropped`` counts groups by reason, ``published_for`` versions by why they were published. ``divergence``: how
    far the learner's policy is from the published one, nats per token; None if that is not known yet.
    """

    run: str
    step: int
    published_version: int
    active_workers: int
    mu_pool: float
    mu_target: float
    spend_per_hour: float
    buffered: int
    leased: int
    bubble_ratio: float
    spend_usd: float
    dropped: dict[str, int]
    workers: list[WorkerStatus]
    divergence: float | None = None
    published_for: dict[str, int] = {}


def learner_record(
    settings: Settings, dispatcher: Dispatcher, provisioner: Provisioner, life: str, addresses: Sequence[str]
) -> LearnerRecord:
    """What the learner leaves in the table; ``life`` is running, stopped or finished."""
    options = settings.learner
    return LearnerRecord(
        task=settings.task.name,
        mode=options.mode,
        staleness=options.staleness,
        kappa=options.publication_period,
        step=dispatcher.version,
        max_steps=options.steps,
        published_version=dispatcher.published,
        state=life,
        active_workers=provisioner.n_active,
        mu_pool=min(provisioner.mu_pool, 1e9),
        mu_target=min(provisioner.mu_target, 1e9),
        spend_per_hour=min(provisioner.spend_per_hour, 1e9),
        software=__version__,
        addresses=tuple(addresses[:MAX_ADDRESSES]),
    )


def worker_status(session: Session, mean_tokens: float) -> WorkerStatus:
    return WorkerStatus(
        session.peer,
        "active" if session.active else "standby",
        session.version,
        session.mu(mean_tokens),
        session.price_per_hour,
        session.accepted,
        session.refused,
        mu_source=session.mu_source,
    )


class Departed:
    """Workers that have left, the latest few: what they were, and what was measured of them."""

    def __init__(self) -> None:
        self._gone: dict[PeerId, tuple[WorkerStatus, float]] = {}
        self._rates: dict[PeerId, RateEstimator] = {}

    def left(self, session: Session, now: float, mean_tokens: float) -> None:
        """Its session has ended."""
        self._gone[session.peer] = (worker_status(session, mean_tokens), now)
        if session.rate is not None:
            self._rates[session.peer] = session.rate  # what was measured outlives the connection
        for kept in (self._gone, self._rates):
            while len(kept) > MAX_GONE_KEPT:
                del kept[next(iter(kept))]

    def rate(self, peer: PeerId) -> RateEstimator | None:
        """What was measured of a worker that is back."""
        return self._rates.pop(peer, None)

    def statuses(self, now: float, here: Container[PeerId]) -> list[WorkerStatus]:
        """Those that are not ``here``."""
        return [
            msgspec.structs.replace(status, gone_s=now - since)
            for peer, (status, since) in self._gone.items()
            if peer not in here
        ]


async def serve_status(network: Network, status: Callable[[], RunStatus]) -> None:
    """Answer every stream of the status protocol with one :class:`RunStatus`."""

    async def answer(stream: Stream) -> None:
        await send(stream, status())

    await network.handle(protocol_id(STATUS_PROTOCOL), answer)


async def ask_status(network: Network, keys: Keys, *, timeout_s: float) -> RunStatus:
    """Ask the learner of a run how it goes.

    Raises:
        PeerUnreachable, DeadlineExceeded: it does not answer.
        SwarmError: it runs another run.
    """
    stream = await network.open_stream(keys.learner_id, protocol_id(STATUS_PROTOCOL), timeout_s=timeout_s)
    try:
        answer: RunStatus = await receive(stream, RunStatus, max_bytes=MAX_STATUS_BYTES, timeout_s=timeout_s)
        if answer.run != keys.run:
            raise SwarmError(f"the learner runs {answer.run}, not {keys.run}")
        return answer
    finally:
        await stream.close()
