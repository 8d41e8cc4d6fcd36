"""Tells whoever runs a learner when its policy breaks: the figures of a step show it, and nobody reads them."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

log = logging.getLogger("echo2p2p.learner")

FAR_KL = 0.5
"""KL(sampler ‖ learner), nats a token: hundreds of times what S versions are apart in a run that learns."""


class PolicyWatch:
    """Reads the metrics of every step and says once what goes wrong, until it has gone right again.

    Args:
        staleness: S.
    """

    def __init__(self, staleness: int) -> None:
        self._staleness = staleness
        self._far = False

    def stepped(self, step: int, metrics: Mapping[str, Any]) -> None:
        """``step`` was trained, with ``metrics`` of :class:`~echo2p2p.learning.metrics.StepMetrics`."""
        mismatch_kl = float(metrics.get("mismatch_kl", 0.0))
        far = mismatch_kl > FAR_KL
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
