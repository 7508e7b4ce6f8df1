"""The commands, as far as they start nothing."""

from __future__ import annotations

import contextlib
import importlib.util
import json
import os
import socket
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path

import pytest
from typer.testing import CliRunner

from stratafl import InvalidInput
from stratafl.base.errors import MissingExtra
from stratafl.cli.deploy import _in_words
from stratafl.cli.main import app

has_flower = importlib.util.find_spec("flwr") is not None
needs_flower = pytest.mark.skipif(not has_flower, reason="flwr is not installed")
CONFIG = '[tree]\nshape = { paris = 2, rome = ["a", "b"] }\n[schedule]\nperiods = [2, 3]\n'


def call(*arguments: object) -> object:
    """What a command raised, or its output."""
    result = CliRunner().invoke(app, ["deploy", *map(str, arguments)])
    return result.exception or result.output


def topology(folder: Path, text: str = "", config: str = CONFIG) -> Path:
    (folder / "run.toml").write_text(config)
    (folder / "topology.toml").write_text(f'config = "run.toml"\n{text}')
    return folder / "topology.toml"


def test_without_flower_one_line_says_what_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    for command in (["init", topology(tmp_path)], ["up", topology(tmp_path), "--local"], ["site", tmp_path]):
        problem = call(*command)
        assert isinstance(problem, MissingExtra)
        assert "stratafl[deploy]" in str(problem) and "\n" not in str(problem)


@needs_flower
def test_every_site_gets_what_it_needs_and_no_other_s_secrets(tmp_path: Path) -> None:
    from stratafl.deploy.sites.site import Site

    out = tmp_path / "sites"
    call("init", topology(tmp_path, "base_port = 9600\n[hosts]\nparis = 'edge.example.org'\n"), "--out", out)
    names = {"root", "paris", "rome", "paris_0", "paris_1", "rome_a", "rome_b"}
    assert {folder.name for folder in out.iterdir()} == names
    for folder in out.iterdir():
        site = Site.load(folder)
        assert (folder / "up.key").exists() == (folder / "node.key").exists() == (not site.is_root)
        assert (folder / "down").exists() == (not site.is_leaf)
        for secret in [*folder.rglob("*.key")]:
            assert secret.stat().st_mode & 0o077 == 0
        assert os.access(folder / "start.sh", os.X_OK)
    edge_keys = {folder.name: (folder / "up.key").read_bytes() for folder in out.iterdir() if folder.name != "root"}
    assert len(set(edge_keys.values())) == len(edge_keys)
    assert (out / "paris" / "down" / "paris_1.key").read_bytes() == edge_keys["paris_1"]
    assert {path.stem for path in (out / "root" / "down").glob("*.key")} == {"paris", "rome"}
    leaf, paris = Site.load(out / "paris_0"), Site.load(out / "paris")
    assert leaf.parent == paris.public == "edge.example.org:9603"
    assert paris.listen == paris.public and Site.load(out / "rome").listen.startswith("127.0.0.1:")


@needs_flower
def test_the_example_makes_its_sites(tmp_path: Path) -> None:
    example = Path(__file__).parents[2] / "examples" / "topology.toml"
    assert "paris/north" in str(call("init", example, "--out", tmp_path / "sites"))


@needs_flower
def test_folders_are_made_once(tmp_path: Path) -> None:
    (tmp_path / "sites").mkdir()
    assert "made once" in str(call("init", topology(tmp_path), "--out", tmp_path / "sites"))


@needs_flower
@pytest.mark.parametrize(
    ("text", "named"),
    [
        ("deadlines = 3", "did you mean 'deadline'"),
        ("deadline = [1, 2, 3]", "topology.deadline"),
        ("deadline = -1", "topology.deadline"),
        ("min_children = 0", "topology.min_children"),
        ("base_port = 80", "topology.base_port"),
        ("[hosts]\nberlin = 'x'", "topology.hosts"),
        ("[hosts]\nrome = 3", "topology.hosts.rome"),
        ("[data]\n'paris/2' = 'x.npz'", "topology.data"),
        ("[data]\n'paris/1' = ''", "topology.data.paris/1"),
        ("data = 'x.npz'", "must be a table"),
    ],
)
def test_a_bad_topology_names_the_field(tmp_path: Path, text: str, named: str) -> None:
    problem = call("init", topology(tmp_path, text), "--out", tmp_path / "sites")
    assert isinstance(problem, InvalidInput) and named in str(problem)
    assert not (tmp_path / "sites").exists()


