"""The live page: read-only, on this machine, and fresh while a run goes on."""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from stratafl.reports import page as page_module
from stratafl.reports.page import HOST, MAX_REQUESTS, CachedData, ReportHandler, ReportServer
from stratafl.reports.page import page as page_of
from stratafl.reports.page_data import page_data
from stratafl.runs.groups import collect_runs
from tests.reports.conftest import ROUNDS, Page


@contextlib.contextmanager
def serving(folder: Path) -> Iterator[ReportServer]:
    server = ReportServer(lambda: page_data(*_gathered(folder)), lambda data: page_of(data, live=True))
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05})
    thread.start()
    try:
        yield server
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def _gathered(folder: Path) -> tuple[list, None, list[str]]:
    result, unreadable = collect_runs([folder])
    return result, None, unreadable


def ask(server: ReportServer, path: str, method: str = "GET", host: str | None = None) -> tuple[int, bytes]:
    connection = http.client.HTTPConnection(HOST, server.server_address[1], timeout=120)
    try:
        connection.putrequest(method, path, skip_host=True)
        connection.putheader("Host", host or f"{HOST}:{server.server_address[1]}")
        connection.endheaders()
        answer = connection.getresponse()
        return answer.status, answer.read()
    finally:
        connection.close()


def test_reading_takes_a_small_share_of_the_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(page_module, "CACHE_SECONDS", 0.0)
    reads = []

    def read() -> dict[str, Any]:
        reads.append(time.sleep(0.03))
        return {}

    cache, begin = CachedData(read), time.monotonic()
    while time.monotonic() - begin < 0.7:
        cache.get()
    assert 2 <= len(reads) <= 1 + 0.7 / (0.03 + 0.03 / page_module.MAX_LOAD)


def test_two_addresses_and_nothing_else(runs: Path) -> None:
    with serving(runs) as server:
        status, content = ask(server, "/")
        assert status == 200 and b"connect-src &#x27;self&#x27;" in content
        status, content = ask(server, "/data.json?now")
        assert status == 200 and len(json.loads(content)["settings"]) == 2
        assert ask(server, "/", "HEAD") == (200, b"")
        for path in ("/run.json", "/../../etc/passwd", "/%2e%2e/run.json", "//etc/passwd", "/data.json/", "etc/passwd"):
            assert ask(server, path)[0] == 404, path
        for method in ("POST", "PUT", "DELETE", "OPTIONS"):
            assert ask(server, "/", method)[0] == 501


def test_a_name_that_was_made_to_point_here_gets_nothing(runs: Path) -> None:
    with serving(runs) as server:
        assert ask(server, "/data.json", host="example.org")[0] == 403
        assert ask(server, "/data.json", host="127.0.0.1.example.org")[0] == 403
        assert ask(server, "/data.json", host="localhost")[0] == 200


def test_only_this_machine_can_connect(runs: Path) -> None:
    with serving(runs) as server:
        assert server.server_address[0] == "127.0.0.1"


def test_runs_are_not_read_anew_for_each_who_asks(runs: Path) -> None:
    read = []
    latest = CachedData(lambda: {"times": read.append(1) or len(read)})
    assert {latest.get()[0]["times"] for _ in range(50)} == {1}


def test_many_idle_connections_do_not_stop_it(runs: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ReportHandler, "timeout", 0.3)
    with serving(runs) as server, contextlib.ExitStack() as idle:
        for _ in range(3 * MAX_REQUESTS):
            idle.enter_context(socket.create_connection(server.server_address, timeout=60))
        for _ in range(100):
            with contextlib.suppress(OSError, http.client.HTTPException):
                assert ask(server, "/data.json")[0] == 200
                break
            threading.Event().wait(0.1)
        else:
            pytest.fail("the server did not come back")
        assert threading.active_count() < MAX_REQUESTS + 10


def test_the_page_follows_a_run(page: Page, copied: Path) -> None:
    lines = {run: (run / "rounds.jsonl").read_text().splitlines(keepends=True) for run in copied.iterdir()}
    for run, records in lines.items():
        (run / "rounds.jsonl").write_text("".join(records[:2]))
    plot = "document.querySelector('#curve-accuracy .plot')"
    points = f"{plot}.chart.lines[0].x.length"
    with serving(copied) as server:
        page.open(server.address)
        assert page.js(points) == 2
        page.click("#curves-title ~ .chips button:nth-child(1)")
        page.click('#quantity [data-value="progress"]')
        page.js(f"zoomTo({plot}, [1, 3])")
        page.click("#summary th:nth-child(4) button")
        page.js("document.getElementById('target').value = '55', chooseTargets('55')")
        for run, records in lines.items():
            (run / "rounds.jsonl").write_text("".join(records))
        page.until(f"{points} === {ROUNDS}")
        assert page.js(f"{plot}.chart.x.domain") == [1, 3]
        assert page.js("document.querySelector('#summary th:nth-child(4)').ariaSort") == "descending"
        assert "rounds to 55 %" in page.text("summary")
        assert page.lines("curve-accuracy", 1) == 1
        assert page.js("""document.querySelector('#quantity [aria-pressed="true"]').dataset.value""") == "progress"
        assert all(url.startswith((server.address, "data:")) for url in page.requests())
        assert page.errors() == []
    page.until("document.getElementById('subtitle').textContent.includes('has stopped')")


def test_ctrl_c_ends_it_quietly(runs: Path) -> None:
    process = subprocess.Popen(
        [sys.executable, "-m", "stratafl", "report", str(runs), "--watch"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    try:
        assert process.stdout is not None
        output = process.stdout.readline()
        assert output.startswith("serving on http://127.0.0.1:")
        port = int(output.split(":")[2].partition("/")[0])
        connection = http.client.HTTPConnection(HOST, port, timeout=120)
        connection.request("GET", "/data.json")
        assert connection.getresponse().status == 200
        connection.close()
        process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=300)
    finally:
        process.kill()
        process.communicate()
    assert (process.returncode, out, err) == (0, "stopped\n", "")
