"""How long a policy version takes to reach every worker over shaped links, against the fluid bound.

``python -m benchmarks.relay --peers 8 --mib 32 --up-mbit 50``

Each host is a network namespace with one process and its own p2pd. A small version travels first, so that
connections stand as they do in a run; then one that is relayed (``ours``), then one that goes from the
learner to every peer (``star``). Measured from the announcement until the last peer has verified the whole
snapshot. The last line on stdout is one JSON object: ``bound_s``, ``ours`` and ``star`` with ``seconds`` and
``ratio`` (seconds / bound_s), and
``learner_bytes_ratio`` (chunk bytes that the learner sent / snapshot bytes). ``cpu_s`` is what all hosts
together used; near a ``cpu_busy`` of 1 it was this machine's processors that were measured, not the plan.
``--run-dir`` leaves events behind, of which ``echo2p2p report`` draws who got what when.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil

from benchmarks.netns import Host, ShapingError, cpu_seconds, measure_mbit, shaped_hosts
from echo2p2p.swarm.clock import SystemClock
from echo2p2p.telemetry.events import EventLog
from echo2p2p.weights.plan import fluid_bound_s

_START_S = 180.0
_WARM_UP_BYTES = 2**20


def main() -> None:
    arguments = _parser().parse_args()
    if arguments.node:
        asyncio.run(_node(json.loads(arguments.node)))
        return
    # A terminated run must leave through its finally clauses too.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    try:
        print(json.dumps(_measure(arguments)))
    except ShapingError as error:
        sys.exit(f"relay: {error}")


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.relay", description=__doc__.split("\n")[0])
    parser.add_argument("--peers", type=int, default=8, help="workers, apart from the learner")
    parser.add_argument("--mib", type=int, default=32, help="size of the snapshot")
    parser.add_argument("--up-mbit", type=float, default=50.0, help="uplink of the learner and of every peer")
    parser.add_argument(
        "--uplinks", help="comma-separated uplinks of the peers, instead of --peers equal ones"
    )
    parser.add_argument(
        "--down-mbit", type=float, help="downlink of every host; the largest uplink if not given"
    )
    parser.add_argument("--chunk-kib", type=int, default=128)
    parser.add_argument("--run-dir", type=Path, help="write the events of both ways there")
    parser.add_argument("--node", help=argparse.SUPPRESS)
    return parser


def _measure(arguments: argparse.Namespace) -> dict[str, Any]:
    uplinks = [arguments.up_mbit] * arguments.peers
    if arguments.uplinks:
        uplinks = [float(each) for each in arguments.uplinks.split(",")]
    down_mbit = arguments.down_mbit or max(arguments.up_mbit, *uplinks)
    nbytes = arguments.mib * 2**20
    bound_s = fluid_bound_s(nbytes, arguments.up_mbit, uplinks, [down_mbit] * len(uplinks))
    rates = [(arguments.up_mbit, down_mbit), *((up, down_mbit) for up in uplinks)]
    with shaped_hosts(rates) as hosts, tempfile.TemporaryDirectory(prefix="echo2p2p-bench-") as folder:
        link_mbit = measure_mbit(hosts[0], hosts[1])
        _say(f"raw TCP over a link of {min(arguments.up_mbit, down_mbit):g} Mbit/s: {link_mbit:.1f} Mbit/s")
        with _swarm(hosts, Path(folder), arguments.chunk_kib * 1024) as nodes:
            _send_once("warm-up", 0, nodes, _WARM_UP_BYTES)
            measured = {
                way: _send_once(way, version, nodes, nbytes, arguments.run_dir)
                for version, way in enumerate(("ours", "star"), 1)
            }
    for way, figures in measured.items():
        figures["ratio"] = round(figures["seconds"] / bound_s, 3)
        figures["learner_bytes_ratio"] = round(figures["learner_bytes_ratio"] / nbytes, 3)
        _say(f"{way}: {figures}")
    return {"bound_s": round(bound_s, 3), "link_mbit": round(link_mbit, 1)} | measured


class _Node:
    """The parent's end of one host's process: one JSON object a line, in both directions."""

    def __init__(self, host: Host, settings: dict[str, Any]) -> None:
        self.host = host
        self.peer_id = ""
        self._process = subprocess.Popen(
            host.command(sys.executable, "-m", "benchmarks.relay", "--node", json.dumps(settings)),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=os.environ | {"OMP_NUM_THREADS": "1"},
        )

    def tell(self, message: dict[str, Any]) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(message) + "\n")
        self._process.stdin.flush()

    def answer(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise ShapingError(f"the process on {self.host.address} ended before it answered")
        answer: dict[str, Any] = json.loads(line)
        return answer

    def end(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        try:
            self._process.wait(5)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()


@contextmanager
def _swarm(hosts: Sequence[Host], folder: Path, chunk_bytes: int) -> Iterator[list[_Node]]:
    """One node a host, the learner first, all joined."""
    nodes: list[_Node] = []
    settings: dict[str, Any] = {"chunk_bytes": chunk_bytes}
    try:
        nodes.append(_Node(hosts[0], settings | {"folder": str(folder / "0"), "address": hosts[0].address}))
        learner = nodes[0].answer()
        for at, host in enumerate(hosts[1:], 1):
            own = {"folder": str(folder / str(at)), "address": host.address, "run": learner["run"]}
            nodes.append(_Node(host, settings | own | {"initial_peers": learner["addresses"]}))
        for node in nodes[1:]:
            node.peer_id = node.answer()["peer_id"]
            _say(f"{node.host.address} has joined")
        yield nodes
    finally:
        with ThreadPoolExecutor(len(hosts)) as pool:
            list(pool.map(_Node.end, nodes))


def _send_once(
    way: str, version: int, nodes: list[_Node], nbytes: int, run_dir: Path | None = None
) -> dict[str, Any]:
    learner, *workers = nodes
    members = [[node.peer_id, node.host.up_mbit] for node in workers] if way != "star" else []
    learner.tell({"publish": version, "members": members, "nbytes": nbytes})
    published = learner.answer()
    psutil.cpu_percent()
    used_s = cpu_seconds([node.host for node in nodes])
    started = time.monotonic()
    for node in workers:
        node.tell({"fetch": published["record"]})
    fetched = [node.answer() for node in workers]
    busy = round(psutil.cpu_percent() / 100, 2)
    used_s = cpu_seconds([node.host for node in nodes]) - used_s
    _say(f"{way}: peers done after {[round(each['done'] - started, 2) for each in fetched]} s")
    learner.tell({"sent": version})
    by_learner = learner.answer()["bytes"]
    seconds = [each["done"] - started for each in fetched]
    if run_dir is not None:
        log = EventLog(run_dir / "events.jsonl", role="learner", peer="learner", clock=SystemClock())
        log.emit("run_started", run=f"relay of {len(workers)} peers")
        log.emit("published", version=version, snapshot_bytes=nbytes, members=len(members))
        sent: Counter[str] = Counter({node.peer_id: 0 for node in workers})
        for node, each, after_s in zip(workers, fetched, seconds, strict=True):
            log.emit(
                "ready", worker=node.peer_id, version=version, after_s=after_s, arrivals=each["arrivals"]
            )
            sent.update({peer: n for peer, n in each["sources"].items() if peer in sent})
        log.emit(
            "broadcast", version=version, t_bcast_s=max(seconds), ready=len(workers), active=len(workers)
        )
        log.emit("relayed", version=version, reports=len(workers), from_learner=by_learner, sent=sent)
        log.close()
    return {
        "seconds": round(max(seconds), 3),
        "learner_bytes_ratio": by_learner,
        "cpu_busy": busy,
        "cpu_s": round(used_s, 2),
    }


async def _node(settings: dict[str, Any]) -> None:
    """One host's process: does what its stdin says, until that ends."""
    from echo2p2p.swarm.hivemind import HivemindNetwork

    folder = Path(settings["folder"])
    network = await HivemindNetwork.join(
        folder / "identity",
        initial_peers=settings.get("initial_peers", ()),
        host_maddrs=[f"/ip4/{settings['address']}/tcp/0"],
        startup_timeout_s=_START_S,
    )
    try:
        if "run" in settings:
            await _work(network, folder, settings)
        else:
            await _learn(network, folder, settings)
    finally:
        await network.close()


