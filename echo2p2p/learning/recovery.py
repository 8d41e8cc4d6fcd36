"""What the learner does about weights that must not be published: it goes on from the last good ones.

Weights that the gate (:mod:`echo2p2p.weights.gate`) refuses are never on the disk, in a manifest or under an
evaluation. Policy, optimizer and books go back to the last checkpoint, which is that of the last good version;
it is published again under a number that nobody has seen, and the prompts that were trained since are leased
anew. So the run neither ends for one bad batch nor trains on for ever on NaN. What goes wrong again and again
ends the run, with an error that names the tensor.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable

import msgspec

from echo2p2p.errors import OutOfDisk, UnsoundWeights
from echo2p2p.learning.dispatcher import Dispatcher
from echo2p2p.learning.ledger import LedgerState, PromptLedger
from echo2p2p.learning.publication import Publication
from echo2p2p.learning.state import Capture, LearnerState, Trainer
from echo2p2p.telemetry.events import EventLog
from echo2p2p.weights.snapshot import Snapshot

log = logging.getLogger("echo2p2p.learner")


class Recovery:
    """Publishes what the learner trained, and goes back when that may not be published.

    Args:
        capture: takes everything of the version as it is now; only called between two steps.
        stop: set when the learner is to end, which no full disk holds up.
        limit: times in a row that the last good weights take the place of unsound ones.

    Attributes:
        needed: set once weights were refused, until :meth:`roll_forward`.
    """

    def __init__(
        self,
        *,
        trainer: Trainer,
        ledger: PromptLedger,
        dispatcher: Dispatcher,
        publication: Publication,
        capture: Callable[[], Awaitable[Capture]],
        stop: asyncio.Event,
        events: EventLog,
        limit: int,
    ) -> None:
        self._trainer = trainer
        self._ledger = ledger
        self._dispatcher = dispatcher
        self._publication = publication
        self._capture = capture
        self._stop = stop
        self._events = events
        self._limit = limit
        self._in_a_row = 0
        self._reason: UnsoundWeights | None = None
        self.needed = asyncio.Event()

    async def publish(self, capture: Capture, *, why: str, trained: bool = True) -> None:
        """Publish a version, or note that it must not be.

        Args:
            why: for the log: period, divergence, window, end or recovery.
            trained: False for good weights that were published before; they do not end a row of bad ones.

        Raises:
            OutOfDisk: there is no room, and no waiting for it; never once the learner is to stop.
        """
        try:
            await self._publication.publish(capture, why=why)
        except UnsoundWeights as error:
            self._refuse(capture.version, error)
        except OutOfDisk as error:
            if not self._stop.is_set():
                raise
            log.error("version %d is not published, for there is no room: %s", capture.version, error)
        else:
            if trained:
                self._in_a_row = 0

    async def checkpoint(self, capture: Capture) -> OutOfDisk | None:
        """Write a last checkpoint, unless the weights are unsound; returns why there was no room for it, if so."""
        try:
            await self._publication.checkpoint(capture)
        except UnsoundWeights as error:
            self._refuse(capture.version, error)
        except OutOfDisk as error:
            return error
        return None

    async def is_sound(self, snapshot: Snapshot, version: int) -> bool:
        """Whether these weights could be published; if not, that is noted."""
        try:
            await self._publication.check(snapshot)
        except UnsoundWeights as error:
            self._refuse(version, error)
            return False
        return True

    async def roll_forward(self) -> None:
        """Go on from the last good weights, as a new version. Between two steps, with nothing being published.

        Raises:
            UnsoundWeights: that was done too often in a row.
            VerificationError: the last checkpoint is damaged.
            OutOfDisk: as :meth:`publish`.
        """
        reason = self._reason or UnsoundWeights("the weights are unsound")
        if self._in_a_row >= self._limit:
            raise UnsoundWeights(
                f"{self._in_a_row + 1} times in a row the weights were not fit to be published, the last time: "
                f"{reason.message}",
                hint=reason.hint,
            )
        self._in_a_row += 1
        good = self._publication.saved
        books = msgspec.msgpack.decode(await self._trainer.go_back(good), type=LearnerState)
        returned = self._ledger.go_back(LedgerState(books.frontier, books.beyond))
        bad = self._dispatcher.version
        self._dispatcher.version += 1
        self._reason = None
        self.needed.clear()
        self._events.emit(
            "rolled_forward",
            version=self._dispatcher.version,
            good_version=good,
            prompts=returned,
            in_a_row=self._in_a_row,
        )
        log.warning(
            "steps %d to %d are undone: the run goes on from version %d as version %d, optimizer included, and "
            "%d prompts are leased again",
            good + 1,
            bad,
            good,
            self._dispatcher.version,
            returned,
        )
        await self.publish(await self._capture(), why="recovery", trained=False)

    def _refuse(self, version: int, error: UnsoundWeights) -> None:
        self._reason = error
        self.needed.set()
        self._events.emit("withheld", version=version, reason=error.message)
        log.error("version %d is not published: %s", version, error)
