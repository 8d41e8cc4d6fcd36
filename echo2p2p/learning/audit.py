"""Whether what a worker sends was drawn from the policy, as it says. Pure; ``docs/decisions/0017`` has the reasons.

The learner chooses some groups by lot, before it has trained on them, and reads them with its own policy π. Let q be
what a worker's tokens were drawn from, by its own word: an older version, other kernels, another precision. If that
word is true then, whatever q is and whatever came before a token,

* E[ρ] = 1, with ρ = π/q its importance weight;
* E[ρ · (−ln π − H)] = 0, with H the entropy of π there: weighted so, it is as surprising as a token of π should be.

So the means over a worker's tokens tell log-probabilities that are not those of its tokens (the first), and tokens
that were chosen and not drawn: greedy, at another temperature, of another model (the second). Staleness and rounding
move neither. A few tokens said to be next to impossible, with a ρ beyond 100, would hide the rest in the errors of
both means: so the second is looked at without large ρ as well, more leniently. Who computes what it should have drawn
from can make up a lie that fits all; that costs a prefill.
"""

from __future__ import annotations

import logging
import math
import random
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, fields

from echo2p2p.learning.replay import Entry
from echo2p2p.swarm.identity import PeerId

log = logging.getLogger("echo2p2p.learner")

ENOUGH_TOKENS = 2000
"""With fewer nobody is judged."""
NEW_TOKENS = 2500
"""The first of every worker are read in any case."""
KEPT_TOKENS = 20_000.0
"""Older ones fade, so that a worker that begins to lie is found out by what it does now."""
DEVIATIONS = 6.0
"""Standard errors that a mean has to be off by, which chance does not come to."""
RATIO_OFF = 0.02
"""And by so much of ρ: tokens that q never draws, and π would, are missing in a mean of few thousand."""
SURPRISE_OFF = 0.08
"""And by so many nats."""
BOUNDED_OFF = 0.2
"""The same where no ρ is large: the mean is then not quite 0 for the honest, and cannot drown in its own error."""
TOO_FAR_KL = 0.3
"""Where the middle worker's tokens are so far from π, nats each (the nearer of two), ρ says nothing of anybody."""
_MAX_WORKERS = 4096


@dataclass(frozen=True)
class Reading:
    """Sums over the tokens of one group, as the policy reads them.

    Attributes:
        tokens: how many the model drew.
        ratio, ratio_squares: of ρ − 1 and its square.
        surprise, surprise_squares: of ρ · (−ln π − H) and its square, nats.
        distance: of the k3 estimate of KL(q ‖ π), nats.
        bounded, bounded_squares: as ``surprise``, with a ρ of e² at most.
    """

    tokens: float = 0.0
    ratio: float = 0.0
    ratio_squares: float = 0.0
    surprise: float = 0.0
    surprise_squares: float = 0.0
    distance: float = 0.0
    bounded: float = 0.0
    bounded_squares: float = 0.0

    def __add__(self, other: Reading) -> Reading:
        return Reading(*(getattr(self, each.name) + getattr(other, each.name) for each in fields(self)))

    def faded(self) -> Reading:
        """With as much weight as :data:`KEPT_TOKENS`, if it has more."""
        share = min(1.0, KEPT_TOKENS / max(1.0, self.tokens))
        return Reading(*(share * getattr(self, each.name) for each in fields(self)))

    def fault(self) -> str:
        """What is wrong with them, in words; empty if nothing is, or too little is known."""
        if self.tokens < ENOUGH_TOKENS:
            return ""
        not_drawn = "its tokens are not drawn from the policy"
        tests = (
            (self.ratio, self.ratio_squares, RATIO_OFF, "its log-probabilities are not those of its tokens"),
            (self.surprise, self.surprise_squares, SURPRISE_OFF, not_drawn),
            (self.bounded, self.bounded_squares, BOUNDED_OFF, not_drawn),
        )
        failed = [
            (
                abs(total) / math.sqrt(squares),
                f"{what} (off by {total / self.tokens:+.2g}, {self.tokens:.0f} read)",
            )
            for total, squares, off, what in tests
            if abs(total) > max(off * self.tokens, DEVIATIONS * math.sqrt(squares))
        ]
        return max(failed, default=(0.0, ""))[1]


