"""A version between its swap and its proof: it generates, and nobody is told of it yet."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from echo2p2p.data.trajectory import Group
from echo2p2p.data.work import MAX_ARRIVALS, Lease, Ready, arrivals_reported
from echo2p2p.errors import FingerprintMismatch
from echo2p2p.rollout.engine import InferenceEngine, Swap
from echo2p2p.swarm.clock import Clock
from echo2p2p.weights.subscriber import Fetched

MAX_SOURCES_LOGGED = 64


@dataclass(frozen=True)
class Prompt:
    """One leased prompt, and until when (monotonic seconds) it is this worker's."""

    lease: Lease
    index: int
    expires_at: float


@dataclass(frozen=True)
class Arrived:
    """A version that is staged; ``life`` counts the learner's lives, of which it belongs to one."""

    fetched: Fetched
    swap: Swap
    life: int

    @property
    def version(self) -> int:
        return self.fetched.manifest.version


@dataclass
class Trial:
    """The version that was swapped in last, until it is known whether the engine really holds it.

    Attributes:
        pause_s: how long generation has stood still for it.
        kept_back: groups that it generated, each with its prompt.
        refuted: the engine holds something else.
    """

    arrived: Arrived
    pause_s: float
    kept_back: list[tuple[Prompt, Group]] = field(default_factory=list)
    refuted: bool = False

    @property
    def published(self) -> str:
        """The fingerprint that the engine must have."""
        return self.arrived.fetched.manifest.fingerprint

    async def repair(self, engine: InferenceEngine, clock: Clock) -> None:
        """Write the whole of a version whose proof failed; generation stands still.

        Raises:
            FingerprintMismatch: that did not help.
            EngineError: neither did it for the engine, which has looked itself.
        """
        version = self.arrived.version
        started = clock.monotonic()
        fingerprint = await engine.install(self.arrived.fetched.snapshot, version)
        self.pause_s += clock.monotonic() - started
        if fingerprint != self.published:
            raise FingerprintMismatch(
                f"after installing version {version} the engine holds {fingerprint}, "
                f"the learner published {self.published}",
                hint="the engine changes weights on the way in; report it as a bug",
            )

    def ready(self) -> Ready:
        """What the learner is told once the engine is proven to hold it."""
        fetched = self.arrived.fetched
        members = [member.peer for member in fetched.manifest.members]
        return Ready(
            self.arrived.version,
            self.published,
            fetched.bytes_from_learner,
            fetched.bytes_from_peers,
            fetched.fetch_s,
            self.pause_s,
            fetched.timeline.points(arrivals_reported(len(members))),
            fetched.timeline.sent_by(members),
        )

    def costs(self) -> dict[str, Any]:
        """The fields of the event ``installed``."""
        fetched = self.arrived.fetched
        return {
            "version": self.arrived.version,
            "fetch_s": fetched.fetch_s,
            "pause_s": self.pause_s,
            "bytes_from_learner": fetched.bytes_from_learner,
            "bytes_from_peers": fetched.bytes_from_peers,
            "patches": fetched.patches,
            "arrivals": fetched.timeline.points(MAX_ARRIVALS),
            "sources": dict(fetched.timeline.by_source.most_common(MAX_SOURCES_LOGGED)),
        }
