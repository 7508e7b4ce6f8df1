"""Tuning from the task to its results, within a time budget, in one or several calls.

The best settings of the search on each network are repeated with other seeds, and compared.
"""

from __future__ import annotations

import itertools
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from stratafl.base.errors import TIME_IS_OVER, InvalidInput
from stratafl.base.files import check_writable, make_folder, remove_tree, write_json
from stratafl.base.signals import Interrupted, InterruptHandler
from stratafl.base.statistics import MeanStd, mean_std
from stratafl.runs.format import RunLock
from stratafl.tuning.study import BASELINE, FINALISTS, JOURNAL, Search, optuna
from stratafl.tuning.task import FILE, Cost, GridPoint, TuningTask
from stratafl.tuning.trials import OutOfTime, Show, StopConditions, TrialRunner, TuningTrial, cumulative_cost_R


@dataclass(frozen=True, eq=False)
class TuningCandidate:
    """Setting with its runs, one per seed, the first of which is that of the search."""

    label: str
    setting: GridPoint | None
    """None for a given config that is not one of the settings."""
    runs: tuple[TuningTrial, ...]
    is_baseline: bool

    def reached(self, network: str, task: TuningTask) -> int:
        """Number of runs that reached the target within the budgets."""
        return sum(run.objective_value(network, task) < math.inf for run in self.runs)

    def mean_cost(self, network: str, kind: Cost) -> MeanStd | None:
        """Mean cost up to the target, whatever the budgets; None unless all runs reached it."""
        if any(run.first is None for run in self.runs):
            return None
        return mean_std([run.cost(network, kind) for run in self.runs])

    def rounds(self) -> MeanStd | None:
        """Mean number of rounds to the target; None unless all runs reached it."""
        firsts = [float(run.first) for run in self.runs if run.first is not None]
        return mean_std(firsts) if len(firsts) == len(self.runs) else None


@dataclass(frozen=True, eq=False)
class FrontierPoint:
    """Point on the frontier: no trial reached as good a value for less."""

    label: str
    round: int
    value: float
    cost: float


@dataclass(frozen=True, eq=False)
class NetworkResult:
    """Result of the search for one network."""

    network: str
    candidates: tuple[TuningCandidate, ...]
    """Settings that reached the target in the search, best first; the first is the choice. Empty if
    none did."""
    baseline: TuningCandidate
    frontier: tuple[FrontierPoint, ...]

    @property
    def choice(self) -> TuningCandidate | None:
        return self.candidates[0] if self.candidates else None


def finalists(search: Search, network: str) -> list[GridPoint]:
    """Best settings of the search on a network."""
    values = {setting: trial.objective_value(network, search.task) for setting, trial in search.trials.items()}
    reached = sorted((setting for setting in values if values[setting] < math.inf), key=values.__getitem__)
    return reached[:FINALISTS]


def repeat(
    search: Search, stop_conditions: StopConditions, repeated: dict[GridPoint | None, list[TuningTrial]]
) -> None:
    """Run the finalists of all networks and the given config with each further seed.

    repeated: gets the runs by setting, one per seed, as far as there is time.
    """
    task, baseline = search.task, search.space.baseline
    settings: list[GridPoint | None] = list(
        dict.fromkeys(setting for network in task.networks for setting in finalists(search, network.name))
    )
    if settings and baseline not in settings:
        settings.append(baseline)
    repeated.update({setting: [_first_trial(search, setting)] for setting in settings})
    no_cost_limits = {network.name: math.inf for network in task.networks}
    for seed in task.seed_list[1:]:
        for setting in settings:
            repeated[setting].append(search.attempt(setting, seed, stop_conditions, no_cost_limits))


