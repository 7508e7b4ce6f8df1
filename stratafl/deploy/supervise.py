"""`deploy site`: a site's processes, started in order, watched, started again when they end, and stopped together.

root          SuperLink, and on it the root's ServerApp
aggregator    SuperLink, on it the aggregator's ServerApp, and a SuperNode towards its parent
leaf          the leaf's resident process, and a SuperNode towards its parent
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import FrameType

from stratafl.deploy.site import Site, slug
from stratafl.errors import InvalidInput, MissingExtra
from stratafl.store import files
from stratafl.store.lock import Lock, is_held

PATIENCE = 60.0
"""Seconds a process gets to answer, or to end when asked to."""
LINGER = 5.0
"""Seconds a SuperNode gets to hand its node's last reply to the parent."""
START = 180.0
"""Seconds a ServerApp gets until it has taken its node's state."""
PAUSE = 2.0
"""Seconds before a process that ended is started again."""
QUIET = {
    "FLWR_TELEMETRY_ENABLED": "0",
    "FLWR_DISABLE_UPDATE_CHECK": "1",
    "PYTHONUNBUFFERED": "1",
}
APP = """\
[build-system]
requires = ["hatchling"]
build-backend = "hatchling.build"

[project]
name = "stratafl-site"
version = "1.0.0"
description = "One node of a stratafl tree"
license = "Apache-2.0"
dependencies = []

[tool.hatch.build.targets.wheel]
packages = ["."]

[tool.flwr.app]
publisher = "stratafl"

[tool.flwr.app.components]
serverapp = "stratafl_site.server:app"
clientapp = "stratafl_site.client:app"

[tool.flwr.app.config]
folder = ""
"""

PRCTL = ctypes.CDLL(None).prctl
COMMANDS = """\
import json, sys
from flwr.cli.app import app
for command in json.loads(sys.argv[1]):
    print("$ flwr", *command, flush=True)
    app(command, standalone_mode=False)
"""


