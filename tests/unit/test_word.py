"""How old the learner's last word is: what counts as one, and what does not."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Coroutine
from typing import Any

import pytest

from echo2p2p.swarm.identity import Identity
from echo2p2p.swarm.memory import MemorySwarm
from echo2p2p.swarm.records import Keys, LearnerRecord, seal
from echo2p2p.swarm.virtual_time import START_UNIX, run_virtual
from echo2p2p.swarm.word import FIRST_WORD_S, LearnerWord

LEARNER = Identity.from_seed(b"learner".ljust(32))
RUN = f"run@{LEARNER.peer_id}"
KEYS = Keys(RUN)
BODY = LearnerRecord("strings", "async", 2, 1, 0, 10, 0, "running", 1, 0.0, 0.0, 0.0, "0")


def record(
    sequence: int,
    *,
    next_s: float = 30,
    life_s: float = 90,
    signer: Identity = LEARNER,
    key: str = KEYS.learner,
) -> bytes:
    expires_unix = START_UNIX + now() + life_s
    return seal(signer, key, BODY, sequence=sequence, expires_unix=expires_unix, next_s=next_s)


def now() -> float:
    return asyncio.get_running_loop().time()


def watched(
    test: Callable[[LearnerWord, list[tuple[float, bool]]], Coroutine[Any, Any, None]],
) -> Callable[[], None]:
    """Run ``test`` with a word that is watched, and the times at which it turned stale or fresh."""

    async def main() -> None:
        async with MemorySwarm() as swarm:
            turns: list[tuple[float, bool]] = []
            word = LearnerWord(
                swarm.add_peer(),
                RUN,
                rng=random.Random(0),
                changed=lambda stale: turns.append((now(), stale)),
            )
            watching = asyncio.create_task(word.watch())
            await test(word, turns)
            watching.cancel()
            await asyncio.gather(watching, return_exceptions=True)

    def run() -> None:
        run_virtual(main)

    return run


@watched
async def test_three_silent_periods_are_stale_and_a_word_ends_that(
    word: LearnerWord, turns: list[Any]
) -> None:
    for _ in range(10):
        word.heard(5)
        await asyncio.sleep(5)
    await asyncio.sleep(60)
    assert turns == [(pytest.approx(45 + 15), True)]
    assert word.age_s == pytest.approx(65)
    word.heard(5)
    assert turns[1:] == [(now(), False)]
    assert not word.stale


@watched
async def test_nothing_at_all_since_the_start_is_stale_in_the_end(
    word: LearnerWord, turns: list[Any]
) -> None:
    await asyncio.sleep(1000)
    assert turns == [(FIRST_WORD_S, True)]


@watched
async def test_a_copy_or_an_older_record_is_no_news(word: LearnerWord, turns: list[Any]) -> None:
    old, new = record(1, life_s=3000), record(2, life_s=3000)
    assert word.take(new)
    for _ in range(20):
        await asyncio.sleep(10)
        assert not word.take(new)
        assert not word.take(old)
    assert turns == [(90, True)]


@watched
async def test_a_record_that_was_held_back_counts_until_its_own_expiry(
    word: LearnerWord, turns: list[Any]
) -> None:
    held_back = record(1)
    await asyncio.sleep(80)
    assert word.take(held_back)
    await asyncio.sleep(100)
    assert turns == [(90, True)]


@watched
async def test_a_record_promises_no_more_than_three_of_its_periods(
    word: LearnerWord, turns: list[Any]
) -> None:
    assert word.take(record(1, next_s=10, life_s=3000))
    await asyncio.sleep(100)
    assert turns == [(30, True)]


@watched
async def test_only_the_learners_own_records_under_its_own_keys_count(
    word: LearnerWord, turns: list[Any]
) -> None:
    stranger = Identity.from_seed(b"stranger".ljust(32))
    other = Keys(f"other@{LEARNER.peer_id}").learner
    good = record(5)
    for forged in (
        record(3, signer=stranger),
        record(3, key=other),
        good[:-1],
        good[:70] + bytes([good[70] ^ 1]) + good[71:],
        b"",
    ):
        assert not word.take(forged)
    assert word.take(good)
