"""What tests of data share: an empty data root, and a loud list of the real sets not at hand."""

from __future__ import annotations

from pathlib import Path

import pytest


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


@pytest.fixture
def root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty data root that every call uses by default, with no originals in reach."""
    folder = tmp_path / "root"
    monkeypatch.setenv("STRATAFL_DATA", str(folder))
    monkeypatch.delenv("STRATAFL_REAL_DATA", raising=False)
    return folder
