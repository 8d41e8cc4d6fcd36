"""The modelled engine owes the swarm's code what any engine does, but for a policy behind its tokens."""

from __future__ import annotations

import asyncio

import pytest
import torch

from echo2p2p.data.trajectory import Sampling
from echo2p2p.errors import EngineError
from echo2p2p.simulation.engine import VOCAB_SIZE, Lengths, ModelledEngine
from echo2p2p.swarm.virtual_time import run_virtual
from echo2p2p.weights.snapshot import from_state_dict

ONE, TWO = (from_state_dict({"weight": torch.full((4,), value)}) for value in (1.0, 2.0))
SAMPLING = Sampling(max_new_tokens=8)


def engine():
    return ModelledEngine(tokens_per_s=100.0, lengths=Lengths(6.0), install_s=1.0)


def flat(results):
    return [(c.tokens, c.finish, c.version_min, c.version_max) for group in results for c in group]


def test_nothing_is_generated_before_a_version_is_installed():
    async def main():
        assert engine().version == -1
        with pytest.raises(EngineError, match="no policy version"):
            await engine().generate([[1]], n_samples=1, sampling=SAMPLING, seed=0)

    run_virtual(main())


def test_completions_are_within_the_limits_and_a_seed_repeats_them():
    async def main():
        here = engine()
        await here.install(ONE, 3)
        one, two, other = [
            await here.generate([[1], [2]], n_samples=16, sampling=SAMPLING, seed=seed) for seed in (7, 7, 8)
        ]
        assert flat(one) == flat(two) != flat(other)
        assert [len(group) for group in one] == [16, 16]
        for completion in (c for group in one for c in group):
            assert 1 <= len(completion.tokens) <= 8
            assert len(completion.logprobs) == len(completion.tokens)
            assert all(0 <= token < VOCAB_SIZE for token in completion.tokens)
            assert (completion.version_min, completion.version_max) == (3, 3)

    run_virtual(main())


def test_a_staged_version_is_held_once_it_is_swapped_in():
    async def main():
        here = engine()
        assert await here.install(ONE, 0) == ONE.fingerprint()
        swap = await here.stage(TWO, 1)
        assert (here.version, await here.fingerprint()) == (0, ONE.fingerprint())
        await swap()
        assert (here.version, await here.fingerprint()) == (1, TWO.fingerprint())

    run_virtual(main())


def test_a_cancelled_call_stops_and_the_engine_goes_on():
    async def main():
        here = engine()
        await here.install(ONE, 0)
        running = asyncio.ensure_future(here.generate([[1]] * 99, n_samples=9, sampling=SAMPLING, seed=0))
        await asyncio.sleep(1)
        running.cancel()
        with pytest.raises(asyncio.CancelledError):
            await running
        assert await here.generate([[1]], n_samples=1, sampling=SAMPLING, seed=0)

    run_virtual(main())
