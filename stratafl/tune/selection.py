"""The choice per network: the best few settings of the search, repeated with further seeds."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from stratafl.base.statistics import OverSeeds, over_seeds
from stratafl.tune.space import GridPoint
from stratafl.tune.study import BASELINE, FINALISTS, Search
from stratafl.tune.task import Cost, TuningTask
from stratafl.tune.trials import StopConditions, TuningTrial, spent_R


@dataclass(frozen=True, eq=False)
class Candidate:
    """A setting with its runs, one per seed, of which the search's is the first."""

    label: str
    setting: GridPoint | None
    """None for a config as given that is not one of the space's settings."""
    runs: tuple[TuningTrial, ...]
    is_baseline: bool

    def reached(self, network: str, question: TuningTask) -> int:
        """How many runs got to the target, within the budgets."""
        return sum(run.wins(network, question) < math.inf for run in self.runs)

    def over(self, network: str, kind: Cost) -> OverSeeds | None:
        """What it took to the target; None unless all runs got there."""
        if any(run.first is None for run in self.runs):
            return None
        return over_seeds([run.cost(network, kind) for run in self.runs])

    def rounds(self) -> OverSeeds | None:
        firsts = [float(run.first) for run in self.runs if run.first is not None]
        return over_seeds(firsts) if len(firsts) == len(self.runs) else None


@dataclass(frozen=True, eq=False)
class FrontierPoint:
    """A point on the frontier: nothing that was tried is as good for less."""

    label: str
    round: int
    value: float
    cost: float


@dataclass(frozen=True, eq=False)
class NetworkResult:
    """The answer for one network."""

    network: str
    candidates: tuple[Candidate, ...]
    """The best first: the choice, unless it never got to the target."""
    baseline: Candidate
    frontier: tuple[FrontierPoint, ...]

    @property
    def choice(self) -> Candidate | None:
        return self.candidates[0] if self.candidates else None


def finalists(search: Search, network: str) -> list[GridPoint]:
    """The settings that the search found best there."""
    worth = {setting: tried.wins(network, search.question) for setting, tried in search.tried.items()}
    known = sorted((setting for setting in worth if worth[setting] < math.inf), key=lambda each: worth[each])
    return known[:FINALISTS]


def repeat(search: Search, watch: StopConditions, found: dict[GridPoint | None, list[TuningTrial]]) -> None:
    """The finalists of all networks and the config as given, with each further seed.

    found: gets the runs by setting, one per seed, as far as there is time.
    """
    question, usual = search.question, search.space.usual
    chosen: list[GridPoint | None] = list(
        dict.fromkeys(setting for network in question.networks for setting in finalists(search, network.name))
    )
    if chosen and usual not in chosen:
        chosen.append(usual)
    found.update({setting: [_first(search, setting)] for setting in chosen})
    free = {network.name: math.inf for network in question.networks}
    for seed in question.seed_list[1:]:
        for setting in chosen:
            found[setting].append(search.attempt(setting, seed, watch, free))


def answers(search: Search, repeated: dict[GridPoint | None, list[TuningTrial]]) -> list[NetworkResult]:
    """What is best on each network, with what it was compared with."""
    usual, space, question = search.space.usual, search.space, search.question
    runs = repeated.get(usual) or [_first(search, usual)]
    baseline = Candidate(BASELINE if usual is None else space.label(usual), usual, tuple(runs), True)
    found = []
    for network in question.networks:
        name = network.name
        candidates = [
            baseline
            if setting == usual
            else Candidate(
                space.label(setting), setting, tuple(repeated.get(setting) or [search.tried[setting]]), False
            )
            for setting in finalists(search, name)
        ]
        candidates.sort(key=_order(name, question))
        found.append(NetworkResult(name, tuple(candidates), baseline, tuple(frontier(search, name))))
    return found


def frontier(search: Search, network: str) -> list[FrontierPoint]:
    """The rounds, of all runs of the search, that nothing cheaper is as good as, cheapest first."""
    assert search.baseline is not None
    labelled = [(search.space.label(setting), tried) for setting, tried in search.tried.items()]
    if search.space.usual is None:
        labelled.append((BASELINE, search.baseline))
    points = []
    for label, tried in labelled:
        if network in tried.costs:
            spent = spent_R(tried.costs[network], search.question.minimise)
            points += [FrontierPoint(label, round, value, float(spent[round - 1])) for round, value in tried.curve]
    sign = -1.0 if search.baseline.goal.sign == "<=" else 1.0
    best, found = -math.inf, []
    for point in sorted(points, key=lambda each: (each.cost, -sign * each.value)):
        if sign * point.value > best:
            best = sign * point.value
            found.append(point)
    return found


def frontier_segments(points: Sequence[FrontierPoint]) -> list[FrontierPoint]:
    """The end of each stretch of the frontier that one setting has."""
    ends = [each for each, after in itertools.pairwise(points) if each.label != after.label]
    return [*ends, *points[-1:]]


def _first(search: Search, setting: GridPoint | None) -> TuningTrial:
    """The search's own run."""
    assert search.baseline is not None
    return search.baseline if setting in (None, search.space.usual) else search.tried[setting]


def _order(network: str, question: TuningTask) -> Callable[[Candidate], tuple[float, ...]]:
    """First those that always got there, then those that were tried more often, then the
    cheaper."""

    def key(each: Candidate) -> tuple[float, ...]:
        reached, runs = each.reached(network, question), len(each.runs)
        spent = over_seeds([run.cost(network, question.minimise) for run in each.runs]).mean
        return -reached / runs, -runs, spent

    return key
