"""Whatever process of a site is killed while a leaf trains: the leaf trains again, or goes on,
within seconds."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

pytest.importorskip("flwr")

from tests.deploy.real import Run

pytestmark = pytest.mark.deploy
RECEIVED, BEGUN = "Received successfully", "Started task"
SOON = 10.0
"""Seconds: twice what it may take where the machine has nothing else to do."""


@pytest.fixture
def runs(tmp_path: Path) -> Iterator[Callable[[str, list[int]], Run]]:
    made: list[Run] = []

    def make(shape: str, periods: list[int]) -> Run:
        made.append(Run(tmp_path, 22000 + os.getpid() % 900, shape=shape, periods=periods, rounds=1))
        return made[-1]

    yield make
    for each in made:
        each.close()


def kill(run: Run, site: str, name: str, until: Callable[[float], bool]) -> None:
    """And wait for what has to follow, which is told when that was."""
    number, at = run.processes(site)[name], time.time()
    os.kill(number, signal.SIGKILL)
    while not until(at):
        assert time.time() < at + SOON, f"{site}: {name}"
        time.sleep(0.02)


def works_since(run: Run, site: str) -> Callable[[float], bool]:
    """Whether a node has begun to work on a round since then."""
    path = run.folders[site] / "state" / "status.json"
    return lambda at: path.stat().st_mtime > at and run.status(site).get("doing") == "round"


def counted(run: Run, site: str, name: str, what: str) -> int:
    return (run.folders[site] / "logs" / f"{name}.log").read_text().count(what)


def test_killed_processes_are_asked_again_or_go_on(runs: Callable[[str, list[int]], Run]) -> None:
    run = runs("2", [25_000])  # so many that leaf 1 trains all the while
    run.start("root", apart=[["0"], ["1"]])
    run.wait(lambda: run.is_inside(1, "0") and run.is_inside(1, "1"))
    kill(run, "0", "node", works_since(run, "0"))
    trains, asked = run.processes("1")["node"], counted(run, "1", "supernode", RECEIVED)
    kill(run, "1", "supernode", lambda at: counted(run, "1", "supernode", RECEIVED) > asked)
    begun = counted(run, "root", "superlink", BEGUN)
    kill(run, "root", "superlink", lambda at: counted(run, "root", "superlink", BEGUN) > begun)
    assert run.processes("1")["node"] == trains  # the same as before
    run.wait()
    (line,) = run.rounds
    assert line["absent"] == line["refused"] == []
    assert run.difference() < 1e-6


def test_an_aggregator_s_node_is_asked_again(runs: Callable[[str, list[int]], Run]) -> None:
    run = runs("1x1", [1, 6_000])
    run.start("root", apart=[["0"], ["0/0"]])
    run.wait(lambda: run.is_inside(1, "0/0"))
    kill(run, "0", "node", works_since(run, "0"))
    run.wait()
    (line,) = run.rounds
    assert line["absent"] == line["refused"] == []
    assert run.difference() < 1e-6
