"""The opponent: one libtorrent session a host, on the same links, with the settings that serve it best.

Everybody knows everybody's address and is connected before the clock starts, so that no tracker or DHT is
waited for. Measured from the signal until the last peer has hashed the last piece.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import libtorrent as lt

from benchmarks.netns import Host
from benchmarks.nodes import Node, answer, ask_all, ended_together, messages, say
from benchmarks.payload import PAYLOADS, payload

_PORT = 6881
_CONNECT_S = 30.0
_FINISH_S = 600.0
PIECE_KIB = 256
"""The best of 64, 128, 256, 512, 1024 and 2048 (8 peers, 32 MiB, 50 Mbit/s): 1.83, 1.60, 1.58, 1.79, 2.06 and
2.16 × the fluid bound. Super-seeding took 3.0 ×, with these settings and with others."""

_SETTINGS: lt.settings_pack = {
    # Nobody is looked for: all addresses are given.
    "enable_dht": False,
    "enable_lsd": False,
    "enable_upnp": False,
    "enable_natpmp": False,
    "smooth_connects": False,
    "connection_speed": 500,
    "connections_limit": 1000,
    # uTP took 1.82 × the bound where TCP took 1.58, and four times the processor; plaintext costs nothing.
    "enable_incoming_utp": False,
    "enable_outgoing_utp": False,
    "in_enc_policy": 2,
    "out_enc_policy": 2,
    # Everybody is served; who is complete stays, since others may still need what it has.
    "unchoke_slots_limit": -1,
    "close_redundant_connections": False,
    "allowed_fast_set_size": 0,
    # All peers share the blocks of a piece, and none commits itself to the learner for long, so that pieces are
    # whole, and can be passed on, early. The long queues of libtorrent's own preset for seeds took 2.13 ×.
    "whole_pieces_threshold": 0,
    "request_queue_time": 1,
    "max_out_request_queue": 32,
    "max_allowed_in_request_queue": 2000,
    "suggest_mode": 1,
    "send_buffer_low_watermark": 1048576,
    "send_buffer_watermark": 3145728,
    "send_buffer_watermark_factor": 150,
    # Rarest pieces from the first one on, and the disk never in the way.
    "initial_picker_threshold": 0,
    "max_queued_disk_bytes": 2**29,
    "alert_mask": lt.alert.category_t.status_notification | lt.alert.category_t.error_notification,
}


@contextmanager
def torrent_swarm(hosts: Sequence[Host], folder: Path) -> Iterator[list[Node]]:
    """One session a host, the learner's first."""
    with ended_together() as nodes:
        for at, host in enumerate(hosts):
            settings = {"address": host.address, "folder": str(folder / f"torrent-{at}")}
            nodes.append(Node("benchmarks.torrent", settings, host))
        for node in nodes:
            node.answer()
        yield nodes


def send_torrent(
    name: str,
    nodes: Sequence[Node],
    nbytes: int,
    kind: str = PAYLOADS[0],
    *,
    piece_kib: int = PIECE_KIB,
    super_seeding: bool = False,
) -> tuple[float, list[float]]:
    """Send a :func:`payload` of ``nbytes`` from the first of ``nodes`` to the others.

    Returns:
        When the signal was given and when each of the others had verified everything, on this machine's
        monotonic clock.
    """
    seed, *peers = nodes
    made = seed.ask(
        {
            "seed": name,
            "payload": [kind, nbytes],
            "piece_bytes": piece_kib * 1024,
            "super_seeding": super_seeding,
        }
    )
    ask_all(peers, {"join": made["torrent"]})
    # Each pair once: everyone dials those that come before it.
    for at, node in enumerate(peers, 1):
        node.ask({"connect": [each.name for each in nodes[:at]]})
    ask_all(nodes, {"connected": len(peers)})
    started = time.monotonic()
    for node in peers:
        node.tell({"go": True})
    done = [node.answer()["done"] for node in peers]
    ask_all(nodes, {"forget": True})
    return started, done


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--node", required=True)
    settings = json.loads(parser.parse_args().node)
    folder = Path(settings["folder"])
    folder.mkdir()
    own: lt.settings_pack = {"listen_interfaces": f"{settings['address']}:{_PORT}"}
    session = lt.session(_SETTINGS | own)
    answer({})
    torrent: Any = None
    for message in messages():
        match message:
            case {
                "seed": name,
                "payload": [kind, nbytes],
                "piece_bytes": piece_bytes,
                "super_seeding": super_seeding,
            }:
                file = _make(folder, name, payload(kind, nbytes), piece_bytes)
                flags = lt.torrent_flags.seed_mode
                if super_seeding:
                    flags |= lt.torrent_flags.super_seeding
                torrent = _add(session, folder, file, flags)
                answer({"torrent": str(file)})
            case {"join": file}:
                # In upload mode it connects and asks for nothing, until the signal.
                torrent = _add(session, folder, Path(file), lt.torrent_flags.upload_mode)
                answer({})
            case {"connect": addresses}:
                for address in addresses:
                    torrent.connect_peer((address, _PORT))
                answer({})
            case {"connected": count}:
                _await_connections(torrent, count)
                answer({})
            case {"go": _}:
                torrent.unset_flags(lt.torrent_flags.upload_mode)
                answer({"done": _finished(session)})
            case {"forget": _}:
                session.remove_torrent(torrent, lt.session.delete_files)
                answer({})


def _make(folder: Path, name: str, data: bytes, piece_bytes: int) -> Path:
    """The payload and its torrent, SHA-1 pieces only: the other kind of hash costs more and gains nothing here."""
    (folder / name).write_bytes(data)
    files = [lt.create_file_entry(name, len(data))]
    creator = lt.create_torrent(files, piece_bytes, lt.create_torrent.v1_only)
    lt.set_piece_hashes(creator, str(folder))
    file = folder / f"{name}.torrent"
    file.write_bytes(lt.bencode(creator.generate()))
    return file


def _add(session: Any, folder: Path, file: Path, flags: Any) -> Any:
    parameters = lt.load_torrent_file(str(file))
    parameters.save_path = str(folder)
    managed = lt.torrent_flags.auto_managed | lt.torrent_flags.paused
    parameters.flags = (parameters.flags & ~managed) | flags
    return session.add_torrent(parameters)


def _await_connections(torrent: Any, count: int) -> None:
    unready = lt.peer_info.connecting | lt.peer_info.handshake
    deadline = time.monotonic() + _CONNECT_S
    while sum(not peer.flags & unready for peer in torrent.get_peer_info()) < count:
        if time.monotonic() > deadline:
            raise TimeoutError(f"{len(torrent.get_peer_info())} of {count} peers after {_CONNECT_S:g} s")
        time.sleep(0.05)


def _finished(session: Any) -> float:
    """When the last piece was verified."""
    deadline = time.monotonic() + _FINISH_S
    while time.monotonic() < deadline:
        session.wait_for_alert(1000)
        now = time.monotonic()
        for alert in session.pop_alerts():
            if isinstance(alert, lt.torrent_finished_alert):
                return now
            if isinstance(alert, lt.torrent_error_alert | lt.file_error_alert):
                say(alert.message())
    raise TimeoutError(f"not finished after {_FINISH_S:g} s")


if __name__ == "__main__":
    main()
