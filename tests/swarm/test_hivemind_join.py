"""Joining, leaving, and the errors of both."""

from __future__ import annotations

import asyncio
import logging
import os
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
from hivemind_helpers import Join

from echo2p2p.errors import JoinError, PeerUnreachable, SettingsError
from echo2p2p.swarm.clock import SystemClock
from echo2p2p.swarm.hivemind.daemon import NodeFolder
from echo2p2p.swarm.identity import Identity

DEAD = f"/ip4/127.0.0.1/tcp/1/p2p/{Identity.from_seed(b'd' * 32).peer_id}"


class SkewedClock(SystemClock):
    def __init__(self, ahead_s: float) -> None:
        self.ahead_s = ahead_s

    def unix(self) -> float:
        return super().unix() + self.ahead_s


async def test_a_node_joins_through_a_bootstrap_peer(join: Join, tmp_path: Path) -> None:
    first = await join("first")
    second = await join("second", through=first)
    assert second.peer_id == Identity.load_or_create(tmp_path / "second").peer_id
    assert [info.peer for info in await second.peers()] == [first.peer_id]
    assert all(address.endswith(f"/p2p/{second.peer_id}") for address in second.addresses())


async def test_a_dead_bootstrap_peer_among_living_ones_does_not_matter(join: Join) -> None:
    first = await join("first")
    started = time.monotonic()
    second = await join("second", through=[DEAD, *first.addresses()])
    assert time.monotonic() - started < 5
    assert first.peer_id in [info.peer for info in await second.peers()]


async def test_a_bootstrap_peer_may_be_told_of_itself(join: Join) -> None:
    first = await join("first")
    address = first.addresses()
    await first.close()
    again = await join("first", through=address, host_maddrs=[address[0].split("/p2p/")[0]])
    assert again.addresses() == address


async def test_no_living_bootstrap_peer_is_a_join_error_within_the_deadline(join: Join) -> None:
    started = time.monotonic()
    with pytest.raises(JoinError, match=r"12D3KooW.*refused") as failure:
        await join("first", through=[DEAD], startup_timeout_s=2)
    assert time.monotonic() - started < 4
    assert "port" in failure.value.hint


async def test_a_bootstrap_peer_that_comes_up_late_is_found(join: Join, tmp_path: Path) -> None:
    first = await join("first")
    address = first.addresses()
    port = address[0].split("/tcp/")[1].split("/")[0]
    await first.close()
    joining = asyncio.ensure_future(join("second", through=address))
    await asyncio.sleep(0.5)
    await join("first", host_maddrs=[f"/ip4/127.0.0.1/tcp/{port}"])
    assert (await joining).addresses()


@pytest.mark.parametrize(
    "address",
    [
        "nonsense",
        "/ip4/127.0.0.1/tcp/99999999",
        "/ip4/127.0.0.1/tcp/4001",
        "/ip4/127.0.0.1/tcp/4001/p2p/x",
        "",
    ],
)
async def test_a_malformed_bootstrap_address_is_a_settings_error_that_names_it(
    join: Join, address: str
) -> None:
    with pytest.raises(SettingsError) as failure:
        await join("first", through=[address])
    assert repr(address) in failure.value.message


async def test_announcing_port_zero_is_a_settings_error(join: Join) -> None:
    with pytest.raises(SettingsError, match="port"):
        await join("first", announce_maddrs=["/ip4/1.2.3.4/tcp/0"])


async def test_a_port_that_is_taken_is_a_join_error(join: Join) -> None:
    first = await join("first")
    taken = first.addresses()[0].split("/p2p/")[0]
    with pytest.raises(JoinError, match="address already in use") as failure:
        await join("second", host_maddrs=[taken])
    assert "--host-maddrs" in failure.value.hint


