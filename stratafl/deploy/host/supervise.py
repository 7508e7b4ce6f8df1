"""`deploy site`: a site's processes, started in order, watched, started again when they end, and
stopped together.

root          SuperLink, and the root's own process: its ServerApp
aggregator    SuperLink, the aggregator's own process, and a SuperNode towards its parent
leaf          the leaf's own process, and a SuperNode towards its parent
all but root  one that tells the site's news to its parent
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

from stratafl.base import files
from stratafl.base.errors import InvalidInput, MissingExtra
from stratafl.data.catalog import prepare
from stratafl.deploy.host.attendance import INCOMPLETE, never
from stratafl.deploy.host.garbage import give_back_soon
from stratafl.deploy.host.newsroom import Newsroom
from stratafl.deploy.host.processes import MOST, Forked, Restarts
from stratafl.deploy.news import door
from stratafl.deploy.notes import boards, log
from stratafl.deploy.sites import user_files
from stratafl.deploy.sites.site import Site, stored_experiment
from stratafl.deploy.sites.state_file import DAMAGED, STATUS, status
from stratafl.deploy.sites.watched import WatchedTable
from stratafl.runs.format import RunLock, is_locked

PATIENCE = 60.0
"""Seconds a process gets to answer."""
ENDING = 15.0
"""Seconds a process gets to end when asked to."""
LOGS = 10.0
"""Seconds between two looks at the size of logs."""
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
"""What Flower, and what is below it, import at first use: every process for itself, unless it is
there already."""
QUIET = {
    "FLWR_TELEMETRY_ENABLED": "0",
    "FLWR_DISABLE_UPDATE_CHECK": "1",
    "FLWR_INTERNAL_GRPC_CONTROL_API": "0",
    "FLWR_INTERNAL_GRPC_FLEET_API": "0",
}
"""Flower's settings in the environment of a site. The last two would open ports of a SuperLink to
all, without accounts."""
Say = Callable[[str], None]


def run_sites(folders: Sequence[Path], say: Say) -> int:
    """One site in this process, or several, each in a session of its own, as on a host of its
    own."""
    os.umask(0o077)  # state and logs are nobody else's to read
    folders = list({folder.resolve(): folder.absolute() for folder in folders}.values())
    sites = [Site.load(folder) for folder in folders]
    _check_each_once(sites, folders)
    for site, folder in zip(sites, folders, strict=True):
        user_files.check(folder, site.files)
    _import_what_they_need(sites)
    if len(folders) > 1:
        _load_what_they_share(folders, sites)
    # a search for garbage among all that was imported would take each process its time, and a copy
    # of the memory
    gc.collect()
    gc.freeze()
    if len(folders) == 1:
        return Supervisor(folders[0], say).run()
    return Together(dict(zip([site.name for site in sites], folders, strict=True)), say).run()


def _check_each_once(sites: Sequence[Site], folders: Sequence[Path]) -> None:
    """Refuse two folders of one site: only one of them would be started."""
    first: dict[str, Path] = {}
    for site, folder in zip(sites, folders, strict=True):
        if (other := first.setdefault(site.name, folder)) != folder:
            raise InvalidInput(
                "folder", folder, f"and {other} are of one site, {site.name}: start the one that is meant"
            )


class Together:
    """Several sites' supervisors. One that was ended by a signal is started again, one that cannot
    go on ends all."""

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
        failed, over = 0, 0.0
        while self._again or any(process.poll() is None for process in self._started.values()):
            time.sleep(0.1)
            for name, process in list(self._started.items()):
                failed = failed or self._look_after(name, process)
            root = self._started.get("root")
            # the run is over: those that it could reach have said goodbye, and the others never
            # will
            if root is not None and root.poll() in (0, INCOMPLETE) and not self._stop:
                over = over or time.monotonic()
                if time.monotonic() > over + LINGER + ENDING:
                    self._pass_on(signal.SIGTERM)
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
            if time.monotonic() > self._again[name] and not is_locked(self._folders[name]):
                del self._again[name]
                self._start(name)
            return 0
        if code == INCOMPLETE:
            return code
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


def settle_environment() -> None:
    """Leave Flower no settings but ours: the host's may be meant for something else, and some of
    them decide who is let in. Flower reads them when it is imported."""
    for name in [name for name in os.environ if name.startswith("FLWR_")]:
        del os.environ[name]
    os.environ.update(QUIET)


def _import_what_they_need(sites: Sequence[Site]) -> None:
    """Once, before anything is started: every process of these sites is a copy of this one."""
    if importlib.util.find_spec("flwr") is None:
        raise MissingExtra("a deployed site", "flwr", "deploy")
    settle_environment()
    needed = ["stratafl.deploy.flower.process", "stratafl.deploy.flower.supernode", "flwr.supernode.main"]
    if not all(site.is_leaf for site in sites):
        needed.append("stratafl.deploy.flower.superlink")
    for name in needed:
        importlib.import_module(name)
    for name in LATE:
        with contextlib.suppress(ImportError):  # then it is another version's, which does without
            importlib.import_module(name)


def _load_what_they_share(folders: Sequence[Path], sites: Sequence[Site]) -> None:
    """The data set that the root tests on, and that leaves without data of their own take their
    part of."""
    for folder, site in zip(folders, sites, strict=True):
        if site.is_root or (site.is_leaf and not site.data):
            with contextlib.suppress(InvalidInput, MissingExtra):  # a site that needs it will say so
                prepare.load(stored_experiment(folder).data.source)
            return


class Supervisor:
    """Runs the processes of one site: starts them, starts those again that ended, and stops them
    when the run is over."""

    def __init__(self, folder: Path, say: Say):
        self.folder, self.site, self._say = folder.absolute(), Site.load(folder), say
        self._running: dict[str, Forked] = {}
        self._stop = False
        self._again: dict[str, float] = {}
        self._restarts: defaultdict[str, Restarts] = defaultdict(Restarts)
        self._lock: RunLock | None = None
        self._newsroom = Newsroom(self.folder, self.site)
        self._shown = WatchedTable(self.folder / "state" / STATUS)
        self._looked_at_logs = 0.0

    def run(self) -> int:
        """Run until told to stop, or until the run is over. The root's exit code says whether a
        site never took part."""
        for name in (signal.SIGTERM, signal.SIGINT):
            signal.signal(name, self._asked)
        clock = importlib.import_module("stratafl.deploy.flower.clock")  # it needs Flower
        clock.check_certificates(self.folder, self.site.name)
        clock.run_steadily()
        files.make_folder(self.folder / "logs")
        files.make_folder(self.folder / "flower")
        self._lock = RunLock(self.folder)  # only one of them, and its process number for `deploy down`
        try:
            while not self._stop and not self._is_over():
                self._keep_up()
                self._look()
            until = time.monotonic() + LINGER
            while not self._stop and not self.site.is_root and time.monotonic() < until:
                self._look()
        finally:
            self._newsroom.look(self._running, stopping=True)
            self.stop()
            self._lock.release()
        if self.site.is_root and self._is_over() and (missing := never(self.folder)):
            self._say(f"never took part in this run: {', '.join(missing)}")
            return INCOMPLETE
        return 0

    def _look(self) -> None:
        """What there is to do beside, and a pause."""
        self._newsroom.look(self._running)
        if time.monotonic() - self._looked_at_logs > LOGS:
            self._looked_at_logs = time.monotonic()
            log.keep_small((self.folder / "logs").glob("*.log"))
        time.sleep(0.1)

    def _asked(self, number: int, frame: FrameType | None) -> None:
        self._stop = True

    def _is_over(self) -> bool:
        """Whether the node wrote that the run is."""
        return bool(self._shown.read().get("doing") == "done")

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
        if site.is_root:
            return
        if self._running["node"].poll() is not None:
            # it would take requests that nobody answers, and keep the one that was worked on for a
            # minute; the next one comes with the next node, which its parent then asks again
            self._end("supernode")
        elif self._ended("supernode"):
            self._start("supernode", _supernode)
        if not site.is_root and self._ended("news"):
            self._start("news", partial(door.run, board=self._newsroom.telling))

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
            self._newsroom.ended(name, process.poll() or 0)
            self._again[name] = time.monotonic() + pause
        return time.monotonic() > self._again[name]

    def _was_reset(self, name: str) -> bool:
        """Whether somebody has taken the damaged state away; until then nothing is tried, and it is
        said once."""
        shown = status(self.folder / "state")
        if shown.get("doing") != "damaged":
            self._newsroom.begin_anew()
            return True
        if name not in self._again:
            self._say(f"{self.site.name}: {shown.get('problem')}")
            self._again[name] = 0.0
        return False

    def _start(self, name: str, work: Callable[[Path], None]) -> None:
        self._again.pop(name, None)
        self._newsroom.starts(name)
        path = self.folder / "logs" / f"{name}.log"
        home = {"FLWR_HOME": str(self.folder / "flower")}
        self._running[name] = Forked(partial(self._work, name, work), path, self.folder, home)

    def _work(self, name: str, work: Callable[[Path], None]) -> None:
        boards.use(self._newsroom.boards[name], self._newsroom.boards["superlink"])
        if self._lock is not None:
            self._lock.close_in_child()
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
    from stratafl.deploy.flower import superlink

    superlink.run(folder)


def _node(folder: Path) -> None:
    from stratafl.deploy.flower import process

    process.live(folder)


def _supernode(folder: Path) -> None:
    from stratafl.deploy.flower import supernode

    supernode.run(Site.load(folder))
