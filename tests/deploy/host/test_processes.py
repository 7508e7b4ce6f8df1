"""Processes on a system whose C library lacks what only Linux's has."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

ELSEWHERE = """
import ctypes, sys
from pathlib import Path

class Library(ctypes.CDLL):
    def __init__(self, name, *given, **named):
        super().__init__(name, *given, **named)
        self.own = name is None

    def __getattr__(self, name):
        if self.own and name in ("prctl", "mallopt"):
            raise AttributeError(name)
        return super().__getattr__(name)

ctypes.CDLL = Library
from stratafl.deploy.host import this_machine, view
from stratafl.deploy.host.processes import Forked

folder = Path(sys.argv[1])
process = Forked(lambda: sys.exit(7), folder / "log", folder)
print(process.wait(20), this_machine.sites.__name__, view.seen({})["sites"])
"""


def test_sites_can_be_looked_at_and_started_without_prctl(tmp_path: Path) -> None:
    command = [sys.executable, "-c", ELSEWHERE, str(tmp_path)]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=100)
    assert (ended.returncode, ended.stdout) == (0, "7 sites {}\n"), ended.stderr
