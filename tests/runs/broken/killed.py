"""Runs as processes that are about to be killed."""

from __future__ import annotations

from pathlib import Path

from tests.runs.conftest import Server, wait


def is_writing(run: Path) -> bool:
    """Whether a checkpoint is half written just now."""
    return any(path.name.endswith(".partial") for path in (run / "checkpoints").iterdir())


def only(folder: Path) -> Path:
    """The one run in a folder."""
    (run,) = (path for path in folder.iterdir() if not path.name.startswith("."))
    return run


def start(server: Server, folder: Path, config: Path):
    """The run's first process, and its folder once it is there."""
    process = server.start("run", config, "--quiet", "--runs", folder)
    wait(lambda: folder.exists() and any(not p.name.startswith(".") for p in folder.iterdir()))
    return process, only(folder)
