"""Text that strangers chose, made fit to show: on a terminal, in a figure, in a page.

What a peer announces ends up before a person's eyes. Nothing here lets it move the cursor, colour the
screen, reverse the reading order, forge a second line or fill the page.
"""

from __future__ import annotations

import math
import unicodedata

PEER_TAIL = 6
"""Characters of a peer id that are shown: its end, since all Ed25519 ids begin alike."""

_HIDDEN = {"Cc", "Cf", "Cs", "Co", "Cn", "Zl", "Zp"}


def clean(value: object, limit: int = 64) -> str:
    """``value`` as one line of visible characters, at most ``limit`` of them.

    Control and format characters, lone surrogates, private-use characters and line separators become ``?``;
    whatever was cut off shows as ``…``. Markup (HTML, rich, mathtext) is not touched: who renders escapes.
    """
    text = value if isinstance(value, str) else "" if value is None else str(value)
    cut = text[:limit] if len(text) <= limit else text[: limit - 1] + "…"
    return "".join("?" if unicodedata.category(char) in _HIDDEN else char for char in cut)


def ascii_only(value: object, limit: int = 64) -> str:
    """:func:`clean`, and ``?`` for whatever a plain font or a plain stream may lack."""
    return clean(value, limit).replace("…", "~").encode("ascii", "replace").decode()


def short_peer(peer: object) -> str:
    """A peer id for people: ``…`` and its last characters."""
    text = clean(peer, 128)
    return text if len(text) <= PEER_TAIL + 1 else "…" + text[-PEER_TAIL:]


def human_bytes(count: float) -> str:
    """``count`` bytes in binary units, such as ``3.2 MiB``."""
    for unit in ("B", "KiB", "MiB", "GiB", "TiB"):
        if abs(count) < 1024 or unit == "TiB":
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1024
    raise AssertionError


def human_seconds(seconds: float) -> str:
    """A duration such as ``42 s``, ``3 min 05 s`` or ``2 h 07 min``; ``? s`` if it is not a number."""
    if not math.isfinite(seconds):
        return "? s"
    if seconds < 60:
        return f"{seconds:.2g} s" if seconds < 10 else f"{seconds:.0f} s"
    minutes, rest = divmod(round(seconds), 60)
    if minutes < 60:
        return f"{minutes} min {rest:02d} s"
    return f"{minutes // 60} h {minutes % 60:02d} min"


def human_number(value: float) -> str:
    """Three significant digits and no exponent where that can be read: ``0.0123``, ``12.3``, ``1,230``."""
    if 1000 <= abs(value) < 1e9:
        return f"{value:,.0f}"
    return f"{value:.3g}"


def human_usd(amount: float) -> str:
    """Dollars, with as many digits as small sums need."""
    if abs(amount) >= 1 or amount == 0:
        return f"${amount:,.2f}"
    return f"${amount:.3f}" if abs(amount) >= 0.01 else f"${amount:.2g}"
