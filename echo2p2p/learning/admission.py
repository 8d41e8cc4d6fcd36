"""What a worker's group must be before it may enter the replay buffer.

Pure. Size and schema are checked before this module sees anything (framing and msgspec types). The order
here is: who may send it, is it new, is it fresh, and only then, since it costs most, what is in it. Nothing
that a worker claims about its own work is believed where it can be computed.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from enum import StrEnum

import msgspec
import numpy as np

from echo2p2p.data.episode import is_replayed, score_sample
from echo2p2p.data.scoring import Scorer
from echo2p2p.data.trajectory import Group, Trajectory
from echo2p2p.errors import TaskError
from echo2p2p.learning.ledger import PromptLedger

REWARD_TOLERANCE = 1e-6
MIN_LOGPROB = -100.0
MAX_LOGPROB = 1e-4
"""A log-probability is at most 0; float32 rounding may lift it above by a little."""


class Refusal(StrEnum):
    """Why a group was not taken. The text goes back to the worker and into the counters."""

    NOT_LEASED = "not leased to the sender"
    DUPLICATE = "already delivered"
    STALE = "older than the window"
    UNPUBLISHED = "of a version that was never published"
    SAMPLES = "wrong number of samples"
    PROMPT = "not the prompt that was leased"
    TOKENS = "token ids out of range"
    LENGTH = "longer than allowed"
    LOGPROBS = "log-probabilities implausible"
    TURNS = "turns are not those of the task's environment"
    ENDING = "does not end where it says that it does"
    REWARD = "reward does not match its recomputation"
    UNPROVEN = "of a version that the sender has not proved to hold"
    OUTDATED = "of an older version than its lease asked for"
    TASK = "the task could not score it"
    COSTLY = "takes longer to score than its sender may ask for"
    FULL = "replay buffer full"


def check_claim(
    group: Group,
    *,
    lease: int,
    sender: str,
    ledger: PromptLedger,
    learner_version: int,
    proved: Collection[int],
    staleness: int,
) -> Refusal | None:
    """The cheap part: lease, duplicate, window.

    Args:
        sender: the authenticated peer at the other end of the stream.
        learner_version: v_t.
        proved: the published versions whose weights the sender has shown to hold.
        staleness: S.
    """
    if ledger.holder(lease, group.index) != sender:
        return Refusal.DUPLICATE if ledger.is_settled(group.index) else Refusal.NOT_LEASED
    if group.version < learner_version - staleness:
        return Refusal.STALE
    if any(s.version_min > s.version_max or s.version_max > learner_version for s in group.samples):
        return Refusal.UNPUBLISHED
    if any(s.version_min not in proved or s.version_max not in proved for s in group.samples):
        return Refusal.UNPROVEN
    if group.version < ledger.min_version(lease):
        return Refusal.OUTDATED
    return None


def check_contents(
    group: Group,
    *,
    scorer: Scorer,
    n_samples: int,
    max_new_tokens: int,
    is_over: Callable[[], bool] = lambda: False,
) -> Group | Refusal:
    """The expensive part: everything that can be recomputed from the prompt's index. Safe off the loop.

    Args:
        is_over: asked before each sample is replayed and before it is scored; True ends it.

    Returns:
        The group with its rewards as recomputed (a tolerance must not become an advantage), or why not.
    """
    if len(group.samples) != n_samples:
        return Refusal.SAMPLES
    try:
        if group.prompt != scorer.prompt_tokens(group.index):
            return Refusal.PROMPT
        samples = []
        for sample in group.samples:
            if len(sample.completion) > max_new_tokens:
                return Refusal.LENGTH
            if max(sample.completion) >= scorer.vocab_size:
                return Refusal.TOKENS
            if not plausible_logprobs(sample):
                return Refusal.LOGPROBS
            # What an environment says to a turn may take as long as a reward does.
            if scorer.max_turns > 1 and is_over():
                return Refusal.COSTLY
            if not is_replayed(sample, scorer, group.index, budget=max_new_tokens):
                return Refusal.TURNS
            if not ends_as_said(sample, scorer, max_new_tokens=max_new_tokens):
                return Refusal.ENDING
        for sample in group.samples:
            if is_over():
                return Refusal.COSTLY
            reward, failed = score_sample(sample, scorer, group.index)
            # Written so that a NaN is refused: no comparison with one is true. Where the reward cannot be computed on
            # one of the two machines, nobody has lied: the learner's word counts.
            if not (failed or sample.failed) and not abs(reward - sample.reward) <= REWARD_TOLERANCE:
                return Refusal.REWARD
            samples.append(msgspec.structs.replace(sample, reward=reward, failed=failed))
    except TaskError:
        return Refusal.TASK
    return msgspec.structs.replace(group, samples=samples)


def ends_as_said(sample: Trajectory, scorer: Scorer, *, max_new_tokens: int) -> bool:
    """Whether each turn of the model ends with its first stop token, or else is as long as a turn may be.

    A worker could otherwise cut a completion off where its reward is best, or go on after the model had ended it.
    """
    if not scorer.stop_tokens:
        return True
    limit = max_new_tokens if scorer.max_turns == 1 else min(scorer.turn_tokens, max_new_tokens)
    stopped = True
    for start, end in sample.spans()[::2]:
        tokens = sample.completion[start:end]
        stopped = tokens[-1] in scorer.stop_tokens
        if not scorer.stop_tokens.isdisjoint(tokens[:-1]) or not (stopped or len(tokens) == limit):
            return False
    # Which of the two is said where both are so is the engine's choice.
    return stopped if sample.finish == "stop" else end - start == limit


def plausible_logprobs(sample: Trajectory) -> bool:
    """One finite value a token, none positive, none below what a sampler can draw; 0 where nothing was sampled."""
    if len(sample.logprobs) != 4 * len(sample.completion):
        return False
    values = sample.logprob_array()
    plausible = (values >= MIN_LOGPROB) & (values <= MAX_LOGPROB)
    if sample.turns:
        if sum(sample.turns) != len(sample.completion):
            return False
        plausible &= sample.trained() | (values == 0)
    return bool(np.all(plausible))