async def _learn(network: Any, folder: Path, settings: dict[str, Any]) -> None:
    from echo2p2p.weights.manifest import Member
    from echo2p2p.weights.publisher import WeightPublisher
    from echo2p2p.weights.snapshot import Layout, Snapshot, TensorSpec
    from echo2p2p.weights.store import DiskStore

    run = f"bench@{network.peer_id}"
    publisher = WeightPublisher(
        network, run, DiskStore(folder / "store"), chunk_bytes=settings["chunk_bytes"]
    )
    await publisher.start()
    _answer({"run": run, "addresses": network.addresses()})
    async for message in _messages():
        if "publish" in message:
            members = [Member(peer, up_mbit) for peer, up_mbit in message["members"]]
            nbytes = message["nbytes"]
            layout = Layout((TensorSpec("weights", "uint8", (nbytes,), 0, nbytes),), {})
            snapshot = Snapshot(layout, os.urandom(nbytes))
            published = await publisher.publish(snapshot, message["publish"], members, {})
            record = published.record
            _answer({"record": [record.version, record.manifest_digest, record.manifest_bytes, nbytes]})
        else:
            _answer({"bytes": sum(publisher.bytes_sent[message["sent"]].values())})


async def _work(network: Any, folder: Path, settings: dict[str, Any]) -> None:
    from echo2p2p.swarm.records import ManifestRecord
    from echo2p2p.weights.store import DiskStore
    from echo2p2p.weights.subscriber import WeightSubscriber

    subscriber = WeightSubscriber(network, settings["run"], DiskStore(folder / "store"))
    await subscriber.start()
    _answer({"peer_id": network.peer_id})
    async for message in _messages():
        started = time.monotonic()
        fetched = await subscriber.fetch(ManifestRecord(*message["fetch"]))
        timeline = fetched.timeline
        _answer(
            {
                "done": started + fetched.fetch_s,
                "arrivals": timeline.points(64),
                "sources": timeline.by_source,
            }
        )


async def _messages() -> Any:
    while line := await asyncio.to_thread(sys.stdin.readline):
        yield json.loads(line)


def _answer(message: dict[str, Any]) -> None:
    print(json.dumps(message), flush=True)


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


if __name__ == "__main__":
    main()
