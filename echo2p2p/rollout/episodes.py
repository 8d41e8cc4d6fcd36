"""Rolls prompts out to scored groups: one turn for most tasks, a conversation with an environment for others."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Protocol, TypeVar

import msgspec
import numpy as np

from echo2p2p.data.episode import next_turn, score_sample
from echo2p2p.data.scoring import Scorer
from echo2p2p.data.task import TRAIN
from echo2p2p.data.trajectory import Group, Sampling, Trajectory, pack_logprobs
from echo2p2p.rollout.engine import Completion, InferenceEngine

T = TypeVar("T")

_SEEDS = 2**63


class Offload(Protocol):
    """Runs blocking work off the loop, as :meth:`echo2p2p.swarm.clock.Clock.offload` does."""

    def __call__(self, fn: Callable[[], T], /) -> Awaitable[T]: ...


@dataclass
class _Episode:
    """One sample under way; ``said`` is what the environment answered to each turn but the last."""

    index: int
    prompt: list[int]
    turns: list[Completion] = field(default_factory=list)
    said: list[list[int]] = field(default_factory=list)

    @property
    def used(self) -> int:
        return sum(len(turn.tokens) for turn in self.turns) + sum(map(len, self.said))

    def context(self) -> list[int]:
        """All tokens so far."""
        tokens = list(self.prompt)
        for turn, said in zip(self.turns, self.said, strict=True):
            tokens += [*turn.tokens, *said]
        return tokens


async def roll_out(
    engine: InferenceEngine,
    scorer: Scorer,
    indices: Sequence[int],
    *,
    n_samples: int,
    sampling: Sampling,
    seed: int,
    offload: Offload,
    split: str = TRAIN,
) -> list[Group]:
    """``n_samples`` scored trajectories of every prompt of ``indices``, in order.

    Raises:
        OutOfMemory, EngineError: as the engine does.
        TaskError: the task failed. A reward that cannot be computed is no error but a trajectory's mark.
    """
    prompts = await offload(lambda: [scorer.prompt_tokens(index, split) for index in indices])
    a_turn = sampling
    if scorer.max_turns > 1:
        a_turn = msgspec.structs.replace(
            sampling, max_new_tokens=min(scorer.turn_tokens, sampling.max_new_tokens)
        )
    first = await engine.generate(prompts, n_samples=n_samples, sampling=a_turn, seed=seed)
    episodes = [
        _Episode(index, prompt, [done])
        for index, prompt, samples in zip(indices, prompts, first, strict=True)
        for done in samples
    ]
    live = episodes
    while scorer.max_turns > 1:
        live = await offload(partial(_answered, scorer, live, sampling, split))
        if not live:
            break
        seed = (seed + 1) % _SEEDS
        contexts = [episode.context() for episode in live]
        answers = await engine.generate(contexts, n_samples=1, sampling=a_turn, seed=seed)
        for episode, (done,) in zip(live, answers, strict=True):
            episode.turns.append(done)
    return await offload(partial(_groups, scorer, episodes, n_samples, split))


def _answered(scorer: Scorer, episodes: Sequence[_Episode], sampling: Sampling, split: str) -> list[_Episode]:
    """Those of ``episodes`` that go on, with what the environment said."""
    going_on = []
    for episode in episodes:
        turns = [turn.tokens for turn in episode.turns]
        said = next_turn(
            scorer, episode.index, turns, used=episode.used, budget=sampling.max_new_tokens, split=split
        )
        if said is not None:
            episode.said.append(said)
            going_on.append(episode)
    return going_on


def _groups(scorer: Scorer, episodes: Sequence[_Episode], n_samples: int, split: str) -> list[Group]:
    groups = []
    for start in range(0, len(episodes), n_samples):
        samples = []
        for episode in episodes[start : start + n_samples]:
            sample = _trajectory(episode, lengths=scorer.max_turns > 1)
            reward, failed = score_sample(sample, scorer, episode.index, split)
            samples.append(msgspec.structs.replace(sample, reward=reward, failed=failed))
        groups.append(Group(episodes[start].index, episodes[start].prompt, samples))
    return groups


def _trajectory(episode: _Episode, *, lengths: bool) -> Trajectory:
    tokens, logprobs, turns = (
        list(episode.turns[0].tokens),
        [episode.turns[0].logprobs],
        [len(episode.turns[0].tokens)],
    )
    for said, turn in zip(episode.said, episode.turns[1:], strict=True):
        tokens += [*said, *turn.tokens]
        logprobs += [np.zeros(len(said), dtype=np.float32), turn.logprobs]
        turns += [len(said), len(turn.tokens)]
    return Trajectory(
        completion=tokens,
        logprobs=pack_logprobs(np.concatenate(logprobs)),
        version_min=min(turn.version_min for turn in episode.turns),
        version_max=max(turn.version_max for turn in episode.turns),
        reward=0.0,
        finish=episode.turns[-1].finish,
        turns=turns if lengths else [],
    )
