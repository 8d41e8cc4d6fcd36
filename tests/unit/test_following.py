"""One fetch after another: which are given up for newer versions, and who is asked after a failure."""

import asyncio
import random
from types import SimpleNamespace

import pytest

from echo2p2p.errors import PeerUnreachable
from echo2p2p.rollout.following import MAX_OTHERS, VersionFetcher
from echo2p2p.swarm.virtual_time import run_virtual
from echo2p2p.weights.supersede import Arriving

FETCH_S, END_S = 10.0, 1.0


class Subscriber:
    """Takes ``FETCH_S`` for a fetch, and ``END_S`` to end one that is cancelled or fails."""

    def __init__(self):
        self.arriving = Arriving(100, 100, None, by_patches=False)
        self.fails = False
        self.asked = []

    async def fetch(self, record, peers, announced):
        self.asked.append(peers)
        try:
            await asyncio.sleep(FETCH_S)
        except asyncio.CancelledError:
            await asyncio.sleep(END_S)
            raise
        if self.fails:
            raise PeerUnreachable("nobody is left to ask")
        return record


class Directory:
    """Twenty workers that hold a version and one that does not; they are found after ``END_S``."""

    async def workers(self, timeout_s):
        await asyncio.sleep(END_S)
        return {f"peer{at:02}": SimpleNamespace(version=at - 1, addresses=()) for at in range(21)}


def fetcher_for(subscriber):
    network = SimpleNamespace(know=lambda peer, addresses: None)
    return VersionFetcher(network, subscriber, Directory(), random.Random(1))


def news_at(fetcher, *moments):
    for moment in moments:
        asyncio.get_running_loop().call_later(moment, fetcher.newer)


async def timed(fetcher):
    began = asyncio.get_running_loop().time()
    return await fetcher.fetch("record", 0.0), asyncio.get_running_loop().time() - began


def failing_in(main):
    """Run ``main`` to its end; what a callback raises counts too."""

    async def watched():
        wrong = []
        asyncio.get_running_loop().set_exception_handler(lambda _, context: wrong.append(context))
        await main()
        assert not wrong

    run_virtual(watched)


def test_of_two_fetches_in_a_row_at_most_the_first_is_given_up():
    async def main():
        fetcher = fetcher_for(Subscriber())
        for _ in range(2):
            news_at(fetcher, 2.0)
            assert await timed(fetcher) == (None, 2.0 + END_S)
            news_at(fetcher, 2.0)
            assert await timed(fetcher) == ("record", FETCH_S)

    failing_in(main)


def test_more_news_while_a_fetch_is_ending_changes_nothing():
    async def main():
        fetcher = fetcher_for(Subscriber())
        news_at(fetcher, 2.0, 2.0, 2.5)
        assert await timed(fetcher) == (None, 2.0 + END_S)

    failing_in(main)


def test_a_fetch_that_is_nearly_done_goes_on():
    async def main():
        subscriber = Subscriber()
        subscriber.arriving = Arriving(10, 100, None, by_patches=False)
        fetcher = fetcher_for(subscriber)
        news_at(fetcher, 2.0)
        assert await timed(fetcher) == ("record", FETCH_S)

    failing_in(main)


def test_after_a_failure_workers_that_hold_some_version_are_asked_too_until_one_comes():
    async def main():
        subscriber = Subscriber()
        fetcher = fetcher_for(subscriber)
        subscriber.fails = True
        # Also news in the moment in which others are looked for.
        news_at(fetcher, FETCH_S + END_S / 2)
        with pytest.raises(PeerUnreachable):
            await timed(fetcher)
        subscriber.fails = False
        assert await timed(fetcher) == ("record", FETCH_S)
        assert await timed(fetcher) == ("record", FETCH_S)
        assert subscriber.asked[0] == subscriber.asked[2] == ()
        assert len(set(subscriber.asked[1])) == MAX_OTHERS
        assert "peer00" not in subscriber.asked[1]

    failing_in(main)
