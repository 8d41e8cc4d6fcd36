"""Versions that travel as patches on the memory network: what that saves, and every way in which it can fail."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from functools import cache

import numpy as np
import pytest
from test_relay_memory import ASSETS, CHUNKS, UP_MBIT, World, now, virtual

from echo2p2p.errors import FingerprintMismatch
from echo2p2p.swarm.messages import receive, send
from echo2p2p.weights import publisher as publishing
from echo2p2p.weights.patch import encode
from echo2p2p.weights.publisher import Published, WeightPublisher
from echo2p2p.weights.snapshot import Layout, Snapshot, TensorSpec
from echo2p2p.weights.subscriber import Fetched, WeightSubscriber
from echo2p2p.weights.wire import Missing, OpenLane, Want

WORDS = 2**20
NBYTES = 2 * WORDS
ONE_IN = 20
"""The share of words that change where a patch needs more chunks than members."""
WHOLE_BYTES = NBYTES + sum(map(len, ASSETS.values()))


@cache
def policy(version: int, one_in: int = 100) -> Snapshot:
    """A bf16 snapshot; one word in ``one_in`` differs from the version before by a unit in the last place."""
    rng = np.random.default_rng(0)
    words = (rng.normal(0, 0.02, WORDS).astype(np.float32).view(np.uint32) >> 16).astype(np.uint16)
    for step in range(version):
        rng = np.random.default_rng(step + 1)
        at = rng.choice(WORDS, WORDS // one_in, replace=False)
        words[at] += rng.choice(np.array([1, 0xFFFF], np.uint16), at.size)
    half = NBYTES // 2
    layout = Layout(
        (
            TensorSpec("a", "bfloat16", (WORDS // 2,), 0, half),
            TensorSpec("b", "bfloat16", (WORDS // 2,), half, half),
        ),
        {},
    )
    return Snapshot(layout, words.tobytes())


async def publish(world: World, version: int, one_in: int = 100) -> Published:
    return await world.publish(version, policy(version, one_in))


async def fetch(world: World, published: Published, *at: int, one_in: int = 100) -> list[Fetched]:
    """Those at ``at``, or everybody, fetch; what they get is checked."""
    chosen = [world.subscribers[each] for each in at] or world.subscribers
    fetched = await asyncio.gather(*(each.fetch(published.record) for each in chosen))
    for each in fetched:
        assert bytes(each.snapshot.data) == bytes(policy(published.manifest.version, one_in).data)
        assert each.assets == ASSETS
    return fetched


def came(fetched: Fetched) -> int:
    return fetched.bytes_from_learner + fetched.bytes_from_peers


def sent(world: World, version: int) -> int:
    return sum(world.publisher.bytes_sent[version].values())


# --- what it saves ----------------------------------------------------------------------------------------


@virtual([UP_MBIT] * 8)
async def test_versions_of_which_a_hundredth_changes_take_a_twentieth_of_the_bytes(world: World) -> None:
    assert all(came(each) == WHOLE_BYTES for each in await fetch(world, await publish(world, 0)))
    for version in (1, 2, 3):
        published = await publish(world, version)
        fetched = await fetch(world, published)
        (patch,) = published.manifest.patches[:1]
        assert all(came(each) == patch.nbytes < WHOLE_BYTES / 20 for each in fetched)
        assert sent(world, version) == patch.nbytes


@virtual()
async def test_a_change_of_everything_travels_whole(world: World) -> None:
    await world.fetch(await world.publish(0))
    published = await world.publish(1)
    assert not published.manifest.patches
    await world.fetch(published)


@virtual()
async def test_a_patch_that_would_not_pay_does_not_travel(world: World) -> None:
    first = await publish(world, 0)
    (patch,) = (await publish(world, 1)).manifest.patches
    share = patch.nbytes / NBYTES
    for margin, expected in ((1.01, (patch,)), (0.99, ())):
        again = WeightPublisher(
            world.learner, world.run, world.learner_store, max_patch_share=share * margin, keep_versions=1
        )
        await again.publish(policy(0), 0, world.members, ASSETS)
        assert (await again.publish(policy(1), 1, world.members, ASSETS)).manifest.patches == expected
    assert not first.manifest.patches


@virtual()
async def test_weights_of_another_layout_travel_whole(world: World) -> None:
    await world.fetch(await world.publish(0))
    published = await publish(world, 1)
    assert not published.manifest.patches
    await fetch(world, published)


@virtual()
async def test_weights_that_did_not_change_at_all_cost_nothing(world: World) -> None:
    await fetch(world, await publish(world, 0))
    fetched = await world.subscribers[0].fetch((await world.publish(1, policy(0))).record)
    assert fetched.snapshot.data == policy(0).data
    assert came(fetched) == 0


# --- those who do not hold the base -----------------------------------------------------------------------


@virtual()
async def test_a_late_joiner_gets_the_whole_from_those_who_took_the_patch(world: World) -> None:
    await fetch(world, await publish(world, 0))
    published = await publish(world, 1)
    await fetch(world, published)
    await world.join().start()
    (fetched,) = await fetch(world, published, -1)
    assert (fetched.bytes_from_learner, fetched.bytes_from_peers) == (0, WHOLE_BYTES)
    following = await publish(world, 2)
    assert all(came(each) < WHOLE_BYTES / 20 for each in await fetch(world, following))


@virtual()
async def test_a_member_without_a_base_gets_the_whole_while_the_others_take_the_patch(world: World) -> None:
    await fetch(world, await publish(world, 0), 0, 1, 2)
    await fetch(world, await publish(world, 1), 0, 1, 2)
    published = await publish(world, 2)
    *others, behind = await fetch(world, published)
    assert all(came(each) < WHOLE_BYTES / 20 for each in others)
    assert NBYTES <= came(behind) <= WHOLE_BYTES
    # Its own stripe comes from the learner; for the others it waits until their holders have applied the patch.
    assert behind.bytes_from_learner < WHOLE_BYTES / 3
    assert sent(world, 2) - behind.bytes_from_learner < 1.1 * published.manifest.patches[0].nbytes


@virtual()
async def test_who_fetches_the_whole_does_not_promise_the_patch(world: World) -> None:
    await fetch(world, await publish(world, 0))
    published = await publish(world, 1)
    late = world.join()
    await late.start()
    fetching = asyncio.create_task(late.fetch(published.record))
    await asyncio.sleep(0.2)
    stream = await world.peers[0].open_stream(world.peers[-1].peer_id, CHUNKS, timeout_s=1)
    await send(stream, OpenLane(published.digest))
    last = published.manifest.n_chunks - 1
    await send(stream, Want((last,), True))
    assert await receive(stream, Missing, max_bytes=1000, timeout_s=0.5) == Missing((last,))
    assert not fetching.done()
    await fetching


@virtual()
async def test_a_worker_that_comes_back_takes_the_whole_from_its_store_and_the_next_patch(
    world: World,
) -> None:
    await fetch(world, await publish(world, 0))
    published = await publish(world, 1)
    await fetch(world, published)
    world.subscribers[0] = WeightSubscriber(world.peers[0], world.run, world.stores[0])
    await world.subscribers[0].start()
    (fetched,) = await fetch(world, published, 0)
    assert came(fetched) == 0
    assert all(came(each) < WHOLE_BYTES / 20 for each in await fetch(world, await publish(world, 2)))


@virtual()
async def test_a_learner_that_comes_back_goes_on_with_patches(world: World) -> None:
    await fetch(world, await publish(world, 0))
    await fetch(world, await publish(world, 1))
    world.publisher = world.new_publisher()
    await world.publisher.start()
    await publish(world, 1)
    published = await publish(world, 2)
    assert all(came(each) < WHOLE_BYTES / 20 for each in await fetch(world, published))
    # It serves the patch that an earlier life of it has made, too.
    world.publisher = world.new_publisher()
    await world.publisher.start()
    world.subscribers[0] = world.join()
    await world.subscribers[0].start()
    await fetch(world, published, 0)


# --- patches that fail ------------------------------------------------------------------------------------

Encode = Callable[..., bytes]


def flipped(base: Snapshot, new: Snapshot, **named: str) -> bytes:
    data = bytearray(encode(base, new, **named))
    data[-1000] ^= 1
    return bytes(data)


def cut_short(base: Snapshot, new: Snapshot, **named: str) -> bytes:
    return encode(base, new, **named)[:-1000]


def nonsense(base: Snapshot, new: Snapshot, **named: str) -> bytes:
    return bytes(NBYTES // 100)


def lying(base: Snapshot, new: Snapshot, **named: str) -> bytes:
    """In order by all its digests, but it makes something else than it names."""
    return encode(base, policy(5), **named)


def from_another_base(base: Snapshot, new: Snapshot, **named: str) -> bytes:
    return encode(policy(3), new, base_fingerprint=policy(3).fingerprint(), fingerprint=named["fingerprint"])


def from_a_base_that_is_not_the_one_it_names(base: Snapshot, new: Snapshot, **named: str) -> bytes:
    return encode(policy(3), new, **named)


def to_another_version(base: Snapshot, new: Snapshot, **named: str) -> bytes:
    return encode(base, policy(5))


@pytest.mark.parametrize(
    "bad",
    [
        flipped,
        cut_short,
        nonsense,
        lying,
        from_another_base,
        from_a_base_that_is_not_the_one_it_names,
        to_another_version,
    ],
)
def test_a_patch_that_does_not_make_what_was_signed_is_replaced_by_the_whole(
    bad: Encode, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    async def main(world: World) -> None:
        await fetch(world, await publish(world, 0))
        monkeypatch.setattr(publishing, "encode", bad)
        published = await publish(world, 1)
        (patch,) = published.manifest.patches[:1]
        with caplog.at_level(logging.WARNING, "echo2p2p.weights"):
            fetched = await fetch(world, published)
        assert all(came(each) == patch.nbytes + NBYTES for each in fetched)
        assert caplog.text.count("version 1 is fetched whole, for its patches on version 0 failed") == len(
            fetched
        )
        assert not any(each.patches for each in fetched)
        assert not any(each.banned for each in world.subscribers)
        monkeypatch.undo()
        following = await publish(world, 2)
        assert all(came(each) < WHOLE_BYTES / 20 for each in await fetch(world, following))

    virtual()(main)()


def test_who_waits_for_the_whole_gets_it_though_the_patch_of_those_it_waits_for_fails(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def main(world: World) -> None:
        await fetch(world, await publish(world, 0), 0, 1, 2)
        await fetch(world, await publish(world, 1), 0, 1, 2)
        monkeypatch.setattr(publishing, "encode", lying)
        await world.join().start()
        started = now()
        *_, behind, late = await fetch(world, await publish(world, 2))
        assert now() - started < 5
        assert came(behind) <= WHOLE_BYTES
        assert (late.bytes_from_learner, late.bytes_from_peers) == (0, WHOLE_BYTES)

    virtual()(main)()


@virtual()
async def test_a_patch_that_is_not_to_be_had_is_replaced_by_the_whole(world: World) -> None:
    await fetch(world, await publish(world, 0))
    published = await publish(world, 1)
    lost = published.manifest.chunk_digest(published.manifest.n_chunks - 1)
    get = world.learner_store.get
    world.learner_store.get = lambda digest: None if digest == lost else get(digest)  # type: ignore[method-assign]
    assert all(came(each) > NBYTES for each in await fetch(world, published))


@virtual()
async def test_a_right_patch_in_a_manifest_of_wrong_chunks_is_no_way_around_the_check(world: World) -> None:
    await fetch(world, await publish(world, 0))
    honest = world.publisher._store_chunks

    def of_something_else(data: memoryview, chunk_bytes: int) -> bytes:
        return honest(policy(5).data if len(data) == NBYTES else data, chunk_bytes)

    world.publisher._store_chunks = of_something_else  # type: ignore[method-assign]
    published = await publish(world, 1)
    # Such a learner has what it signed for in its store only.
    assert world.publisher._newest_holding is not None
    world.publisher._newest_holding.leave_buffer()
    with pytest.raises(FingerprintMismatch):
        await world.subscribers[0].fetch(published.record)


@virtual()
async def test_a_peer_that_damages_a_patch_on_the_way_is_banned_and_the_patch_comes_from_others(
    world: World,
) -> None:
    await fetch(world, await publish(world, 0), one_in=ONE_IN)
    world.corrupt_all_from(world.peers[2])
    fetched = await fetch(world, await publish(world, 1, ONE_IN), one_in=ONE_IN)
    assert all(came(each) < WHOLE_BYTES / 5 for each in fetched)
    liar = world.peers[2].peer_id
    assert any(liar in each.banned for each in world.subscribers)


# --- patches that are cut off -----------------------------------------------------------------------------

SLOW_MBIT = 0.5


async def cut_off_in_mid_patch(world: World) -> tuple[Published, int]:
    """Peer 0 is stopped while the patch of version 1 arrives; how many bytes of it it has then."""
    await fetch(world, await publish(world, 0), one_in=ONE_IN)
    world.swarm.set_rate(world.learner, upload_mbit=SLOW_MBIT)
    published = await publish(world, 1, ONE_IN)
    fetching = asyncio.create_task(world.subscribers[0].fetch(published.record))
    await asyncio.sleep(0.5)
    fetching.cancel()
    await asyncio.gather(fetching, return_exceptions=True)
    manifest = published.manifest
    behind_assets = range(manifest.whole.stop, manifest.n_chunks)
    held = [at for at in behind_assets if world.stores[0].has(manifest.chunk_digest(at))]
    assert 0 < len(held) < len(behind_assets)
    return published, sum(end - start for start, end in map(manifest.chunk_span, held))


@virtual()
async def test_a_patch_goes_on_from_what_the_store_has(world: World) -> None:
    published, held = await cut_off_in_mid_patch(world)
    (fetched,) = await fetch(world, published, 0, one_in=ONE_IN)
    assert came(fetched) == published.manifest.patches[0].nbytes - held


@virtual()
async def test_a_worker_killed_in_mid_patch_goes_on_with_it_from_the_base_in_its_store(world: World) -> None:
    published, held = await cut_off_in_mid_patch(world)
    world.subscribers[0] = WeightSubscriber(world.peers[0], world.run, world.stores[0])
    await world.subscribers[0].start()
    fetched = await fetch(world, published, one_in=ONE_IN)
    assert came(fetched[0]) == published.manifest.patches[0].nbytes - held
    assert all(came(each) < WHOLE_BYTES / 5 for each in fetched[1:])


@virtual()
async def test_a_newer_version_supersedes_a_patch_in_progress(world: World) -> None:
    await cut_off_in_mid_patch(world)
    world.swarm.set_rate(world.learner, upload_mbit=UP_MBIT)
    fetched = await fetch(world, await publish(world, 2, ONE_IN), one_in=ONE_IN)
    assert all((each.patches, came(each) < WHOLE_BYTES / 3) == (2, True) for each in fetched)
    fetched = await fetch(world, await publish(world, 3, ONE_IN), one_in=ONE_IN)
    assert all(came(each) < WHOLE_BYTES / 5 for each in fetched)


@virtual([UP_MBIT] * 2)
async def test_where_everything_changes_making_patches_is_given_a_rest(world: World) -> None:
    encoded = []

    def counting(*snapshots: Snapshot, **names: str) -> bytes:
        encoded.append(names)
        return encode(*snapshots, **names)

    publishing.encode, original = counting, publishing.encode
    try:
        noise = np.random.default_rng(0)
        for version in range(12):
            dense = Snapshot(policy(0).layout, noise.bytes(NBYTES))
            assert not (await world.publish(version, dense)).manifest.patches
    finally:
        publishing.encode = original
    assert len(encoded) == 2
