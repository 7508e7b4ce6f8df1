"""Stored runs, found by what they compute, and training of missing ones."""

from __future__ import annotations

import math
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from datetime import datetime
from itertools import accumulate
from pathlib import Path
from typing import Any

from papers.harness.series import Case, identity, run_name, runs_of
from stratafl.base.errors import InvalidInput
from stratafl.config.schema import Config
from stratafl.metrics.records import diverged, measured
from stratafl.runs import format
from stratafl.runs.provenance import changed_files_since
from stratafl.runs.reader import StoredRun, list_runs
from stratafl.runs.sweep import Outcome, run_all
from stratafl.runs.sweep.pool import Watch, is_computed_alike

SETTING_UP = 120.0
"""Seconds that a run may take beside its rounds, to read data and compile kernels."""


@dataclass(frozen=True)
class RunCurve:
    """Values of a run per evaluated round, up to the end of the config it serves."""

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
        self._by_identity: dict[str, list[tuple[Config, StoredRun]]] = defaultdict(list)
        for run in runs:
            try:
                config = Config.of(run.config)
            except InvalidInput:
                continue  # a run of another version, whose keys are unknown here
            self._by_identity[identity(config)].append((config, run))

    @staticmethod
    def of(folder: Path) -> StoredRuns:
        return StoredRuns(list_runs(folder) if folder.is_dir() else ())

    def curve(self, config: Config) -> RunCurve | None:
        """Curve of the newest complete run on any device, otherwise of the longest run."""
        curves = [_cut(run_config, run, config) for run_config, run in self._offered(config)]
        newest = reversed([curve for curve in curves if curve.rounds])
        return max(newest, key=lambda curve: (curve.complete, curve.complete or len(curve.rounds)), default=None)

    def has(self, config: Config) -> bool:
        """Whether there is a complete run on the same device and in the same precision."""
        return any(
            is_computed_alike(run, config) and _cut(run_config, run, config).complete
            for run_config, run in self._offered(config)
        )

    def _offered(self, config: Config) -> Iterator[tuple[Config, StoredRun]]:
        """Runs of any length that compute the same as the config would compute today."""
        for run_config, run in self._by_identity[identity(config)]:
            if not changed_files_since(run, config):
                yield run_config, run


def _cut(config: Config, run: StoredRun, target: Config) -> RunCurve:
    """Curve of a run, up to the end of the target config."""
    goal, limit = target.run.stop_at, target.run.rounds
    elapsed = list(accumulate(record["seconds"] for record in run.rounds))
    kept = []
    complete = False
    for record, seconds in zip(run.rounds[:limit], elapsed, strict=False):
        values = measured(record)
        value = values.get("accuracy", math.nan)
        reached = goal is not None and value >= goal
        complete = reached or record["round"] == limit
        if "accuracy" in values:
            kept.append((record["round"], value, record["bytes_per_client"], seconds))
        if complete:
            break
    rounds, accuracy, sent, seconds = zip(*kept, strict=True) if kept else ((), (), (), ())
    steps = run.rounds[rounds[-1] - 1]["steps"] if rounds else 0
    chosen = {key: getattr(config.run, key) for key in ("device", "precision")}
    made_with = tuple({**environment, **chosen} for environment in run.environments(rounds[-1] if rounds else 0))
    begin, end = (datetime.fromisoformat(text).timestamp() for text in (run.created, run.updated))
    if len(kept) < len(run.rounds):  # the time of the other rounds does not count
        end = min(end, begin + (seconds[-1] if seconds else 0.0))
    died = diverged(run.rounds[: rounds[-1]]) if rounds else None
    return RunCurve(rounds, accuracy, sent, seconds, limit, complete, steps, (begin, end), made_with, died)


def required_runs(cases: Sequence[Case], seeds: int) -> list[Config]:
    """Configs of all runs, in the order of training."""
    return [case.seeded(number) for case, number in runs_of(cases, seeds)]


def missing_runs(configs: Iterable[Config], folder: Path) -> list[Config]:
    """Configs without a complete stored run."""
    stored = StoredRuns.of(folder)
    return [config for config in configs if not stored.has(config)]


def missing_names(configs: Iterable[Config], folder: Path) -> set[str]:
    """Names of the missing runs; several series may share one."""
    return {run_name(config) for config in missing_runs(configs, folder)}


def train(
    configs: Sequence[Config],
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
        left = longest_of_equal(c for c in missing_runs(configs, folder) if (c.run.stop_at is not None) == stops)
        if not left:
            continue
        rest = None if seconds is None else max(seconds - (time.monotonic() - began), 0.0)
        if rest == 0 and outcomes:
            break  # without time left, another round would still be computed
        # device and precision must be those of the config, as in `missing_runs`
        outcomes += run_all(left, folder, workers, watch, say, rest, computed_alike=True)
    last = {outcome.name: outcome for outcome in outcomes}
    return list(last.values())


def longest_of_equal(configs: Iterable[Config]) -> dict[str, Config]:
    """Configs by the name of their run; the longest of configs that differ in length only."""
    longest: dict[str, Config] = {}
    for config in configs:
        name = run_name(config)
        other = longest.get(name, config)
        assert identity(other) == identity(config), "run names include the identity"
        run = replace(
            config.run,
            rounds=max(config.run.rounds, other.run.rounds),
            stop_at=max(config.run.stop_at, other.run.stop_at) if config.run.stop_at and other.run.stop_at else None,
        )
        longest[name] = replace(config, run=run)
    return longest


def failures(outcomes: Iterable[Outcome]) -> list[Outcome]:
    """Outcomes of failed runs."""
    return [outcome for outcome in outcomes if outcome.status == format.FAILED]