async def test_an_identity_is_used_by_one_node_at_a_time(join: Join) -> None:
    first = await join("first")
    with pytest.raises(JoinError, match="runs on this machine already"):
        await join("first")
    await first.close()
    assert (await join("first")).peer_id == first.peer_id


def test_the_folder_of_a_killed_node_is_swept_and_that_of_a_living_one_is_not() -> None:
    seeds = (b"1" * 32, b"2" * 32, b"3" * 32)
    dead, living, ours = (Identity.from_seed(seed).peer_id for seed in seeds)
    hold = (
        "import sys, time; from echo2p2p.swarm.hivemind.daemon import NodeFolder;"
        "f = NodeFolder(sys.argv[1]); print(f.path, flush=True); time.sleep(60)"
    )
    with (
        subprocess.Popen([sys.executable, "-c", hold, dead], stdout=subprocess.PIPE, text=True) as first,
        subprocess.Popen([sys.executable, "-c", hold, living], stdout=subprocess.PIPE, text=True) as second,
    ):
        assert first.stdout is not None
        assert second.stdout is not None
        left, held = Path(first.stdout.readline().strip()), Path(second.stdout.readline().strip())
        first.kill()
        first.wait()
        NodeFolder(ours).release()
        assert left.exists(), "it may be about to be taken again"
        for folder in (left, held):
            os.utime(folder, (0, 0))
        NodeFolder(ours).release()
        assert not left.exists()
        assert held.exists()
        second.kill()
    NodeFolder(living).release()
    assert not held.exists()


@pytest.mark.parametrize(("ahead_s", "said"), [(10.0, "10.. s ahead of"), (-10.0, "(10|9).. s behind")])
async def test_a_clock_that_is_off_is_a_join_error_that_says_by_how_much(
    join: Join, ahead_s: float, said: str
) -> None:
    first = await join("first")
    with pytest.raises(JoinError, match=said) as failure:
        await join("second", through=first, clock=SkewedClock(ahead_s))
    assert "NTP" in failure.value.hint


async def test_a_node_in_client_mode_finds_and_reaches_others(join: Join) -> None:
    first = await join("first")
    second = await join("second", through=first, client_mode=True)
    assert await second.find_records("echo2p2p/1/runs", timeout_s=5) == {}


async def test_close_ends_p2pd_and_removes_its_folder_and_later_calls_raise(join: Join) -> None:
    first = await join("first")
    children = psutil.Process().children()
    assert [child.name() for child in children] == ["p2pd"]
    folder = Path(f"/tmp/echo2p2p-{psutil.Process().uids().real}-{first.peer_id}")
    assert folder.exists()
    failed = asyncio.ensure_future(first.wait_failed())
    started = time.monotonic()
    await first.close()
    await first.close()
    assert time.monotonic() - started < 3
    assert not folder.exists()
    assert not psutil.Process().children()
    await failed
    for call in (
        first.open_stream(first.peer_id, "/x", timeout_s=1),
        first.find_records("x", timeout_s=1),
        first.peers(),
    ):
        with pytest.raises(PeerUnreachable):
            await call


def test_importing_leaves_signals_loop_policy_and_logging_alone() -> None:
    script = """
import asyncio, logging, signal
def state():
    return [signal.getsignal(s) for s in signal.valid_signals()], type(asyncio.get_event_loop_policy())
before = state()
import echo2p2p.swarm.hivemind
assert before == state()
assert not logging.getLogger("hivemind").handlers and not logging.getLogger().handlers
assert logging.getLevelName(logging.WARNING) == "WARNING"
assert logging.getLogger("hivemind.dht").getEffectiveLevel() == logging.WARNING
"""
    subprocess.run([sys.executable, "-W", "ignore", "-c", script], check=True, timeout=60)


async def test_the_start_says_nothing_above_debug_of_ours(
    join: Join, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO):
        first = await join("first")
        await join("second", through=first)
    assert [r for r in caplog.records if r.name.startswith(("hivemind", "echo2p2p"))] == []
