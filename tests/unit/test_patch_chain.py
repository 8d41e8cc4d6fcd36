"""Chains of patches on the memory network: who missed versions, who comes back, and what can be wrong on the way."""

from __future__ import annotations

import asyncio
import logging

import msgspec
import pytest
from test_patch_relay import (
    NBYTES,
    WHOLE_BYTES,
    Encode,
    came,
    cut_short,
    encode,
    fetch,
    flipped,
    from_a_base_that_is_not_the_one_it_names,
    from_another_base,
    lying,
    nonsense,
    policy,
    publish,
    sent,
    to_another_version,
)
from test_relay_memory import ASSETS, CHUNK_BYTES, UP_MBIT, World, snapshot, virtual

from echo2p2p.errors import ManifestError
from echo2p2p.weights import publisher as publishing
from echo2p2p.weights.manifest import Manifest, ManifestLimits
from echo2p2p.weights.publisher import Published, WeightPublisher
from echo2p2p.weights.store import MemoryStore
from echo2p2p.weights.subscriber import WeightSubscriber

OTHERS = (0, 1, 2)
"""Peers that are there for every version; peer 3 is not."""


def chain_bytes(manifest: Manifest, count: int) -> int:
    return sum(patch.nbytes for patch in manifest.patches[:count])


async def go_on(world: World, versions: range, *at: int) -> Published:
    """Publish ``versions``; the peers at ``at`` fetch each of them."""
    for version in versions:
        published = await publish(world, version)
        if at:
            await fetch(world, published, *at)
    return published


async def restart_learner(world: World, **options: object) -> None:
    world.publisher = WeightPublisher(
        world.learner, world.run, world.learner_store, chunk_bytes=CHUNK_BYTES, **options
    )  # type: ignore[arg-type]
    await world.publisher.start()


async def restart(world: World, *at: int) -> None:
    for each in at:
        world.subscribers[each] = WeightSubscriber(world.peers[each], world.run, world.stores[each])
        await world.subscribers[each].start()


def lose(store: MemoryStore, digest: bytes) -> None:
    """The store still lists the chunk, and finds out that it is damaged when it reads it."""
    get = store.get
    store.get = lambda wanted: None if wanted == digest else get(wanted)  # type: ignore[method-assign]


# --- who missed versions ----------------------------------------------------------------------------------


@pytest.mark.parametrize("missed", [1, 3, 10])
def test_a_worker_that_missed_versions_takes_their_patches_from_the_others(missed: int) -> None:
    async def main(world: World) -> None:
        await fetch(world, await publish(world, 0))
        await go_on(world, range(1, missed + 1), *OTHERS)
        published = await publish(world, missed + 1)
        manifest = published.manifest
        *others, behind = await fetch(world, published)
        assert [each.patches for each in others] == [1, 1, 1]
        assert behind.patches == missed + 1 == len(manifest.patches)
        assert came(behind) == chain_bytes(manifest, missed + 1) < WHOLE_BYTES / 10
        # The learner sends the newest patch once, and of the others only the stripe of the one that lacks them.
        assert sent(world, missed + 1) <= chain_bytes(manifest, 1) + behind.bytes_from_learner
        assert behind.bytes_from_peers > 0

    virtual()(main)()


@virtual([UP_MBIT] * 6)
async def test_all_ways_are_taken_at_once(world: World) -> None:
    for version, missing in enumerate(({4, 5}, {2, 3, 4, 5}, {2, 3, 4, 5}, {3, 4, 5}, {4, 5})):
        published = await publish(world, version)
        await fetch(world, published, *sorted(set(range(6)) - missing | ({3, 4} if version == 0 else set())))
    late = world.join()
    await late.start()
    published = await publish(world, 5)
    fetched = await fetch(world, published)
    assert [each.patches for each in fetched] == [1, 1, 1, 1, 5, 0, 0]
    for each in fetched:
        expected = chain_bytes(published.manifest, each.patches) if each.patches else WHOLE_BYTES
        assert came(each) == expected


@virtual()
async def test_who_takes_part_in_relaying_need_not_have_taken_the_same_way(world: World) -> None:
    """After a restart of everybody, too, the patches of before are served by those who have them."""
    await fetch(world, await publish(world, 0))
    await go_on(world, range(1, 4), *OTHERS)
    await restart(world, *OTHERS)
    await restart_learner(world)
    published = await publish(world, 4)
    await fetch(world, published, *OTHERS)
    await restart(world, *OTHERS)
    before = sent(world, 4)
    (behind,) = await fetch(world, published, 3)
    assert came(behind) == chain_bytes(published.manifest, 4)
    assert sent(world, 4) - before == behind.bytes_from_learner < came(behind) / 2


