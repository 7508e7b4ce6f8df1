"""The runs that recipes want and a folder does not have yet."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from pathlib import Path

from stratafl.config.schema import Config
from stratafl.paper.recipes.base import Case, essence, run_name, runs_of
from stratafl.paper.reproduce.stored_runs import StoredRuns
from stratafl.runs import format
from stratafl.runs.sweep import Outcome, run_all
from stratafl.runs.sweep.pool import Watch


def wanted(cases: Sequence[Case], seeds: int) -> list[Config]:
    """One config per run, in the order they are to be done."""
    return [case.seeded(number) for case, number in runs_of(cases, seeds)]


def missing(configs: Iterable[Config], folder: Path) -> list[Config]:
    """The configs of which there is no stored run that is long enough."""
    stored = StoredRuns.of(folder)
    return [config for config in configs if not stored.has(config)]


def to_do(configs: Iterable[Config], folder: Path) -> set[str]:
    """The names of the runs that are missing; recipes share some."""
    return {run_name(config) for config in missing(configs, folder)}


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
        left = merged(c for c in missing(configs, folder) if (c.run.stop_at is not None) == stops)
        if not left:
            continue
        rest = None if seconds is None else max(seconds - (time.monotonic() - began), 0.0)
        if rest == 0 and outcomes:
            break  # with no time left at all it would still do a round
        # as `missing` has it: times are compared, and a precision is asked for
        outcomes += run_all(left, folder, workers, watch, say, rest, computed_alike=True)
    last = {outcome.name: outcome for outcome in outcomes}
    return list(last.values())


def merged(configs: Iterable[Config]) -> dict[str, Config]:
    """All runs by name; where two want the same run to different lengths, the longer."""
    found: dict[str, Config] = {}
    for config in configs:
        name = run_name(config)
        other = found.get(name, config)
        assert essence(other) == essence(config), "a name is made of what a run computes"
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
