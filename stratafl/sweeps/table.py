"""Table of a sweep: final value of a metric and rounds to a target of each group, over seeds."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from stratafl.base.statistics import mean_std
from stratafl.metrics.objective import Goal, default_metric
from stratafl.metrics.records import measured
from stratafl.runs.reader import StoredRun
from stratafl.sweeps.grid import SweepEntry


@dataclass(frozen=True)
class GroupSummary:
    """Summary of a group of runs that differ only in their seed."""

    group: str
    runs: int
    """Number of planned runs."""
    done: int
    """Number of finished runs."""
    diverged: int
    """Number of finished runs whose loss is not finite at the end."""
    metric: str
    """Metric of the target; the default one without a target."""
    final: float | None
    """Mean of the metric over the finished runs that did not diverge."""
    final_deviation: float | None
    """Standard deviation over these runs; None for fewer than two."""
    reached: int
    """Number of runs that reached the target."""
    rounds: float | None
    """Mean number of rounds to the target. A run that did not reach it counts with all its rounds,
    and the mean is then too low."""
    rounds_deviation: float | None
    """Standard deviation over the same runs; None for fewer than two."""

    @property
    def final_text(self) -> str:
        value = _text(self.final, self.final_deviation, 4)
        if not self.diverged:
            return value
        return f"{value}, {self.diverged} diverged" if value else "diverged"

    @property
    def rounds_text(self) -> str:
        """Mean and deviation of the rounds to the target; ">T" if no run reached it within T
        rounds, and ">" and the mean if only some did."""
        if self.rounds is None:
            return ""
        if self.reached < self.done:
            return f">{self.rounds:g}" if self.reached == 0 else f">{self.rounds:.1f}"
        return _text(self.rounds, self.rounds_deviation, 1)

    def __str__(self) -> str:
        rounds = f", {self.rounds_text} rounds to the target" if self.rounds is not None else ""
        return f"{self.group}: {self.done}/{self.runs} done, final {self.metric} {self.final_text or 'none'}{rounds}"

    def as_dict(self) -> dict[str, Any]:
        return {**vars(self), "final_text": self.final_text, "rounds_text": self.rounds_text}


def table(
    entries: Sequence[SweepEntry], stored: Mapping[str, StoredRun], target: Goal | None = None
) -> list[GroupSummary]:
    """Create a row per group, in the order of the entries. stored: finished runs by name."""
    groups = dict.fromkeys(entry.group for entry in entries)
    seen = {name for run in stored.values() for record in run.rounds for name in measured(record)}
    metric = default_metric(seen) if target is None else target.metric
    return [_row(group, [e for e in entries if e.group == group], stored, metric, target) for group in groups]


def _row(
    group: str, entries: Sequence[SweepEntry], stored: Mapping[str, StoredRun], metric: str, target: Goal | None
) -> GroupSummary:
    runs = [stored[entry.name] for entry in entries if entry.name in stored]
    alive = [run for run in runs if run.diverged is None]
    finals = [values[-1] for values in (_values(run, metric)[1] for run in alive) if values]
    reached, rounds = 0, []
    if target is not None:
        for run in runs:
            first = target.with_direction(run.better).first_round(*_values(run, metric))
            reached += first is not None
            rounds.append(run.round if first is None else first)
    final, final_deviation = mean_std(finals) if finals else (None, None)
    mean_rounds, rounds_deviation = mean_std(rounds) if rounds else (None, None)
    return GroupSummary(
        group=group,
        runs=len(entries),
        done=len(runs),
        diverged=len(runs) - len(alive),
        metric=metric,
        final=final,
        final_deviation=final_deviation,
        reached=reached,
        rounds=mean_rounds,
        rounds_deviation=rounds_deviation,
    )


def _values(run: StoredRun, metric: str) -> tuple[list[int], list[float]]:
    """Evaluated rounds that have a metric, and its values."""
    evaluated = [(record["round"], measured(record).get(metric, math.nan)) for record in run.rounds]
    seen = [(round, value) for round, value in evaluated if not math.isnan(value)]
    return [round for round, _ in seen], [value for _, value in seen]


def _text(mean: float | None, deviation: float | None, digits: int) -> str:
    if mean is None:
        return ""
    if deviation is None:
        return f"{mean:.{digits}f}" if digits > 1 else f"{mean:g}"
    return f"{mean:.{digits}f} ± {deviation:.{digits}f}"
