"""The token bucket: what may be sent in any span of time, and who is first."""

import math

from hypothesis import given
from hypothesis import strategies as st

from echo2p2p.weights.rate import BURST_S, TokenBucket

MBIT = 8.0
RATE = 1_000_000
BUCKET = RATE * BURST_S


def test_without_a_cap_everything_goes_at_once():
    bucket = TokenBucket(math.inf, 0.0)
    assert not bucket.capped
    assert bucket.reserve(2**40, 5.0) == 5.0
    assert bucket.missing_s(2**40, 5.0) == 0


def test_a_full_bucket_goes_at_once_and_the_rest_at_the_rate_in_order():
    bucket = TokenBucket(MBIT, 10.0)
    assert bucket.reserve(250_000, 10.0) == 10.0
    assert bucket.reserve(500_000, 10.0) == 10.5
    assert bucket.reserve(100_000, 10.0) == 10.6
    assert bucket.reserve(1, 100.0) == 100.0


def test_what_is_given_back_serves_the_next():
    bucket = TokenBucket(MBIT, 0.0)
    bucket.reserve(1_250_000, 0.0)
    bucket.give_back(1_000_000)
    assert bucket.reserve(500_000, 0.0) == 0.5


def test_a_piece_larger_than_the_bucket_waits_for_a_full_one():
    bucket = TokenBucket(MBIT, 0.0)
    assert bucket.missing_s(10 * RATE, 0.0) == 0
    bucket.reserve(RATE, 0.0)
    assert bucket.missing_s(10 * RATE, 0.0) == 1.0
    assert bucket.missing_s(10 * RATE, 1.0) == 0


@given(
    st.lists(
        st.tuples(st.floats(0, 3), st.integers(1, 2_000_000), st.sampled_from([0, 0, 0.5, 1])), max_size=60
    )
)
def test_no_span_of_time_sees_more_than_its_rate_and_a_bucket_or_a_piece(asked):
    bucket, now, sent = TokenBucket(MBIT, 0.0), 0.0, []
    for wait_s, nbytes, unused in asked:
        now += wait_s
        at = bucket.reserve(nbytes, now)
        used = nbytes - int(nbytes * unused)
        bucket.give_back(nbytes - used)
        sent.append((at, used, nbytes))
    sent.sort()
    for first in range(len(sent)):
        total = 0
        for at, used, _ in sent[first:]:
            total += used
            largest = max(nbytes for _, _, nbytes in sent)
            assert total <= RATE * (at - sent[first][0]) + max(BUCKET, largest) + 1
