import errno
import json
import logging
import os
import threading
from pathlib import Path

import numpy as np
import pytest
from fake_run import FakeClock, FakeRun

from echo2p2p.errors import SettingsError
from echo2p2p.telemetry import events as events_module
from echo2p2p.telemetry.events import MAX_TEXT_CHARS, EventLog, read_events
from echo2p2p.telemetry.kinds import ENVELOPE, KINDS
from echo2p2p.telemetry.story import tell


def open_log(path: Path | None) -> EventLog:
    return EventLog(path, role="learner", peer="12D3KooWx", clock=FakeClock())


def test_an_event_carries_its_envelope_and_its_fields(tmp_path):
    log = open_log(tmp_path / "deep" / "events.jsonl")
    log.emit("eval", step=3, reward=0.5, n=64)
    (event,) = read_events(tmp_path / "deep" / "events.jsonl")
    assert event == {
        "t": 0.0,
        "unix": 1_790_001_000.0,
        "role": "learner",
        "peer": "12D3KooWx",
        "event": "eval",
        "step": 3,
        "reward": 0.5,
        "n": 64,
    }


def test_a_field_cannot_forge_the_envelope():
    log, seen = open_log(None), []
    log.subscribe(seen.append)
    log.emit("state", state="active", role="bootstrap", peer="somebody else", event="eval", kind="x")
    assert (seen[0]["role"], seen[0]["peer"], seen[0]["event"], seen[0]["kind"]) == (
        "learner",
        "12D3KooWx",
        "state",
        "x",
    )


def test_values_become_plain_json(tmp_path):
    log = open_log(tmp_path / "events.jsonl")
    loop: list = []
    loop.append(loop)
    log.emit(
        "step",
        single=np.float32(0.5),
        count=np.int64(7),
        flag=np.bool_(True),
        array=np.arange(3),
        nan=float("nan"),
        inf=np.float64("inf"),
        nested={"a": (1, float("-inf")), 2: {3}},
        huge=10**5000,
        alien=object(),
        loop=loop,
    )
    (event,) = read_events(tmp_path / "events.jsonl")
    assert event["single"] == 0.5
    assert event["count"] == 7
    assert event["flag"] is True
    assert event["array"] == [0, 1, 2]
    assert event["nan"] is event["inf"] is event["huge"] is None
    assert event["nested"] == {"a": [1, None], "2": [3]}
    assert event["alien"] == "<object>"
    assert "<list>" in json.dumps(event["loop"])


def test_a_line_holds_no_raw_control_character_and_no_endless_text(tmp_path):
    path = tmp_path / "events.jsonl"
    open_log(path).emit("worker_left", worker="\x1b[2J\n\u202e\ud800", reason="x" * 200_000)
    raw = path.read_bytes()
    assert raw.count(b"\n") == 1
    assert all(32 <= byte < 127 for byte in raw[:-1])
    assert len(raw) < MAX_TEXT_CHARS + 300
    (event,) = read_events(path)
    assert event["worker"] == "\x1b[2J\n\u202e\ud800"
    assert event["reason"].endswith("…")


def test_a_torn_last_line_is_not_read_and_a_new_writer_starts_a_new_line(tmp_path):
    path = tmp_path / "events.jsonl"
    open_log(path).emit("eval", step=1)
    with path.open("ab") as file:
        file.write(b'{"event":"eval","step":2')
    assert [event["step"] for event in read_events(path)] == [1]
    open_log(path).emit("eval", step=3)
    assert [event["step"] for event in read_events(path)] == [1, 3]


@pytest.mark.parametrize("cut", range(0, 60, 7))
def test_a_log_cut_anywhere_reads_up_to_the_last_whole_line(tmp_path, cut):
    path = tmp_path / "events.jsonl"
    log = open_log(path)
    for step in range(5):
        log.emit("eval", step=step)
    data = path.read_bytes()
    path.write_bytes(data[: len(data) - 1 - cut])
    assert [event["step"] for event in read_events(path)] == [0, 1, 2, 3]


def test_junk_lines_are_skipped(tmp_path, monkeypatch):
    monkeypatch.setattr(events_module, "MAX_LINE_BYTES", 1000)
    good = b'{"event":"eval","step":1}\n'
    junk = [
        b"\n",
        b"\0\0\0\n",
        b"[1]\n",
        b'{"step":1}\n',
        b'{"event":1}\n',
        b"\xff\xfe\n",
        b"[" * 900 + b"\n",
    ]
    junk += [
        b'{"event":"eval","long":"' + b"x" * 3000 + b'"}\n',
        b'{"event":"eval","n":' + b"9" * 900 + b"\n",
    ]
    path = tmp_path / "events.jsonl"
    path.write_bytes(good.join([b"", *junk, b""]))
    assert [event["step"] for event in read_events(path)] == [1] * (len(junk) + 1)


