"""A run whose workers have real engines, and what its event logs say of it."""

from __future__ import annotations

import time
from typing import Any

from processes import Processes

from echo2p2p.telemetry.events import read_events


class Swarm(Processes):
    def events(self, name: str, kind: str) -> list[dict[str, Any]]:
        path = self.folder / name / "events.jsonl"
        return [event for event in read_events(path) if event["event"] == kind] if path.exists() else []

    def patched(self, name: str) -> int:
        """How many versions a worker has installed by patches."""
        return sum(event["patches"] > 0 for event in self.events(name, "installed"))

    def wait(self, what: str, condition: Any, timeout_s: float = 200) -> None:
        deadline = time.monotonic() + timeout_s
        while not condition():
            assert time.monotonic() < deadline, f"waited {timeout_s} s for {what}"
            assert all(process.poll() is None for process in self.processes)
            time.sleep(0.5)
