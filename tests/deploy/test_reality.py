"""How the clock is held against a deployment: what is calibrated is what was put in."""

from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip("flwr")

from benchmarks.deployment.clock_accuracy import (
    ABOVE,
    BELOW,
    PERIODS,
    Overhead,
    RoundTimings,
    Run,
    between,
    compared,
    lines_of,
    overhead_of,
    priced,
    workload_of,
)
from benchmarks.deployment.network_emulator import LinkConfig
from stratafl.base.topology import Topology

STEP = 0.002


def as_priced(run: Run, overhead: Overhead, folder: Path) -> RoundTimings:
    """A deployment that takes exactly as long as the clock says."""
    price = priced(workload_of(run.experiment(folder)), run.limited, STEP, overhead)
    return RoundTimings([9.0] + [price.seconds] * 3, [9.0] + [price.wire_bytes] * 3, STEP, {}, "")


@pytest.mark.parametrize("tree", PERIODS)
def test_the_overhead_of_a_message_is_found_again(tree: str, tmp_path: Path) -> None:
    run, overhead = Run(tree, "small", False), Overhead(0.3, 700.0)
    found = overhead_of(workload_of(run.experiment(tmp_path)), as_priced(run, overhead, tmp_path))
    assert found == pytest.approx(overhead)


def test_a_deployment_like_the_clock_is_priced_right(tmp_path: Path) -> None:
    overhead = Overhead(0.3, 700.0)
    runs = [Run("2x2", model, limited) for model in ("tiny", "small", "large") for limited in (False, True)]
    table = compared("2x2", {run: as_priced(run, overhead, tmp_path) for run in runs})
    assert [(line["model"], line["ratio"]) for line in table] == [
        ("small", pytest.approx(1.0)),
        ("large", pytest.approx(1.0)),
    ]


def test_a_size_between_two_costs_something_between() -> None:
    found = between((10.0, Overhead(1.0, 100.0)), (30.0, Overhead(2.0, 500.0)), 15.0)
    assert found == pytest.approx(Overhead(1.25, 200.0))


def test_every_child_has_a_line_to_its_parent() -> None:
    lines = lines_of(Topology.of("2x2"), limited=True)
    assert lines["0", "root"] == ABOVE and lines["1/0", "1"] == BELOW and len(lines) == 6
    assert lines_of(Topology.of("2x2"), limited=False)["1/0", "1"] == LinkConfig(BELOW.delay)
