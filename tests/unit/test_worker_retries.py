"""A worker that cannot fetch a version goes on trying, and says so once for each version."""

import asyncio
import logging
from types import SimpleNamespace

import pytest

from echo2p2p.errors import SwarmError
from echo2p2p.rollout import worker


async def test_a_version_that_cannot_be_fetched_is_told_of_once(monkeypatch, caplog):
    monkeypatch.setattr(worker, "FETCH_RETRY_S", 0)
    tried = []

    async def fetch(record, _):
        tried.append(record.version)
        if len(tried) == 8:
            raise asyncio.CancelledError
        if len(tried) == 4:
            stuck._head = SimpleNamespace(version=2)
        raise SwarmError("nobody has it")

    stuck = SimpleNamespace(
        _new_head=asyncio.Event(),
        _head=SimpleNamespace(version=1),
        _life=0,
        _generating=0,
        _announced=None,
        _fetcher=SimpleNamespace(fetch=fetch),
    )
    stuck._new_head.set()
    with caplog.at_level(logging.WARNING), pytest.raises(asyncio.CancelledError):
        await worker.Worker._follow_versions(stuck)
    assert tried == [1] * 4 + [2] * 4
    assert [record.getMessage() for record in caplog.records] == [
        f"version {n} could not be fetched, trying again: nobody has it" for n in (1, 2)
    ]
