"""Set-up of all tests: one thread per process, and a visible list of data sets that are missing."""

from __future__ import annotations

import os
from importlib.metadata import EntryPoint

import pytest
import torch

from stratafl.cli.main import COMMAND_GROUP, add_installed_commands, app

# the suite runs in several processes on all cores, and small operations do not gain from threads;
# the variable is for processes that tests start
torch.set_num_threads(1)
os.environ.setdefault("OMP_NUM_THREADS", "1")

# add the papers' command as `make` does, also if the papers are not installed
add_installed_commands(app, [EntryPoint("reproduce", "papers.harness.cli:reproduce_command", COMMAND_GROUP)])


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    absent = [
        f"{report.nodeid}: {report.longrepr[2]}"
        for report in terminalreporter.stats.get("skipped", [])
        if "/data/" in report.nodeid
    ]
    if absent:
        terminalreporter.section("DATA NOT TESTED", sep="!", yellow=True)
        for line in absent:
            terminalreporter.line(line)
