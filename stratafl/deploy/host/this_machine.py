"""All sites of a topology whose folders lie on this machine: started, looked at and stopped
together."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from stratafl.base import files
from stratafl.base.errors import InvalidInput, unknown
from stratafl.deploy.host import newsroom
from stratafl.deploy.host.processes import MOST, Restarts
from stratafl.deploy.news.changes import Changes
from stratafl.deploy.notes import log
from stratafl.deploy.sites.address import bound
from stratafl.deploy.sites.rounds import read_lines
from stratafl.deploy.sites.site import HUGE_PAGES, Site, stored_config, tree_of
from stratafl.deploy.sites.state_file import checked, set_aside, status
from stratafl.runs import layout, trackers
from stratafl.runs.lock import is_held

PATIENCE = 30.0
"""Seconds a site gets to stop."""


@dataclass(frozen=True)
class SiteStatus:
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


def look(out: Path) -> list[SiteStatus]:
    """How each site below a folder is doing, from what it has on disk."""
    seen = []
    for folder in sites(out).values():
        seen.append(SiteStatus(Site.load(folder), is_held(folder), status(folder / "state")))
    return seen


def _is_done(root: Path) -> bool:
    return bool(status(root / "state").get("doing") == "done")


def start(*folders: Path) -> subprocess.Popen[bytes]:
    """One site, or several by one process."""
    log_folder = folders[0] / "logs"
    files.make_folder(log_folder)
    with open(log_folder / "site.log", "ab", opener=partial(os.open, mode=files.PRIVATE)) as log:
        return subprocess.Popen(
            [sys.executable, "-m", "stratafl", "deploy", "site", *map(str, folders)],
            stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True,
            env=dict([HUGE_PAGES]) | os.environ,
        )  # fmt: skip


def run(
    out: Path,
    say: Callable[[str], None],
    warn: Callable[[str], None] = log.warn,
    inform: Callable[[str], None] = log.say,
) -> None:
    """Start every site, unless the run is over, and wait until it is; then, or when interrupted,
    stop them all."""
    folders = sites(out)
    root = folders["root"]
    if _is_done(root):
        return
    for name, folder in folders.items():
        if is_held(folder):
            raise InvalidInput("sites", name, "runs already: `stratafl deploy down` stops it")
        site = Site.load(folder)
        _check_ports(site)
        checked(folder / "state", site.job)
    process, told = start(*folders.values()), len(read_lines(root))
    restarts, began, warned = Restarts(), time.monotonic(), set[str]()
    changes = Changes(newsroom.parents(tree_of(stored_config(root)), "root"), whole=True)
    over = False
    try:
        # when the root is done, every site that it could reach has said goodbye: none is waited for
        while not over:
            time.sleep(0.1)
            over = _is_done(root)
            lines = read_lines(root)
            for line in lines[told:]:
                say(line)
            told = len(lines)
            for problem in _damaged(folders) - warned:
                warn(problem)
                warned.add(problem)
            for text, level in changes.lines(newsroom.read(root)):
                (warn if level >= log.WARNING else inform)(text)
            if process.poll() is None or over:
                continue
            pause = restarts.after(time.monotonic() - began)
            if process.returncode >= 0 or restarts.too_many:
                break
            # those that it started have ended with it
            warn(f"the sites were ended by signal {-process.returncode}, starting them again in {pause:g} s")
            time.sleep(pause)
            process, began = start(*folders.values()), time.monotonic()
    finally:
        process.terminate()  # it may not have started them all
        stop(out)
        process.wait(PATIENCE)
    if not over and process.returncode < 0:
        often = f"were ended by signal {-process.returncode}, {MOST + 1} times in a short while"
        raise InvalidInput("sites", out, often)
    if not over and process.returncode:
        raise InvalidInput("sites", out, f"the run failed: {_last_line(root / 'logs' / 'site.log')}")


def _damaged(folders: dict[str, Path]) -> set[str]:
    """What sites say that can only go on after a reset."""
    shown = {name: status(folder / "state") for name, folder in folders.items()}
    return {f"{name}: {each.get('problem')}" for name, each in shown.items() if each.get("doing") == "damaged"}


def reset(names: Sequence[str], out: Path) -> dict[str, Path]:
    """Set the state of these sites aside, each a folder's path or a name in `out`; where each now
    is. Without the root's the run begins anew, so all that lie beside it go with it."""
    folders = {}
    for name in names:
        here = Path(name)
        folder = here if (here / "site.json").exists() else _named(name, out)
        site = Site.load(folder)
        folders.update(sites(folder.absolute().parent) if site.is_root else {site.name: folder})
    for name, folder in folders.items():
        if not status(folder / "state").get("doing") == "damaged" and is_held(folder):
            raise InvalidInput("site", name, "runs: `stratafl deploy down`, or SIGTERM, stops it")
    made = [name for name in (*layout.FILES, layout.CHECKPOINTS, trackers.FOLDER) if name != layout.LOCK]
    return {name: set_aside(folder / "state", *(folder / each for each in made)) for name, folder in folders.items()}


def _named(name: str, out: Path) -> Path:
    known = sites(out)
    if name not in known:
        raise unknown("site", name, known)
    return known[name]


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
