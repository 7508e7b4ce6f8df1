"""Who may speak to a SuperLink: only registered keys, over TLS, under this run's authority; and
what they may ask."""

from __future__ import annotations

import contextlib
import http.client
import os
import signal
import ssl
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("flwr")

from cryptography.hazmat.primitives.asymmetric import ec
from flwr.proto.control_pb2 import ListRunsRequest, RegisterNodeRequest, StartRunRequest

from stratafl.deploy.host import this_machine
from stratafl.deploy.host.supervise import QUIET
from stratafl.deploy.sites.provision import Authority, DeploymentTopology, provision
from stratafl.deploy.sites.provision import _ssh_private as ssh_private
from stratafl.deploy.sites.site import Site

pytestmark = pytest.mark.deploy
LIMIT = 180
SECONDS = 20
"""That a SuperNode gets to be let in, where it does not give up by itself."""
LET_IN = "Activated node_id"
PORT = 29000 + os.getpid() % 1000


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """The folder of a root whose SuperLink runs and waits for its children."""
    folder = tmp_path_factory.mktemp("security")
    (folder / "run.toml").write_text('[tree]\nshape = "2"\n[schedule]\nperiods = [2]\n')
    (folder / "topology.toml").write_text(f'config = "run.toml"\nbase_port = {PORT}\n')
    folders = provision(DeploymentTopology.load(folder / "topology.toml"), folder / "sites")
    process = this_machine.start(folders["root"])
    log, give_up = folders["root"] / "logs" / "superlink.log", time.monotonic() + LIMIT
    while not (log.exists() and "Application startup complete" in log.read_text()):
        assert time.monotonic() < give_up and process.poll() is None
        time.sleep(0.2)
    yield folders["root"]
    this_machine.stop(folders)
    if process.poll() is None:
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def attempt(root: Path, *arguments: str, home: Path) -> tuple[str, str]:
    """What a SuperNode with these arguments said before it ended or was ended, and what the
    SuperLink said of it."""
    log = root / "logs" / "superlink.log"
    before = len(log.read_text())
    address = Site.load(root).public
    flower = str(Path(sys.executable).parent / "flower-supernode")
    command = [flower, "--superlink", address, "--max-retries", "1", "--port", str(PORT + 20), "--isolation", "process",
               *arguments]  # fmt: skip
    environment = {**os.environ, **QUIET, "FLWR_HOME": str(home)}
    said = home / "supernode.log"
    with open(said, "w") as output:
        process = subprocess.Popen(command, stdout=output, stderr=output, env=environment, start_new_session=True)
    give_up = time.monotonic() + SECONDS
    while process.poll() is None and time.monotonic() < give_up and LET_IN not in log.read_text()[before:]:
        time.sleep(0.1)
    if process.poll() is None:
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    return said.read_text(), log.read_text()[before:]


def private_key(path: Path) -> str:
    path.write_bytes(ssh_private(ec.generate_private_key(ec.SECP384R1())))
    return str(path)


def refused(said: str, heard: str) -> bool:
    return "SuperNode ID" not in said and LET_IN not in heard


def test_a_registered_key_is_let_in(root: Path, tmp_path: Path) -> None:
    child = root.parent / "0"
    said, heard = attempt(
        root, "--root-certificates", str(root / "ca.pem"), "--auth-supernode-private-key", str(child / "node.key"),
        home=tmp_path,
    )  # fmt: skip
    assert not refused(said, heard)


def test_an_unregistered_key_is_refused(root: Path, tmp_path: Path) -> None:
    key = private_key(tmp_path / "key")
    said, heard = attempt(
        root, "--root-certificates", str(root / "ca.pem"), "--auth-supernode-private-key", key, home=tmp_path
    )
    assert refused(said, heard)
    assert "a key that is no child's" in heard


def test_no_key_is_refused(root: Path, tmp_path: Path) -> None:
    assert refused(*attempt(root, "--root-certificates", str(root / "ca.pem"), home=tmp_path))


def test_another_authority_is_refused(root: Path, tmp_path: Path) -> None:
    (tmp_path / "ca.pem").write_bytes(Authority.new("another").pem)
    child = root.parent / "1"
    said, heard = attempt(
        root, "--root-certificates", str(tmp_path / "ca.pem"), "--auth-supernode-private-key",
        str(child / "node.key"), home=tmp_path,
    )  # fmt: skip
    assert refused(said, heard)


def test_plaintext_is_refused(root: Path, tmp_path: Path) -> None:
    assert refused(*attempt(root, "--insecure", home=tmp_path))


def ports(root: Path) -> dict[str, int]:
    site = Site.load(root)
    return {"public": int(site.public.rsplit(":", 1)[1]), "runtime": site.runtime_port}


def posted(root: Path, door: str, path: str, body: bytes = b"") -> int:
    """The status of the answer to a request over this run's TLS."""
    context = ssl.create_default_context(cafile=str(root / "ca.pem"))
    connection = http.client.HTTPSConnection("127.0.0.1", ports(root)[door], context=context, timeout=30)
    with contextlib.closing(connection):
        connection.request("POST", path, body, {"Content-Type": "application/x-protobuf"})
        with connection.getresponse() as response:
            return response.status


@pytest.mark.parametrize("door", ["public", "runtime"])
@pytest.mark.parametrize(
    ("path", "asked"),
    [
        ("register-node", RegisterNodeRequest(public_key=b"mine")),
        ("start-run", StartRunRequest()),
        ("list-runs", ListRunsRequest()),
    ],
)
def test_nobody_reaches_the_control_interface(root: Path, door: str, path: str, asked: Any) -> None:
    assert posted(root, door, f"/v1/control/{path}", asked.SerializeToString()) == 403


@pytest.mark.parametrize(
    ("door", "path", "status"),
    [
        ("public", "/v1/runtime/acquire-task", 403),
        ("public", "/v1/fleet/../control/start-run", 401),
        ("public", "/v1/fleet%2f..%2fcontrol/start-run", 401),
        ("public", "/openapi.json", 403),
        ("runtime", "/v1/fleet/activate-node", 403),
    ],
)
def test_what_does_not_belong_to_a_port_is_refused(root: Path, door: str, path: str, status: int) -> None:
    assert posted(root, door, path) == status


ACQUIRE = """
import itertools, sys
from pathlib import Path
from stratafl.deploy.flower.tasks import SERVER_APP, Tasks

tasks = Tasks(SERVER_APP, int(sys.argv[1]), Path("ca.pem").read_bytes(), sys.argv[2].encode(), print)
looks = itertools.count()
print("asked and got", tasks.next(lambda: next(looks) < 2))
"""


def test_only_who_has_the_site_s_secret_may_ask_for_its_tasks(root: Path) -> None:
    """Who is not let in ends."""

    def ask(secret: str) -> subprocess.Popen[str]:
        command = [sys.executable, "-c", ACQUIRE, str(ports(root)["runtime"]), secret]
        return subprocess.Popen(command, cwd=root, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)

    with ask("guessed") as other, ask((root / "inner.key").read_text()) as own:
        assert other.communicate(timeout=LIMIT)[0].startswith("not let in") and other.returncode == 1
        got = own.communicate(timeout=LIMIT)[0]
    assert got == "asked and got None\n", "the root's own process has the only one"
