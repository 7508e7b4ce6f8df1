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

from stratafl.deploy.address import bound
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
        return time.time() - at if isinstance(at, float) else None


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
        seen.append(Seen(Site.load(folder), is_held(folder), _status(folder)))
    return seen


def _status(folder: Path) -> dict[str, Any]:
    try:
        found = files.read_json(folder / "state" / STATUS)
    except InvalidInput:
        return {}
    return found if isinstance(found, dict) else {}


def _is_done(root: Path) -> bool:
    return bool(_status(root).get("doing") == "done")


def start(*folders: Path) -> subprocess.Popen[bytes]:
    """One site, or several by one process."""
    log_folder = folders[0] / "logs"
    files.make_folder(log_folder)
    with open(log_folder / "site.log", "ab") as log:
        return subprocess.Popen(
            [sys.executable, "-m", "stratafl", "deploy", "site", *map(str, folders)],
            stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True,
        )  # fmt: skip


def run(out: Path, say: Callable[[str], None]) -> None:
    """Start every site, unless the run is over, and wait until it is; then, or when interrupted, stop them all."""
    folders = sites(out)
    root = folders["root"]
    if _is_done(root):
        return
    for name, folder in folders.items():
        if is_held(folder):
            raise InvalidInput("sites", name, "runs already: `stratafl deploy down` stops it")
        _check_ports(Site.load(folder))
    process, told = start(*folders.values()), len(_lines(root))
    over = False
    try:
        # when the root is done, every site that it could reach has said goodbye: none is waited for
        while process.poll() is None and not over:
            time.sleep(0.1)
            over = _is_done(root)
            lines = _lines(root)
            for line in lines[told:]:
                say(line)
            told = len(lines)
    finally:
        process.terminate()  # it may not have started them all
        stop(out)
        process.wait(PATIENCE)
    if process.returncode:
        raise InvalidInput("sites", out, f"the run failed: {_last_line(root / 'logs' / 'site.log')}")


def _check_ports(site: Site) -> None:
    """Somebody else's port is found before anything is started."""
    for address in site.addresses:
        try:
            bound(address).close()
        except InvalidInput as problem:
            wanted = f"{problem.allowed}; another base_port in the topology, and folders made anew, give other ports"
            raise InvalidInput(f"port of site {site.name}", address, wanted) from None


def _last_line(path: Path) -> str:
    lines = files.read_bytes(path).decode(errors="replace").splitlines()
    return lines[-1] if lines else f"see {path.parent}"


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
