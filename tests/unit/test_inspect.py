"""What `inspect` makes of what it is told: each peer once, and estimates marked as what they are."""

from types import SimpleNamespace

import msgspec

from echo2p2p.learning.sessions import Session
from echo2p2p.learning.status import WorkerStatus, worker_status
from echo2p2p.swarm.network import PeerInfo, each_once
from echo2p2p.swarm.records import WorkerAdvert


def test_a_peer_with_two_connections_is_listed_once():
    seen = [PeerInfo("a", ("/1", "/2")), PeerInfo("b", ("/3",)), PeerInfo("a", ("/2", "/4"))]
    assert each_once(seen) == [PeerInfo("a", ("/1", "/2", "/4")), PeerInfo("b", ("/3",))]


def joined(tokens_per_s: float) -> Session:
    advert = WorkerAdvert(
        gpu="A100",
        gpu_count=1,
        gpu_memory_gib=80,
        upload_mbit=100,
        download_mbit=100,
        price_per_hour=1.0,
        tokens_per_s=tokens_per_s,
        version=-1,
        engine="transformers",
        state="standby",
        software="test",
    )
    return Session(SimpleNamespace(remote="peer"), advert)


def test_an_estimate_says_whether_it_was_measured():
    assert worker_status(joined(0.0), 10.0).mu_source == "assumed"
    session = joined(900.0)
    assert worker_status(session, 10.0).mu_source == "announced"
    session.started_work(0.0)
    session.delivered(1, 5.0, 4, still_busy=False, mean_tokens=10.0)
    assert worker_status(session, 10.0).mu_source == "measured"


def test_a_learner_of_an_older_release_says_nothing_of_where_estimates_come_from():
    told = {"peer": "p", "state": "active", "version": 1, "mu": 2.0, "price_per_hour": 1.0}
    status = msgspec.convert({**told, "accepted": 1, "refused": 0}, WorkerStatus)
    assert status.mu_source == ""
