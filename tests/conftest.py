"""For all tests: one compute thread a process, and no deadline for single examples on a busy machine."""

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")  # before anything imports torch; children inherit it

from hypothesis import settings

settings.register_profile("suite", deadline=None)
settings.load_profile("suite")
