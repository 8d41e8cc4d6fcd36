"""For all tests: one compute thread a process, no deadline for single examples, logging as it was.

What a test cannot ask of this machine it notes with ``record_property("untested", what)``; the end lists it.
"""

import logging
import os

os.environ.setdefault("OMP_NUM_THREADS", "1")  # before anything imports torch; children inherit it

import pytest
from hypothesis import settings

settings.register_profile("suite", deadline=None)
settings.load_profile("suite")


@pytest.fixture(autouse=True)
def _logging_as_it_was():
    """A command that runs in this process decides how loud it is, for itself."""
    root, ours = logging.getLogger(), logging.getLogger("echo2p2p")
    level, root_level, handlers = ours.level, root.level, list(root.handlers)
    yield
    ours.setLevel(level)
    root.setLevel(root_level)
    for handler in [each for each in root.handlers if each not in handlers]:
        root.removeHandler(handler)


def pytest_terminal_summary(terminalreporter):
    """What this machine did not have for the tests."""
    passed, skipped = terminalreporter.getreports("passed"), terminalreporter.getreports("skipped")
    untested = {what for report in passed for kind, what in report.user_properties if kind == "untested"}
    untested |= {f"{report.location[0]}: {report.longrepr[2]}" for report in skipped}
    if untested:
        terminalreporter.section("not tested on this machine")
        for what in sorted(untested):
            terminalreporter.line(what)
