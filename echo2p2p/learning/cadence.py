"""When a policy version is published: every κ steps, or as soon as the policy has moved far enough. Pure.

Guarantees, whatever was measured and whatever workers report:

* a version is published at the latest after :func:`latest` steps, from which on work that is leased now could be
  older than S when it is trained;
* and never before the broadcast of the one before can have ended, unless that bound asks for it. Every κ steps means
  every few steps more where broadcasts take longer than κ.

How far the policy has moved is not measured anew: each step knows the KL divergence between the policy that sampled
its tokens and the learner's, and how many versions lie between the two. Over a few steps it grows as their square.
"""

from __future__ import annotations

from echo2p2p.provisioning.capacity import arriving_kappa, min_kappa
from echo2p2p.settings import LearnerSettings

WEIGHT = 0.3
"""Of the newest step in the moving mean of the drift."""


def latest(
    *,
    staleness: int,
    kappa: int | None,
    t_train_s: float,
    t_bcast_s: float,
    rollouts: int,
    mu_pool: float,
    t_work_s: float = 0.0,
) -> int:
    """Steps after which a version is published at the latest: the longest publication period that keeps Δ_cons ≤ S.

    Δ_cons = κ + ⌈lag / T_train⌉ − 1 with lag = T_bcast + T_work/2 + R/μ, so κ ≤ S + 1 − ⌈lag / T_train⌉; at least 1,
    and no more than ``kappa`` where one is set.
    """
    if mu_pool <= 0:
        return 1
    lag_s = t_bcast_s + t_work_s / 2 + rollouts / mu_pool
    whole, rest = divmod(min(lag_s / t_train_s, float(staleness)), 1)
    longest = max(1, staleness + 1 - int(whole) - (rest > 1e-9))
    return min(longest, max(1, staleness), kappa or longest)


def due(*, steps: int, earliest: int, latest: int, divergence: float | None, bound: float) -> str:
    """Why to publish now, or nothing.

    Args:
        steps: since the last publication.
        earliest, latest: steps, at least 1.
        divergence: nats per token from what was published last; None if that is not known.
        bound: of the divergence.
    """
    if steps >= latest:
        return "window"
    if steps >= earliest and divergence is not None and divergence > bound:
        return "divergence"
    return ""


class Cadence:
    """Follows one run's steps and says when the next version is due.

    Args:
        version: the version that the run begins or goes on with; it is published first.
    """

    def __init__(self, settings: LearnerSettings, version: int) -> None:
        self._settings = settings
        self._published = version
        self._drift: float | None = None

    def published(self, version: int) -> None:
        """``version`` goes out now."""
        self._published = version

    def stepped(self, *, mismatch_kl: float | None, square_age: float) -> None:
        """A step was trained on tokens that were sampled from policies at such a distance.

        Args:
            mismatch_kl: nats per token, mean over its tokens; None if it trained none.
            square_age: their age in versions, squared, mean over its tokens.
        """
        if mismatch_kl is None or square_age <= 0:
            return  # tokens of the learner's own version tell what numerics amount to, and no drift
        drift = max(0.0, mismatch_kl) / square_age
        self._drift = drift if self._drift is None else self._drift + WEIGHT * (drift - self._drift)

    def divergence(self, version: int) -> float | None:
        """KL(published ‖ ``version``) in nats per token, as far as steps have told; None before any has."""
        return None if self._drift is None else self._drift * (version - self._published) ** 2

    def due(
        self, version: int, *, t_train_s: float, t_bcast_s: float, mu_pool: float, t_work_s: float = 0.0
    ) -> str:
        """Why ``version`` is to be published now: ``period``, ``divergence`` or ``window``; empty if it is not."""
        settings = self._settings
        steps = version - self._published
        if settings.is_sequential:
            return "period" if steps >= settings.publication_period else ""
        if settings.publish == "period":
            kappa = arriving_kappa(
                settings.publication_period,
                staleness=settings.staleness,
                t_train_s=t_train_s,
                t_bcast_s=t_bcast_s,
            )
            return "period" if steps >= kappa else ""
        return due(
            steps=steps,
            earliest=min_kappa(t_train_s=t_train_s, t_bcast_s=t_bcast_s),
            latest=latest(
                staleness=settings.staleness,
                kappa=settings.kappa,
                t_train_s=t_train_s,
                t_bcast_s=t_bcast_s,
                t_work_s=t_work_s,
                rollouts=settings.rollouts_per_step,
                mu_pool=mu_pool,
            ),
            divergence=self.divergence(version),
            bound=settings.publish_divergence,
        )
