"""The table of a sweep: means and deviations over seeds, and rounds to a target."""

from __future__ import annotations

import math
from pathlib import Path

from stratafl.experiment.experiment import Experiment
from stratafl.metrics.objective import Goal
from stratafl.runs import StoredRun
from stratafl.sweeps import SweepEntry, table
from tests.runs.stopped import CONFIG


def stored(*accuracies: float) -> StoredRun:
    rounds = [{"round": i, "metrics": {"accuracy": value}} for i, value in enumerate(accuracies, 1)]
    return StoredRun(Path(), "n", "i", "done", "", len(rounds), len(rounds), "", "", {}, {}, rounds, {}, {})


def test_mean_and_deviation_over_seeds_and_targets_missed() -> None:
    experiment = Experiment.from_table(CONFIG)
    groups = {"both": [(0.5, 0.9), (0.7, 0.8)], "one": [(0.1, 0.2), (0.75, 0.8)], "none": [(0.1, 0.2), (0.1, 0.1)]}
    entries = [SweepEntry(f"{g}{i}", g, experiment) for g, runs in groups.items() for i in range(len(runs))]
    entries.append(SweepEntry("lone0", "lone", experiment))
    entries.append(SweepEntry("absent0", "absent", experiment))
    runs = {f"{g}{i}": stored(*values) for g, curves in groups.items() for i, values in enumerate(curves)}
    runs["lone0"] = stored(0.9)
    rows = {row.group: row for row in table(entries, runs, target=Goal("accuracy", 0.7))}
    assert rows["both"].final_text == "0.8500 ± 0.0707"
    assert math.isclose(rows["both"].final_deviation or 0, 0.005**0.5)
    assert rows["both"].rounds_text == "1.5 ± 0.7"
    assert rows["one"].rounds_text == ">1.5"
    assert rows["none"].rounds_text == ">2"
    assert (rows["lone"].final_text, rows["lone"].rounds_text) == ("0.9000", "1")
    assert (rows["absent"].done, rows["absent"].final_text, rows["absent"].rounds_text) == (0, "", "")
    assert table(entries, runs)[0].rounds_text == ""
