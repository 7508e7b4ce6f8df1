"""Whole trees as processes on loopback, with TLS and keys on: they end where the simulation ends,
whoever is killed."""

from __future__ import annotations

import re
from typing import Any

import pytest

pytest.importorskip("flwr")

from stratafl.deploy.sites.assemble import reference_simulation

pytestmark = pytest.mark.deploy


@pytest.mark.parametrize("method", ["mtgc", "hfedavg", "scaffold"])
@pytest.mark.parametrize(("shape", "periods"), [("2x2", [2, 3]), ("2x2x2", [2, 2, 2])], ids=["2x2", "2x2x2"])
def test_the_final_model_is_the_simulation_s(runs: Any, shape: str, periods: list[int], method: str) -> None:
    """One of the leaves has its data beside it."""
    run = runs(shape=shape, periods=periods, method=method, own="1/1" if shape == "2x2" else "1/0/1")
    run.start()
    run.wait()
    assert [line["round"] for line in run.rounds] == [1, 2]
    assert all(line["refused"] == line["absent"] == [] for line in run.rounds)
    assert run.difference() < 1e-6


@pytest.mark.parametrize(
    "names", [["1/0"], ["0"], ["root"], ["0", "0/0", "0/1"]], ids=["leaf", "aggregator", "root", "host of a group"]
)
def test_who_is_killed_inside_a_round_comes_back_and_nothing_is_lost(runs: Any, names: list[str]) -> None:
    """Without a deadline its parent waits for it: the run ends where the undisturbed one does."""
    run = runs(rounds=4)
    run.start(apart=[names])
    run.wait(lambda: run.is_inside(2, names[0] if names[0] == "0" else "root"))
    run.kill(*names)
    run.start(*names)
    run.wait()
    assert [line["round"] for line in run.rounds] == [1, 2, 3, 4]
    assert all(line["refused"] == line["absent"] == [] for line in run.rounds)
    assert run.difference() < 1e-6
    run.assert_corrections_sum_to_zero()
    for name in names:  # its parent did not take it for the one before, still alive
        log = (run.folders[name] / "logs" / "site.log").read_text()
        # a child whose reply nobody took may have ended, to be asked again
        assert not re.search(rf" {name}: (its )?supernode ended", log), log


def test_who_is_killed_is_left_out_after_the_deadline(runs: Any) -> None:
    """A leaf and an aggregator, in one run: each is missed, comes back, and the run goes on all the
    while."""
    run = runs(rounds=16, deadline=[20, 4])
    run.start(apart=[["0/1"], ["1"]])
    for name, inside in (("0/1", 2), ("1", 6)):
        run.wait(lambda: run.is_inside(inside))
        run.kill(name)
        run.wait(lambda: run.missed(name))
        run.start(name)
        run.wait(lambda: not run.missed(name))
    run.wait()
    assert [line["round"] for line in run.rounds] == list(range(1, 17))
    undisturbed = reference_simulation(run.experiment).run().history[-1].metrics["accuracy"]
    assert abs(run.accuracy() - undisturbed) < 0.1
    run.assert_corrections_sum_to_zero()


def test_a_leaf_with_another_config_is_refused_by_name_and_the_run_goes_on(runs: Any) -> None:
    """Although its parent waits for ever for whoever belongs to the run."""
    run = runs(rounds=2)
    path = run.folders["1/0"] / "config.toml"
    path.write_text(path.read_text().replace("lr = 0.1", "lr = 0.2"))
    run.start()
    run.wait()
    assert [(line["round"], set(line["refused"]), line["absent"]) for line in run.rounds] == [
        (1, {"1/0"}, []),
        (2, {"1/0"}, []),
    ]
    said = (run.folders["1"] / "logs" / "node.log").read_text()
    assert "1/0 is refused" in said and "client.lr is 0.2 there and 0.1 here" in said