@virtual()
async def test_who_missed_more_than_the_chain_has_takes_the_whole(world: World) -> None:
    await restart_learner(world, patch_chain=3)
    await fetch(world, await publish(world, 0))
    await go_on(world, range(1, 3), 0, 1)
    published = await go_on(world, range(3, 4), 0)
    assert [patch.base_version for patch in published.manifest.patches] == [2, 1, 0]
    published = await publish(world, 4)
    assert [patch.base_version for patch in published.manifest.patches] == [3, 2, 1]
    fetched = await fetch(world, published)
    assert [each.patches for each in fetched] == [1, 2, 0, 0]
    assert all(came(each) >= NBYTES for each in fetched[2:])


@virtual()
async def test_a_chain_of_one_is_the_patch_on_the_version_before(world: World) -> None:
    await restart_learner(world, patch_chain=1)
    published = await go_on(world, range(3))
    assert [patch.base_version for patch in published.manifest.patches] == [1]


@virtual()
async def test_a_chain_that_cannot_pay_is_not_listed(world: World) -> None:
    published = await go_on(world, range(4))
    share = chain_bytes(published.manifest, 3) / NBYTES
    world.learner_store = MemoryStore()
    await restart_learner(world, max_patch_share=share)
    published = await go_on(world, range(4))
    assert [patch.base_version for patch in published.manifest.patches] == [2, 1]


@virtual()
async def test_a_version_without_a_patch_breaks_the_chain(world: World) -> None:
    await fetch(world, await go_on(world, range(2)))
    noise = await world.publish(2, snapshot(2))
    assert not noise.manifest.patches
    await world.fetch(noise, 3)
    # Another layout twice, so no patch; then it goes on from there.
    assert not (await publish(world, 3)).manifest.patches
    published = await publish(world, 4)
    assert [patch.base_version for patch in published.manifest.patches] == [3]
    (behind,) = await fetch(world, published, 3)
    assert behind.patches == 0


@virtual()
async def test_a_chain_is_shortened_until_its_manifest_may_travel(world: World) -> None:
    longest = await go_on(world, range(5))
    assert len(longest.manifest.patches) == 4
    world.learner_store = MemoryStore()
    await restart_learner(world, limits=ManifestLimits(max_manifest_bytes=longest.record.manifest_bytes - 1))
    assert len((await go_on(world, range(5))).manifest.patches) == 3


@virtual()
async def test_the_chunks_of_a_chain_are_limited_with_the_others(world: World) -> None:
    longest = await go_on(world, range(5))
    world.learner_store = MemoryStore()
    limits = ManifestLimits(max_chunks=longest.manifest.n_chunks - len(ASSETS) - 1)
    await restart_learner(world, limits=limits, max_patch_share=0.1)
    assert len((await go_on(world, range(5))).manifest.patches) == 3


@virtual()
async def test_patches_stay_in_the_stores_as_long_as_a_manifest_names_them_and_no_longer(
    world: World,
) -> None:
    await restart_learner(world, patch_chain=3)
    await fetch(world, await publish(world, 0))
    first = (await go_on(world, range(1, 2), *OTHERS)).manifest.patches[0]
    for version in range(2, 8):
        await go_on(world, range(version, version + 1), *OTHERS)
        # Two versions are kept, and each names three patches.
        for store in (world.learner_store, *world.stores[:3]):
            assert store.has(first.chunk_digest(0)) == (version <= 4)


# --- who comes back ---------------------------------------------------------------------------------------


@virtual()
async def test_a_worker_that_comes_back_starts_from_its_store(world: World) -> None:
    await fetch(world, await publish(world, 0))
    await go_on(world, range(1, 3), *OTHERS)
    await restart(world, 3)
    published = await publish(world, 3)
    behind = (await fetch(world, published))[-1]
    assert (behind.patches, came(behind)) == (3, chain_bytes(published.manifest, 3))
    # From then on the base is in memory.
    world.stores[3].get = lambda _: None  # type: ignore[method-assign]
    (behind,) = await fetch(world, await publish(world, 4), 3)
    assert behind.patches == 1


@virtual()
async def test_a_worker_that_comes_back_to_a_damaged_base_takes_the_whole(world: World) -> None:
    first = await publish(world, 0)
    await fetch(world, first)
    await go_on(world, range(1, 3), *OTHERS)
    await restart(world, 3)
    lose(world.stores[3], first.manifest.chunk_digest(5))
    published = await publish(world, 3)
    behind = (await fetch(world, published))[-1]
    assert behind.patches == 0
    assert NBYTES < came(behind) <= NBYTES + chain_bytes(published.manifest, 3)