def test_a_missing_log_is_a_settings_error(tmp_path):
    with pytest.raises(SettingsError, match=r"none\.jsonl"):
        list(read_events(tmp_path / "none.jsonl"))


def test_a_log_that_cannot_be_opened_says_so(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(SettingsError, match="cannot be opened"):
        open_log(tmp_path / "file" / "events.jsonl")


def test_a_full_disk_warns_once_loses_events_and_says_how_many(tmp_path, monkeypatch, caplog):
    path = tmp_path / "events.jsonl"
    log, seen = open_log(path), []
    log.subscribe(seen.append)
    log.emit("eval", step=1)

    def full(fd, data):
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patched, caplog.at_level(logging.WARNING):
        patched.setattr(os, "write", full)
        log.emit("eval", step=2)
        log.emit("eval", step=3)
    assert [record.levelname for record in caplog.records] == ["WARNING"]
    assert log.lost == 2
    log.emit("eval", step=4)
    assert [event.get("step", event.get("count")) for event in read_events(path)] == [1, 2, 4]
    assert [event["event"] for event in read_events(path)] == ["eval", "events_lost", "eval"]
    assert [event["step"] for event in seen] == [1, 2, 3, 4]


def test_a_line_that_the_disk_took_in_part_does_not_spoil_the_next(tmp_path, monkeypatch):
    path = tmp_path / "events.jsonl"
    log, write = open_log(path), os.write
    with monkeypatch.context() as patched:
        patched.setattr(os, "write", lambda fd, data: write(fd, data[:10]))
        log.emit("eval", step=1)
    log.emit("eval", step=2)
    assert [event["event"] for event in read_events(path)] == ["events_lost", "eval"]


def test_an_event_too_long_for_a_line_is_counted_and_not_written(tmp_path, monkeypatch):
    monkeypatch.setattr(events_module, "MAX_LINE_BYTES", 1000)
    log = open_log(tmp_path / "events.jsonl")
    log.emit("activation", active=["x" * 100] * 20)
    log.emit("eval", step=1)
    assert [event["event"] for event in read_events(tmp_path / "events.jsonl")] == ["events_lost", "eval"]


def test_a_listener_that_fails_is_left_out_and_the_others_go_on(caplog):
    log, seen = open_log(None), []

    def broken(event):
        raise RuntimeError("no")

    log.subscribe(broken)
    end = log.subscribe(seen.append)
    log.emit("eval", step=1)
    log.emit("eval", step=2)
    end()
    log.emit("eval", step=3)
    assert [event["step"] for event in seen] == [1, 2]
    assert len(caplog.records) == 1


def test_threads_do_not_mix_their_lines(tmp_path):
    log = open_log(tmp_path / "events.jsonl")
    threads = [
        threading.Thread(target=lambda: [log.emit("eval", step=step, pad="x" * 500) for step in range(50)])
        for _ in range(4)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=10)
    assert len(list(read_events(tmp_path / "events.jsonl"))) == 200


def test_a_closed_log_still_serves_its_listeners(tmp_path):
    log, seen = open_log(tmp_path / "events.jsonl"), []
    log.subscribe(seen.append)
    log.close()
    log.close()
    log.emit("eval", step=1)
    assert len(seen) == 1
    assert not list(read_events(tmp_path / "events.jsonl"))


def test_the_table_of_kinds():
    assert sorted(KINDS) == [
        "activation",
        "broadcast",
        "checkpoint",
        "disk_full",
        "disk_has_room",
        "eval",
        "events_lost",
        "found_out",
        "generated",
        "installed",
        "joined",
        "peers",
        "published",
        "ready",
        "refused",
        "relayed",
        "rolled_forward",
        "run_finished",
        "run_started",
        "session",
        "state",
        "step",
        "superseded",
        "verdicts",
        "version_refused",
        "withheld",
        "worker_joined",
        "worker_left",
    ]
    for name, kind in KINDS.items():
        assert kind.role in {"any", "learner", "worker", "bootstrap"}, name
        assert not set(kind.fields) & set(ENVELOPE), name
        assert all(kind.fields.values()), name


def test_the_made_up_run_emits_what_the_table_says(tmp_path):
    run = FakeRun(tmp_path / "events.jsonl")
    run.play(20)
    for event in read_events(tmp_path / "events.jsonl"):
        assert set(event) - set(ENVELOPE) <= set(KINDS[event["event"]].fields), event["event"]


@pytest.mark.parametrize(
    ("patches", "told"),
    [(0, ", whole"), (1, ", by one patch"), (4, ", by 4 patches"), (None, ""), ("x", ""), (-3, ", whole")],
)
def test_a_worker_tells_which_way_a_version_came(patches, told):
    event = {"event": "installed", "version": 7, "patches": patches}
    assert tell(event) == f"version 7 installed{told}"
