"""How long a policy version takes to reach every worker over shaped links, against the fluid bound.

``python -m benchmarks.relay --peers 8 --mib 32 --up-mbit 50``

Each host is a network namespace with one process and its own p2pd. A small version travels first, so that
connections stand as they do in a run. Measured from the announcement until the last peer has verified the
whole snapshot. The last line on stdout is one JSON object; ``bound_s`` is the fluid bound, ``link_mbit`` what
raw TCP makes of one link, and then comes what was asked for:

* ``ours`` (relayed), ``star`` (the learner sends to every peer) and ``libtorrent`` (as many bytes, one session
  a host, connected beforehand; null if it is not installed): ``seconds``, ``ratio`` (seconds / bound_s);
  ``learner_bytes_ratio`` (chunk bytes that the learner sent / snapshot bytes) of the first two;
  with ``--payload bf16`` all of them send weights, which ours codes on the way, and the bound is still that of
  the bytes as they are;
* ``killed``: with ``--kill``, the first peers and their p2pd are killed at half of the undisturbed time;
* ``liars``: with ``--liars``, all that the first peers serve has a flipped bit. ``bad_bytes_stored`` is what
  finished honest peers hold that the learner did not publish, ``named`` how many liars the learner suspects in the
  end, ``wrongly_named`` how many others, ``with_liars_seconds`` when the liars had everything too.
  Both have ``seconds`` until the last of the other, honest peers is done, and ``ratio_to_undisturbed`` of that;
  with ``--faulty-from`` it is not the first peers, but those after so many;
* ``loopback``: with ``--loopback-gib``, to one worker on this machine, unshaped, against a plain stream through
  the same two p2pd: ``seconds``, ``bare_seconds``, ``ratio``; and of both the processor seconds that were used by
  the learner, the worker and the p2pd of each.

``--run-dir`` leaves the events of ``ours`` behind, of which ``echo2p2p report`` draws who got what when.
With ``--repeat``, ``seconds`` are medians and ``all_seconds`` every single one. ``cpu_s`` is what the processes
of all hosts used together, faulty peers left out; near a ``cpu_busy`` of 1 it was this machine's processors that
were measured, not the plan.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import json
import math
import os
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import psutil

from benchmarks.netns import Host, ShapingError, cpu_seconds, measure_mbit, processes, shaped_hosts
from benchmarks.nodes import Node, NodeError, ask_all, ended_together, say
from benchmarks.payload import PAYLOADS
from echo2p2p.swarm.clock import SystemClock
from echo2p2p.telemetry.events import EventLog
from echo2p2p.weights.plan import fluid_bound_s

_WAYS = ("ours", "star", "libtorrent")
_WARM_UP_BYTES = 2**20


def main() -> None:
    parser = _parser()
    arguments = parser.parse_args()
    chosen = [way for way in arguments.only.split(",") if way]
    if not set(chosen) <= set(_WAYS):
        parser.error(f"--only takes some of {','.join(_WAYS)}")
    # A terminated run must leave through its finally clauses too.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    try:
        figures = _measure(arguments, chosen)
        if arguments.loopback_gib:
            figures["loopback"] = _loopback(arguments)
        print(json.dumps(figures))
    except (ShapingError, NodeError) as error:
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
    parser.add_argument("--chunk-kib", type=int, default=64)
    parser.add_argument(
        "--payload",
        choices=PAYLOADS,
        default=PAYLOADS[0],
        help="what is sent, by everybody: bytes or weights",
    )
    parser.add_argument(
        "--only", default=",".join(_WAYS), help="the ways to measure, comma-separated; '' for none of them"
    )
    parser.add_argument("--repeat", type=int, default=1, help="times that each way is measured")
    parser.add_argument("--kill", type=int, default=0, help="peers that are killed on the way")
    parser.add_argument("--liars", type=int, default=0, help="peers that serve corrupted chunks")
    parser.add_argument("--faulty-from", type=int, default=0, help="peers that come before the faulty ones")
    parser.add_argument("--run-dir", type=Path, help="write the events of ours there")
    parser.add_argument("--loopback-gib", type=float, default=0.0, help="size of the snapshot on loopback")
    return parser


def _measure(arguments: argparse.Namespace, chosen: Sequence[str]) -> dict[str, Any]:
    """Everything that needs shaped links."""
    uplinks = [arguments.up_mbit] * arguments.peers
    if arguments.uplinks:
        uplinks = [float(each) for each in arguments.uplinks.split(",")]
    down_mbit = arguments.down_mbit or max(arguments.up_mbit, *uplinks)
    nbytes = arguments.mib * 2**20
    bound_s = fluid_bound_s(nbytes, arguments.up_mbit, uplinks, [down_mbit] * len(uplinks))
    faults = {"killed": arguments.kill, "liars": arguments.liars}
    if max(faults.values()) and (
        max(faults.values()) >= len(uplinks) or arguments.faulty_from + max(faults.values()) > len(uplinks)
    ):
        raise ShapingError("somebody must be left to measure: fewer faulty peers than peers")
    ways = [way for way in _WAYS if way in chosen or (way == "ours" and any(faults.values()))]
    if not ways:
        return {}
    figures: dict[str, Any] = {"bound_s": round(bound_s, 3)}
    rates = [(arguments.up_mbit, down_mbit), *((up, down_mbit) for up in uplinks)]
    with shaped_hosts(rates) as hosts, tempfile.TemporaryDirectory(prefix="echo2p2p-bench-") as name:
        made = {"chunk_bytes": arguments.chunk_kib * 1024, "payload": arguments.payload}
        bench = _Bench(hosts, Path(name), nbytes, made, arguments.repeat, arguments.run_dir)
        figures["link_mbit"] = round(measure_mbit(hosts[0], hosts[1]), 1)
        say(f"raw TCP from {rates[0][0]:g} to {rates[1][1]:g} Mbit/s: {figures['link_mbit']} Mbit/s")
        figures |= bench.relayed([way for way in ways if way != "libtorrent"])
        if "libtorrent" in ways:
            figures["libtorrent"] = bench.libtorrent()
        for way in ways:
            if figures[way] is not None:
                figures[way]["ratio"] = round(figures[way]["seconds"] / bound_s, 3)
        for fault, count in faults.items():
            if count:
                chosen_ones = slice(1 + arguments.faulty_from, 1 + arguments.faulty_from + count)
                figures[fault] = bench.disturbed(fault, chosen_ones, figures["ours"]["seconds"])
    return figures


class _Bench:
    """One set-up of hosts, and the ways to send ``nbytes`` from the first of them to the others."""

    def __init__(
        self,
        hosts: Sequence[Host],
        folder: Path,
        nbytes: int,
        made: dict[str, Any],
        repeat: int,
        run_dir: Path | None,
    ) -> None:
        self._hosts = hosts
        self._folder = folder
        self._nbytes = nbytes
        self._made = made
        self._repeat = repeat
        self._run_dir = run_dir
        self._swarms = 0

    def relayed(self, ways: Sequence[str]) -> dict[str, Any]:
        """``ours`` and ``star``, in turns, in one swarm."""
        figures: dict[str, list[dict[str, Any]]] = {way: [] for way in ways}
        if not ways:
            return {}
        with self._swarm() as nodes:
            for turn in range(self._repeat):
                for at, way in enumerate(ways):
                    figures[way].append(self._send(way, 1 + turn * len(ways) + at, nodes))
        return {way: _medians(way, each) for way, each in figures.items()}

    def libtorrent(self) -> dict[str, Any] | None:
        if importlib.util.find_spec("libtorrent") is None:
            say("libtorrent: left out, it is not installed (pip install -c constraints.txt -e '.[bench]')")
            return None
        from benchmarks.torrent import send_torrent, torrent_swarm

        figures = []
        with torrent_swarm(self._hosts, self._folder) as nodes:
            for turn in range(self._repeat):
                usage = _Usage(self._hosts)
                started, done = send_torrent(f"payload-{turn}", nodes, self._nbytes, self._made["payload"])
                figures.append({"seconds": round(max(done) - started, 3)} | usage.so_far())
                _say_done("libtorrent", started, done)
        return _medians("libtorrent", figures)

    def disturbed(self, fault: str, chosen: slice, undisturbed_s: float) -> dict[str, Any]:
        """The ``chosen`` hosts are ``killed`` at half of ``undisturbed_s``, or are ``liars`` throughout."""
        figures = []
        for _ in range(self._repeat):
            with self._swarm() as nodes:
                faulty = nodes[chosen]
                if fault == "killed":
                    pids = [pid for host in self._hosts[chosen] for pid in processes(host)]
                    strike = partial(_kill, pids, undisturbed_s / 2)
                else:
                    ask_all(faulty, {"lie": True})
                    strike = None
                figures.append(self._send(fault, 1, nodes, faulty, strike))
        merged = _medians(fault, figures)
        return merged | {"ratio_to_undisturbed": round(merged["seconds"] / undisturbed_s, 3)}

    @contextmanager
    def _swarm(self) -> Iterator[list[Node]]:
        """One node a host, the learner first, all joined and connected."""
        folder = self._folder / f"swarm-{self._swarms}"
        self._swarms += 1
        with _joined(self._hosts, folder, self._made) as nodes:
            self._send("warm-up", 0, nodes, nbytes=_WARM_UP_BYTES)
            yield nodes

    def _send(
        self,
        way: str,
        version: int,
        nodes: Sequence[Node],
        faulty: Sequence[Node] = (),
        meanwhile: Callable[[], None] | None = None,
        nbytes: int | None = None,
    ) -> dict[str, Any]:
        """Publish and fetch one version; what is measured is when the nodes that are not ``faulty`` have it."""
        learner, *workers = nodes
        nbytes = nbytes or self._nbytes
        links = dict(zip(nodes, self._hosts, strict=True))
        members = (
            [[node.peer_id, links[node].up_mbit, links[node].down_mbit] for node in workers]
            if way != "star"
            else []
        )
        published = learner.ask({"publish": version, "members": members, "nbytes": nbytes})
        ask_all(workers, {"ready": 0})
        usage = _Usage([links[node] for node in nodes if node not in faulty])
        started = time.monotonic()
        for node in workers:
            node.tell({"fetch": published["record"]})
        if meanwhile is not None:
            meanwhile()
        honest = [node for node in workers if node not in faulty]
        fetched = {node.peer_id: node.answer() for node in honest}
        done = [each["done"] for each in fetched.values()]
        figures = {"seconds": round(max(done) - started, 3)} | usage.so_far()
        _say_done(way, started, done)
        told = learner.ask({"sent": version})
        sent = told["bytes"]
        figures["learner_bytes_ratio"] = round(sent / nbytes, 3)
        if way == "ours" and self._run_dir is not None:
            _write_events(self._run_dir / "events.jsonl", version, nbytes, sent, started, fetched)
        if way == "liars":
            ended = [node.answer()["done"] for node in faulty]
            figures["with_liars_seconds"] = round(max(*done, *ended) - started, 3)
            figures |= _audited(honest, published["blocks"])
            liars, suspects = {node.peer_id for node in faulty}, set(told["suspects"])
            figures |= {"named": len(suspects & liars), "wrongly_named": len(suspects - liars)}
        return figures


def _write_events(
    path: Path, version: int, nbytes: int, by_learner: int, started: float, fetched: dict[str, dict[str, Any]]
) -> None:
    """What a learner would have written of this dissemination."""
    log = EventLog(path, role="learner", peer="learner", clock=SystemClock())
    log.emit("run_started", run=f"relay of {len(fetched)} peers")
    log.emit("published", version=version, snapshot_bytes=nbytes, members=len(fetched))
    sent = Counter(dict.fromkeys(fetched, 0))
    for peer, each in fetched.items():
        after_s = each["done"] - started
        log.emit("ready", worker=peer, version=version, after_s=after_s, arrivals=each["arrivals"])
        sent.update({source: n for source, n in each["sources"].items() if source in sent})
    t_bcast_s = max(each["done"] for each in fetched.values()) - started
    log.emit("broadcast", version=version, t_bcast_s=t_bcast_s, ready=len(fetched), active=len(fetched))
    log.emit("relayed", version=version, reports=len(fetched), from_learner=by_learner, sent=sent)
    log.close()


def _loopback(arguments: argparse.Namespace) -> dict[str, Any]:
    """One worker, no shaping, against a plain stream of the same bytes between the same processes."""
    nbytes = int(arguments.loopback_gib * 2**30)
    made = {"chunk_bytes": arguments.chunk_kib * 1024, "payload": arguments.payload}
    figures = []
    with (
        tempfile.TemporaryDirectory(prefix="echo2p2p-bench-") as folder,
        _joined([None, None], Path(folder), made) as (learner, worker),
    ):
        for version in range(arguments.repeat + 1):
            size = nbytes if version else _WARM_UP_BYTES
            members = [[worker.peer_id, 1.0, 1.0]]
            record = learner.ask({"publish": version, "members": members, "nbytes": size})["record"]
            # What a fetch takes: its buffer, and what the kernel keeps of the files.
            worker.ask({"ready": 2 * size})
            before = _cpu_seconds(learner, worker)
            started = time.monotonic()
            seconds = worker.ask({"fetch": record})["done"] - started
            fetched = _cpu_seconds(learner, worker)
            worker.ask({"ready": 2 * size})
            between = _cpu_seconds(learner, worker)
            bare_s = worker.ask({"bare": learner.peer_id, "nbytes": size})["seconds"]
            after = _cpu_seconds(learner, worker)
            figures.append(
                {"seconds": round(seconds, 3), "bare_seconds": round(bare_s, 3)}
                | {f"{who}_cpu_s": fetched[who] - before[who] for who in before}
                | {f"bare_{who}_cpu_s": after[who] - between[who] for who in before}
            )
    merged = _medians("loopback", figures[1:])
    return merged | {"ratio": round(merged["seconds"] / merged["bare_seconds"], 3)}


def _cpu_seconds(learner: Node, worker: Node) -> dict[str, float]:
    """Processor seconds that the two processes and the p2pd of each have used so far."""
    used = {}
    for who, node in (("learner", learner), ("worker", worker)):
        process = psutil.Process(node.pid)
        for name, counted in ((who, [process]), (f"{who}_p2pd", process.children())):
            times = [each.cpu_times() for each in counted]
            used[name] = sum(each.user + each.system for each in times)
    return used


@contextmanager
def _joined(hosts: Sequence[Host | None], folder: Path, made: dict[str, Any]) -> Iterator[list[Node]]:
    """One node of the package a host, the learner first, all joined. A host that is None is this machine."""
    folder.mkdir(exist_ok=True)
    module = "benchmarks.relay_node"
    with ended_together() as nodes:
        joining = dict(made)
        for at, host in enumerate(hosts):
            address = host.address if host is not None else "127.0.0.1"
            up_mbit = host.up_mbit if host is not None else math.inf
            own = {"folder": str(folder / str(at)), "address": address, "up_mbit": up_mbit}
            nodes.append(Node(module, joining | own, host))
            if not at:
                learner = nodes[0].answer()
                nodes[0].peer_id = learner["peer_id"]
                joining |= {"run": learner["run"], "initial_peers": learner["addresses"]}
        for node in nodes[1:]:
            node.peer_id = node.answer()["peer_id"]
        yield nodes


def _kill(pids: Sequence[int], after_s: float) -> None:
    time.sleep(after_s)
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


def _audited(honest: Sequence[Node], blocks: list[str]) -> dict[str, Any]:
    audits = ask_all(honest, {"audit": blocks})
    return {"bad_bytes_stored": sum(audit["bad_bytes"] for audit in audits)}


class _Usage:
    """Processor time from now on: of the processes on ``hosts``, and of the whole machine."""

    def __init__(self, hosts: Sequence[Host]) -> None:
        self._hosts = hosts
        self._used_s = cpu_seconds(hosts)
        psutil.cpu_percent()

    def so_far(self) -> dict[str, float]:
        busy = round(psutil.cpu_percent() / 100, 2)
        return {"cpu_s": round(cpu_seconds(self._hosts) - self._used_s, 2), "cpu_busy": busy}


def _medians(way: str, figures: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Of every figure the median, and all the seconds if there are several."""
    merged: dict[str, Any] = {key: round(median(each[key] for each in figures), 3) for key in figures[0]}
    if len(figures) > 1:
        merged["all_seconds"] = [each["seconds"] for each in figures]
    say(f"{way}: {merged}")
    return merged


def _say_done(way: str, started: float, done: Sequence[float]) -> None:
    say(f"{way}: peers done after {[round(each - started, 2) for each in done]} s")


if __name__ == "__main__":
    main()
