"""Stored runs, found by what they compute, and training of missing ones."""

from __future__ import annotations

import math
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from itertools import accumulate
from pathlib import Path
from typing import Any

from papers.harness.series import Case, identity, run_name, runs_of
from stratafl import Experiment
from stratafl.base.errors import InvalidInput
from stratafl.metrics.metrics import ACCURACY
from stratafl.metrics.objective import parse_stop_goals
from stratafl.metrics.records import diverged, measured
from stratafl.runs import format
from stratafl.runs.provenance import changed_files_since
from stratafl.runs.reader import StoredRun, list_runs
from stratafl.sweeps import Outcome, run_all
from stratafl.sweeps.state import is_computed_alike
from stratafl.sweeps.sweep import Watch

SETTING_UP = 120.0
"""Seconds that a run may take beside its rounds, to read data and compile kernels."""


@dataclass(frozen=True)
class RunCurve:
    """Values of a run per evaluated round, up to the end of the experiment it serves."""

    rounds: tuple[int, ...]
    accuracy: tuple[float, ...]
    """NaN where the scores were not finite."""
    sent: tuple[float, ...]
    """Cumulative bytes sent and received by a client."""
    seconds: tuple[float, ...]
    """Seconds since the start."""
    limit: int
    """Planned rounds."""
    complete: bool
    """Whether the run has all planned rounds or reached its target."""
    steps: int = 0
    """Local steps of a client."""
    span: tuple[float, float] = (0.0, 0.0)
    """Begin and end of the computation, in seconds since 1970."""
    made_with: tuple[dict[str, Any], ...] = field(default=(), repr=False)
    """Environments of the computation, each with device and precision."""
    diverged: int | None = None
    """First round whose test loss is not finite."""

    @property
    def paused(self) -> bool:
        """Whether the run was interrupted."""
        return self.span[1] - self.span[0] > self.seconds[-1] + SETTING_UP

    @property
    def last_sent(self) -> float:
        """Bytes of the last round, since the first has no corrections to send."""
        before = (0, 0.0) if len(self.rounds) < 2 else (self.rounds[-2], self.sent[-2])
        return (self.sent[-1] - before[1]) / (self.rounds[-1] - before[0])


class StoredRuns:
    """Stored runs of a folder, found by what they compute."""

    def __init__(self, runs: Iterable[StoredRun]):
        self._by_identity: dict[str, list[tuple[Experiment, StoredRun]]] = defaultdict(list)
        for run in runs:
            try:
                experiment = Experiment.from_table(run.config)
            except InvalidInput:
                continue  # a run of another version, whose keys are unknown here
            self._by_identity[identity(experiment)].append((experiment, run))

    @staticmethod
    def of(folder: Path) -> StoredRuns:
        return StoredRuns(list_runs(folder) if folder.is_dir() else ())

    def curve(self, experiment: Experiment) -> RunCurve | None:
        """Curve of the newest complete run on any device, otherwise of the longest run."""
        curves = [_cut(computed, run, experiment) for computed, run in self._offered(experiment)]
        newest = reversed([curve for curve in curves if curve.rounds])
        return max(newest, key=lambda curve: (curve.complete, curve.complete or len(curve.rounds)), default=None)

    def has(self, experiment: Experiment) -> bool:
        """Whether there is a complete run on the same device and in the same precision."""
        return any(
            is_computed_alike(run, experiment) and _cut(computed, run, experiment).complete
            for computed, run in self._offered(experiment)
        )

    def _offered(self, experiment: Experiment) -> Iterator[tuple[Experiment, StoredRun]]:
        """Runs of any length, with their experiments, that compute the same as this experiment
        would compute today."""
        for computed, run in self._by_identity[identity(experiment)]:
            if not changed_files_since(run, experiment):
                yield computed, run


def target_accuracy(experiment: Experiment) -> float:
    """Test accuracy at which a run stops; infinite if it computes all its rounds."""
    goals = {goal.metric: goal.value for goal in parse_stop_goals(experiment.evaluation.stop_when)}
    return goals.get(ACCURACY, math.inf)


