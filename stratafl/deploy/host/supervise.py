"""`deploy site`: a site's processes, started in order, watched, started again when they end, and stopped together.

root          SuperLink, and the root's own process: its ServerApp
aggregator    SuperLink, the aggregator's own process, and a SuperNode towards its parent
leaf          the leaf's own process, and a SuperNode towards its parent
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import importlib.util
import os
import signal
import socket
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from types import FrameType

from stratafl.config import Config
from stratafl.data import sources
from stratafl.deploy import user_files
from stratafl.deploy.durable import DAMAGED, status
from stratafl.deploy.garbage import give_back_soon
from stratafl.deploy.processes import MOST, Forked, Restarts
from stratafl.deploy.site import Site
from stratafl.errors import InvalidInput, MissingExtra
from stratafl.store import files
from stratafl.store.lock import Lock, is_held

PATIENCE = 60.0
"""Seconds a process gets to answer."""
ENDING = 15.0
"""Seconds a process gets to end when asked to."""
LINGER = 3.0
"""Seconds a SuperNode gets to hand its node's last reply to the parent."""
LATE = (
    "anyio._backends._asyncio",
    "cryptography.hazmat.backends.openssl",
    "httpcore",
    "numpy.random",
    "uvicorn.lifespan.on",
    "uvicorn.loops.auto",
    "uvicorn.protocols.http.auto",
    "uvicorn.protocols.websockets.auto",
)
"""What Flower, and what is below it, import at first use: every process for itself, unless it is there already."""
QUIET = {"FLWR_TELEMETRY_ENABLED": "0", "FLWR_DISABLE_UPDATE_CHECK": "1"}
Say = Callable[[str], None]


def run_sites(folders: Sequence[Path], say: Say) -> int:
    """One site in this process, or several, each in a session of its own, as on a host of its own."""
    os.umask(0o077)  # state and logs are nobody else's to read
    sites = [Site.load(folder) for folder in folders]
    for site, folder in zip(sites, folders, strict=True):
        user_files.check(folder, site.files)
    _import_what_they_need(sites)
    if len(folders) > 1:
        _load_what_they_share(folders, sites)
    # a search for garbage among all that was imported would take each process its time, and a copy of the memory
    gc.collect()
    gc.freeze()
    if len(folders) == 1:
        return Supervisor(folders[0], say).run()
    names = [site.name for site in sites]
    return Together(dict(zip(names, map(Path.absolute, folders), strict=True)), say).run()


class Together:
    """Several sites' supervisors. One that was ended by a signal is started again, one that cannot go on ends all."""

    def __init__(self, folders: Mapping[str, Path], say: Say):
        self._folders, self._say = folders, say
        self._started: dict[str, Forked] = {}
        self._restarts = {name: Restarts() for name in folders}
        self._again: dict[str, float] = {}
        self._stop = False

    def run(self) -> int:
        """How it ended: the first exit code that was not 0."""
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, self._pass_on)
        for name in self._folders:
            if not self._stop:
                self._start(name)
        failed = 0
        while self._again or any(process.poll() is None for process in self._started.values()):
            time.sleep(0.1)
            for name, process in list(self._started.items()):
                failed = failed or self._look_after(name, process)
        return failed

    def _pass_on(self, number: int, frame: FrameType | None = None) -> None:
        self._stop = True
        self._again.clear()
        for process in self._started.values():
            process.signal(number)

    def _start(self, name: str) -> None:
        folder = self._folders[name]
        files.make_folder(folder / "logs")
        self._started[name] = Forked(partial(_supervised, folder, self._say), folder / "logs" / "site.log", folder)

    def _look_after(self, name: str, process: Forked) -> int:
        """The exit code to end with, if this one's end is everybody's."""
        code, restarts = process.poll(), self._restarts[name]
        if self._stop or not code:
            return 0
        if name in self._again:
            # held: somebody has started it elsewhere meanwhile
            if time.monotonic() > self._again[name] and not is_held(self._folders[name]):
                del self._again[name]
                self._start(name)
            return 0
        pause = restarts.after(process.age)
        if code < 0 and not restarts.too_many:
            self._say(f"{name}: its supervisor was ended by signal {-code}, starting it again in {pause:g} s")
            self._again[name] = time.monotonic() + pause
            return 0
        why = f"was ended by signal {-code}, {MOST + 1} times in a short while" if code < 0 else "could not go on"
        self._say(f"{name} {why}; see {self._folders[name] / 'logs' / 'site.log'}")
        self._pass_on(signal.SIGTERM)
        return code if code > 0 else 128 - code


def _supervised(folder: Path, say: Say) -> None:
    try:
        sys.exit(Supervisor(folder, say).run())
    except InvalidInput as problem:
        say(f"stratafl: {problem}")
        sys.exit(2)


def _import_what_they_need(sites: Sequence[Site]) -> None:
    """Once, before anything is started: every process of these sites is a copy of this one."""
    if importlib.util.find_spec("flwr") is None:
        raise MissingExtra("a deployed site", "flwr", "deploy")
    os.environ.update(QUIET)  # Flower reads them when it is imported
    needed = ["stratafl.deploy.flower", "stratafl.deploy.supernode", "flwr.supernode.main"]
    if not all(site.is_leaf for site in sites):
        needed.append("stratafl.deploy.superlink")
    for name in needed:
        importlib.import_module(name)
    for name in LATE:
        with contextlib.suppress(ImportError):  # then it is another version's, which does without
            importlib.import_module(name)


