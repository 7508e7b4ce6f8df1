"""A sweep in a table: each group's final accuracy and rounds to a target, mean and standard deviation over seeds."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from stratafl.divergence import measured
from stratafl.metrics import rounds_to
from stratafl.store.read import StoredRun
from stratafl.sweep.plan import Entry


@dataclass(frozen=True)
class Row:
    """One group of runs that differ in their seed only."""

    group: str
    runs: int
    done: int
    diverged: int
    """How many of those that are done ended with a loss that is not finite."""
    accuracy: float | None
    """Mean over those that are done and did not diverge."""
    accuracy_deviation: float | None
    """Standard deviation (of a sample); None for fewer than two."""
    reached: int
    """How many reached the target."""
    rounds: float | None
    """Mean rounds to the target; one that never reached it counts with all its rounds, so the mean is then too low."""
    rounds_deviation: float | None

    @property
    def accuracy_text(self) -> str:
        known = _text(self.accuracy, self.accuracy_deviation, 4)
        if not self.diverged:
            return known
        return f"{known}, {self.diverged} diverged" if known else "diverged"

    @property
    def rounds_text(self) -> str:
        """As the paper writes it: ">T" where the target was not reached within T rounds."""
        if self.rounds is None:
            return ""
        if self.reached < self.done:
            return f">{self.rounds:g}" if self.reached == 0 else f">{self.rounds:.1f}"
        return _text(self.rounds, self.rounds_deviation, 1)

    def as_dict(self) -> dict[str, Any]:
        return {**vars(self), "accuracy_text": self.accuracy_text, "rounds_text": self.rounds_text}


def table(entries: Sequence[Entry], stored: Mapping[str, StoredRun], target: float | None = None) -> list[Row]:
    """One row per group, in the order of the entries; `stored` holds the runs that are done, by name."""
    groups = dict.fromkeys(entry.group for entry in entries)
    return [_row(group, [e for e in entries if e.group == group], stored, target) for group in groups]


def _row(group: str, entries: Sequence[Entry], stored: Mapping[str, StoredRun], target: float | None) -> Row:
    runs = [stored[entry.name] for entry in entries if entry.name in stored]
    alive = [run for run in runs if run.diverged is None]
    finals = [values[-1] for values in (_accuracies(run)[1] for run in alive) if values]
    reached, rounds = 0, []
    if target is not None:
        for run in runs:
            first = rounds_to(target, *_accuracies(run))
            reached += first is not None
            rounds.append(run.round if first is None else first)
    dead = len(runs) - len(alive)
    return Row(group, len(entries), len(runs), dead, *_moments(finals), reached, *_moments(rounds))


def _accuracies(run: StoredRun) -> tuple[list[int], list[float]]:
    """Of the evaluated rounds that have one."""
    found = [(record["round"], measured(record).get("accuracy", math.nan)) for record in run.rounds]
    seen = [(round, value) for round, value in found if not math.isnan(value)]
    return [round for round, _ in seen], [value for _, value in seen]


def _moments(values: Sequence[float]) -> tuple[float | None, float | None]:
    mean = statistics.fmean(values) if values else None
    return mean, statistics.pstdev(values) if len(values) > 1 else None


def _text(mean: float | None, deviation: float | None, digits: int) -> str:
    if mean is None:
        return ""
    if deviation is None:
        return f"{mean:.{digits}f}" if digits > 1 else f"{mean:g}"
    return f"{mean:.{digits}f} ± {deviation:.{digits}f}"
