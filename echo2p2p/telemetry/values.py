"""Figures out of events, whatever their fields really hold."""

from __future__ import annotations

import math

_MAX_COUNT = 2**53


def number(value: object) -> float:
    """``value`` as a float, NaN where it is none; a list counts as its length."""
    if isinstance(value, list):
        return float(len(value))
    if isinstance(value, bool) or not isinstance(value, int | float) or abs(value) > 1e300:
        return math.nan
    return float(value)


def amount(value: object) -> float:
    """:func:`number`, with 0 where it is none: for sums."""
    result = number(value)
    return 0.0 if math.isnan(result) else result


def whole(value: object) -> int:
    """:func:`amount` as an integer, for steps and versions; clamped to what an int64 holds."""
    return int(min(max(amount(value), -_MAX_COUNT), _MAX_COUNT))
