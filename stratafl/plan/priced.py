"""A trial's run put beside the target: whether it got there, and what that cost on each network.

Shape suffix: R global rounds of a run.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np

from stratafl.cost.costs import Costs, PricedRun, Total
from stratafl.metrics.objective import Goal
from stratafl.metrics.records import measured
from stratafl.plan.question import Cost, Question
from stratafl.runs import StoredRun, format

Outcome = Literal["reached", "stopped", "never", "diverged", "failed"]
"""How a run ended: it got to the target; it was stopped as it could not be among the best any more;
it did all its rounds, and never got there; its loss was no number any more; it broke down."""


@dataclass(frozen=True, eq=False)
class Tried:
    """A run with what it cost, round by round, on every network."""

    run: StoredRun | None
    """None where it failed before it had a folder."""
    outcome: Outcome
    reason: str
    goal: Goal
    first: int | None
    """The first round that is as good as the target."""
    costs: Mapping[str, Costs]
    """What it cost by the network's name; nothing for a run without rounds."""

    @staticmethod
    def of(run: StoredRun, question: Question) -> Tried:
        """A stored run, priced for every network that is asked about."""
        goal = question.target.towards(run.better)
        curve = curve_of(run, goal.metric)
        first = goal.first([round for round, _ in curve], [value for _, value in curve])
        ready = PricedRun.of(run) if run.rounds else None
        costs = {} if ready is None else {each.name: ready.on(each) for each in question.networks}
        return Tried(run, _outcome(run, first), run.reason, goal, first, costs)

    @staticmethod
    def failed(question: Question, reason: str) -> Tried:
        """A run that could not be set up."""
        return Tried(None, "failed", reason, question.target, None, {})

    @property
    def curve(self) -> list[tuple[int, float]]:
        """The evaluated rounds, and the target's metric there."""
        return [] if self.run is None else curve_of(self.run, self.goal.metric)

    @property
    def best(self) -> float | None:
        """The metric's best value."""
        values = [value for _, value in self.curve]
        pick = min if self.goal.sign == "<=" else max
        return pick(values) if values else None

    @property
    def shortfall(self) -> float:
        """How far from the target it stayed."""
        return math.inf if self.best is None else max(0.0, abs(self.goal.value - self.best) * (self.first is None))

    def total(self, network: str) -> Total | None:
        """What it cost up to the target; where it did not get there, what was spent."""
        if network not in self.costs or self.run is None:
            return None
        return self.costs[network].until(self.first or len(self.run.rounds))

    def cost(self, network: str, kind: Cost) -> float:
        """One of the costs on a network; infinite where it never got there."""
        total = self.total(network)
        return math.inf if total is None else cost_in(total, kind)

    def wins(self, network: str, question: Question) -> float:
        """What is minimised, if the target was reached within the budgets; infinite otherwise."""
        within = all(self.cost(network, kind) <= limit for kind, limit in question.budgets.items())
        return self.cost(network, question.minimise) if self.first is not None and within else math.inf


def cost_in(total: Total, kind: Cost) -> float:
    """One cost of several; bytes are those of all levels."""
    return float(sum(total.bytes)) if kind == "bytes" else float(getattr(total, kind))


def curve_of(run: StoredRun, metric: str) -> list[tuple[int, float]]:
    """The evaluated rounds that have this metric, and its values."""
    evaluated = [(int(record["round"]), measured(record).get(metric, math.nan)) for record in run.rounds]
    return [(round, value) for round, value in evaluated if not math.isnan(value)]


def last_round(run: StoredRun, question: Question, bars: Mapping[str, float]) -> int:
    """Up to which round a run can still cost less than the bar on any network, and stay within the
    budgets there: what it will send and compute is known before it does."""
    ready, rounds = PricedRun.of(run), run.total
    story = replace(ready.recovered.story, rounds=rounds)
    whole = replace(ready, recovered=replace(ready.recovered, story=story))
    return max(_within(whole.on(network), question, bars[network.name], rounds) for network in question.networks)


def spent_R(costs: Costs, kind: Cost) -> np.ndarray:
    """A cost up to the end of each round."""
    if kind == "bytes":
        return np.cumsum(np.sum(costs.bytes, axis=0))
    each_R = {"seconds": costs.seconds_R, "joules": costs.joules_R, "money": costs.money_R}[kind]
    return np.cumsum(each_R)


def _within(costs: Costs, question: Question, bar: float, rounds: int) -> int:
    alive_R = spent_R(costs, question.minimise) < bar
    for kind, limit in question.budgets.items():
        alive_R = alive_R & (spent_R(costs, kind) <= limit)
    return rounds if alive_R.all() else int(np.argmin(alive_R))


def _outcome(run: StoredRun, first: int | None) -> Outcome:
    if first is not None:
        return "reached"
    if run.diverged is not None:
        return "diverged"
    if run.status == format.FAILED:
        return "failed"
    return "never" if run.status == format.DONE else "stopped"
