"""Whole episodes of several turns on every engine: who said which token, and with which probability."""

from __future__ import annotations

import asyncio
import importlib.util
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import pytest_asyncio
import torch
from engine_bench import HAS_VLLM, SHAPE, build
from policies import EOS, make_text_policy

from echo2p2p.data.policy import build_model, load_config, scaled_log_softmax
from echo2p2p.data.scoring import TaskScorer
from echo2p2p.data.task import make_task
from echo2p2p.data.tokens import PolicyTokenizer
from echo2p2p.data.trajectory import Group, Sampling
from echo2p2p.learning.admission import check_contents
from echo2p2p.rollout.engine import InferenceEngine
from echo2p2p.rollout.episodes import roll_out
from echo2p2p.weights.snapshot import Snapshot, from_state_dict

pytestmark = [pytest.mark.asyncio(loop_scope="session"), pytest.mark.timeout(300)]

KINDS = ["transformers", *(["vllm"] if HAS_VLLM else [])]
ROOMS = {"width": 8, "height": 8, "scramble": 6, "turns": 4, "moves": 8, "turn_tokens": 24, "partial": True}
"""Prompts longer than the 128 tokens that vLLM caches as one block on a CPU."""
TASKS: dict[str, dict[str, Any]] = {
    "sokoban": ROOMS,
    **({"holdem": {"turns": 6, "turn_tokens": 12}} if importlib.util.find_spec("pokerkit") else {}),
}
CHAT = (
    "{% for m in messages %}<{{ m.role }}>{{ m.content }}{{ eos_token }}{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)
BUDGET = 900
N_SAMPLES = 8
INDICES = range(4)


@dataclass
class Table:
    """Where episodes are played.

    Attributes:
        one, two: policies of the folder's architecture, as plain transformers computes them.
        version: that was installed last.
    """

    folder: Path
    engine: InferenceEngine
    one: Any
    two: Any
    version: int = field(default=-1)

    def scorer(self, name: str, *, chat: bool) -> TaskScorer:
        tokenizer = PolicyTokenizer(self.folder, chat_template=chat)
        return TaskScorer(
            make_task(name, options=TASKS[name]), tokenizer, int(load_config(self.folder).vocab_size)
        )

    async def install(self, model: Any) -> int:
        self.version += 1
        await self.engine.install(snapshot_of(model), self.version)
        return self.version

    async def play(
        self, scorer: TaskScorer, sampling: Sampling, *, engine: InferenceEngine | None = None, seed: int = 0
    ) -> list[Group]:
        return await roll_out(
            engine or self.engine,
            scorer,
            INDICES,
            n_samples=N_SAMPLES,
            sampling=sampling,
            seed=seed,
            offload=asyncio.to_thread,
        )


def snapshot_of(model: Any) -> Snapshot:
    return from_state_dict(model.state_dict())


@pytest_asyncio.fixture(scope="module", loop_scope="session", params=KINDS)
async def table(request, tmp_path_factory) -> AsyncIterator[Table]:
    models = []
    for seed in (1, 2):
        folder = make_text_policy(
            tmp_path_factory.mktemp("policy"), seed=seed, head_dim=SHAPE["head_dim"], positions=2048
        )
        model = build_model(folder, dtype=torch.float32, device="cpu", weights=True)
        with torch.no_grad():
            # Large enough for uneven distributions, small enough for an end of sequence in every third turn or so.
            for parameter in model.parameters():
                if parameter.ndim > 1:
                    parameter.mul_(3)
        models.append(model)
    (folder / "chat_template.jinja").write_text(CHAT)
    engine = build(request.param, folder)
    yield Table(folder, engine, *models)
    await engine.close()


def expected_logprobs(model: Any, group: Group, completion: list[int], temperature: float) -> np.ndarray:
    """Of every completion token, by one forward pass over prompt and completion."""
    with torch.no_grad():
        logits = model(torch.tensor([group.prompt + completion])).logits[0, len(group.prompt) - 1 : -1]
    chosen = scaled_log_softmax(logits, temperature)[torch.arange(len(completion)), completion]
    return np.asarray(chosen)


@pytest.mark.parametrize("chat", [True, False], ids=["chat", "plain"])
@pytest.mark.parametrize("name", TASKS)
@pytest.mark.parametrize(
    "sampling",
    [Sampling(max_new_tokens=BUDGET), Sampling(temperature=0.7, top_p=0.9, max_new_tokens=BUDGET)],
    ids=["whole", "nucleus"],
)
async def test_every_token_of_an_episode_is_whose_it_is_said_to_be(table, name, chat, sampling):
    version = await table.install(table.one)
    scorer = table.scorer(name, chat=chat)
    tokenizer = PolicyTokenizer(table.folder, chat_template=chat)
    groups = await table.play(scorer, sampling)
    assert [group.index for group in groups] == list(INDICES)
    n_turns, lost_in_text, ended, cut = set(), 0, 0, 0
    for group in groups:
        assert group.prompt == scorer.prompt_tokens(group.index)
        for sample in group.samples:
            # The environment says again what it said, told by token ids alone.
            mask = np.zeros(len(sample.completion), bool)
            turns: list[list[int]] = []
            for number, (start, end) in enumerate(sample.spans()):
                tokens = sample.completion[start:end]
                if number % 2 == 0:
                    turns.append(tokens)
                    mask[start:end] = True
                    lost_in_text += (
                        tokenizer.encode_prompt(tokenizer.decode_completion(tokens) or "?") != tokens
                    )
                    continue
                assert tokens == scorer.respond(group.index, turns)
                if chat:
                    # The template ends a model's turn; an end that was sampled already is not said again.
                    assert turns[-1][-1] == EOS or tokens[0] == EOS
                    assert turns[-1][-1] != EOS or tokens[0] != EOS
                    ended, cut = ended + (turns[-1][-1] == EOS), cut + (turns[-1][-1] != EOS)
            assert len(sample.turns) % 2 == 1
            assert np.array_equal(sample.trained(), mask)
            logprobs = sample.logprob_array()
            expected = expected_logprobs(table.one, group, sample.completion, sampling.temperature)
            np.testing.assert_allclose(logprobs[mask], expected[mask], atol=5e-5)
            assert not logprobs[~mask].any()
            assert (sample.version_min, sample.version_max) == (version, version)
            n_turns.add(len(turns))
        checked = check_contents(group, scorer=scorer, n_samples=N_SAMPLES, max_new_tokens=BUDGET)
        assert checked == group
    assert max(n_turns) > 1
    # Turns that text would have changed: a mask made from it would be another.
    assert lost_in_text
    assert not chat or cut
    assert not chat or ended or sampling.top_p < 1


async def test_a_seed_repeats_whole_episodes(table):
    await table.install(table.one)
    scorer, sampling = table.scorer("sokoban", chat=True), Sampling(max_new_tokens=BUDGET)
    one, two, other = [await table.play(scorer, sampling, seed=seed) for seed in (5, 5, 6)]
    tokens = [[[s.completion for s in group.samples] for group in groups] for groups in (one, two, other)]
    assert tokens[0] == tokens[1]
    assert tokens[0] != tokens[2]


class BetweenTurns:
    """An engine that gets a version after the first turns of a batch, as one that overlaps may."""

    def __init__(self, engine: InferenceEngine, snapshot: Snapshot, version: int) -> None:
        self._engine, self._snapshot, self._version = engine, snapshot, version
        self.swapped = False

    async def generate(self, *prompts: Any, **how: Any) -> Any:
        done = await self._engine.generate(*prompts, **how)
        if not self.swapped:
            await (await self._engine.stage(self._snapshot, self._version))()
            self.swapped = True
        return done


async def test_a_version_between_two_turns_is_seen_by_the_second_alone(table):
    """The second turn reads the first anew: nothing that the old version computed of it may be left in a cache."""
    first = await table.install(table.one)
    scorer, sampling = table.scorer("sokoban", chat=True), Sampling(max_new_tokens=BUDGET)
    table.version += 1
    engine = BetweenTurns(table.engine, snapshot_of(table.two), table.version)
    groups = await table.play(scorer, sampling, engine=engine)
    n_of_both = 0
    for group in groups:
        assert len(group.prompt) > 128
        for sample in group.samples:
            spans, logprobs = sample.spans(), sample.logprob_array()
            old, new = (
                expected_logprobs(model, group, sample.completion, 1.0) for model in (table.one, table.two)
            )
            for number, (start, end) in enumerate(spans[::2]):
                expected = new if number else old
                np.testing.assert_allclose(logprobs[start:end], expected[start:end], atol=5e-5)
            n_of_both += len(spans) > 1
            assert (sample.version_min, sample.version_max) == (first, first + (len(spans) > 1))
    assert n_of_both
