"""The commands as processes of a test, all in one folder; whatever still runs at the end is ended."""

import os
import subprocess
import sys


class Processes:
    """``settings`` is the text of the settings file that every command is given."""

    def __init__(self, folder, settings):
        self.folder = folder
        self.settings = folder / "settings.toml"
        self.settings.write_text(settings)
        self.processes = []

    def start(self, *arguments, environment=None):
        with (self.folder / f"{len(self.processes)}.log").open("wb") as log:
            process = subprocess.Popen(
                [sys.executable, "-m", "echo2p2p", *arguments, "--config", str(self.settings)],
                stdout=subprocess.PIPE,
                stderr=log,
                cwd=self.folder,
                env={**os.environ, "OMP_NUM_THREADS": "1", **(environment or {})},
            )
        self.processes.append(process)
        return process

    def line(self, process):
        line = process.stdout.readline().decode().strip()
        assert line, f"process {process.args} printed nothing"
        return line.split()

    def close(self):
        for process in reversed(self.processes):
            if process.poll() is None:
                process.terminate()
        for process in self.processes:
            try:
                process.wait(timeout=15)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
            process.stdout.close()
