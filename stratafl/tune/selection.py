"""Selection per network: the best settings of the search, repeated with other seeds."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from stratafl.base.statistics import MeanStd, mean_std
from stratafl.tune.space import GridPoint
from stratafl.tune.study import BASELINE, FINALISTS, Search
from stratafl.tune.task import Cost, TuningTask
from stratafl.tune.trials import StopConditions, TuningTrial, cumulative_cost_R


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
        """Mean cost up to the target; None unless all runs reached it."""
        if any(run.first is None for run in self.runs):
            return None
        return mean_std([run.cost(network, kind) for run in self.runs])

    def rounds(self) -> MeanStd | None:
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
    """Candidates, best first: the first is the choice, unless it never reached the target."""
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
    no_limits = {network.name: math.inf for network in task.networks}
    for seed in task.seed_list[1:]:
        for setting in settings:
            repeated[setting].append(search.attempt(setting, seed, stop_conditions, no_limits))


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
        candidates = [
            baseline
            if setting == baseline_setting
            else TuningCandidate(
                space.label(setting), setting, tuple(repeated.get(setting) or [search.trials[setting]]), False
            )
            for setting in finalists(search, name)
        ]
        candidates.sort(key=_order(name, task))
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


def _order(network: str, task: TuningTask) -> Callable[[TuningCandidate], tuple[float, ...]]:
    """Sort key: success rate, then number of runs, then mean cost."""

    def key(candidate: TuningCandidate) -> tuple[float, ...]:
        reached, runs = candidate.reached(network, task), len(candidate.runs)
        cost = mean_std([run.cost(network, task.minimise) for run in candidate.runs]).mean
        return -reached / runs, -runs, cost

    return key
