"""The examples run as they stand."""

import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLES = sorted((Path(__file__).parents[2] / "examples").glob("*.py"))


@pytest.mark.parametrize("example", EXAMPLES, ids=lambda path: path.stem)
def test_the_example_runs(example):
    done = subprocess.run([sys.executable, str(example)], capture_output=True, text=True, timeout=110)
    assert done.returncode == 0, done.stderr
    assert done.stdout
