"""A SuperLink without its root, a child without its leaf, and strangers: what the tests of its gate
are made of."""

from __future__ import annotations

import contextlib
import datetime
import http.client
import os
import resource
import socket
import ssl
import subprocess
import sys
import threading
import time
from base64 import b64encode
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import ClassVar

from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import load_ssh_private_key
from flwr.proto.fleet_pb2 import ActivateNodeRequest, ActivateNodeResponse, PullMessagesRequest
from flwr.supercore.primitives.asymmetric import public_key_to_bytes, sign_message
from flwr.supercore.protobuf.constants import PROTOBUF_MEDIA_TYPE

from stratafl.deploy.host.supervise import QUIET
from stratafl.deploy.sites.provision import DeploymentTopology, provision
from stratafl.deploy.sites.site import Site

LIMIT = 120
CONFIG = """
rounds = 100000
[tree]
shape = "{shape}"
[model]
name = "mlp"
hidden = [{hidden}]
[schedule]
periods = [1]
"""
HOLD = """
import sys
from pathlib import Path
from stratafl.deploy.flower import superlink
from stratafl.deploy.host.garbage import give_back_soon

give_back_soon()  # as a site's supervisor does
for setting in sys.argv[1:]:
    from stratafl.deploy.door import gate
    name, _, value = setting.partition("=")
    setattr(gate, name, int(value))
superlink.run(Path())
"""
PORTS = iter(range(15000 + os.getpid() % 900, 19000, 100))


def provisioned(folder: Path, shape: str, hidden: int) -> Path:
    (folder / "run.toml").write_text(CONFIG.format(shape=shape, hidden=hidden))
    (folder / "topology.toml").write_text(f'config = "run.toml"\nbase_port = {next(PORTS)}\n')
    return provision(DeploymentTopology.load(folder / "topology.toml"), folder / "sites")["root"]


class SuperLink:
    """A root's, in a process of its own, without the root."""

    def __init__(self, root: Path, *settings: str, descriptors: int | None = None):
        self.root, self.site = root, Site.load(root)
        self.port = int(self.site.public.rsplit(":", 1)[1])
        self.log = root / "superlink.log"

        def limit() -> None:
            if descriptors is not None:
                resource.setrlimit(resource.RLIMIT_NOFILE, (descriptors, descriptors))

        environment = {**os.environ, **QUIET, "FLWR_HOME": str(root / "flower")}
        with open(self.log, "wb") as output:
            self.process = subprocess.Popen(
                [sys.executable, "-c", HOLD, *settings],
                cwd=root, env=environment, stdout=output, stderr=output, preexec_fn=limit,
            )  # fmt: skip

    def __enter__(self) -> SuperLink:
        give_up = time.monotonic() + LIMIT
        while "Application startup complete" not in self.log.read_text():
            assert time.monotonic() < give_up and self.process.poll() is None, self.log.read_text()
            time.sleep(0.1)
        return self

    def __exit__(self, *problem: object) -> None:
        self.process.kill()
        self.process.wait()

    def resident(self) -> int:
        return int(Path(f"/proc/{self.process.pid}/statm").read_text().split()[1]) * resource.getpagesize()

    @contextlib.contextmanager
    def watched(self) -> Iterator[list[int]]:
        """The most that it grew by during the block."""
        before, grown, over = self.resident(), [0], threading.Event()

        def watch() -> None:
            while not over.wait(0.02):
                grown[0] = max(grown[0], self.resident() - before)

        watching = threading.Thread(target=watch)
        watching.start()
        try:
            yield grown
        finally:
            over.set()
            watching.join()

    def tls(self, port: int | None = None, timeout: float = 30.0) -> socket.socket:
        return connected(port or self.port, self.root, timeout)


def connected(port: int, trusted: Path | None = None, timeout: float = 5.0) -> socket.socket:
    """A connection, with TLS where there is something to trust."""
    stream = socket.socket()
    if trusted is not None:
        stream = trusting(trusted).wrap_socket(stream, server_hostname="127.0.0.1")
    stream.settimeout(timeout)
    try:
        stream.connect(("127.0.0.1", port))
    except OSError:
        stream.close()
        raise
    return stream


@cache
def trusting(root: Path) -> ssl.SSLContext:
    return ssl.create_default_context(cafile=str(root / "ca.pem"))


class Connection(http.client.HTTPSConnection):
    """One that leaves no socket open where the other side resets it before the handshake, as
    Python's own does: `wrap_socket` of a connected socket raises then, and closes nothing."""

    def __init__(self, port: int, trusted: Path):
        super().__init__("127.0.0.1", port, context=trusting(trusted), timeout=30)
        self.trusted = trusted

    def connect(self) -> None:
        self.sock = connected(self.port, self.trusted, 30)


class Child:
    """One that has its node key, and asks as its SuperNode would."""

    made: ClassVar[list[Child]] = []

    def __init__(self, root: Path, port: int, name: str = "0", key: ec.EllipticCurvePrivateKey | None = None):
        loaded = key or load_ssh_private_key((root.parent / name / "node.key").read_bytes(), None)
        assert isinstance(loaded, ec.EllipticCurvePrivateKey)
        self.key, self.public = loaded, public_key_to_bytes(loaded.public_key())
        self.port, self.trusted = port, root
        self.made.append(self)
        self.connect()

    def connect(self) -> None:
        self.connection = Connection(self.port, self.trusted)

    def headers(self, ahead: float = 0.0) -> dict[str, str]:
        stamp = (datetime.datetime.now(datetime.UTC) + datetime.timedelta(seconds=ahead)).isoformat()
        return {
            "content-type": PROTOBUF_MEDIA_TYPE,
            "flwr-public-key": b64encode(self.public).decode(),
            "flwr-timestamp": stamp,
            "flwr-signature": b64encode(sign_message(self.key, stamp.encode())).decode(),
        }

    def ask(self, path: str, body: bytes, ahead: float = 0.0) -> tuple[int, bytes]:
        self.connection.request("POST", path, body, self.headers(ahead))
        with self.connection.getresponse() as response:
            return response.status, response.read()

    def activate(self) -> None:
        request = ActivateNodeRequest(public_key=self.public, heartbeat_interval=60)
        status, said = self.ask("/v1/fleet/activate-node", request.SerializeToString())
        assert status == 200, said
        node = ActivateNodeResponse.FromString(said).node_id
        self.looks = PullMessagesRequest()
        self.looks.node.node_id = node

    def look(self) -> int:
        return self.ask("/v1/fleet/pull-messages", self.looks.SerializeToString())[0]


def head(path: str, *fields: str) -> bytes:
    return "\r\n".join([f"POST {path} HTTP/1.1", "host: root", *fields, "", ""]).encode()


def poured(link: SuperLink, port: int, first: bytes, bytes_: int, chunked: bool) -> bytes:
    """The answer to a body of so many bytes, of which as many are sent as the other side takes."""
    piece = bytes(1 << 18)
    if chunked:
        piece = b"%x\r\n%s\r\n" % (len(piece), piece)
    with contextlib.suppress(OSError), link.tls(port, timeout=4.0) as stream:
        with contextlib.suppress(OSError):
            stream.sendall(first)
            for _ in range(bytes_ >> 18):
                stream.sendall(piece)
        return stream.recv(1000)
    return b""