def _load_what_they_share(folders: Sequence[Path], sites: Sequence[Site]) -> None:
    """The data set that the root tests on, and that leaves without data of their own take their part of."""
    for folder, site in zip(folders, sites, strict=True):
        if site.is_root or (site.is_leaf and not site.data):
            with contextlib.suppress(InvalidInput, MissingExtra):  # a site that needs it will say so
                sources.load(Config.load(folder / "config.toml").data.name)
            return


class Supervisor:
    def __init__(self, folder: Path, say: Say):
        self.folder, self.site, self._say = folder.absolute(), Site.load(folder), say
        self._running: dict[str, Forked] = {}
        self._stop = False
        self._again: dict[str, float] = {}
        self._restarts: defaultdict[str, Restarts] = defaultdict(Restarts)
        self._lock: Lock | None = None

    def run(self) -> int:
        """Until it is told to stop, or the run is over."""
        for name in (signal.SIGTERM, signal.SIGINT):
            signal.signal(name, self._asked)
        files.make_folder(self.folder / "logs")
        files.make_folder(self.folder / "flower")
        self._lock = Lock(self.folder)  # only one of them, and its process number for `deploy down`
        try:
            while not self._stop and not self._is_over():
                self._keep_up()
                time.sleep(0.1)
            until = time.monotonic() + LINGER
            while not self._stop and not self.site.is_root and time.monotonic() < until:
                time.sleep(0.1)
        finally:
            self.stop()
            self._lock.release()
        return 0

    def _asked(self, number: int, frame: FrameType | None) -> None:
        self._stop = True

    def _is_over(self) -> bool:
        """Whether the node wrote that the run is."""
        return bool(status(self.folder / "state").get("doing") == "done")

    def _keep_up(self) -> None:
        site = self.site
        if not site.is_leaf and self._ended("superlink"):
            self._end("node")  # its run was that of the SuperLink before
            self._start("superlink", _superlink)
            self._wait_for(site.runtime_port)
        if self._ended("node"):
            if "node" in self._running and not site.is_leaf:
                self._running["superlink"].signal(signal.SIGUSR1)
            self._start("node", _node)
        if not site.is_root and self._ended("supernode"):
            self._start("supernode", _supernode)

    def _ended(self, name: str) -> bool:
        process = self._running.get(name)
        if process is None:
            return True
        if process.poll() is None:
            return False
        if process.returncode == DAMAGED:
            return self._was_reset(name)
        if name not in self._again:
            pause = self._restarts[name].after(process.age)
            again = f"starting it again in {pause:g} s; see logs/{name}.log"
            self._say(f"{self.site.name}: {name} ended with {process.returncode}, {again}")
            self._again[name] = time.monotonic() + pause
        return time.monotonic() > self._again[name]

    def _was_reset(self, name: str) -> bool:
        """Whether somebody has taken the damaged state away; until then nothing is tried, and it is said once."""
        shown = status(self.folder / "state")
        if shown.get("doing") != "damaged":
            return True
        if name not in self._again:
            self._say(f"{self.site.name}: {shown.get('problem')}")
            self._again[name] = 0.0
        return False

    def _start(self, name: str, work: Callable[[Path], None]) -> None:
        self._again.pop(name, None)
        log = self.folder / "logs" / f"{name}.log"
        home = {"FLWR_HOME": str(self.folder / "flower")}
        self._running[name] = Forked(partial(self._work, work), log, self.folder, home)

    def _work(self, work: Callable[[Path], None]) -> None:
        if self._lock is not None:
            self._lock.leave()
        give_back_soon()
        work(self.folder)

    def _wait_for(self, port: int) -> None:
        until = time.monotonic() + PATIENCE
        while not self._stop and time.monotonic() < until and self._running["superlink"].poll() is None:
            with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), timeout=1):
                return
            time.sleep(0.05)
        if not self._stop:
            raise InvalidInput("SuperLink", port, f"does not answer; see {self.folder / 'logs' / 'superlink.log'}")

    def _end(self, name: str) -> None:
        if name in self._running:
            self._running[name].signal(signal.SIGKILL)
            self._running.pop(name).wait()

    def stop(self) -> None:
        """Ask those still running to end, and end what is left of them and of what they started."""
        for process in self._running.values():
            process.signal(signal.SIGTERM)
        until = time.monotonic() + ENDING
        for process in self._running.values():
            process.wait(max(0.1, until - time.monotonic()))
            process.signal(signal.SIGKILL)
            process.wait()


def _superlink(folder: Path) -> None:
    from stratafl.deploy import superlink

    superlink.run(folder)


def _node(folder: Path) -> None:
    from stratafl.deploy import flower

    flower.live(folder)


def _supernode(folder: Path) -> None:
    from stratafl.deploy import supernode

    supernode.run(Site.load(folder))
