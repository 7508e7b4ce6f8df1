"""Made-up runs: stored as far as the reports look at them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any

from papers.harness.results import Results, measure
from papers.harness.runs import StoredRuns, target_accuracy
from papers.harness.series import Case, Options
from papers.mtgc.paper import MTGC
from stratafl import Experiment
from stratafl.runs.reader import StoredRun

BEGUN = "2026-01-01T00:00:00+00:00"
ENVIRONMENT = {"commit": "abc", "gpu": "none", "processor": "some", "torch": "2.0", "changed_since_commit": False}


def stored(
    experiment: Experiment, accuracy: Sequence[float], *, sent: float = 100.0, seconds: float = 2.0
) -> StoredRun:
    """A run with these accuracies, cut where it would have stopped."""
    records: list[dict[str, Any]] = []
    for number, value in enumerate(accuracy, 1):
        records.append({"round": number, "steps": number, "metrics": {"accuracy": value, "loss": 0.0},
                        "bytes_per_client": number * sent, "seconds": seconds})  # fmt: skip
        if value >= target_accuracy(experiment):
            break
    end = (datetime.fromisoformat(BEGUN) + timedelta(seconds=seconds * len(records))).isoformat()
    return StoredRun(
        path=Path("nowhere"), name="run", id="1", status="done", reason="", round=len(records),
        total=experiment.rounds, created=BEGUN, updated=end, config=experiment.to_table(), environment=ENVIRONMENT,
        rounds=records, tree={}, summary=None,
    )  # fmt: skip


def reaching(round: float, limit: int, target: float) -> list[float]:
    """Accuracies that first reach the target in this round, or not within the limit."""
    return [target if number >= round else target / 2 for number in range(1, limit + 1)]


def results(
    name: str, histories: Callable[[Case], Sequence[float] | None], *, seeds: int = 1, **changes: Any
) -> Results:
    """A recipe as if its cases had gone like this; None for one that was not run."""
    options = replace(Options(), **changes)
    cases = MTGC.find(name).cases(options)
    runs = []
    for case in cases:
        accuracy = histories(case)
        if accuracy is not None:
            runs += [stored(case.seeded(number), accuracy) for number in range(seeds)]
    return measure(MTGC.find(name), cases, options, seeds, StoredRuns(runs))
