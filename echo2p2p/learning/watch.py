"""What a learner looks at beside its training: whether workers send what they say, and whether its policy breaks."""

from __future__ import annotations

import logging
import random
from collections.abc import Mapping, Sequence
from typing import Any

from echo2p2p.errors import OutOfMemory
from echo2p2p.learning.audit import Auditor
from echo2p2p.learning.dispatcher import Dispatcher
from echo2p2p.learning.replay import Entry
from echo2p2p.learning.sessions import WorkSessions
from echo2p2p.learning.state import Trainer
from echo2p2p.settings import LearnerSettings
from echo2p2p.telemetry.events import EventLog

log = logging.getLogger("echo2p2p.learner")

FAR_KL = 0.5
"""KL(sampler ‖ learner), nats a token: hundreds of times what S versions are apart in a run that learns."""


class Watch:
    """Of one learner, step by step."""

    def __init__(
        self,
        settings: LearnerSettings,
        *,
        trainer: Trainer,
        sessions: WorkSessions,
        dispatcher: Dispatcher,
        events: EventLog,
    ) -> None:
        self._staleness = settings.staleness
        self._trainer = trainer
        self._sessions = sessions
        self._dispatcher = dispatcher
        self._events = events
        self._far = self._blind = False
        # What top_p cuts off would be missing in both tests.
        share = settings.audit_share if settings.top_p == 1 else 0.0
        self._auditor = Auditor(share=share, dice=random.SystemRandom())

    async def before(self, batch: Sequence[Entry]) -> None:
        """``batch`` is about to be trained: turn away whoever sends what was not drawn from the policy."""
        chosen = self._auditor.choose(batch)
        if not chosen:
            return
        try:
            readings = list(await self._trainer.read([entry.group for entry in chosen]))
            witnesses = self._auditor.witnesses(batch, chosen, readings)
            if witnesses:
                readings += await self._trainer.read([entry.group for entry in witnesses])
        except OutOfMemory as error:
            if not self._blind:
                self._blind = True
                log.warning("workers are not audited: %s; lower learner.optimizer.micro_batch_tokens", error)
            return
        found = self._auditor.judge([*chosen, *witnesses], readings, present=self._sessions.open)
        for worker, reason in found.items():
            log.warning("worker %s is turned away: %s", worker, reason)
            self._events.emit("found_out", worker=worker, reason=reason)
            self._sessions.ban(worker, reason)
            self._dispatcher.discard(worker)

    def after(self, step: int, metrics: Mapping[str, Any]) -> None:
        """``step`` was trained, with ``metrics`` of :class:`~echo2p2p.learning.metrics.StepMetrics`.

        Says once that the policy has run away from its samples, until it is back.
        """
        mismatch_kl = float(metrics.get("mismatch_kl", 0.0))
        # Around one bound it would be said at every other step; and a worker that makes log-probabilities up moves
        # the mean as well, which is another matter.
        far = mismatch_kl > (FAR_KL / 5 if self._far else FAR_KL) and self._auditor.far is not False
        if far and not self._far:
            log.warning(
                "step %d: the policy is %.2g nats a token away from the one that its samples were drawn from, at "
                "most %d versions ago: it has probably broken. Resume from a checkpoint before this step, with a "
                "lower learner.optimizer.learning_rate or a higher kl_beta",
                step,
                mismatch_kl,
                self._staleness,
            )
        self._far = far
