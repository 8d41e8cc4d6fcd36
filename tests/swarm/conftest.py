"""Small swarms of real nodes on loopback, and the check that no p2pd of ours outlives the tests."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
from hivemind_helpers import Join

from echo2p2p.swarm.hivemind import HivemindNetwork


@pytest.fixture(scope="session", autouse=True)
def no_p2pd_survives(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Every p2pd names its identity file, and those of the tests lie under their own temporary folder."""
    yield
    base = str(tmp_path_factory.getbasetemp())
    deadline = time.monotonic() + 5
    while (left := p2pds_under(base)) and time.monotonic() < deadline:
        time.sleep(0.1)
    assert not left, f"p2pd left running: {left}"


def p2pds_under(folder: str) -> list[int]:
    found = []
    for process in psutil.process_iter(["pid", "cmdline"]):
        arguments = process.info["cmdline"] or []
        if any(argument.startswith(f"-id={folder}") for argument in arguments):
            found.append(process.info["pid"])
    return found


@pytest.fixture
async def join(tmp_path: Path) -> AsyncIterator[Join]:
    """Starts nodes, ``join("name", through=other, ...)``, and closes them after the test."""
    nodes: list[HivemindNetwork] = []

    async def join(
        name: str, *, through: HivemindNetwork | list[str] | None = None, **settings: Any
    ) -> HivemindNetwork:
        peers = through.addresses() if isinstance(through, HivemindNetwork) else through or []
        node = await HivemindNetwork.join(tmp_path / name, initial_peers=peers, **settings)
        nodes.append(node)
        return node

    yield join
    for node in reversed(nodes):
        await node.close()
