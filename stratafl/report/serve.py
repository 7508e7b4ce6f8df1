"""The page served live: on this machine only, read-only, two addresses and nothing else."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

HOST = "127.0.0.1"
FRESH = 1.0
"""Seconds for which an answer is given again instead of reading the runs anew."""
AT_ONCE = 16
"""Requests answered at a time; more are turned away."""
PATIENCE = 10
"""Seconds a client may take to say what it wants."""


class Latest:
    """The newest data, read at most once in a while however many ask."""

    def __init__(self, read: Callable[[], dict[str, Any]]):
        self._read, self._lock = read, threading.Lock()
        self._made = -FRESH
        self._data: dict[str, Any] = {}
        self._text = b""

    def get(self) -> tuple[dict[str, Any], bytes]:
        with self._lock:
            if time.monotonic() - self._made >= FRESH:
                self._data = self._read()
                self._text = json.dumps(self._data, allow_nan=False, separators=(",", ":")).encode()
                self._made = time.monotonic()
            return self._data, self._text


class Server(ThreadingHTTPServer):
    """Serves `page` of the newest data at /, and the data itself at /data.json."""

    daemon_threads = True

    def __init__(self, read: Callable[[], dict[str, Any]], page: Callable[[dict[str, Any]], str], port: int = 0):
        self.latest, self.page = Latest(read), page
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
