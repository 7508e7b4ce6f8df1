"""What is started again, what is not, and the way back from a damaged state."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from typer.testing import CliRunner

pytest.importorskip("flwr")

from stratafl import InvalidInput
from stratafl.base import files
from stratafl.cli.main import app
from stratafl.deploy.host import processes, supervise, this_machine
from stratafl.deploy.host.attendance import INCOMPLETE
from stratafl.deploy.host.processes import MOST, Forked, Restarts
from stratafl.deploy.host.supervise import Supervisor, Together
from stratafl.deploy.protocol.node import NodeState
from stratafl.deploy.sites.provision import DeploymentTopology, provision
from stratafl.deploy.sites.state_file import DAMAGED, STATE, Durable, status
from stratafl.runs.format import RunLock, is_locked

CONFIG = """
rounds = 1
[tree]
shape = "2"
[model]
name = "mlp"
hidden = [2]
[schedule]
periods = [1]
"""
LONGEST = 20.0
"""Seconds that anything here may take."""


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("made")
    (folder / "run.toml").write_text(CONFIG)
    base_port = 25000 + os.getpid() % 1000
    (folder / "topology.toml").write_text(f'config = "run.toml"\nbase_port = {base_port}\n')
    provision(DeploymentTopology.load(folder / "topology.toml"), folder / "sites")
    return folder / "sites"


@pytest.fixture
def sites(made: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(processes, "PAUSE", 0.1)
    monkeypatch.setattr(processes, "LONGEST_PAUSE", 0.1)
    return shutil.copytree(made, tmp_path / "sites")


@pytest.fixture(autouse=True)
def signals() -> Iterator[None]:
    before = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


def wait_until(condition: Callable[[], bool]) -> None:
    until = time.monotonic() + LONGEST
    while not condition():
        assert time.monotonic() < until
        time.sleep(0.02)


def damage(site: Path) -> Path:
    """A state with one bit turned."""
    durable = Durable(site / "state", files.read_json(site / "site.json")["job"])
    durable.write(NodeState(line="x" * 100))
    durable.close()
    path = site / "state" / STATE
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)
    return path


def test_flower_hears_nothing_of_the_hosts_own_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    """One would have a SuperLink serve its Control interface to all, another keep its state in a
    file."""
    theirs = {"FLWR_INTERNAL_GRPC_CONTROL_API": "1", "FLWR_INTERNAL_GRPC_FLEET_API": "1", "FLWR_TELEMETRY_ENABLED": "1"}
    others = {"FLWR_OIDC_ENABLED": "1", "FLWR_DATABASE": "state.db", "FLWR_DISABLE_UPDATE_CHECK": "0", "KEPT": "1"}
    for name, value in {**theirs, **others}.items():
        monkeypatch.setenv(name, value)
    supervise.settle_environment()
    assert not any(value == "1" for name, value in os.environ.items() if name in theirs)
    assert "FLWR_OIDC_ENABLED" not in os.environ and "FLWR_DATABASE" not in os.environ
    assert os.environ["KEPT"] == os.environ["FLWR_DISABLE_UPDATE_CHECK"] == "1"


def test_flower_is_imported_after_its_settings_are_ours(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FLWR_INTERNAL_GRPC_CONTROL_API", "1")
    seen: dict[str, str | None] = {}

    def imported(name: str) -> None:
        seen[name] = os.environ.get("FLWR_INTERNAL_GRPC_CONTROL_API")

    monkeypatch.setattr(supervise.importlib, "import_module", imported)
    supervise._import_what_they_need([])
    assert "flwr.supernode.main" in seen and set(seen.values()) == {"0"}
    lazily = "import sys, stratafl.deploy.host.supervise, stratafl.cli.deploy; print('flwr' in sys.modules)"
    ran = subprocess.run([sys.executable, "-c", lazily], capture_output=True, text=True, timeout=100)
    assert ran.stdout == "False\n", ran.stderr


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGKILL])
def test_a_signal_reaches_a_process_however_young_it_is(number: int, tmp_path: Path) -> None:
    before = signal.signal(signal.SIGTERM, lambda *_: None)  # a supervisor has a handler of its own
    try:
        for _ in range(10):
            process = Forked(lambda: time.sleep(60), tmp_path / "log", tmp_path)
            process.signal(number)
            assert process.wait(20) == -number
    finally:
        signal.signal(signal.SIGTERM, before)


def test_pauses_grow_and_too_many_ends_in_a_short_while_are_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [0.0]
    monkeypatch.setattr(processes.time, "monotonic", lambda: now[0])
    restarts = Restarts()
    assert [restarts.after(1.0) for _ in range(6)] == [1, 2, 4, 8, 15, 15]
    assert restarts.after(processes.LONG + 1) == 1
    assert not restarts.too_many
    for _ in range(MOST - 6):
        restarts.after(1.0)
    assert restarts.too_many
    now[0] += processes.WITHIN
    restarts.after(1.0)
    assert not restarts.too_many


def together(sites: Path, work: Callable[[Path], None], monkeypatch: pytest.MonkeyPatch) -> tuple[int, list[str]]:
    """Supervisors that do this, until all have ended; what was said."""
    said: list[str] = []
    monkeypatch.setattr(supervise, "_supervised", lambda folder, say: work(folder))
    return Together({name: sites / name for name in ("root", "0", "1")}, said.append).run(), said


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGHUP])
@pytest.mark.parametrize("name", ["root", "0"])
def test_a_supervisor_ended_by_a_signal_is_started_again(
    name: str, number: int, sites: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def work(folder: Path) -> None:
        before = folder / "before"
        if folder.name == name and not before.exists():
            before.touch()
            os.kill(os.getpid(), number)
        (folder / "done").touch()
        while not all((sites / each / "done").exists() for each in ("root", "0", "1")):
            time.sleep(0.02)

    code, said = together(sites, work, monkeypatch)
    assert code == 0
    assert len(said) == 1 and f"{name}: its supervisor was ended by signal {number}, starting it again" in said[0]


def test_a_site_that_somebody_else_started_meanwhile_is_left_to_them(
    sites: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    held = [RunLock(sites / "0")]
    threading.Timer(1.0, lambda: held.pop().release()).start()

    def work(folder: Path) -> None:
        before = folder / "before"
        if folder.name == "0" and not before.exists():
            before.touch()
            os.kill(os.getpid(), signal.SIGKILL)
        sys.exit(2 if is_locked(folder) else 0)

    code, said = together(sites, work, monkeypatch)
    assert code == 0 and not held and len(said) == 1


def test_a_supervisor_that_ends_again_and_again_ends_all_with_an_error(
    sites: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def work(folder: Path) -> None:
        if folder.name == "root":
            os.kill(os.getpid(), signal.SIGKILL)
        time.sleep(LONGEST)

    code, said = together(sites, work, monkeypatch)
    assert code == 128 + signal.SIGKILL
    assert len(said) == MOST + 1 and "root was ended by signal 9, 11 times" in said[-1]


def test_a_supervisor_that_cannot_go_on_ends_all_at_once(sites: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def work(folder: Path) -> None:
        if folder.name == "1":
            sys.exit(2)
        time.sleep(LONGEST)

    code, said = together(sites, work, monkeypatch)
    assert code == 2 and len(said) == 1 and "1 could not go on" in said[0]


def test_a_root_whose_run_ended_without_a_site_ends_nobody_else_and_its_code_is_that_of_all(
    sites: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def work(folder: Path) -> None:
        if folder.name == "root":
            sys.exit(INCOMPLETE)
        time.sleep(0.5)
        (folder / "said_goodbye").touch()
        if folder.name == "1":  # nobody told it that the run is over
            time.sleep(LONGEST)

    monkeypatch.setattr(supervise, "ENDING", 0.0)
    code, said = together(sites, work, monkeypatch)
    assert code == INCOMPLETE and said == [] and (sites / "0" / "said_goodbye").exists()


def test_up_starts_the_sites_again_when_all_were_killed_at_once(sites: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ends = iter(["kill -9 $$", "kill -11 $$", f'echo \'{{"doing": "done"}}\' > {sites}/root/state/status.json'])
    (sites / "root" / "state").mkdir()
    monkeypatch.setattr(this_machine, "start", lambda *folders: subprocess.Popen(["sh", "-c", next(ends)]))
    said: list[str] = []
    this_machine.run(sites, said.append, said.append)
    assert [line.split(",")[0] for line in said] == [f"the sites were ended by signal {number}" for number in (9, 11)]


def test_up_ends_with_an_error_where_they_are_killed_again_and_again(
    sites: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(this_machine, "start", lambda *folders: subprocess.Popen(["sh", "-c", "kill -9 $$"]))
    with pytest.raises(InvalidInput, match="signal 9"):
        this_machine.run(sites, print, print)


@pytest.mark.parametrize("code", [0, 1, 2, -signal.SIGKILL])
def test_a_process_of_a_site_is_started_again_however_it_ended(code: int, sites: Path) -> None:
    said: list[str] = []
    supervisor = Supervisor(sites / "0", said.append)

    def work() -> None:
        if code < 0:
            os.kill(os.getpid(), -code)
        sys.exit(code)

    supervisor._running["node"] = process = Forked(work, sites / "log", sites)
    wait_until(lambda: process.poll() is not None)
    assert not supervisor._ended("node")
    wait_until(lambda: supervisor._ended("node"))
    assert len(said) == 1 and f"node ended with {code}" in said[0]


def test_a_damaged_state_is_said_once_and_waited_for(sites: Path) -> None:
    said: list[str] = []
    site = sites / "0"
    damage(site)
    files.make_folder(site / "logs")
    supervisor = Supervisor(site, said.append)
    supervisor._start("node", supervise._node)
    process = supervisor._running["node"]
    wait_until(lambda: process.poll() is not None)
    assert process.returncode == DAMAGED
    assert not any(supervisor._ended("node") for _ in range(5))
    assert len(said) == 1 and f"stratafl deploy reset {site}" in said[0], said
    assert "Traceback" not in (site / "logs" / "node.log").read_text()
    assert this_machine._damaged({"0": status(site / "state")}) == {said[0]}
    supervisor._newsroom._took_part.add("0")
    this_machine.reset([str(site)], sites)
    assert supervisor._ended("node")
    assert not supervisor._newsroom._took_part, "that was in the run before"


def test_up_names_the_way_back_from_a_damaged_state_before_anything_is_started(
    sites: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = damage(sites / "1")
    monkeypatch.setattr(this_machine, "start", lambda *folders: pytest.fail("started"))
    with pytest.raises(InvalidInput, match="stratafl deploy reset") as problem:
        this_machine.run(sites, print, print)
    assert "\n" not in str(problem.value)
    data = path.read_bytes()
    ran = CliRunner().invoke(app, ["deploy", "reset", "1", "--out", str(sites)])
    assert ran.exit_code == 0, ran.output
    assert not path.exists()
    (aside,) = (sites / "1" / "state").glob("aside-*")
    assert (aside / STATE).read_bytes() == data and str(aside) in ran.output.replace("\n", "")


def test_with_the_root_all_sites_beside_it_begin_anew(sites: Path) -> None:
    for name in ("root", "0"):
        damage(sites / name)
    (sites / "root" / "rounds.jsonl").write_text("{}\n")
    assert set(this_machine.reset(["root"], sites)) == {"root", "0", "1"}
    assert not (sites / "0" / "state" / STATE).exists() and not (sites / "root" / "rounds.jsonl").exists()


def test_a_site_that_runs_is_not_reset(sites: Path) -> None:
    site = sites / "0"
    durable = Durable(site / "state", "run")
    durable.write(NodeState())
    durable.show(doing="round")
    with pytest.raises(InvalidInput, match="runs"):
        this_machine.reset(["0"], sites)
    assert (site / "state" / STATE).exists() and status(site / "state")["doing"] == "round"
    durable.close()
    with pytest.raises(InvalidInput, match="did you mean"):
        this_machine.reset(["rot"], sites)
    this_machine.reset(["0"], sites)
    assert not (site / "state" / STATE).exists()
