"""``fedecider serve`` as a process of its own."""

import os
import re
import signal
import subprocess
import sys
import threading
from contextlib import contextmanager
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parents[2]
SERVE = ("-m", "fedecider.cli.main", "serve")
TOYS = (str(REPOSITORY / "tests" / "serve" / "toy_server.py"),)


class Running:
    """A service that has printed its address."""

    def __init__(self, process: subprocess.Popen):
        self.process, self.lines = process, []
        self._reader = threading.Thread(target=self._read)
        self._reader.start()

    def _read(self):
        for line in self.process.stdout:
            self.lines.append(line)

    def address(self) -> str:
        for _ in range(1200):
            found = re.search(r"http://\S+/", "".join(self.lines))
            if found:
                return found[0]
            assert self.process.poll() is None, self.lines
            threading.Event().wait(0.1)
        raise AssertionError(f"no address: {self.lines}")

    def stop(self, kind: signal.Signals = signal.SIGTERM) -> int:
        """The exit code after a signal."""
        if self.process.poll() is None:
            self.process.send_signal(kind)
        code = self.process.wait(60)
        self._reader.join(10)
        return code

    @property
    def output(self) -> str:
        return "".join(self.lines)


@contextmanager
def started(*words: str, environment: dict[str, str] | None = None):
    """A process of Python with these words; what it prints on both streams is kept."""
    own = {name: value for name, value in os.environ.items() if name != "FEDECIDER_API_KEY"}
    own |= {"PYTHONPATH": f"{REPOSITORY}:{REPOSITORY / 'tests' / 'serve'}", "OMP_NUM_THREADS": "1", "COLUMNS": "200"}
    process = subprocess.Popen(
        [sys.executable, "-u", *words],
        env={**own, **(environment or {})},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    running = Running(process)
    try:
        yield running
    finally:
        running.stop(signal.SIGKILL)
        process.stdout.close()