def _cut(computed: Experiment, run: StoredRun, served: Experiment) -> RunCurve:
    """Curve of a run, up to the end of the experiment that it serves."""
    target, limit = target_accuracy(served), served.rounds
    elapsed = list(accumulate(record["seconds"] for record in run.rounds))
    kept = []
    complete = False
    for record, seconds in zip(run.rounds[:limit], elapsed, strict=False):
        values = measured(record)
        value = values.get("accuracy", math.nan)
        complete = value >= target or record["round"] == limit
        if "accuracy" in values:
            kept.append((record["round"], value, record["bytes_per_client"], seconds))
        if complete:
            break
    rounds, accuracy, sent, seconds = zip(*kept, strict=True) if kept else ((), (), (), ())
    steps = run.rounds[rounds[-1] - 1]["steps"] if rounds else 0
    chosen = {key: getattr(computed.execution, key) for key in ("device", "precision")}
    made_with = tuple({**environment, **chosen} for environment in run.environments(rounds[-1] if rounds else 0))
    begin, end = (datetime.fromisoformat(text).timestamp() for text in (run.created, run.updated))
    if len(kept) < len(run.rounds):  # the time of the other rounds does not count
        end = min(end, begin + (seconds[-1] if seconds else 0.0))
    died = diverged(run.rounds[: rounds[-1]]) if rounds else None
    return RunCurve(rounds, accuracy, sent, seconds, limit, complete, steps, (begin, end), made_with, died)


def required_runs(cases: Sequence[Case], seeds: int) -> list[Experiment]:
    """Experiments of all runs, in the order of training."""
    return [case.seeded(number) for case, number in runs_of(cases, seeds)]


def missing_runs(experiments: Iterable[Experiment], folder: Path) -> list[Experiment]:
    """Experiments without a complete stored run."""
    stored = StoredRuns.of(folder)
    return [experiment for experiment in experiments if not stored.has(experiment)]


def missing_names(experiments: Iterable[Experiment], folder: Path) -> set[str]:
    """Names of the missing runs; several series may share one."""
    return {run_name(experiment) for experiment in missing_runs(experiments, folder)}


def train(
    experiments: Sequence[Experiment],
    folder: Path,
    workers: int | None = None,
    watch: Watch = lambda event: None,
    say: Callable[[str], None] = lambda text: None,
    seconds: float | None = None,
) -> list[Outcome]:
    """Train missing runs.

    Runs with a fixed number of rounds come first, since one of them may serve a series whose runs
    stop at a target.
    """
    began = time.monotonic()
    outcomes: list[Outcome] = []
    for stops in (False, True):
        missing = missing_runs(experiments, folder)
        left = longest_of_equal(e for e in missing if math.isfinite(target_accuracy(e)) == stops)
        if not left:
            continue
        rest = None if seconds is None else max(seconds - (time.monotonic() - began), 0.0)
        if rest == 0 and outcomes:
            break  # without time left, another round would still be computed
        # device and precision must be those of the experiment, as in `missing_runs`
        outcomes += run_all(left, folder, workers, watch, say, rest, computed_alike=True)
    last = {outcome.name: outcome for outcome in outcomes}
    return list(last.values())


def longest_of_equal(experiments: Iterable[Experiment]) -> dict[str, Experiment]:
    """Experiments by the name of their run; the longest of those that differ in length only."""
    longest: dict[str, Experiment] = {}
    for experiment in experiments:
        name = run_name(experiment)
        other = longest.get(name, experiment)
        assert identity(other) == identity(experiment), "run names include the identity"
        later = max(experiment, other, key=target_accuracy)
        longest[name] = experiment.replace(
            {"rounds": max(experiment.rounds, other.rounds), "evaluation.stop_when": later.evaluation.stop_when}
        )
    return longest


def failures(outcomes: Iterable[Outcome]) -> list[Outcome]:
    """Outcomes of failed runs."""
    return [outcome for outcome in outcomes if outcome.status == format.FAILED]
