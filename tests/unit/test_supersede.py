"""When a fetch gives way to a newer version."""

import pytest

from echo2p2p.weights.supersede import Arriving, gives_up


@pytest.mark.parametrize(
    ("arriving", "expected"),
    [
        (Arriving(100, 100, None, by_patches=False), True),
        (Arriving(81, 100, None, by_patches=False), True),
        # What is here would be lost, and the next version come so much later.
        (Arriving(79, 100, None, by_patches=False), False),
        (Arriving(24, 100, None, by_patches=False), False),
        (Arriving(0, 100, None, by_patches=False), False),
        # Patches of a few percent: the newer version is cheap from the older one, not from nothing.
        (Arriving(100, 100, 2, by_patches=False), False),
        (Arriving(100, 100, 40, by_patches=False), True),
        (Arriving(2, 100, 2, by_patches=True), False),
        (Arriving(90, 100, 2, by_patches=True), False),
    ],
)
def test_a_fetch_is_given_up_where_going_on_would_delay_the_newer_version(arriving, expected):
    assert gives_up(arriving) is expected
