"""All sites of a topology whose folders lie on this machine: started, looked at and stopped
together."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from stratafl.base import files
from stratafl.base.errors import InvalidInput, unknown_name
from stratafl.deploy.host import newsroom
from stratafl.deploy.host.processes import MOST, Restarts
from stratafl.deploy.news.changes import Changes
from stratafl.deploy.notes import log
from stratafl.deploy.protocol.node import NodeState
from stratafl.deploy.sites import readmission
from stratafl.deploy.sites.address import bound
from stratafl.deploy.sites.site import HUGE_PAGES, Site, stored_experiment, tree_of
from stratafl.deploy.sites.state_file import STATUS, checked, set_aside, status, stored
from stratafl.deploy.sites.watched import NewLines, WatchedTable
from stratafl.runs import format, trackers
from stratafl.runs.format import is_locked

PATIENCE = 30.0
"""Seconds a site gets to stop."""


LOOK = 0.5
"""Seconds between two looks at how the sites are."""


def sites(out: Path) -> dict[str, Path]:
    """The folders of all sites that lie in this one, or of the one that it is; the root's first."""
    places = [out] if (out / "site.json").exists() else [path.parent for path in out.glob("*/site.json")]
    if not places:
        wanted = "no site's folder in it: `stratafl deploy init` makes them, and --out, or a site's folder, names them"
        raise InvalidInput("sites", out, wanted)
    return _in_order(places)


def whole(out: Path) -> dict[str, Path]:
    """The folders of a tree's sites, which lie in this one with the root's among them."""
    found = sites(out)
    if "root" not in found:
        wanted = "the root's folder is not in it: `stratafl deploy site` starts the sites that a host has of a tree"
        raise InvalidInput("--out", out, wanted)
    return found


def chosen(names: Sequence[str], out: Path) -> dict[str, Path]:
    """The folders of these sites, each named by its folder, by one that it lies in or by its name
    in `out`; without names, of all in `out`."""
    if not names:
        return sites(out)
    places: list[Path] = []
    for name in names:
        place = Path(name)
        is_one = (place / "site.json").exists() or next(place.glob("*/site.json"), None) is not None
        places.extend(sites(place).values() if is_one else [_named(name, out)])
    return _in_order(places)


def _in_order(places: Sequence[Path]) -> dict[str, Path]:
    """Folders by the names of their sites, the root's first. Two of one site are refused: nobody
    can say which of them is meant, and one may be running."""
    # a link is no second folder: what it points at stands for both
    real = {place.resolve(): place for place in sorted(places, key=Path.is_symlink, reverse=True)}
    loaded = [(Site.load(folder), folder) for folder in real.values()]
    found: dict[str, Path] = {}
    for site, folder in sorted(loaded, key=lambda each: (each[0].level, each[0].number, each[1])):
        other = found.setdefault(site.name, folder)
        if other != folder:
            around = Path(os.path.commonpath([other.parent, folder.parent]))
            first, second = (str(each.relative_to(around)) for each in (other, folder))
            running = " and ".join(str(each.relative_to(around)) for each in (other, folder) if _runs(each))
            wanted = f"has two folders of site {site.name}, {first} and {second}, and it runs in {running or 'neither'}"
            raise InvalidInput("folder", around, f"{wanted}: move the copy elsewhere, or name the one that is meant")
    return found


def _is_done(root: Path) -> bool:
    return bool(status(root / "state").get("doing") == "done")