class Auditor:
    """Chooses what is read, and judges workers by what was.

    Args:
        share: of the groups that are read, 0 to 1; 0 reads none.
        dice: nobody else should know them.
    """

    def __init__(self, *, share: float, dice: random.Random) -> None:
        self._share = share
        self._dice = dice
        self._sent: dict[PeerId, int] = {}
        self._read: dict[PeerId, Reading] = {}
        self._told = False
        self.far: bool | None = None
        """Whether what was read last, of two workers or more, is too far from the policy; None if nothing was."""

    def choose(self, batch: Sequence[Entry]) -> list[Entry]:
        """The groups of ``batch`` to be read: whatever is in them, or what is found would depend on it."""
        chosen = []
        for entry in batch if self._share else ():
            sent = self._sent.pop(entry.worker, 0)
            self._sent[entry.worker] = sent + entry.group.n_tokens
            if self._dice.random() < self._share or sent < NEW_TOKENS:
                chosen.append(entry)
        _bound(self._sent)
        self.far = None
        return chosen

    def witnesses(
        self, batch: Sequence[Entry], chosen: Sequence[Entry], readings: Sequence[Reading]
    ) -> list[Entry]:
        """Groups of ``batch`` that are to be read as well before ``readings`` of ``chosen`` can be judged.

        Where the middle worker of those that were read is too far from the policy, others tell which of the two is:
        as many and one more, as far as ``batch`` has them, so that it can be the workers.
        """
        sums = _by_worker(chosen, readings)
        if not _is_too_far(sums.values()):
            return []
        others: dict[PeerId, list[Entry]] = {}
        for entry in batch:
            if entry.worker not in sums:
                others.setdefault(entry.worker, []).append(entry)
        picked = self._dice.sample(list(others), min(len(others), len(sums) + 1))
        return [self._dice.choice(others[worker]) for worker in picked]

    def judge(
        self,
        chosen: Sequence[Entry],
        readings: Sequence[Reading],
        *,
        present: Collection[PeerId] | None = None,
    ) -> dict[PeerId, str]:
        """Who is found out by ``readings`` of ``chosen``, and of what.

        Nobody is where half of the workers or more are at fault together, or the others taken together are: then it
        is the policy that has broken, or an engine that many of them run.

        Args:
            present: the workers that are there. What those were that have left says nothing of a policy that has
                broken since. None: all are.
        """
        new = _by_worker(chosen, readings)
        too_far = _is_too_far(new.values())
        self.far = too_far if len(new) > 1 else None
        if too_far:
            return {}
        for worker, reading in new.items():
            self._read[worker] = (self._read.pop(worker, Reading()) + reading).faded()
        _bound(self._read)
        here = {w: each for w, each in self._read.items() if present is None or w in present}
        found = {worker: fault for worker, each in here.items() if (fault := each.fault())}
        others = [each for worker, each in here.items() if worker not in found]
        together = sum(others, Reading())
        if len(found) < len(others) and together.tokens >= ENOUGH_TOKENS and not together.fault():
            for worker in found:
                del self._read[worker]
            return found
        if found and not self._told and all(each.tokens >= ENOUGH_TOKENS for each in here.values()):
            self._told = True
            log.warning(
                "%d of %d workers send what the policy would not: %s. With so many nobody is turned away; look at "
                "their engines, and at the learner's",
                len(found),
                len(here),
                next(iter(found.values())),
            )
        return {}


def _by_worker(chosen: Sequence[Entry], readings: Sequence[Reading]) -> dict[PeerId, Reading]:
    """The sums of each worker. What a policy that has broken says in NaN would spoil all that is added to it."""
    sums: dict[PeerId, Reading] = {}
    for entry, reading in zip(chosen, readings, strict=False):
        if reading.tokens and not math.isnan(reading.ratio + reading.surprise):
            sums[entry.worker] = sums.get(entry.worker, Reading()) + reading
    return sums


def _is_too_far(readings: Iterable[Reading]) -> bool:
    """Whether the middle worker is far from the policy; of two, whether both are."""
    distances = sorted(each.distance / each.tokens for each in readings)
    return bool(distances) and distances[(len(distances) - 1) // 2] > TOO_FAR_KL


def _bound(known: dict[PeerId, int] | dict[PeerId, Reading]) -> None:
    while len(known) > _MAX_WORKERS:
        del known[next(iter(known))]