@virtual()
async def test_a_worker_killed_in_the_middle_of_a_chain_goes_on_with_it(world: World) -> None:
    await fetch(world, await publish(world, 0))
    await go_on(world, range(1, 4), *OTHERS)
    published = await publish(world, 4)
    await fetch(world, published, *OTHERS)
    for peer in (world.learner, *world.peers[:3]):
        world.swarm.set_rate(peer, upload_mbit=0.1)
    fetching = asyncio.create_task(world.subscribers[3].fetch(published.record))
    await asyncio.sleep(1.5)
    fetching.cancel()
    await asyncio.gather(fetching, return_exceptions=True)
    chain = published.manifest.by_patches(4)[len(ASSETS) :]
    held = [at for at in chain if world.stores[3].has(published.manifest.chunk_digest(at))]
    assert 0 < len(held) < len(chain)
    await restart(world, 3)
    (behind,) = await fetch(world, published, 3)
    spans = [published.manifest.chunk_span(at) for at in set(chain) - set(held)]
    assert (behind.patches, came(behind)) == (4, sum(end - start for start, end in spans))


@virtual()
async def test_a_learner_that_comes_back_makes_its_next_version_a_patch(world: World) -> None:
    await fetch(world, await publish(world, 0))
    await go_on(world, range(1, 3), *OTHERS)
    await restart_learner(world)
    published = await publish(world, 3)
    assert [patch.base_version for patch in published.manifest.patches] == [2, 1, 0]
    assert [each.patches for each in await fetch(world, published)] == [1, 1, 1, 3]


@virtual()
async def test_a_learner_that_comes_back_to_a_damaged_base_publishes_the_whole(
    world: World,
) -> None:
    published = await publish(world, 0)
    await restart_learner(world)
    lose(world.learner_store, published.manifest.chunk_digest(5))
    published = await publish(world, 1)
    assert not published.manifest.patches
    await fetch(world, published)


@virtual()
async def test_a_learner_lists_no_patch_that_its_store_has_lost(world: World) -> None:
    published = await go_on(world, range(4))
    lost = published.manifest.patches[1].chunk_digest(0)
    has = world.learner_store.has
    world.learner_store.has = lambda digest: digest != lost and has(digest)  # type: ignore[method-assign]
    assert [patch.base_version for patch in (await publish(world, 4)).manifest.patches] == [3, 2]


@virtual()
async def test_manifests_of_another_format_in_a_store_are_passed_over(world: World) -> None:
    published = await publish(world, 0)
    await fetch(world, published)
    payload = msgspec.msgpack.decode(world.learner_store.manifests()[0][64:])
    payload["patch"] = payload.pop("patches") or None
    other = msgspec.msgpack.encode(payload)
    body = world.learner.identity.sign(b"echo2p2p/1/manifest", other) + other
    for store in (world.learner_store, world.stores[0]):
        store.pin(0, body, published.manifest.digests())
    await restart_learner(world)
    await restart(world, 0)
    assert world.publisher.newest is None
    published = await publish(world, 1)
    assert not published.manifest.patches
    # Of what it holds already, a worker fetches nothing again.
    assert all(came(each) <= NBYTES for each in await fetch(world, published))


# --- chains that fail -------------------------------------------------------------------------------------

BAD = [
    flipped,
    cut_short,
    nonsense,
    lying,
    from_another_base,
    from_a_base_that_is_not_the_one_it_names,
    to_another_version,
]


@pytest.mark.parametrize("at", [1, 2, 3])
@pytest.mark.parametrize("bad", BAD)
def test_one_bad_patch_anywhere_in_a_chain_leads_to_the_whole(
    bad: Encode, at: int, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    async def main(world: World) -> None:
        (installed,) = await fetch(world, await publish(world, 0), 0)
        for version in range(1, 4):
            monkeypatch.setattr(publishing, "encode", bad if version == at else encode)
            published = await publish(world, version)
        with caplog.at_level(logging.WARNING, "echo2p2p.weights"):
            (fetched,) = await fetch(world, published, 0)
        assert fetched.patches == 0
        assert "version 3 is fetched whole, for its patches on version 0 failed" in caplog.text
        assert bytes(installed.snapshot.data) == bytes(policy(0).data)
        assert not world.subscribers[0].banned

    virtual([UP_MBIT])(main)()


@virtual()
async def test_a_manifest_whose_chain_does_not_hang_together_is_not_signed(world: World) -> None:
    published = await go_on(world, range(3))
    patches = published.manifest.patches
    for wrong in (patches[::-1], (patches[0], patches[0]), (patches[0], *patches)):
        with pytest.raises(ManifestError):
            publishing.sign(
                world.learner.identity, msgspec.structs.replace(published.manifest, patches=wrong)
            )
