"""Chunks coded for the wire: every byte comes back, nothing else is believed, and it is done where it pays."""

import asyncio
import contextlib
import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from test_relay_memory import now

from echo2p2p.errors import ChunkError
from echo2p2p.swarm.memory import MemorySwarm
from echo2p2p.swarm.virtual_time import run_virtual
from echo2p2p.weights.coding import Coder, decode, encode, word_bytes
from echo2p2p.weights.exchange import ServerLimits
from echo2p2p.weights.lane import FetchLimits
from echo2p2p.weights.manifest import Member
from echo2p2p.weights.publisher import WeightPublisher
from echo2p2p.weights.snapshot import Layout, Snapshot, TensorSpec
from echo2p2p.weights.store import MemoryStore
from echo2p2p.weights.subscriber import WeightSubscriber


def weights(count, dtype="bfloat16", seed=0):
    values = np.random.default_rng(seed).normal(0, 0.02, count).astype(np.float32)
    return (
        (values.view(np.uint32) >> 16).astype(np.uint16).tobytes()
        if dtype == "bfloat16"
        else values.tobytes()
    )


def snapshot_of(data, dtype):
    width = {"bfloat16": 2, "float32": 4, "uint8": 1}[dtype]
    layout = Layout((TensorSpec("w", dtype, (len(data) // width,), 0, len(data)),), {})
    return Snapshot(layout, data)


@given(
    st.one_of(st.binary(max_size=4096), st.integers(1, 3000).map(weights)),
    st.sampled_from([0, 1, 2, 3, 4, 8, 16]),
)
def test_what_is_coded_is_shorter_and_comes_back(chunk, width):
    coded = encode(chunk, width)
    if coded is not None:
        assert len(coded) < len(chunk)
        assert decode(coded, len(chunk)) == chunk


@pytest.mark.parametrize(("dtype", "width", "share"), [("bfloat16", 2, 0.71), ("float32", 4, 0.86)])
def test_weights_come_down_to_what_their_exponents_are_worth(dtype, width, share):
    chunk = weights(2**17, dtype)
    coded = encode(chunk, width)
    assert coded is not None
    assert len(coded) < share * len(chunk)


@given(st.binary(max_size=300), st.integers(0, 4096))
def test_bytes_that_nobody_coded_are_refused_or_make_just_what_was_asked_for(coded, nbytes):
    with contextlib.suppress(ChunkError):
        assert len(decode(coded, nbytes)) == nbytes


@given(st.data())
def test_one_wrong_byte_never_changes_the_length(data):
    chunk = weights(2000)
    coded = bytearray(encode(chunk, 2) or b"")
    coded[data.draw(st.integers(0, len(coded) - 1))] ^= data.draw(st.integers(1, 255))
    with contextlib.suppress(ChunkError):
        assert len(decode(bytes(coded), len(chunk))) == len(chunk)


def test_a_chunk_of_another_length_or_with_something_behind_it_is_refused():
    chunk = weights(2000)
    coded = encode(chunk, 2)
    for wrong, nbytes in (
        (coded, len(chunk) + 2),
        (coded + b"x", len(chunk)),
        (coded[:-1], len(chunk)),
        (b"", 8),
    ):
        with pytest.raises(ChunkError):
            decode(wrong, nbytes)


def test_the_words_of_a_snapshot_are_those_of_most_of_it():
    specs = (TensorSpec("a", "uint8", (64,), 0, 64), TensorSpec("b", "bfloat16", (64,), 64, 128))
    assert word_bytes(Layout(specs, {})) == 2
    assert word_bytes(Layout((), {})) == 1


class Ticking:
    """A clock that moves when it is told to, and counts what is handed off."""

    def __init__(self):
        self.at, self.n_offloaded = 0.0, 0

    def monotonic(self):
        return self.at

    async def offload(self, fn):
        self.n_offloaded += 1
        return fn()


async def sent_over(mbit, chunk, count):
    """How many of ``count`` chunks were coded, and how many were tried, over a link of ``mbit``."""
    clock = Ticking()
    coder = Coder(clock)
    n_coded = 0
    for _ in range(count):
        coded = await coder.coded(chunk, 2)
        n_coded += coded is not None
        clock.at += len(coded or chunk) * 8e-6 / mbit
        coder.wrote(len(coded or chunk))
    return n_coded, clock.n_offloaded


@pytest.mark.parametrize(("mbit", "share"), [(50, 1.0), (400, 1.0), (2000, 0.3), (50_000, 0.02)])
async def test_chunks_are_coded_unless_they_leave_faster_than_is_worth_it(mbit, share):
    count = max(128, 4 * int(mbit))
    n_coded, _ = await sent_over(mbit, weights(2**15), count)
    assert n_coded == count if share == 1 else n_coded < count * share


async def test_chunks_that_do_not_shrink_are_only_tried_now_and_then():
    n_coded, n_tried = await sent_over(50, np.random.default_rng(0).bytes(2**16), 640)
    assert n_coded == 0
    assert n_tried < 40


def relayed(data, dtype, *, capped):
    """Bytes that the learner sent for ``data`` to four peers, as a share of it, and the seconds that it took."""
    mbit = 20.0
    link = math.inf if capped else mbit
    server = ServerLimits(upload_mbit=mbit if capped else math.inf)
    limits = FetchLimits(download_mbit=mbit if capped else math.inf)

    async def main():
        async with MemorySwarm(seed=1) as swarm:
            learner, *peers = [
                swarm.add_peer(upload_mbit=link, download_mbit=link, delay_s=0.01) for _ in range(5)
            ]
            run = f"run@{learner.peer_id}"
            publisher = WeightPublisher(learner, run, MemoryStore(), chunk_bytes=2**16, server_limits=server)
            await publisher.start()
            workers = [
                WeightSubscriber(peer, run, MemoryStore(), server_limits=server, fetch_limits=limits)
                for peer in peers
            ]
            for worker in workers:
                await worker.start()
            members = [Member(peer.peer_id, mbit) for peer in peers]
            published = await publisher.publish(snapshot_of(data, dtype), 0, members, {})
            began_s = now()
            fetched = await asyncio.gather(*(worker.fetch(published.record) for worker in workers))
            assert all(each.snapshot.data == data for each in fetched)
            return sum(publisher.bytes_sent[0].values()) / len(data), now() - began_s

    return run_virtual(main)


@pytest.mark.parametrize("capped", [False, True])
def test_weights_cross_slow_links_and_caps_in_fewer_bytes_and_less_time(capped):
    nbytes = 4 * 2**20
    plain_share, plain_s = relayed(np.random.default_rng(1).bytes(nbytes), "uint8", capped=capped)
    assert plain_share == 1
    for dtype, width, most in (("bfloat16", 2, 0.72), ("float32", 4, 0.87)):
        share, seconds = relayed(weights(nbytes // width, dtype), dtype, capped=capped)
        assert share < most
        assert seconds < (most + 0.06) * plain_s
