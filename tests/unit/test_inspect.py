"""What `inspect` makes of what it is told: each peer once, estimates marked, and runs that are not there."""

from types import SimpleNamespace

import msgspec
import pytest
from click.testing import CliRunner

from echo2p2p.cli import inspect, plan
from echo2p2p.errors import SwarmError
from echo2p2p.learning.sessions import Session
from echo2p2p.learning.status import WorkerStatus, worker_status
from echo2p2p.swarm.directory import Directory
from echo2p2p.swarm.identity import Identity
from echo2p2p.swarm.memory import MemorySwarm
from echo2p2p.swarm.network import PeerInfo, each_once
from echo2p2p.swarm.records import LearnerRecord, ManifestRecord, WorkerAdvert
from echo2p2p.swarm.virtual_time import run_virtual


def test_a_peer_with_two_connections_is_listed_once():
    seen = [PeerInfo("a", ("/1", "/2")), PeerInfo("b", ("/3",)), PeerInfo("a", ("/2", "/4"))]
    assert each_once(seen) == [PeerInfo("a", ("/1", "/2", "/4")), PeerInfo("b", ("/3",))]


LEARNER = LearnerRecord(
    task="strings",
    mode="async",
    staleness=3,
    kappa=2,
    step=9,
    max_steps=9,
    published_version=9,
    state="finished",
    active_workers=0,
    mu_pool=0,
    mu_target=0,
    spend_per_hour=0,
    software="test",
)
MANIFEST = ManifestRecord(version=9, manifest_digest="ab" * 32, manifest_bytes=4000, snapshot_bytes=10**6)
LEFT = Identity.from_seed(b"l" * 32)
LOOKS = {
    "workers": (inspect.command, ["workers"]),
    "learner": (inspect.command, ["learner"]),
    "manifest": (inspect.command, ["manifest"]),
    "plan": (plan.command, ["-R", "1", "--t-train", "1", "--t-bcast", "0", "--initial-peers", "/there"]),
}


@pytest.fixture
def look(monkeypatch):
    """One of the commands that look at a run, in a swarm whose learner has left records and gone."""

    def in_a_swarm(said, name):
        def join_and_look(_, ask, timeout_s):
            async def main():
                async with MemorySwarm(seed=0) as swarm:
                    left = swarm.add_peer(LEFT)
                    directory = Directory(left, f"spark@{left.peer_id}")
                    for body in said:
                        await directory.publish(body)
                    swarm.kill(left)
                    return await ask(swarm.add_peer())

            return run_virtual(main)

        monkeypatch.setattr(inspect, "join_and_look", join_and_look)
        command, arguments = LOOKS[name]
        return CliRunner().invoke(command, [*arguments, "--run", f"spark@{LEFT.peer_id}"])

    return in_a_swarm


@pytest.mark.parametrize("name", LOOKS)
def test_a_run_that_nobody_speaks_of_is_a_failure_and_not_an_empty_table(look, name):
    done = look([], name)
    assert isinstance(done.exception, SwarmError)
    assert done.exception.exit_code == 1
    assert str(done.exception).startswith("nothing is known of spark@")
    assert done.output == ""


@pytest.mark.parametrize("name", ["manifest", "plan"])
def test_a_learner_that_has_left_is_said_to_have_left(look, name):
    done = look([LEARNER, MANIFEST], name)
    assert isinstance(done.exception, SwarmError)
    assert "cannot be reached: the run is finished (" in str(done.exception)
    running = look([msgspec.structs.replace(LEARNER, state="running"), MANIFEST], name)
    assert "it may have finished, or be down" in str(running.exception)


def test_a_finished_run_whose_manifest_record_is_gone_has_not_published_nothing(look):
    done = look([LEARNER], "manifest")
    assert isinstance(done.exception, SwarmError)
    assert "the run is finished (what it published is in its run folder" in str(done.exception)
    running = look([msgspec.structs.replace(LEARNER, state="running")], "manifest")
    assert "has published nothing yet" in str(running.exception)


@pytest.mark.parametrize("name", ["learner", "workers"])
def test_what_was_announced_is_shown_although_the_learner_has_left(look, name):
    done = look([LEARNER], name)
    assert done.exit_code == 0
    assert "the learner does not answer: the run is finished; this is what" in done.stderr
    assert "cannot be reached" not in done.output, "the network's own words"
    running = look([msgspec.structs.replace(LEARNER, state="running")], name)
    assert "it may have finished, or be down" in running.stderr
    if name == "learner":
        assert "finished" in done.stdout


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
