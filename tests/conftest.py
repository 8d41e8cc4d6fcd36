"""For all tests: one compute thread a process, no deadline for single examples, logging as it was."""

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
