"""The command line in this process, as a user types it."""

from __future__ import annotations

import sys

import pytest

from stratafl.cli.main import main


def command(monkeypatch: pytest.MonkeyPatch, *arguments: object) -> int:
    """The exit code of a command."""
    monkeypatch.setattr(sys, "argv", ["stratafl", *map(str, arguments)])
    with pytest.raises(SystemExit) as ended:
        main()
    return int(ended.value.code or 0)
