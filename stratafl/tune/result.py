"""Tuning from the task to its results, within a time budget, in one or several calls."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from stratafl.base.errors import InvalidInput
from stratafl.base.files import check_writable, make_folder, remove_tree, write_json
from stratafl.base.signals import Interrupted, InterruptHandler
from stratafl.runs.format import RunLock
from stratafl.tune.selection import NetworkResult, network_results, repeat
from stratafl.tune.space import GridPoint
from stratafl.tune.study import BASELINE, JOURNAL, Search, optuna
from stratafl.tune.task import FILE, TuningTask
from stratafl.tune.trials import OutOfTime, Show, StopConditions, TrialRunner, TuningTrial

SEARCH = 0.6
"""Fraction of the time for the search; the rest is for repetitions of the best settings."""
RUNS = "runs"


@dataclass(frozen=True, eq=False)
class TuningResult:
    """Results of a search, which may be incomplete."""

    task: TuningTask
    search: Search
    repeated: dict[GridPoint | None, list[TuningTrial]]
    network_results: list[NetworkResult]
    is_complete: bool
    """Whether all trials and repetitions were done."""
    interrupted: Interrupted | None = None

    @property
    def baseline(self) -> TuningTrial:
        assert self.search.baseline is not None
        return self.search.baseline

    @property
    def all_trials(self) -> list[tuple[str, int, TuningTrial]]:
        """All runs with their settings and seeds, the given config first."""
        space, seeds = self.search.space, self.task.seed_list
        trials = [(BASELINE, seeds[0], self.baseline)]
        trials += [
            (space.label(setting), seeds[0], trial)
            for setting, trial in self.search.trials.items()
            if setting != space.baseline
        ]
        for setting, runs in self.repeated.items():
            label = BASELINE if setting in (None, space.baseline) else space.label(setting)
            trials += [(label, seed, run) for seed, run in zip(seeds[1:], runs[1:], strict=False)]
        return trials

    @property
    def is_reached(self) -> bool:
        """Whether a choice reached the target on any network."""
        return any(result.choice is not None for result in self.network_results)


def tune(
    task: TuningTask,
    folder: Path,
    *,
    seconds: float | None = None,
    must_exist: bool = False,
    keep_stale: bool = False,
    say: Callable[[str], None],
    show: Show,
) -> TuningResult:
    """Search, repeat the best settings with other seeds, and choose.

    The same call continues an interrupted one from the files in the folder. keep_stale: use also
    runs whose source files have changed since.
    """
    optuna()
    begun = time.monotonic()
    check_writable("--out", folder)
    if must_exist and not (folder / RUNS).is_dir():
        raise InvalidInput("--resume", folder, "no plan in it that could go on")
    make_folder(folder)
    lock = RunLock(folder, "makes a plan in it")
    try:
        description = task.check(folder)
        runner = TrialRunner(task, folder / RUNS, say, show, keep_stale)
        if runner.is_stale:
            # the journal has results of runs that are outdated
            remove_tree(folder / JOURNAL)
        search = Search(task, runner, folder)
        with InterruptHandler(say) as stop:
            return _search_and_repeat(
                search, stop, TimeBudget(begun, seconds), lambda: write_json(folder / FILE, description)
            )
    finally:
        lock.release()


class TimeBudget(NamedTuple):
    """Start of the search, and its time limit."""

    begun: float
    seconds: float | None

    def until(self, share: float) -> float | None:
        """Time at which a fraction of the budget is used."""
        return None if self.seconds is None else self.begun + share * self.seconds


def _search_and_repeat(
    search: Search, stop: InterruptHandler, budget: TimeBudget, store_task: Callable[[], None]
) -> TuningResult:
    repeated: dict[GridPoint | None, list[TuningTrial]] = {}
    interrupted, is_searched, complete = None, False, False
    try:
        try:
            stop_conditions = StopConditions(stop, budget.until(SEARCH if search.task.seeds > 1 else 1.0))
            search.begin(stop_conditions)
            # stored only now, since until then the task may be rejected and changed
            store_task()
            search.run(stop_conditions)
            is_searched = True
        except OutOfTime:
            if search.baseline is None:
                raise
        repeat(search, StopConditions(stop, budget.until(1.0)), repeated)
        complete = is_searched
    except OutOfTime:
        if search.baseline is None:
            reason = "was over before the config as given was done; the same command goes on"
            raise InvalidInput("--max-seconds", budget.seconds, reason) from None
    except Interrupted as problem:
        if search.baseline is None:
            raise Interrupted(problem.number, _progress_text(search)) from None
        interrupted = Interrupted(problem.number, _progress_text(search))
    return TuningResult(search.task, search, repeated, network_results(search, repeated), complete, interrupted)


def _progress_text(search: Search) -> str:
    settings = f"{search.count} of {search.task.trials} settings are tried"
    return f"interrupted; {settings}, and the same command goes on"
