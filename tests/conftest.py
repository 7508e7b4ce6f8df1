"""What all tests share: one thread a process, and a loud list of the real data sets that are not at
hand."""

from __future__ import annotations

import os
from importlib.metadata import EntryPoint

import pytest
import torch

from stratafl.cli.main import COMMAND_GROUP, add_installed_commands, app

# the suite runs in several processes, and small operations gain nothing from more threads; those of
# a process that it starts would wait for each other most of the time, with the cores taken
torch.set_num_threads(1)
os.environ.setdefault("OMP_NUM_THREADS", "1")

# a command line as `make` installs it, also where the papers are only in the checkout
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
