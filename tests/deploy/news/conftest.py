"""A tree of sites, with boards and a clock of each test's own."""

from __future__ import annotations

import shutil
import time
from pathlib import Path

import pytest

from stratafl.base import files
from stratafl.deploy.host.newsroom import NEWS
from stratafl.deploy.news.entries import Entry
from stratafl.deploy.notes import boards
from stratafl.deploy.notes.boards import Board

WELL = Entry(state="waiting", age=0.0, up=100.0)


@pytest.fixture(autouse=True)
def board(monkeypatch: pytest.MonkeyPatch) -> Board:
    """A board of its own for each test."""
    fresh = Board()
    monkeypatch.setattr(boards, "own", fresh)
    monkeypatch.setattr(boards, "heard", fresh)
    return fresh


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """Seconds that have passed, as modules of the deployment see them."""
    now = [1000.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    return now


@pytest.fixture(scope="session")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The sites of a small tree, not to be changed."""
    from stratafl.deploy.sites.provision import provision
    from stratafl.deploy.sites.topology import DeploymentTopology

    folder = tmp_path_factory.mktemp("news")
    (folder / "run.toml").write_text(
        "rounds = 4\n[tree]\nshape = { paris = 2, rome = 1 }\n[model]\nname = 'mlp'\nhidden = [2]\n"
        "[schedule]\nperiods = [2, 1]\n"
    )
    (folder / "topology.toml").write_text('config = "run.toml"\n')
    provision(DeploymentTopology.load(folder / "topology.toml"), folder / "sites")
    return folder / "sites"


@pytest.fixture
def sites(made: Path, tmp_path: Path) -> Path:
    """The same sites, to be changed."""
    return shutil.copytree(made, tmp_path / "sites")


def write_news(folder: Path, entries: dict[str, Entry]) -> None:
    """Write what a site's supervisor knew last into its folder."""
    files.write_json(
        folder / NEWS, {"at": time.time(), "sites": {name: each.as_dict() for name, each in entries.items()}}
    )
