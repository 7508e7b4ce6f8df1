"""Random processes of random sites are killed at random moments, supervisors and those that upload
included.

Each tree ends, has every round once, and has the model of the simulation in which the same nodes
were absent. `make test-kills` kills a hundred, the suite's usual run a few of them.
"""

from __future__ import annotations

import contextlib
import os
import random
import signal
import time
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

import pytest

pytest.importorskip("flwr")

from stratafl.deploy.sites.state_file import STATE
from tests.deploy.real import Run

pytestmark = pytest.mark.deploy
KILLS = int(os.environ.get("STRATAFL_KILLS", "2"))
"""Of each tree."""
UPLOAD = 0.3
"""Seconds, at most, from a node's state on the disk to its message at the parent's SuperLink."""
HOST = "host"


@dataclass
class Killer:
    """Kills one process after another, each when the run has gone on since the last."""

    run: Run
    random: random.Random
    sites: list[str]
    kinds: tuple[str, ...] = ("node", "supernode", "superlink", "supervisor", HOST)
    killed: Counter[str] = field(default_factory=Counter)

    def kill(self, times: int) -> None:
        for number in range(times):
            done = len(self.run.rounds)
            self.run.wait(lambda done=done: self.is_over() or self.wounded(number, done))
            if self.is_over():
                return
            self.run.wait(lambda done=done: self.is_over() or len(self.run.rounds) > done)

    def is_over(self) -> bool:
        return self.run.is_over()

    def wounded(self, number: int, done: int) -> bool:
        """Whether a process was found and killed."""
        site = self.random.choice(self.sites)
        if number % 2:
            time.sleep(self.random.uniform(0.0, 1.0))
        elif not self.saved(site):
            return False
        else:
            time.sleep(self.random.uniform(0.0, UPLOAD))
        alive = self.run.processes(site)
        kind = self.random.choice(self.kinds)
        if kind == HOST:
            self.restart_host()
        elif kind not in alive:
            return False
        else:
            with contextlib.suppress(ProcessLookupError):
                os.kill(alive[kind], signal.SIGKILL)
        self.killed[kind] += 1
        return True

    def saved(self, site: str) -> bool:
        """Wait for a node to write its state, which it does just before its reply leaves."""
        path = self.run.folders[site] / "state" / STATE

        def written() -> int:
            return path.stat().st_mtime_ns if path.exists() else 0

        before, until = written(), time.monotonic() + 20.0
        while time.monotonic() < until and not self.is_over():
            if written() != before:
                return True
            time.sleep(0.002)
        return False

    def restart_host(self) -> None:
        """The process that holds all supervisors, and so everything."""
        (names,) = self.run.hosts
        self.run.kill(*names)
        self.run.start(*names)


TREES: dict[str, dict[str, Any]] = {
    "three leaves": {"shape": "3", "periods": [3], "method": "scaffold"},
    "two groups": {"shape": "2x2", "periods": [2, 3], "method": "mtgc"},
    "uneven": {"shape": [1, 3], "periods": [2, 2], "method": "mtgc", "hidden": [4000]},
    "heads at home": {"shape": "2x2", "periods": [2, 2], "method": "mtgc", "local_parameters": ["3"]},
    "three levels": {"shape": "2x1x2", "periods": [2, 1, 2], "method": "mtgc"},
}


@pytest.mark.parametrize("tree", TREES)
def test_whoever_is_killed_whenever_nothing_is_lost(runs: Any, tree: str) -> None:
    """Nobody has a deadline: everybody is waited for."""
    rounds = 2 * KILLS + 2
    run = runs(rounds=rounds, **TREES[tree])
    run.start()
    killer = Killer(run, random.Random(f"{tree} {KILLS}"), list(run.folders))
    killer.kill(KILLS)
    run.wait()
    print(f"{tree}: killed {dict(killer.killed)}")
    assert sum(killer.killed.values()) == KILLS
    assert [line["round"] for line in run.rounds] == list(range(1, rounds + 1))
    assert all(line["refused"] == line["absent"] == [] for line in run.rounds)
    assert run.difference() < 1e-6
    run.assert_corrections_sum_to_zero()


@pytest.mark.parametrize("shape", ["3", "2x2"])
def test_with_deadlines_the_model_is_the_simulation_s_with_the_same_absences(runs: Any, shape: str) -> None:
    """Leaves are killed, and only the ends of their sites last longer than their parents wait."""
    depth = shape.count("x") + 1
    rounds = 3 * KILLS + 2
    run = runs(rounds=rounds, shape=shape, periods=[1] * (depth - 1) + [3], deadline=[30, 2][-depth:])
    leaves = [name for name in run.folders if name.count("/") == depth - 1 and name != "root"]
    run.start(apart=[[leaves[0]]])
    killer = Killer(run, random.Random(f"{shape} {KILLS}"), leaves[1:], ("node", "supernode", "supervisor"))
    for number in range(KILLS):
        if number % 4 == 1:  # a host that is gone for longer than a round
            done = len(run.rounds)
            run.kill(leaves[0])
            killer.killed[HOST] += 1
            run.wait(lambda done=done: run.is_over() or any(leaves[0] in r["absent"] for r in run.rounds[done:]))
            run.start(leaves[0])
        else:
            killer.kill(1)
    run.wait()
    print(f"{shape}: killed {dict(killer.killed)}, absent {sum(bool(line['absent']) for line in run.rounds)} times")
    assert [line["round"] for line in run.rounds] == list(range(1, rounds + 1))
    assert any(line["absent"] for line in run.rounds) and not any(line["refused"] for line in run.rounds)
    assert set().union(*(line["absent"] for line in run.rounds)) <= set(leaves)
    assert run.difference() < 1e-6
