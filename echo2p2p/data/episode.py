"""The one rule by which an episode goes on or ends, for whoever rolls it out and whoever checks it.

Everything here is about token ids: text is made of them where a task wants to read it, and never turned back.
"""

from __future__ import annotations

from collections.abc import Sequence

from echo2p2p.data.scoring import Scorer
from echo2p2p.data.task import TRAIN
from echo2p2p.data.trajectory import MAX_REWARD, Trajectory
from echo2p2p.errors import RewardFailed


def next_turn(
    scorer: Scorer,
    index: int,
    turns: Sequence[Sequence[int]],
    *,
    used: int,
    budget: int,
    split: str = TRAIN,
) -> list[int] | None:
    """What the environment says after the model's ``turns``, or None where the episode ends.

    It ends when the environment says so, after the last turn that the task allows, and when what the environment says
    and a whole turn of the model no longer fit.

    Args:
        used: tokens of the episode so far.
        budget: tokens that it may have.
    """
    if len(turns) >= scorer.max_turns:
        return None
    said = scorer.respond(index, turns, split)
    if said is None or used + len(said) + scorer.turn_tokens > budget:
        return None
    return said


def is_replayed(sample: Trajectory, scorer: Scorer, index: int, *, budget: int) -> bool:
    """Whether an environment that hears the model's turns of ``sample`` says what is between them, and no more."""
    if scorer.max_turns == 1:
        return not sample.turns
    if len(sample.turns) % 2 == 0 or sum(sample.turns) != len(sample.completion):
        return False
    turns: list[list[int]] = []
    said: list[int] | None = None
    for number, (start, end) in enumerate(sample.spans()):
        tokens = sample.completion[start:end]
        if number % 2:
            if tokens != said:
                return False
            continue
        if len(tokens) > scorer.turn_tokens:
            return False
        turns.append(tokens)
        said = next_turn(scorer, index, turns, used=end, budget=budget)
    return said is None


def score_sample(sample: Trajectory, scorer: Scorer, index: int, split: str = TRAIN) -> tuple[float, bool]:
    """The reward of ``sample``, and whether it could not be computed and is 0 for that."""
    try:
        if not sample.turns:
            reward = scorer.reward(index, sample.completion, split)
        else:
            turns = [sample.completion[start:end] for start, end in sample.spans()[::2]]
            reward = scorer.episode_reward(index, turns, split)
    except RewardFailed:
        return 0.0, True
    # Anything else, a NaN too, would cost the worker that sends it its session.
    return (reward, False) if abs(reward) <= MAX_REWARD else (0.0, True)
