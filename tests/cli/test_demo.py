"""The demo tells the paper's story: each correction helps, both help most."""

from __future__ import annotations

import pytest

from stratafl.cli import demo
from stratafl.experiment.experiment import Experiment
from stratafl.metrics.evaluation import rounds_to
from stratafl.simulation.build import build


@pytest.mark.slow
def test_the_order_of_the_methods_is_the_paper_s() -> None:
    final, reached = {}, {}
    for title, method in demo.METHODS.items():
        history = build(Experiment.from_table(demo.settings(method))).run().history
        accuracy = [r.metrics["accuracy"] for r in history]
        final[title] = accuracy[-1]
        reached[title] = rounds_to(demo.TARGET, range(1, len(accuracy) + 1), accuracy) or len(accuracy) + 1
    order = ["MTGC", "group correction", "local correction", "HFedAvg"]
    assert sorted(final, key=lambda title: -final[title]) == order
    assert sorted(reached, key=lambda title: reached[title]) == order
