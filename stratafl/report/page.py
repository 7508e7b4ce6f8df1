"""The report's HTML page, and the local server behind --serve."""

from __future__ import annotations

import base64
import functools
import hashlib
import html
import json
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from importlib.resources import files
from pathlib import Path
from typing import Any

from stratafl.base.errors import InvalidInput
from stratafl.cost.costs import PriceBatch
from stratafl.cost.pricing import CostAxes, network_axes
from stratafl.cost.workload import named_networks, resolved
from stratafl.metrics.objective import GoalLike
from stratafl.network.specification import NetworkLike
from stratafl.report.page_data import page_data
from stratafl.runs import StoredRun
from stratafl.runs.groups import Gatherer
from stratafl.runs.sweep.plan import noted_target

SCRIPTS = (
    "state.js",
    "scale.js",
    "chart.js",
    "curves.js",
    "summary.js",
    "export.js",
    "timeline.js",
    "tree.js",
    "tables.js",
    "main.js",
)


def page(data: Mapping[str, Any], title: str = "stratafl report", *, live: bool = False) -> str:
    """live: whether the page asks the server it came from for newer data."""
    script = "\n".join(asset(name) for name in SCRIPTS)
    connections = "'self'" if live else "'none'"
    policy = (
        f"default-src 'none'; script-src 'sha256-{_digest(script)}'; style-src 'unsafe-inline'; img-src data: blob:; "
        f"connect-src {connections}; base-uri 'none'; form-action 'none'"
    )
    parts = {
        "title": html.escape(title),
        "policy": html.escape(policy),
        "style": asset("page.css"),
        "data": json_for_html(data),
        "live": "live" if live else "",
        "script": script,
    }
    # one pass over the template, so that nothing inserted is looked at again
    pieces = asset("page.html").split("@@")
    return "".join(parts[piece] if number % 2 else piece for number, piece in enumerate(pieces))


def json_for_html(data: Mapping[str, Any]) -> str:
    """JSON that cannot end the element it stands in."""
    text = json.dumps(data, allow_nan=False, separators=(",", ":"))
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")


@functools.cache
def asset(name: str) -> str:
    """The text of a file that comes with the package for the page."""
    return files("stratafl.report").joinpath("assets", name).read_text(encoding="utf-8")


def _digest(script: str) -> str:
    return base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()


HOST = "127.0.0.1"

FRESH = 1.0
"""Seconds for which an answer is given again instead of reading the runs anew."""

AT_ONCE = 16
"""Requests answered at a time; more are turned away."""

PATIENCE = 10
"""Seconds a client may take to say what it wants."""


class Live:
    """The data of what stands in some places: a run is read and priced again where it has changed,
    and all is put together again where anything has."""

    def __init__(
        self,
        places: Sequence[Path],
        networks: Sequence[NetworkLike] = (),
        targets: Sequence[GoalLike] | None = None,
        metric: str | None = None,
    ):
        self._places, self._networks, self._targets, self._metric = places, networks, targets, metric
        self._gather, self._pricing = Gatherer(), PriceBatch()
        self._runs: list[StoredRun] = []
        self._made_of: tuple[object, ...] = ()
        self._data: dict[str, Any] = {}

    def read(self) -> dict[str, Any]:
        """The data; the same object where nothing has changed."""
        try:
            runs, problems = self._gather(self._places)
        except InvalidInput as problem:
            # a folder that goes away is told on the page; the server stays
            runs, problems = [], [str(problem)]
        try:
            networks = resolved(named_networks(self._networks), runs)
        except InvalidInput as problem:
            networks, problems = [], [*problems, str(problem)]
        noted = [noted_target(folder) for folder in dict.fromkeys(run.path.parent for run in runs)]
        # a run that was not read again is the same object, which `_runs` holds
        made_of = [*map(id, runs)], networks, problems, noted
        if made_of != self._made_of:
            self._pricing = PriceBatch(before=self._pricing)
            self._data = self._put_together(runs, problems, network_axes(runs, networks, self._pricing))
            self._made_of, self._runs = made_of, runs
        return self._data

    def _put_together(self, runs: list[StoredRun], problems: list[str], further: CostAxes) -> dict[str, Any]:
        try:
            return page_data(runs, self._targets, problems, self._metric, further)
        except InvalidInput as problem:
            # a target of a metric that the runs do not have, perhaps not yet
            return page_data(runs, None, [*problems, str(problem)], self._metric, further)


class CachedData:
    """The newest data, read at most once in a while however many ask."""

    def __init__(self, read: Callable[[], dict[str, Any]]):
        self._read, self._lock = read, threading.Lock()
        self._made = -FRESH
        self._data: dict[str, Any] = {}
        self._text = b""

    def get(self) -> tuple[dict[str, Any], bytes]:
        with self._lock:
            if time.monotonic() - self._made >= FRESH:
                data = self._read()
                if data is not self._data:
                    self._text = json.dumps(data, allow_nan=False, separators=(",", ":")).encode()
                self._data = data
                self._made = time.monotonic()
            return self._data, self._text


class Server(ThreadingHTTPServer):
    """Serves `page` of the newest data at /, and the data itself at /data.json."""

    daemon_threads = True

    def __init__(self, read: Callable[[], dict[str, Any]], page: Callable[[dict[str, Any]], str], port: int = 0):
        self.latest, self.page = CachedData(read), page
        self.places = threading.BoundedSemaphore(AT_ONCE)
        super().__init__((HOST, port), Handler)

    @property
    def address(self) -> str:
        return f"http://{HOST}:{self.server_address[1]}/"

    def process_request(self, request: Any, client_address: Any) -> None:
        if not self.places.acquire(blocking=False):
            self.shutdown_request(request)
            return
        try:
            super().process_request(request, client_address)
        except BaseException:
            self.places.release()
            raise

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        try:
            super().process_request_thread(request, client_address)
        finally:
            self.places.release()

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A browser that went away in the middle of an answer is nobody's problem."""


class Handler(BaseHTTPRequestHandler):
    """Answers one browser's requests for the page and for what is new."""

    server: Server
    timeout = PATIENCE
    server_version, sys_version = "stratafl", ""

    def do_GET(self) -> None:
        self._answer(body=True)

    def do_HEAD(self) -> None:
        self._answer(body=False)

    def _answer(self, body: bool) -> None:
        # a page elsewhere whose name was made to point here must not read what is on this machine
        if self.headers.get("Host", "").partition(":")[0] not in (HOST, "localhost"):
            self.send_error(HTTPStatus.FORBIDDEN)
            return
        path = self.path.partition("?")[0]
        if path not in ("/", "/data.json"):
            self.send_error(HTTPStatus.NOT_FOUND)
            return
        data, text = self.server.latest.get()
        kind, content = "application/json", text
        if path == "/":
            kind, content = "text/html; charset=utf-8", self.server.page(data).encode()
        self.send_response(HTTPStatus.OK)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(content)))
        self.send_header("Cache-Control", "no-store")
        self.send_header("X-Content-Type-Options", "nosniff")
        self.end_headers()
        if body:
            self.wfile.write(content)

    def log_message(self, format: str, *args: Any) -> None:
        """Nobody wants to read of every refresh."""