def network_results(search: Search, repeated: dict[GridPoint | None, list[TuningTrial]]) -> list[NetworkResult]:
    """Best settings on each network, with their comparison."""
    baseline_setting, space, task = search.space.baseline, search.space, search.task
    runs = repeated.get(baseline_setting) or [_first_trial(search, baseline_setting)]
    baseline = TuningCandidate(
        BASELINE if baseline_setting is None else space.label(baseline_setting), baseline_setting, tuple(runs), True
    )
    results = []
    for network in task.networks:
        name = network.name

        def rank(candidate: TuningCandidate) -> tuple[float, ...]:
            """Sort by success rate, then number of runs, then mean cost."""
            cost = mean_std([run.cost(name, task.minimise) for run in candidate.runs]).mean
            return -candidate.reached(name, task) / len(candidate.runs), -len(candidate.runs), cost

        candidates = [
            baseline
            if setting == baseline_setting
            else TuningCandidate(
                space.label(setting), setting, tuple(repeated.get(setting) or [search.trials[setting]]), False
            )
            for setting in finalists(search, name)
        ]
        candidates.sort(key=rank)
        results.append(NetworkResult(name, tuple(candidates), baseline, tuple(frontier(search, name))))
    return results


def frontier(search: Search, network: str) -> list[FrontierPoint]:
    """Frontier of the rounds of all trials, cheapest first."""
    assert search.baseline is not None
    labelled = [(search.space.label(setting), trial) for setting, trial in search.trials.items()]
    if search.space.baseline is None:
        labelled.append((BASELINE, search.baseline))
    points = []
    for label, trial in labelled:
        if network in trial.costs:
            costs = cumulative_cost_R(trial.costs[network], search.task.minimise)
            points += [FrontierPoint(label, round, value, float(costs[round - 1])) for round, value in trial.curve]
    sign = -1.0 if search.baseline.goal.sign == "<=" else 1.0
    best, efficient = -math.inf, list[FrontierPoint]()
    for point in sorted(points, key=lambda point: (point.cost, -sign * point.value)):
        if sign * point.value > best:
            best = sign * point.value
            efficient.append(point)
    return efficient


def frontier_segments(points: Sequence[FrontierPoint]) -> list[FrontierPoint]:
    """Last point of each segment of the frontier that belongs to one setting."""
    ends = [point for point, after in itertools.pairwise(points) if point.label != after.label]
    return [*ends, *points[-1:]]


def _first_trial(search: Search, setting: GridPoint | None) -> TuningTrial:
    """Trial of a setting in the search."""
    assert search.baseline is not None
    return search.baseline if setting in (None, search.space.baseline) else search.trials[setting]


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
        """Runs with their settings and seeds, the given config first."""
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


class TimeIsOver(InvalidInput):
    """The time limit was too short for a result; the same call continues."""

    exit_code = TIME_IS_OVER


def search_and_repeat(
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
    optuna()  # fails at once if it is not installed
    begun = time.monotonic()
    check_writable("--out", folder)
    if must_exist and not (folder / RUNS).is_dir():
        raise InvalidInput("--resume", folder, "no search in it that could go on")
    make_folder(folder)
    lock = RunLock(folder, "searches in it")
    try:
        description = task.check(folder)
        runner = TrialRunner(task, folder / RUNS, say, show, keep_stale)
        if runner.is_stale:
            # the journal has results of runs that are outdated
            remove_tree(folder / JOURNAL)
        search = Search(task, runner, folder)
        with InterruptHandler(say) as stop:
            return _within(search, stop, TimeBudget(begun, seconds), lambda: write_json(folder / FILE, description))
    finally:
        lock.release()


class TimeBudget(NamedTuple):
    """Start of the search, and its time limit."""

    begun: float
    seconds: float | None

    def until(self, share: float) -> float | None:
        """Time at which a fraction of the budget is used."""
        return None if self.seconds is None else self.begun + share * self.seconds


def _within(search: Search, stop: InterruptHandler, budget: TimeBudget, store_task: Callable[[], None]) -> TuningResult:
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
            raise TimeIsOver("--time-limit", budget.seconds, reason) from None
    except Interrupted as problem:
        if search.baseline is None:
            raise Interrupted(problem.number, _progress_text(search)) from None
        interrupted = Interrupted(problem.number, _progress_text(search))
    return TuningResult(search.task, search, repeated, network_results(search, repeated), complete, interrupted)


def _progress_text(search: Search) -> str:
    settings = f"{search.count} of {search.task.trials} settings are tried"
    return f"interrupted; {settings}, and the same command goes on"
