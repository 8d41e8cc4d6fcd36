"""Promise 1: no trained token is older than S versions, under any interleaving."""

from hypothesis import given
from hypothesis import strategies as st

from echo2p2p.data.trajectory import Group, Trajectory, pack_logprobs
from echo2p2p.learning.replay import Entry, ReplayBuffer, staleness_histogram


def group(index, versions):
    samples = [
        Trajectory([1, 2], pack_logprobs([-1.0, -1.0]), oldest, newest, 1.0, "stop")
        for oldest, newest in versions
    ]
    return Group(index, [1], samples)


spans = st.tuples(st.integers(0, 12), st.integers(0, 3)).map(lambda v: (v[0], v[0] + v[1]))
groups = st.lists(spans, min_size=1, max_size=3)
steps = st.lists(
    st.one_of(
        st.tuples(st.just("arrive"), groups),
        st.tuples(st.just("version"), st.integers(1, 4)),
        st.tuples(st.just("resume"), st.integers(0, 3)),
        st.tuples(st.just("take"), st.integers(1, 3)),
        st.tuples(st.just("sweep"), st.none()),
    ),
    max_size=60,
)


@given(staleness=st.integers(0, 5), schedule=steps)
def test_no_trained_token_is_ever_older_than_the_window(staleness, schedule):
    buffer = ReplayBuffer(staleness=staleness, capacity_groups=1000)
    version, arrived, trained, dropped = 0, 0, [], []
    for action, argument in schedule:
        if action == "arrive":
            # Whatever admission let in: also groups from the future and groups long past the window.
            assert buffer.add(Entry(group(arrived, argument), "w"))
            arrived += 1
        elif action == "version":
            version += argument
        elif action == "resume":
            version = max(0, version - argument)  # a checkpoint that is older than the buffer
        elif action == "sweep":
            swept = buffer.drop_stale(version)
            assert not any(buffer.admissible(e.group.version, version) for e in swept)
            dropped += swept
        else:
            batch = buffer.take(argument, version)
            if batch is None:
                continue
            assert len(batch) == argument
            for entry in batch:
                for sample in entry.group.samples:
                    assert version - staleness <= sample.version_min
                # The whole group is judged by its oldest token, and goes as one.
                assert entry.group.version == min(s.version_min for s in entry.group.samples) <= version
            assert max(staleness_histogram(batch, version)) <= staleness
            trained += batch
    indices = [e.group.index for e in trained + dropped]
    assert len(indices) == len(set(indices))
    assert len(indices) + len(buffer) == arrived


def test_version_zero_is_a_version_like_any_other():
    buffer = ReplayBuffer(staleness=2, capacity_groups=10)
    buffer.add(Entry(group(0, [(0, 0)]), "w"))
    assert buffer.take(1, 3) is None
    assert [e.group.index for e in buffer.drop_stale(3)] == [0]
    buffer.add(Entry(group(1, [(0, 0)]), "w"))
    assert [e.group.index for e in buffer.take(1, 2)] == [1]


def test_one_old_token_makes_the_whole_group_old():
    buffer = ReplayBuffer(staleness=1, capacity_groups=10)
    buffer.add(Entry(group(0, [(5, 5), (3, 5)]), "w"))
    assert buffer.take(1, 5) is None


def test_oldest_versions_are_trained_first_and_order_of_arrival_within():
    buffer = ReplayBuffer(staleness=5, capacity_groups=10)
    for index, version in enumerate([3, 2, 3, 2]):
        buffer.add(Entry(group(index, [(version, version)]), "w"))
    assert [e.group.index for e in buffer.take(3, 4)] == [1, 3, 0]


def test_a_full_buffer_takes_nothing():
    buffer = ReplayBuffer(staleness=5, capacity_groups=1)
    assert buffer.add(Entry(group(0, [(0, 0)]), "w"))
    assert not buffer.add(Entry(group(1, [(0, 0)]), "w"))
