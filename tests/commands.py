"""The command line in this process, and a small config for it."""

from __future__ import annotations

import sys

import pytest

from stratafl.cli.main import main

CONFIG = """
rounds = 3

[tree]
shape = "2x2"

[model]
name = "logistic"

[schedule]
periods = [2, 2]
"""


def command(monkeypatch: pytest.MonkeyPatch, *arguments: object) -> int:
    """Run a command and return its exit code."""
    monkeypatch.setattr(sys, "argv", ["stratafl", *map(str, arguments)])
    with pytest.raises(SystemExit) as ended:
        main()
    return int(ended.value.code or 0)