@needs_flower
def test_what_cannot_be_deployed_is_said_before_anything_is_written(tmp_path: Path) -> None:
    config = CONFIG + '[method]\nname = "mtgc"\nrestart = "gradient"\n'
    problem = call("init", topology(tmp_path, config=config), "--out", tmp_path / "sites")
    assert isinstance(problem, InvalidInput) and "restart from gradients" in str(problem)
    assert not (tmp_path / "sites").exists()


@needs_flower
def test_what_was_made_from_another_config_is_not_gone_on_with(tmp_path: Path) -> None:
    call("init", topology(tmp_path), "--out", tmp_path / "sites")
    changed = topology(tmp_path, config="rounds = 3\n" + CONFIG)
    assert "another config" in str(call("up", changed, "--local", "--out", tmp_path / "sites"))


def bound_below(taken: socket.socket, limit: int) -> int:
    for port in range(30000 + os.getpid() % 1000, limit):
        with contextlib.suppress(OSError):
            taken.bind(("127.0.0.1", port))
            return port
    raise AssertionError("no port is free")


@needs_flower
def test_a_port_that_is_taken_is_named_before_anything_starts(tmp_path: Path) -> None:
    with socket.socket() as taken:
        port = bound_below(taken, 60000)
        problem = call("up", topology(tmp_path, f"base_port = {port}\n"), "--local", "--out", tmp_path / "sites")
    assert isinstance(problem, InvalidInput) and "port of site root" in str(problem) and str(port) in str(problem)


@needs_flower
def test_other_hosts_are_not_started_from_here(tmp_path: Path) -> None:
    assert "start.sh" in str(call("up", topology(tmp_path), "--out", tmp_path / "sites"))
    assert not (tmp_path / "sites").exists()


def test_a_round_in_words() -> None:
    line = {"round": 2, "metrics": {"accuracy": 0.5}, "seconds": 1.25, "absent": ["a", "b"], "refused": []}
    assert _in_words(json.dumps(line), 3) == "round 2 of 3  accuracy 0.500  1.2 s  absent: a, b"


@needs_flower
def test_tensorboard_events_of_a_deployment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    from stratafl.deploy.host import attendance, this_machine
    from stratafl.metrics.records import DeployedRound

    records = [
        DeployedRound(number, number, 0.1, {"accuracy": 0.5}, {}, (), 8.0, 1.0, absent=("paris/0",) * number)
        for number in (1, 2)
    ]

    def run(out: Path, say: Callable[[str], None]) -> None:
        for record in records:
            say(json.dumps(asdict(record)))

    monkeypatch.setattr(this_machine, "run", run)
    monkeypatch.setattr(attendance, "never", lambda folder: [])
    shown = call("up", topology(tmp_path), "--local", "--tensorboard", "--out", tmp_path / "sites")
    assert "round 2 of 20  accuracy 0.500  1.0 s  absent: paris/0, paris/0" in str(shown)
    events = accumulator.EventAccumulator(str(tmp_path / "sites" / "root" / "tensorboard"))
    events.Reload()
    assert [(event.step, event.value) for event in events.Scalars("run/absent")] == [(1, 1.0), (2, 2.0)]


@needs_flower
def test_status_and_down_where_nothing_runs(tmp_path: Path) -> None:
    call("init", topology(tmp_path), "--out", tmp_path / "sites")
    assert "paris/1" in str(call("status", "--out", tmp_path / "sites"))
    assert call("down", "--out", tmp_path / "sites") == "nothing ran\n"
    assert "deploy init" in str(call("status", "--out", tmp_path))
