"""The learner's last word: how long ago it came, and where else to ask when none comes.

Guarantees:

* Only what the learner itself says counts: a message on its own authenticated stream, or a record with its
  signature and a higher sequence number than every one seen before. A copy handed out again is no news.
* A peer from whom every newer word is hidden knows it after three of the periods that the learner announced,
  by its own monotonic clock; a record that was held back for a while counts until its own expiry at most.
* When a word is overdue, the table and several other peers are asked, again and again, until one comes.
"""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import Callable
from typing import Annotated, NoReturn

import msgspec
from msgspec import Meta

from echo2p2p.errors import DeadlineExceeded, RecordError, SwarmError
from echo2p2p.swarm.identity import PeerId
from echo2p2p.swarm.messages import protocol_id, receive, send
from echo2p2p.swarm.network import Network, Stream
from echo2p2p.swarm.records import (
    MAX_RECORD_BYTES,
    WORDS_MISSED,
    Keys,
    LearnerRecord,
    Record,
    check,
    check_live,
)

log = logging.getLogger(__name__)

WORD_PROTOCOL = "word"
SOURCES = 8
"""Peers that are asked at once. Not each of them is of this run; three that are suffice."""
ASK_TIMEOUT_S = 5.0
LOOK_PAUSE_S = 10.0
"""A peer that is asked looks into the table first, but not more often than this."""
FIRST_WORD_S = 90.0
"""A peer that has heard nothing at all since it started waits this long before it calls that stale."""
SHORTEST_PAUSE_S = 1.0

Sealed = Annotated[bytes, Meta(max_length=MAX_RECORD_BYTES)]


class Word(msgspec.Struct, frozen=True, tag="word"):
    """The newest sealed records of the run's learner that the sender has seen; they prove themselves."""

    records: Annotated[tuple[Sealed, ...], Meta(max_length=2)]


