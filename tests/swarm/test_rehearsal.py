"""The run of three rented GPUs, rehearsed on this machine as its README says."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

REHEARSAL = Path(__file__).parents[2] / "examples/three-countries/rehearsal.sh"


@pytest.mark.timeout(240)
def test_the_rehearsal_trains_and_ends_what_it_started(tmp_path):
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    done = subprocess.run(
        ["sh", str(REHEARSAL)],
        capture_output=True,
        text=True,
        timeout=220,
        env={**os.environ, "PATH": path, "TMPDIR": str(tmp_path), "OMP_NUM_THREADS": "1"},
    )
    assert done.returncode == 0, done.stderr
    assert "step 3/3" in done.stdout
    assert "finished" in done.stdout
