"""A proxy in the environment is for the way out: a site's own processes reach each other without
it."""

from __future__ import annotations

import ssl
import threading
from collections.abc import Iterator
from functools import partial
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import pytest

pytest.importorskip("flwr")

import httpx
from flwr.proto.runtime_pb2 import AcquireTaskResponse
from flwr.proto.task_pb2 import Task

from stratafl.deploy.flower import supernode
from stratafl.deploy.flower.tasks import CLIENT_APP, Tasks
from stratafl.deploy.host.processes import Forked
from stratafl.deploy.sites import provision
from stratafl.deploy.sites.site import Site

NAMES = ["HTTPS_PROXY", "https_proxy", "HTTP_PROXY", "ALL_PROXY", "all_proxy"]
NOBODY = ["http://127.0.0.1:9", "socks5://127.0.0.1:9"]


class Answers(BaseHTTPRequestHandler):
    """A SuperNode that has a task for everybody."""

    def do_POST(self) -> None:
        body = AcquireTaskResponse(task=Task(task_id=1), token="here").SerializeToString()
        self.send_response(200)
        self.send_header("content-type", "application/x-protobuf")
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *said: object) -> None:
        pass


@pytest.fixture
def port(tmp_path: Path) -> Iterator[int]:
    authority = provision.Authority.new("test")
    certificate, key = authority.sign("here", ["127.0.0.1"])
    for name, data in (("ca.pem", authority.pem), ("server.pem", certificate), ("server.key", key)):
        (tmp_path / name).write_bytes(data)
    server = HTTPServer(("127.0.0.1", 0), Answers)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(tmp_path / "server.pem", tmp_path / "server.key")
    server.socket = context.wrap_socket(server.socket, server_side=True)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield server.server_address[1]
    server.shutdown()
    server.server_close()


def ask(folder: Path, port: int) -> None:
    tasks = Tasks(CLIENT_APP, port, (folder / "ca.pem").read_bytes(), b"1" * 64, print)
    tries = iter([True])
    assert tasks.next(lambda: next(tries, False)) == "here"


def go_up(site: Site) -> None:
    """What a SuperNode does first, with the parent it was told of."""

    def flower_supernode() -> None:
        from flwr.supercore.protobuf import client

        authority = Path("ca.pem").read_bytes()
        made = client.ProtobufClient.from_server_address(site.parent, False, authority, [])
        assert made._client.post(f"https://{site.parent}/").status_code == 200

    vars(supernode)["flower_supernode"] = flower_supernode
    supernode.run(site)


def site_of(parent: str) -> Site:
    nothing = dict.fromkeys(Site.__dataclass_fields__, "")
    return Site(**{**nothing, "parent": parent, "inner_port": 1})  # type: ignore[arg-type]


@pytest.mark.parametrize("proxy", NOBODY)
@pytest.mark.parametrize("name", NAMES)
def test_a_site_s_own_processes_do_without(
    name: str, proxy: str, port: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(name, proxy)
    # processes of their own: both change this one's Flower
    for work in (partial(ask, tmp_path, port), partial(go_up, site_of(f"127.0.0.1:{port}"))):
        assert Forked(work, tmp_path / "log", tmp_path).wait() == 0


def refused(site: Site) -> None:
    with pytest.raises(httpx.ConnectError, match="Connection refused"):
        go_up(site)


def test_the_way_to_a_parent_elsewhere_is_the_proxy_s(
    port: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HTTPS_PROXY", NOBODY[0])
    assert Forked(partial(refused, site_of(f"stratafl.invalid:{port}")), tmp_path / "log", tmp_path).wait() == 0
