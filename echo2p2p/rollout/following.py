"""Fetches one version after another for a worker, and gives one up for a newer one where that is worth it.

Guarantees:

* Of two fetches in a row at most the first is given up, so versions arrive however fast they are published.
* After a failure, workers that have installed some version are asked as well, when nobody else has a chunk.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Mapping

from echo2p2p.errors import SettingsError, SwarmError
from echo2p2p.swarm.directory import Directory
from echo2p2p.swarm.identity import PeerId
from echo2p2p.swarm.network import Network
from echo2p2p.swarm.records import ManifestRecord
from echo2p2p.weights.subscriber import Fetched, WeightSubscriber
from echo2p2p.weights.supersede import gives_up

LOOK_TIMEOUT_S = 5.0
MAX_OTHERS = 16
"""Workers outside a version's members that are asked for it after a fetch has failed."""


class VersionFetcher:
    """The fetches of one worker.

    Args:
        rng: whom to ask after a failure, if there are many.
    """

    def __init__(
        self, network: Network, subscriber: WeightSubscriber, directory: Directory, rng: random.Random
    ) -> None:
        self._network = network
        self._subscriber = subscriber
        self._directory = directory
        self._rng = rng
        self._until_newer: asyncio.Timeout | None = None
        self._may_give_up = True
        self._others: tuple[PeerId, ...] = ()

    async def fetch(self, record: ManifestRecord, announced: float) -> Fetched | None:
        """The version that ``record`` announces; None if it was given up for a newer one.

        Raises:
            SwarmError, VerificationError, ResourceError: as :meth:`WeightSubscriber.fetch`.
        """
        try:
            async with asyncio.timeout(None) as until_newer:
                self._until_newer = until_newer if self._may_give_up else None
                try:
                    fetched = await self._subscriber.fetch(record, peers=self._others, announced=announced)
                finally:
                    self._until_newer = None
        except TimeoutError:
            self._may_give_up = False
            return None
        except SwarmError:
            await self._look_for_others()
            raise
        self._may_give_up = True
        self._others = ()
        return fetched

    def newer(self) -> None:
        """A newer version than the one that is being fetched has been announced."""
        if self._until_newer is not None:
            arriving = self._subscriber.arriving
            if arriving is None or gives_up(arriving):
                self._until_newer.reschedule(asyncio.get_running_loop().time())
                # It takes a moment to end, in which there may be more news.
                self._until_newer = None

    async def _look_for_others(self) -> None:
        """Who else may have a version that its members do not give: any worker that has installed one."""
        try:
            present = await self._directory.workers(LOOK_TIMEOUT_S)
        except SwarmError:
            return
        holders = sorted(peer for peer, advert in present.items() if advert.version >= 0)
        self._others = tuple(self._rng.sample(holders, min(MAX_OTHERS, len(holders))))
        for peer in self._others:
            self._network.know(peer, present[peer].addresses)


def check_same_files(built_from: Mapping[str, bytes], assets: Mapping[str, bytes]) -> None:
    """Whether a version still belongs to the policy that the engine was built from.

    Raises:
        SettingsError: its tokenizer, chat template or architecture is another; prompts would be other tokens.
    """
    changed = sorted(name for name in {*assets, *built_from} if assets.get(name) != built_from.get(name))
    if changed:
        raise SettingsError(
            f"the policy's {', '.join(changed)} has changed during the run", hint="start the worker again"
        )
