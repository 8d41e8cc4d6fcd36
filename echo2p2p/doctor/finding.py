"""What a check found."""

from __future__ import annotations

from typing import Literal

import msgspec


class Finding(msgspec.Struct, frozen=True):
    """One line of the doctor's answer.

    Attributes:
        check: what was looked at.
        state: ``warning`` where a run is possible but will suffer, ``failure`` where it is not.
        says: what was found, with the figure.
        hint: what to do about it; empty where nothing has to be done.
        exit_code: of the command, if this is the first failure; the codes of :mod:`echo2p2p.errors`.
    """

    check: str
    state: Literal["ok", "warning", "failure"]
    says: str
    hint: str = ""
    exit_code: int = 1


def ok(check: str, says: str) -> Finding:
    return Finding(check, "ok", says)


def warning(check: str, says: str, hint: str) -> Finding:
    return Finding(check, "warning", says, hint)


def failure(check: str, says: str, hint: str, exit_code: int = 1) -> Finding:
    return Finding(check, "failure", says, hint, exit_code)
