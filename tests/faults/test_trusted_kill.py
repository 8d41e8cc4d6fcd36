"""The newest version seen is on the disk before it is used: a kill -9 around that moment never takes it back."""

import random
import subprocess
import sys
import time
from pathlib import Path

from echo2p2p.weights.store import DiskStore

CHILD = """
import sys
from pathlib import Path
from echo2p2p.weights.manifest import Trusted
from echo2p2p.weights.store import DiskStore

store = DiskStore(Path(sys.argv[1]))
version = store.trusted().version
while True:
    version += 1
    store.remember(Trusted(version, f"{version:064x}"))
    print(version, flush=True)
"""


def test_kill_9_at_twenty_moments_never_brings_an_older_version_back(tmp_path: Path) -> None:
    rng = random.Random(0)
    newest = -1
    for _ in range(20):
        child = subprocess.Popen(
            [sys.executable, "-c", CHILD, str(tmp_path)], stdout=subprocess.PIPE, text=True
        )
        assert child.stdout is not None
        used = [int(child.stdout.readline())]
        assert used[0] > newest
        time.sleep(rng.uniform(0, 0.02))
        child.kill()
        out, _ = child.communicate(timeout=10)
        # The last line may be torn by the kill.
        used += [int(line) for line in out.splitlines(keepends=True) if line.endswith("\n")]
        store = DiskStore(tmp_path)
        assert store.trusted().version >= used[-1]
        assert store.trusted().digest == f"{store.trusted().version:064x}"
        assert len(list((tmp_path / "tmp").iterdir())) <= 1
        newest = store.trusted().version
