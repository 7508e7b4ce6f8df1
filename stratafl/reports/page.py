"""HTML page of the report, and the local server behind --watch."""

from __future__ import annotations

import base64
import functools
import hashlib
import html
import json
import math
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from importlib.resources import files
from pathlib import Path
from typing import Any

from stratafl.base.errors import InvalidInput
from stratafl.base.plotting import DARK_PALETTE, DASHES, PALETTE
from stratafl.costs.costs import PriceBatch
from stratafl.costs.pricing import CostAxes, network_axes
from stratafl.costs.workload import named_networks, resolved
from stratafl.metrics.objective import GoalLike
from stratafl.network.specification import NetworkLike
from stratafl.reports.page_data import page_data
from stratafl.runs import StoredRun
from stratafl.runs.curves import CurveCache
from stratafl.runs.groups import Gatherer
from stratafl.sweeps.grid import noted_target

SCRIPTS = ["state", "chart", "curves", "summary", "timeline", "tree", "tables", "runs", "main"]
"""Files of the page's program, in their order."""

DASH_SCALE = 1.9
"""Length of a dash on the page, in pixels, per length in `DASHES`."""


def page(data: Mapping[str, Any], title: str = "stratafl report", *, live: bool = False) -> str:
    """Fill the template of the page.

    live: whether the page asks its server for newer data.
    """
    script = "\n".join(asset(f"{name}.js") for name in SCRIPTS)
    connections = "'self'" if live else "'none'"
    policy = (
        f"default-src 'none'; script-src 'sha256-{_digest(script)}'; style-src 'unsafe-inline'; img-src data: blob:; "
        f"connect-src {connections}; base-uri 'none'; form-action 'none'"
    )
    parts = {
        "title": html.escape(title),
        "policy": html.escape(policy),
        "style": palette_css() + asset("page.css"),
        "data": json_for_html(data),
        "live": "live" if live else "",
        "script": script,
    }
    # one pass over the template, so that inserted text is not expanded
    pieces = asset("page.html").split("@@")
    return "".join(parts[piece] if number % 2 else piece for number, piece in enumerate(pieces))


def palette_css() -> str:
    """Colours and dashes of lines as CSS variables; on paper a dark page is light, too."""

    def declarations(prefix: str, values: Iterable[str]) -> str:
        return "".join(f"--{prefix}{place}:{value};" for place, value in enumerate(values))

    dashes = [" ".join(f"{DASH_SCALE * length:g}" for length in dash) or "none" for dash in DASHES]
    light = declarations("c", PALETTE) + declarations("d", dashes)
    dark = declarations("c", DARK_PALETTE)
    return f':root{{{light}}}\n@media screen{{:root[data-theme="dark"]{{{dark}}}}}\n'


def json_for_html(data: Mapping[str, Any]) -> str:
    """Format JSON that cannot end the element that it stands in."""
    text = json.dumps(data, allow_nan=False, separators=(",", ":"))
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")


@functools.cache
def asset(name: str) -> str:
    """Read a file of the page from the package."""
    return files("stratafl.reports").joinpath("assets", name).read_text(encoding="utf-8")


def _digest(script: str) -> str:
    return base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()


HOST = "127.0.0.1"
CACHE_SECONDS = 1.0
"""Minimum seconds for which an answer is reused before the runs are read again."""

MAX_LOAD = 0.1
"""Maximum share of the time that is spent on reading runs, next to which others may be training."""

MAX_REQUESTS = 16
"""Maximum number of concurrent requests; others are rejected."""

REQUEST_TIMEOUT_S = 10
"""Seconds in which a client must send its request."""


