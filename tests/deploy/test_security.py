"""Who may speak to a SuperLink: only registered keys, over TLS, under this run's authority."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

pytest.importorskip("flwr")

from cryptography.hazmat.primitives.asymmetric import ec

from stratafl.deploy import supernode, whole
from stratafl.deploy.provision import Authority, Topology, provision
from stratafl.deploy.provision import _ssh_private as ssh_private
from stratafl.deploy.site import Site
from stratafl.deploy.supervise import QUIET

pytestmark = pytest.mark.deploy
LIMIT = 180
PORT = 29000 + os.getpid() % 1000


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """The folder of a root whose SuperLink runs and waits for its children."""
    folder = tmp_path_factory.mktemp("security")
    (folder / "run.toml").write_text('[tree]\nshape = "2"\n[schedule]\nperiods = [2]\n')
    (folder / "topology.toml").write_text(f'config = "run.toml"\nbase_port = {PORT}\n')
    folders = provision(Topology.load(folder / "topology.toml"), folder / "sites")
    process = whole.start(folders["root"])
    started, give_up = folders["root"] / "logs" / "flwr.log", time.monotonic() + LIMIT
    while not (started.exists() and "Successfully started run" in started.read_text()):
        assert time.monotonic() < give_up and process.poll() is None
        time.sleep(0.2)
    yield folders["root"]
    whole.stop(folder / "sites")
    if process.poll() is None:
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def attempt(root: Path, *arguments: str, home: Path) -> tuple[str, str]:
    """What a SuperNode with these arguments said before it ended or was ended, and what the SuperLink said of it."""
    log = root / "logs" / "superlink.log"
    before = len(log.read_text())
    address = Site.load(root).public
    command = [sys.executable, "-P", supernode.__file__, "--superlink", address, "--max-retries", "1",
               "--port", str(PORT + 20), "--isolation", "process", *arguments]  # fmt: skip
    environment = {**os.environ, **QUIET, "FLWR_HOME": str(home)}
    process = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=environment, start_new_session=True
    )
    try:
        said, _ = process.communicate(timeout=40)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        said, _ = process.communicate()
    return said, log.read_text()[before:]


def private_key(path: Path) -> str:
    path.write_bytes(ssh_private(ec.generate_private_key(ec.SECP384R1())))
    return str(path)


def refused(said: str, heard: str) -> bool:
    return "SuperNode ID" not in said and "Activated node_id" not in heard


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
    assert "No SuperNode found with the given public key" in heard


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
