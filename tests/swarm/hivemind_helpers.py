"""What the tests of the real network share."""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable

from echo2p2p.swarm.hivemind import HivemindNetwork
from echo2p2p.swarm.identity import Identity
from echo2p2p.swarm.records import Keys, WorkerAdvert, seal

Join = Callable[..., Awaitable[HivemindNetwork]]


def run_of(learner: HivemindNetwork) -> Keys:
    return Keys(f"test@{learner.peer_id}")


def sealed_advert(
    owner: Identity, keys: Keys, *, sequence: int = 1, lifetime_s: float = 60, key: str | None = None
) -> tuple[str, bytes, float]:
    """The key, sealed value and expiry of an advert by ``owner``."""
    advert = WorkerAdvert(
        gpu="H200",
        gpu_count=1,
        gpu_memory_gib=139,
        upload_mbit=1000,
        download_mbit=1000,
        price_per_hour=2.5,
        tokens_per_s=5000,
        version=0,
        engine="transformers",
        state="active",
        software="test",
    )
    key = key or keys.worker(owner.peer_id)
    expires = time.time() + lifetime_s
    return key, seal(owner, key, advert, sequence=sequence, expires_unix=expires), expires