class LearnerWord:
    """What this peer last heard of the learner of ``run``, and whether that is too long ago.

    Args:
        rng: chooses whom to ask.
        changed: called when the word turns stale (True) and when a fresh one ends that (False).

    Attributes:
        stale: no fresh word within the announced time.
    """

    def __init__(
        self, network: Network, run: str, *, rng: random.Random, changed: Callable[[bool], None]
    ) -> None:
        self._network = network
        self._clock = network.clock
        self._keys = Keys(run)
        self._rng = rng
        self._changed = changed
        self._held: dict[str, tuple[Record, bytes]] = {}
        self._heard_s = self._clock.monotonic()
        self._fresh_until_s = self._heard_s
        self._period_s = FIRST_WORD_S / WORDS_MISSED
        self._ask_at_s = self._heard_s + self._period_s
        self._fresh = asyncio.Event()
        self._look_again_s = 0.0
        self.stale = False

    @property
    def age_s(self) -> float:
        """Seconds since the last fresh word, or since the start if there was none."""
        return self._clock.monotonic() - self._heard_s

    def heard(self, period_s: float) -> None:
        """The learner said something on its own stream; it promised the next thing within ``period_s``."""
        # It answers after a round trip, so the first period may pass a little before that is silence.
        self._note(WORDS_MISSED * period_s, period_s, ask_in_s=2 * period_s)

    def take(self, sealed: bytes, *, live: bool = False) -> bool:
        """Believe a record of the learner if it is newer than those before; whether it is.

        Args:
            live: it came on the learner's own stream, where :meth:`heard` counts and promises more.
        """
        learner = self._keys.learner_id
        try:
            now_unix = self._clock.unix()
            record = (
                check_live(sealed, owner=learner) if live else check(sealed, owner=learner, now_unix=now_unix)
            )
        except RecordError as error:
            log.debug("no word of the learner: %s", error)
            return False
        if record.key not in (self._keys.learner, self._keys.manifest):
            return False
        held = self._held.get(record.key)
        if held is not None and record.sequence <= held[0].sequence:
            return False
        self._held[record.key] = (record, bytes(sealed))
        fresh_s = record.fresh_for_s(now_unix)
        if fresh_s > 0 and not live:
            self._note(fresh_s, record.next_s, ask_in_s=min(record.next_s, fresh_s / 2))
        if isinstance(record.body, LearnerRecord):
            self._network.know(learner, record.body.addresses)
        return True

    async def serve(self) -> None:
        """Pass on the learner's word to whoever asks, from now on."""

        async def answer(stream: Stream) -> None:
            now = self._clock.monotonic()
            if now >= self._look_again_s:
                # Whoever asks may not see what this peer sees in the table.
                self._look_again_s = now + LOOK_PAUSE_S
                await self._ask_table(self._keys.learner)
            word = Word(tuple(sealed for _, sealed in self._held.values()))
            try:
                async with asyncio.timeout(ASK_TIMEOUT_S):
                    await send(stream, word)
            except TimeoutError:
                raise DeadlineExceeded(f"{stream.remote} did not take the learner's word") from None

        await self._network.handle(protocol_id(WORD_PROTOCOL), answer)

    async def watch(self) -> NoReturn:
        """Ask around when a word is overdue, and tell when it is stale; until cancelled."""
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self._judge())
            await self._keep_asking()

    def _note(self, fresh_s: float, period_s: float, *, ask_in_s: float) -> None:
        now = self._clock.monotonic()
        self._heard_s = now
        self._period_s = period_s
        self._fresh_until_s = max(self._fresh_until_s, now + fresh_s)
        self._ask_at_s = now + max(SHORTEST_PAUSE_S, ask_in_s)
        self._fresh.set()
        if self.stale:
            self.stale = False
            self._changed(False)

    async def _judge(self) -> NoReturn:
        try:
            async with asyncio.timeout(FIRST_WORD_S):
                await self._fresh.wait()
        except TimeoutError:
            pass
        while True:
            left_s = self._fresh_until_s - self._clock.monotonic()
            if left_s > 0:
                await asyncio.sleep(left_s)
                continue
            self._fresh.clear()
            self.stale = True
            self._changed(True)
            await self._fresh.wait()

    async def _keep_asking(self) -> NoReturn:
        while True:
            wait_s = self._ask_at_s - self._clock.monotonic()
            if wait_s > 0:
                await asyncio.sleep(wait_s)
                continue
            self._ask_at_s += max(SHORTEST_PAUSE_S, self._period_s / 2)
            await self._ask_around()

    async def _ask_around(self) -> None:
        """The table and some other peers, all at once; what they have is taken as it comes."""
        async with asyncio.TaskGroup() as tasks:
            for key in (self._keys.learner, self._keys.manifest):
                tasks.create_task(self._ask_table(key))
            for peer in await self._sources():
                tasks.create_task(self._ask_peer(peer))

    async def _sources(self) -> list[PeerId]:
        try:
            known = [info.peer for info in await self._network.peers()]
        except SwarmError:
            return []
        others = sorted(set(known) - {self._keys.learner_id, self._network.peer_id})
        return self._rng.sample(others, min(SOURCES, len(others)))

    async def _ask_table(self, key: str) -> None:
        try:
            found = await self._network.find_records(key, timeout_s=ASK_TIMEOUT_S)
        except SwarmError as error:
            log.debug("no word from the table: %s", error)
            return
        if self._keys.learner_id in found:
            self.take(found[self._keys.learner_id])

    async def _ask_peer(self, peer: PeerId) -> None:
        try:
            stream = await self._network.open_stream(
                peer, protocol_id(WORD_PROTOCOL), timeout_s=ASK_TIMEOUT_S
            )
            try:
                word: Word = await receive(
                    stream, Word, max_bytes=3 * MAX_RECORD_BYTES, timeout_s=2 * ASK_TIMEOUT_S
                )
            finally:
                await stream.close()
        except SwarmError as error:
            log.debug("no word from %s: %s", peer, error)
            return
        for sealed in word.records:
            self.take(sealed)