def start(*folders: Path) -> subprocess.Popen[bytes]:
    """One site, or several by one process."""
    log_folder = folders[0] / "logs"
    files.make_folder(log_folder)
    with open(log_folder / "site.log", "ab", opener=partial(os.open, mode=files.PRIVATE)) as output:
        return subprocess.Popen(
            [sys.executable, "-m", "stratafl", "deploy", "site", *map(str, folders)],
            stdin=subprocess.DEVNULL, stdout=output, stderr=output, start_new_session=True,
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
    folders = whole(out)
    root = folders["root"]
    if _is_done(root):
        return
    for name, folder in folders.items():
        if is_locked(folder):
            raise InvalidInput("sites", name, "runs already: `stratafl deploy down` stops it")
        site = Site.load(folder)
        _check_ports(site)
        checked(folder / "state", site.job)
    process, seen = start(*folders.values()), _Seen(folders, warn, inform)
    restarts, began, over = Restarts(), time.monotonic(), False
    try:
        # when the root is done, every site that it could reach has said goodbye: none is waited for
        while not over:
            time.sleep(0.1)
            over = seen.is_over()
            for line in seen.rounds.take():
                say(line)
            seen.look()
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
        stop(folders)
        process.wait(PATIENCE)
    if not over and process.returncode < 0:
        often = f"were ended by signal {-process.returncode}, {MOST + 1} times in a short while"
        raise InvalidInput("sites", out, often)
    if not over and process.returncode:
        raise InvalidInput("sites", out, f"the run failed: {_last_line(root / 'logs' / 'site.log')}")


class _Seen:
    """A running tree as its files tell of it, what has changed since the last look."""

    def __init__(self, folders: dict[str, Path], warn: Callable[[str], None], inform: Callable[[str], None]):
        root = folders["root"]
        self._warn, self._inform = warn, inform
        self.rounds = NewLines(root / format.ROUNDS)
        self.rounds.take()  # those before were said before
        self._statuses = {name: WatchedTable(folder / "state" / STATUS) for name, folder in folders.items()}
        self._news = WatchedTable(root / newsroom.NEWS)
        self._changes = Changes(newsroom.parents(tree_of(stored_experiment(root)), "root"), whole=True)
        self._warned: set[str] = set()
        self._looked = 0.0

    def is_over(self) -> bool:
        return bool(self._statuses["root"].read().get("doing") == "done")

    def look(self) -> None:
        """Say what has changed; from time to time, as nobody waits for it."""
        if time.monotonic() - self._looked < LOOK:
            return
        self._looked = time.monotonic()
        for problem in _damaged({name: table.read() for name, table in self._statuses.items()}) - self._warned:
            self._warn(problem)
            self._warned.add(problem)
        for text, level in self._changes.lines(newsroom.current(self._news.read())):
            (self._warn if level >= log.WARNING else self._inform)(text)


def _damaged(shown: Mapping[str, Mapping[str, Any]]) -> set[str]:
    """What sites say that can only go on after a reset. `shown`: what each shows."""
    return {f"{name}: {each.get('problem')}" for name, each in shown.items() if each.get("doing") == "damaged"}


def reset(names: Sequence[str], out: Path) -> dict[str, Path]:
    """Set the state of these sites aside, each a folder's path or a name in `out`; where each now
    is. Without the root's the run begins anew, so all that lie beside it go with it."""
    folders = chosen(names, out)
    if "root" in folders:
        folders |= sites(folders["root"].parent)
    for name, folder in folders.items():
        if not status(folder / "state").get("doing") == "damaged" and is_locked(folder):
            raise InvalidInput("site", name, "runs: `stratafl deploy down`, or SIGTERM, stops it")
    made = [name for name in (*format.FILES, format.CHECKPOINTS, trackers.FOLDER) if name != format.LOCK]
    # who took part is of the run that was: in one that goes on, those above know it, too
    made.append(newsroom.NEWS)
    return {name: set_aside(folder / "state", *(folder / each for each in made)) for name, folder in folders.items()}


def readmit(names: Sequence[str], out: Path) -> dict[str, str]:
    """Have the parents of these sites ask them again; the parent of each. They need not run."""
    parents = {}
    for folder in sites(out).values():
        site = Site.load(folder)
        parents.update(dict.fromkeys(site.children, (folder, site)))
    for name in names:
        if name not in parents:
            raise unknown_name("site below one whose folder is here", name, parents)
        folder, site = parents[name]
        if name not in readmission.out(site, stored(folder / "state", site.job) or NodeState()):
            raise InvalidInput("site", name, f"is not out: {site.name} asks it as all others")
    for name in names:
        readmission.request(parents[name][0], name)
    return {name: parents[name][1].name for name in names}


def _named(name: str, out: Path) -> Path:
    known = sites(out)
    if name not in known:
        raise unknown_name("site", name, known)
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


def stop(folders: Mapping[str, Path]) -> tuple[list[str], list[str]]:
    """Ask every site's supervisor to stop; who ran and stopped, and who runs still."""
    running = [name for name, folder in folders.items() if _runs(folder)]
    for folder in (folders[name] for name in running if is_locked(folders[name])):
        with contextlib.suppress(ValueError, OSError):  # it has just ended, or is another user's
            os.kill(int((folder / format.LOCK).read_text()), signal.SIGTERM)
    until = time.monotonic() + PATIENCE
    while time.monotonic() < until and any(_runs(folders[name]) for name in running):
        time.sleep(0.1)
    left = [name for name in running if _runs(folders[name])]
    return [name for name in running if name not in left], left


def _runs(folder: Path) -> bool:
    """Whether a site's supervisor is alive, or what it has started."""
    return is_locked(folder) or is_locked(folder / "state")
