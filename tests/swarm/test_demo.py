"""The demo keeps what it promises, on whatever machine runs this."""

import json
import subprocess
import sys

import pytest

from echo2p2p.telemetry.events import read_events


@pytest.mark.timeout(600)
def test_the_demo_shows_what_it_promises(tmp_path):
    folder = tmp_path / "demo"
    done = subprocess.run(
        [sys.executable, "-m", "echo2p2p", "demo", "--run-dir", str(folder), "--json"],
        capture_output=True,
        text=True,
        timeout=590,
    )
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["report"] == str(folder / "report.html")
    assert (folder / "report.html").stat().st_size > 50_000
    assert (folder / "report.png").stat().st_size > 50_000

    events = list(read_events(folder / "events.jsonl"))
    by_kind = {kind: [e for e in events if e["event"] == kind] for kind in {e["event"] for e in events}}
    (end,) = by_kind["run_finished"]
    assert end["reward_before"] < 0.4
    assert end["reward_after"] > 0.8
    staleness = by_kind["run_started"][0]["staleness"]
    assert max(e["staleness_max"] for e in by_kind["step"]) <= staleness

    # Who was chosen: the three cheapest per rollout, never the dearest.
    joined = {e["worker"]: e["price_per_hour"] for e in by_kind["worker_joined"]}
    assert len(joined) == 4
    dearest = max(joined, key=joined.get)
    for decision in by_kind["activation"]:
        assert dearest not in decision["active"]
    active = set(by_kind["activation"][-1]["active"])
    assert len(active) >= 2
    assert end["spend_usd"] < 0.7 * end["all_on_usd"]

    # Weights: every active worker followed, and most bytes came from other workers.
    for worker in active:
        assert len({e["version"] for e in by_kind["ready"] if e["worker"] == worker}) >= 3
    by_learner = sum(e["bytes_from_learner"] for e in by_kind["ready"])
    by_peers = sum(e["bytes_from_peers"] for e in by_kind["ready"])
    assert by_peers >= by_learner