class Supervisor:
    def __init__(self, folder: Path, say: Callable[[str], None]):
        self.folder, self.site, self._say = folder.absolute(), Site.load(folder), say
        self._running: dict[str, subprocess.Popen[bytes]] = {}
        self._stop = False
        self._again: dict[str, float] = {}
        self._submitted, self._served = 0.0, False
        commands = Path(sys.executable).parent
        if not (commands / "flower-superlink").exists():
            raise MissingExtra("a deployed site", "flwr", "deploy")
        self._environment = {
            **os.environ,
            **QUIET,
            "PATH": f"{commands}{os.pathsep}{os.environ.get('PATH', '')}",
            "FLWR_HOME": str(self.folder / "flower"),
        }

    def run(self) -> int:
        """Until it is told to stop, or the run is over."""
        for name in (signal.SIGTERM, signal.SIGINT):
            signal.signal(name, self._asked)
        files.make_folder(self.folder / "logs")
        files.make_folder(self.folder / "flower")
        lock = Lock(self.folder)  # only one of them, and its process number for `deploy down`
        try:
            while not self._stop and not self._is_over():
                self._keep_up()
                time.sleep(0.2)
            if not self._stop and not self.site.is_root:
                time.sleep(LINGER)
        finally:
            self.stop()
            lock.release()
        return 0

    def _asked(self, number: int, frame: FrameType | None) -> None:
        self._stop = True

    def _is_over(self) -> bool:
        """Whether the node wrote that the run is."""
        try:
            return bool(files.read_json(self.folder / "state" / "status.json").get("doing") == "done")
        except InvalidInput:
            return False

    def _keep_up(self) -> None:
        site = self.site
        if not site.is_leaf:
            if self._ended("superlink"):
                self._start("superlink", self._superlink())
                self._wait_for(site.listen)
                self._control(*self._registrations(), self._submission())
        elif self._ended("leaf"):
            self._start("leaf", [sys.executable, "-m", "stratafl", "deploy", "leaf", str(self.folder)])
        if not site.is_root and self._ended("supernode"):
            self._start("supernode", self._supernode())
        if not site.is_leaf and not self._is_serving():
            self._say(f"{site.name}: its ServerApp ended, starting it again")
            self._control(self._submission())

    def _ended(self, name: str) -> bool:
        process = self._running.get(name)
        if process is None:
            return True
        if process.poll() is None:
            return False
        if name not in self._again:
            self._say(f"{self.site.name}: {name} ended with {process.returncode}, starting it again")
            self._again[name] = time.monotonic() + PAUSE
        return time.monotonic() > self._again[name]

    def _start(self, name: str, command: list[str]) -> None:
        self._again.pop(name, None)
        with open(self.folder / "logs" / f"{name}.log", "ab") as log:
            self._running[name] = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, env=self._environment, cwd=self.folder,
                start_new_session=True, preexec_fn=_end_with_parent,
            )  # fmt: skip

    def _superlink(self) -> list[str]:
        host, port = self.site.listen.rsplit(":", 1)
        tls = ["--ssl-ca-certfile", "ca.pem", "--ssl-certfile", "server.pem", "--ssl-keyfile", "server.key"]
        offline = "--disable-runtime-dependency-installation"
        return ["flower-superlink", "--host", host, "--port", port, *tls, "--enable-supernode-auth", offline]

    def _supernode(self) -> list[str]:
        tls = ["--ssl-ca-certfile", "ca.pem", "--ssl-certfile", "server.pem", "--ssl-keyfile", "server.key"]
        return [
            # by its path, so that the package and torch with it are not loaded
            sys.executable, "-P", str(Path(__file__).parent / "supernode.py"),
            "--superlink", self.site.parent,
            "--root-certificates", "ca.pem",
            "--auth-supernode-private-key", "node.key",
            "--host", "127.0.0.1", "--port", str(self.site.inner_port), *tls,
            "--isolation", "process", "--superexec-auth-secret-file", "inner.key",
        ]  # fmt: skip

    def _wait_for(self, address: str) -> None:
        host, port = address.rsplit(":", 1)
        until = time.monotonic() + PATIENCE
        while not self._stop and time.monotonic() < until:
            with contextlib.suppress(OSError), socket.create_connection((_reachable(host), int(port)), timeout=1):
                return
            time.sleep(0.1)
        if not self._stop:
            raise InvalidInput("SuperLink", address, f"does not answer; see {self.folder / 'logs' / 'superlink.log'}")

    def _control(self, *commands: list[str]) -> None:
        """Flower's own commands, against this site's SuperLink; in one process, since each takes seconds to start."""
        port = self.site.listen.rsplit(":", 1)[1]
        config = (
            f'[superlink]\ndefault = "own"\n\n[superlink.own]\naddress = "127.0.0.1:{port}"\n'
            f'root-certificates = "{self.folder / "ca.pem"}"\n'
        )
        (self.folder / "flower" / "config.toml").write_text(config)
        log = self.folder / "logs" / "flwr.log"
        with open(log, "ab") as output:
            ran = subprocess.run(
                [sys.executable, "-c", COMMANDS, json.dumps(commands)],
                env=self._environment, cwd=self.folder, stdout=output, stderr=output, timeout=PATIENCE, check=False,
            )  # fmt: skip
        self._submitted, self._served = time.monotonic(), False
        if ran.returncode and not self._stop:
            raise InvalidInput("flwr", commands[0][0], f"failed; see {log}")

    def _registrations(self) -> list[list[str]]:
        return [
            ["supernode", "register", f"down/{slug(child)}.pub", "own", "--name", slug(child)]
            for child in self.site.children
        ]

    def _submission(self) -> list[str]:
        """Start the node's ServerApp on its own SuperLink."""
        app = self.folder / "app"
        shutil.rmtree(app, ignore_errors=True)
        package = app / "stratafl_site"
        package.mkdir(parents=True)
        (app / "pyproject.toml").write_text(APP)
        source = Path(__file__).parent / "app"
        for name in ("__init__.py", "client.py", "server.py"):
            shutil.copyfile(source / name, package / name)
        return ["run", "app", "own", "--run-config", f'folder="{self.folder}"']

    def _is_serving(self) -> bool:
        """Whether the ServerApp lives: it holds the lock of the node's state, but for the time it takes to start."""
        if is_held(self.folder / "state"):
            self._served = True
            return True
        return time.monotonic() - self._submitted < (PAUSE if self._served else START)

    def stop(self) -> None:
        """Ask those still running to end, and end what is left of them and of what they started."""
        for process in self._running.values():
            _signal(process, signal.SIGTERM)
        until = time.monotonic() + PATIENCE / 4
        for process in self._running.values():
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(max(0.1, until - time.monotonic()))
            _signal(process, signal.SIGKILL)
            process.wait()


def _signal(process: subprocess.Popen[bytes], number: int) -> None:
    """To a process and all that it started, which are in its session."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, number)


def _end_with_parent() -> None:
    """Asks Linux to end this process when its supervisor ends, however that happens."""
    PRCTL(1, signal.SIGKILL)


def _reachable(host: str) -> str:
    return "127.0.0.1" if host == "0.0.0.0" else host
