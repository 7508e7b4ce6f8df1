"""Stored runs by what they compute, and training of those that are missing."""

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
"""Seconds a run may take beside its rounds: reading data, compiling kernels."""


@dataclass(frozen=True)
class RunCurve:
    """One run as far as it was wanted: a value per evaluated round."""

    rounds: tuple[int, ...]
    accuracy: tuple[float, ...]
    """NaN where the scores were not finite."""
    sent: tuple[float, ...]
    """Bytes sent and received by a client so far."""
    seconds: tuple[float, ...]
    """Seconds since the start."""
    limit: int
    """Rounds it was to have."""
    complete: bool
    """Whether it has them, or reached the accuracy to stop at."""
    steps: int = 0
    """Local steps of a client."""
    span: tuple[float, float] = (0.0, 0.0)
    """When it was computed: begin and end, in seconds since 1970."""
    made_with: tuple[dict[str, Any], ...] = field(default=(), repr=False)
    """The environments it was computed in, each with the precision."""
    diverged: int | None = None
    """The round from which on its test loss is not finite."""

    @property
    def paused(self) -> bool:
        """Whether it was interrupted on the way."""
        return self.span[1] - self.span[0] > self.seconds[-1] + SETTING_UP

    @property
    def last_sent(self) -> float:
        """Bytes of the last round, since the first has no corrections to send."""
        before = (0, 0.0) if len(self.rounds) < 2 else (self.rounds[-2], self.sent[-2])
        return (self.sent[-1] - before[1]) / (self.rounds[-1] - before[0])


class StoredRuns:
    """What a folder of runs has to offer."""

    def __init__(self, runs: Iterable[StoredRun]):
        self._by_identity: dict[str, list[tuple[Config, StoredRun]]] = defaultdict(list)
        for run in runs:
            try:
                config = Config.of(run.config)
            except InvalidInput:
                continue  # of another version, whose keys this one does not know
            self._by_identity[identity(config)].append((config, run))

    @staticmethod
    def of(folder: Path) -> StoredRuns:
        return StoredRuns(list_runs(folder) if folder.is_dir() else ())

    def curve(self, wanted: Config) -> RunCurve | None:
        """The newest that is complete, wherever it was computed, or the longest: of two that
        reached their target, the slower is no better."""
        found = [_cut(config, run, wanted) for config, run in self._offered(wanted)]
        newest = reversed([curve for curve in found if curve.rounds])
        return max(newest, key=lambda curve: (curve.complete, curve.complete or len(curve.rounds)), default=None)

    def has(self, wanted: Config) -> bool:
        """Whether all of it is there, computed in the same place and precision."""
        return any(
            is_computed_alike(run, wanted) and _cut(config, run, wanted).complete
            for config, run in self._offered(wanted)
        )

    def _offered(self, wanted: Config) -> Iterator[tuple[Config, StoredRun]]:
        """The runs that are still what the config would compute, however far they go."""
        for config, run in self._by_identity[identity(wanted)]:
            if not changed_files_since(run, wanted):
                yield config, run


def _cut(config: Config, run: StoredRun, wanted: Config) -> RunCurve:
    """A run's records up to where the wanted one would end."""
    goal, limit = wanted.run.stop_at, wanted.run.rounds
    elapsed = list(accumulate(record["seconds"] for record in run.rounds))
    kept = []
    complete = False
    for record, seconds in zip(run.rounds[:limit], elapsed, strict=False):
        found = measured(record)
        value = found.get("accuracy", math.nan)
        reached = goal is not None and value >= goal
        complete = reached or record["round"] == limit
        if "accuracy" in found:
            kept.append((record["round"], value, record["bytes_per_client"], seconds))
        if complete:
            break
    rounds, accuracy, sent, seconds = zip(*kept, strict=True) if kept else ((), (), (), ())
    steps = run.rounds[rounds[-1] - 1]["steps"] if rounds else 0
    chosen = {key: getattr(config.run, key) for key in ("device", "precision")}
    made_with = tuple({**each, **chosen} for each in run.environments(rounds[-1] if rounds else 0))
    begin, end = (datetime.fromisoformat(text).timestamp() for text in (run.created, run.updated))
    if len(kept) < len(run.rounds):  # the rest of it went into something else
        end = min(end, begin + (seconds[-1] if seconds else 0.0))
    died = diverged(run.rounds[: rounds[-1]]) if rounds else None
    return RunCurve(rounds, accuracy, sent, seconds, limit, complete, steps, (begin, end), made_with, died)


def required_runs(cases: Sequence[Case], seeds: int) -> list[Config]:
    """One config per run, in the order they are to be done."""
    return [case.seeded(number) for case, number in runs_of(cases, seeds)]


def missing_runs(configs: Iterable[Config], folder: Path) -> list[Config]:
    """The configs of which there is no stored run that is long enough."""
    stored = StoredRuns.of(folder)
    return [config for config in configs if not stored.has(config)]


def missing_names(configs: Iterable[Config], folder: Path) -> set[str]:
    """The names of the runs that are missing; recipes share some."""
    return {run_name(config) for config in missing_runs(configs, folder)}


def train(
    configs: Sequence[Config],
    folder: Path,
    workers: int | None = None,
    watch: Watch = lambda event: None,
    say: Callable[[str], None] = lambda text: None,
    seconds: float | None = None,
) -> list[Outcome]:
    """Do what is missing.

    Runs that go all the way come first, since one of them may serve a recipe that would have
    stopped it at a target.
    """
    began = time.monotonic()
    outcomes: list[Outcome] = []
    for stops in (False, True):
        left = longest_of_equal(c for c in missing_runs(configs, folder) if (c.run.stop_at is not None) == stops)
        if not left:
            continue
        rest = None if seconds is None else max(seconds - (time.monotonic() - began), 0.0)
        if rest == 0 and outcomes:
            break  # with no time left at all it would still do a round
        # as `missing_runs` has it: times are compared, and a precision is asked for
        outcomes += run_all(left, folder, workers, watch, say, rest, computed_alike=True)
    last = {outcome.name: outcome for outcome in outcomes}
    return list(last.values())


def longest_of_equal(configs: Iterable[Config]) -> dict[str, Config]:
    """All runs by name; where two want the same run to different lengths, the longer."""
    found: dict[str, Config] = {}
    for config in configs:
        name = run_name(config)
        other = found.get(name, config)
        assert identity(other) == identity(config), "a name is made of what a run computes"
        run = replace(
            config.run,
            rounds=max(config.run.rounds, other.run.rounds),
            stop_at=max(config.run.stop_at, other.run.stop_at) if config.run.stop_at and other.run.stop_at else None,
        )
        found[name] = replace(config, run=run)
    return found


def failures(outcomes: Iterable[Outcome]) -> list[Outcome]:
    """The runs that failed."""
    return [outcome for outcome in outcomes if outcome.status == format.FAILED]