class Live:
    """Page data of changing run folders: runs are read and priced again only if they have
    changed."""

    def __init__(
        self,
        places: Sequence[Path],
        networks: Sequence[NetworkLike] = (),
        targets: Sequence[GoalLike] | None = None,
        metric: str | None = None,
        axis: str = "",
    ):
        self._places, self._networks, self._targets, self._metric = places, networks, targets, metric
        self._axis = axis
        self._gather, self._batch, self._curves = Gatherer(), PriceBatch(), CurveCache()
        self._runs: list[StoredRun] = []
        self._inputs: tuple[object, ...] = ()
        self._data: dict[str, Any] = {}

    def read(self) -> dict[str, Any]:
        """Return the data; the same object if nothing has changed."""
        try:
            runs, problems = self._gather(self._places)
        except InvalidInput as problem:
            # a folder that disappears is reported on the page; the server continues
            runs, problems = [], [str(problem)]
        try:
            networks = resolved(named_networks(self._networks), runs)
        except InvalidInput as problem:
            networks, problems = [], [*problems, str(problem)]
        stored_targets = [noted_target(folder) for folder in dict.fromkeys(run.path.parent for run in runs)]
        # a run that was not read again is the same object, which `_runs` keeps alive
        inputs = [*map(id, runs)], networks, problems, stored_targets
        if inputs != self._inputs:
            self._batch = PriceBatch(before=self._batch)
            self._data = self._page_data(runs, problems, network_axes(runs, networks, self._batch))
            self._curves.retain(runs)
            self._inputs, self._runs = inputs, runs
        return self._data

    def _page_data(self, runs: list[StoredRun], problems: list[str], extra_axes: CostAxes) -> dict[str, Any]:
        try:
            return page_data(runs, self._targets, problems, self._metric, extra_axes, self._axis, self._curves)
        except InvalidInput as problem:
            # a target of a metric, or an axis, that the runs do not have, perhaps not yet
            return page_data(runs, None, [*problems, str(problem)], self._metric, extra_axes, cache=self._curves)


class CachedData:
    """Newest data, read at most once per interval for any number of requests; the interval is
    longer where reading takes long."""

    def __init__(self, read: Callable[[], dict[str, Any]]):
        self._read, self._lock = read, threading.Lock()
        self._due = -math.inf
        self._data: dict[str, Any] = {}
        self._text = b""

    def get(self) -> tuple[dict[str, Any], bytes]:
        with self._lock:
            begin = time.monotonic()
            if begin >= self._due:
                data = self._read()
                if data is not self._data:
                    self._text = json.dumps(data, allow_nan=False, separators=(",", ":")).encode()
                self._data = data
                end = time.monotonic()
                self._due = end + max(CACHE_SECONDS, (end - begin) / MAX_LOAD)
            return self._data, self._text


class ReportServer(ThreadingHTTPServer):
    """HTTP server of the page at /, and of its data at /data.json."""

    daemon_threads = True

    def __init__(self, read: Callable[[], dict[str, Any]], page: Callable[[dict[str, Any]], str], port: int = 0):
        self.cache, self.page = CachedData(read), page
        self.slots = threading.BoundedSemaphore(MAX_REQUESTS)
        super().__init__((HOST, port), ReportHandler)

    @property
    def address(self) -> str:
        return f"http://{HOST}:{self.server_address[1]}/"

    def process_request(self, request: Any, client_address: Any) -> None:
        if not self.slots.acquire(blocking=False):
            self.shutdown_request(request)
            return
        try:
            super().process_request(request, client_address)
        except BaseException:
            self.slots.release()
            raise

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        try:
            super().process_request_thread(request, client_address)
        finally:
            self.slots.release()

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Print nothing about a failed request, such as one that the browser closed early."""


class ReportHandler(BaseHTTPRequestHandler):
    """Handler of the requests of one browser."""

    server: ReportServer
    timeout = REQUEST_TIMEOUT_S
    server_version, sys_version = "stratafl", ""

    def do_GET(self) -> None:
        self._answer(body=True)

    def do_HEAD(self) -> None:
        self._answer(body=False)

    def _answer(self, body: bool) -> None:
        # a foreign page whose host name points here (DNS rebinding) must not read local data
        if self.headers.get("Host", "").partition(":")[0] not in (HOST, "localhost"):
            self.send_error(HTTPStatus.FORBIDDEN)
            return
        path = self.path.partition("?")[0]
        if path not in ("/", "/data.json"):
            self.send_error(HTTPStatus.NOT_FOUND)
            return
        data, text = self.server.cache.get()
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
        """Log nothing: the page asks again every few seconds."""
