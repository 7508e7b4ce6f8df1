"""All sites of a topology whose folders lie on this machine: started, looked at and stopped together."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from stratafl.deploy.durable import STATUS
from stratafl.deploy.site import Site
from stratafl.errors import InvalidInput
from stratafl.store import files, layout
from stratafl.store.lock import is_held

PATIENCE = 30.0
"""Seconds a site gets to stop."""


@dataclass(frozen=True)
class Seen:
    """A site as an operator sees it."""

    site: Site
    running: bool
    status: dict[str, Any]

    @property
    def contact(self) -> float | None:
        """Seconds since it last spoke with its parent."""
        at = self.status.get("contact")
        return None if at is None else time.time() - float(at)


def sites(out: Path) -> dict[str, Path]:
    """The folders of all sites, the root's first."""
    found = {path.parent: Site.load(path.parent) for path in out.glob("*/site.json")}
    if not found:
        raise InvalidInput("sites", out, "no site's folder in it: `stratafl deploy init` makes them")
    order = sorted(found, key=lambda folder: (found[folder].level, found[folder].number))
    return {found[folder].name: folder for folder in order}


def look(out: Path) -> list[Seen]:
    seen = []
    for folder in sites(out).values():
        try:
            status = files.read_json(folder / "state" / STATUS)
        except InvalidInput:
            status = {}
        seen.append(Seen(Site.load(folder), is_held(folder), status))
    return seen


def start(folder: Path) -> subprocess.Popen[bytes]:
    """A site in a session of its own, as on a host of its own."""
    files.make_folder(folder / "logs")
    with open(folder / "logs" / "site.log", "ab") as log:
        return subprocess.Popen(
            [sys.executable, "-m", "stratafl", "deploy", "site", str(folder)],
            stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True,
        )  # fmt: skip


def run(out: Path, say: Callable[[str], None]) -> None:
    """Start every site and wait until the root is done; then, or when interrupted, stop them all."""
    folders = sites(out)
    root = folders["root"]
    processes = {name: start(folder) for name, folder in folders.items()}
    told = 0
    try:
        while processes["root"].poll() is None:
            lines = _lines(root)
            for line in lines[told:]:
                say(line)
            told = len(lines)
            time.sleep(0.5)
        for line in _lines(root)[told:]:
            say(line)
        _wait(processes)
    finally:
        stop(out)
        for process in processes.values():
            process.wait(PATIENCE)
    if processes["root"].returncode:
        raise InvalidInput("root", processes["root"].returncode, f"it failed; see {root / 'logs'}")


def _wait(processes: dict[str, subprocess.Popen[bytes]]) -> None:
    """Those that were told that the run is over end by themselves."""
    until = time.monotonic() + PATIENCE
    while time.monotonic() < until and any(process.poll() is None for process in processes.values()):
        time.sleep(0.2)


def _lines(root: Path) -> list[str]:
    path = root / layout.ROUNDS
    return files.read_bytes(path).decode().splitlines() if path.exists() else []


def stop(out: Path) -> list[str]:
    """Ask every site's supervisor to stop; the names of those that had not ended in time."""
    asked = {}
    for name, folder in sites(out).items():
        if is_held(folder):
            with contextlib.suppress(ValueError, ProcessLookupError):
                os.kill(int((folder / layout.LOCK).read_text()), signal.SIGTERM)
            asked[name] = folder
    until = time.monotonic() + PATIENCE
    while time.monotonic() < until and any(is_held(folder) for folder in asked.values()):
        time.sleep(0.1)
    return [name for name, folder in asked.items() if is_held(folder)]
