"""From whom a manifest is asked, and when."""

import asyncio

import pytest

from echo2p2p.errors import PeerUnreachable
from echo2p2p.swarm.virtual_time import VirtualClock, run_virtual
from echo2p2p.weights.finding import FAN_OUT, Ask, find, order
from echo2p2p.weights.manifest import Member

LEARNER = "learner"
MEMBERS = [Member(f"peer{at:03}", 10.0 + at) for at in range(100)]
LARGE = 2**20


def first(members, me, nbytes=LARGE):
    return order(members, me, LEARNER, nbytes)[0].source


def test_small_manifests_and_those_without_members_come_from_the_learner():
    assert all(first(MEMBERS, member.peer, 1000) == LEARNER for member in MEMBERS)
    assert order([], "me", LEARNER, LARGE, ["other"])[:2] == [Ask(LEARNER, 0.0), Ask("other", 1.0)]


def test_a_large_manifest_leaves_the_learner_a_few_times_and_nobody_has_many_below():
    parents = {member.peer: first(MEMBERS, member.peer) for member in MEMBERS}
    for above in {*parents.values()}:
        assert sum(parent == above for parent in parents.values()) <= FAN_OUT
    for above in parents.values():
        hops = 1
        at = above
        while at != LEARNER:
            at, hops = parents[at], hops + 1
        assert hops <= 4
    # Those with the most uplink are at the top.
    assert {peer for peer, parent in parents.items() if parent == LEARNER} == {
        member.peer for member in MEMBERS[-FAN_OUT:]
    }


def test_everybody_asks_the_learner_and_nobody_itself():
    for me in ["latecomer", *(member.peer for member in MEMBERS)]:
        asks = order(MEMBERS, me, LEARNER, LARGE, ["other"])
        assert LEARNER in [ask.source for ask in asks[:3]]
        assert me not in [ask.source for ask in asks]
        assert {ask.source for ask in asks} | {me} >= {member.peer for member in MEMBERS} | {"other"}
        assert [ask.after_s for ask in asks] == sorted(ask.after_s for ask in asks)


async def searched(answers, asks):
    """(the answer, seconds, whom it asked when); ``answers``: by source, seconds and the body or an error."""
    loop, asked = asyncio.get_running_loop(), []

    async def ask(source):
        asked.append((source, loop.time()))
        seconds, answer = answers[source]
        await asyncio.sleep(seconds)
        if answer is None:
            raise PeerUnreachable(f"{source} is gone")
        return answer

    began = loop.time()
    try:
        found = await find(ask, asks, VirtualClock(loop))
    except PeerUnreachable as error:
        found = error.message
    return found, loop.time() - began, [(source, at - began) for source, at in asked]


ASKS = [Ask("a", 0.0), Ask("b", 3.0), Ask("c", 4.0), Ask("d", 5.0)]


@pytest.mark.parametrize(
    ("answers", "expected"),
    [
        ({"a": (1, b"A")}, (b"A", 1, [("a", 0)])),
        ({"a": (1, None), "b": (0.5, b"B")}, (b"B", 1.5, [("a", 0), ("b", 1)])),
        ({"a": (9, b"A"), "b": (0.5, b"B")}, (b"B", 3.5, [("a", 0), ("b", 3)])),
        # The first to answer wins; a slow one that was asked before goes on meanwhile.
        ({"a": (3.5, b"A"), "b": (9, b"B")}, (b"A", 3.5, [("a", 0), ("b", 3)])),
        # No more than three at once.
        (
            {"a": (9, None), "b": (9, None), "c": (9, None), "d": (1, b"D")},
            (b"D", 10, [("a", 0), ("b", 3), ("c", 4), ("d", 9)]),
        ),
        (
            dict.fromkeys("abcd", (0, None)),
            ("a is gone; b is gone; c is gone; d is gone", 0, [(each, 0) for each in "abcd"]),
        ),
    ],
)
def test_the_next_is_asked_in_time_and_at_once_for_one_that_failed(answers, expected):
    assert run_virtual(lambda: searched(answers, ASKS)) == expected


ROUNDED = {"a": (9, None), "b": (0.01, None), "c": (0.01, b"C")}


def test_one_that_failed_is_stood_in_for_at_any_moment_however_it_rounds():
    async def main():
        for at in range(200):
            await asyncio.sleep(0.1 + at / 7)
            asks = [Ask("a", 0.0), Ask("b", 0.1), Ask("c", 0.1 + at / 3)]
            found, seconds, _ = await searched(ROUNDED, asks)
            assert (found, seconds) == (b"C", pytest.approx(0.12, abs=0.011))

    run_virtual(main)
