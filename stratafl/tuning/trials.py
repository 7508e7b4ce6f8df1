"""Trial of a setting: train, price, stop early."""

from __future__ import annotations

import json
import math
import signal
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

import numpy as np

from stratafl.base.errors import InvalidInput, MissingExtra, UserCodeError, error_message
from stratafl.base.signals import Interrupted, InterruptHandler
from stratafl.costs.costs import CumulativeCost, PriceableRun, RunCosts
from stratafl.experiment.experiment import Experiment
from stratafl.metrics.objective import Goal
from stratafl.metrics.records import RoundResult, diverged_after, measured
from stratafl.runs import StoredRun, format
from stratafl.runs.provenance import changed_files_since, essence, shorten
from stratafl.runs.reader import read_run, scan
from stratafl.runs.session import RunSession
from stratafl.sweeps.grid import run_name
from stratafl.sweeps.state import is_computed_alike
from stratafl.sweeps.sweep import Event
from stratafl.tuning.task import Cost, TuningTask

Outcome = Literal["reached", "stopped", "never", "diverged", "failed"]
"""Outcome of a trial: target reached, pruned, target not reached, diverged, failed."""


@dataclass(frozen=True, eq=False)
class TuningTrial:
    """Run with its costs per round on every network."""

    run: StoredRun | None
    """Stored run; None if it failed before it had a folder."""
    outcome: Outcome
    reason: str
    goal: Goal
    first: int | None
    """First round that reaches the target."""
    costs: Mapping[str, RunCosts]
    """Costs by the network's name; empty for a run without rounds."""

    @staticmethod
    def of(run: StoredRun, task: TuningTask) -> TuningTrial:
        """Price a stored run for every network of a task."""
        goal = task.target.with_direction(run.better)
        curve = curve_of(run, goal.metric)
        first = goal.first_round([round for round, _ in curve], [value for _, value in curve])
        priceable = PriceableRun.of(run) if run.rounds else None
        costs = {} if priceable is None else {network.name: priceable.cost_on(network) for network in task.networks}
        return TuningTrial(run, _outcome(run, first), run.reason, goal, first, costs)

    @staticmethod
    def failed(task: TuningTask, reason: str) -> TuningTrial:
        """Trial that could not be set up."""
        return TuningTrial(None, "failed", reason, task.target, None, {})

    @property
    def curve(self) -> list[tuple[int, float]]:
        """Evaluated rounds with the value of the target's metric."""
        return [] if self.run is None else curve_of(self.run, self.goal.metric)

    @property
    def best(self) -> float | None:
        """Best value of the metric."""
        values = [value for _, value in self.curve]
        pick = min if self.goal.sign == "<=" else max
        return pick(values) if values else None

    @property
    def distance_to_target(self) -> float:
        """Difference between the best value and the target."""
        return math.inf if self.best is None else max(0.0, abs(self.goal.value - self.best) * (self.first is None))

    def total(self, network: str) -> CumulativeCost | None:
        """Cost up to the target, or of all rounds if it was not reached."""
        if network not in self.costs or self.run is None:
            return None
        return self.costs[network].up_to_round(self.first or len(self.run.rounds))

    def cost(self, network: str, kind: Cost) -> float:
        """Cost of one kind on a network; infinite for a run that could not be priced."""
        total = self.total(network)
        return math.inf if total is None else cost_in(total, kind)

    def objective_value(self, network: str, task: TuningTask) -> float:
        """Minimised cost, if the target was reached within the budgets; infinite otherwise."""
        is_within_budgets = all(self.cost(network, kind) <= limit for kind, limit in task.budgets.items())
        return self.cost(network, task.minimise) if self.first is not None and is_within_budgets else math.inf


def cost_in(total: CumulativeCost, kind: Cost) -> float:
    """Select one of the costs; bytes are summed over all levels."""
    return float(sum(total.bytes)) if kind == "bytes" else float(getattr(total, kind))


def curve_of(run: StoredRun, metric: str) -> list[tuple[int, float]]:
    """Evaluated rounds that have this metric, with its values."""
    evaluated = [(int(record["round"]), measured(record).get(metric, math.nan)) for record in run.rounds]
    return [(round, value) for round, value in evaluated if not math.isnan(value)]


def last_round(run: StoredRun, task: TuningTask, cost_limits: Mapping[str, float]) -> int:
    """Last round up to which a run can cost less than the limit on any network, and stay within the
    budgets.

    The run's messages and steps are known before it is trained.
    """
    priceable, rounds = PriceableRun.of(run), run.total
    workload = replace(priceable.recovered.workload, rounds=rounds)
    complete = replace(priceable, recovered=replace(priceable.recovered, workload=workload))
    return max(
        _last_competitive_round(complete.cost_on(network), task, cost_limits[network.name], rounds)
        for network in task.networks
    )


def cumulative_cost_R(costs: RunCosts, kind: Cost) -> np.ndarray:
    """Cost up to the end of each round."""
    if kind == "bytes":
        return np.cumsum(np.sum(costs.bytes, axis=0))
    values_R = {"seconds": costs.seconds_R, "joules": costs.joules_R, "money": costs.money_R}[kind]
    return np.cumsum(values_R)


def _last_competitive_round(costs: RunCosts, task: TuningTask, cost_limit: float, rounds: int) -> int:
    is_competitive_R = cumulative_cost_R(costs, task.minimise) < cost_limit
    for kind, limit in task.budgets.items():
        is_competitive_R = is_competitive_R & (cumulative_cost_R(costs, kind) <= limit)
    return rounds if is_competitive_R.all() else int(np.argmin(is_competitive_R))


def _outcome(run: StoredRun, first: int | None) -> Outcome:
    if first is not None:
        return "reached"
    if run.diverged is not None:
        return "diverged"
    if run.status == format.FAILED:
        return "failed"
    return "never" if run.status == format.DONE else "stopped"


LIMIT_ROUNDS = (1, 3)
"""Rounds after which the last round is computed: the bytes of a run determine the size of its
model, after the third round also if that has buffers."""

BEATEN = "stopped: it cannot be among the best settings any more"
DIVERGED = "stopped: its loss is no number any more"

CostLimits = Mapping[str, float]
"""Cost that a run must stay below, by network."""

Show = Callable[[Event], None]


class OutOfTime(Exception):
    """Raised when the time limit of a search is over."""


class StopConditions:
    """Conditions that stop a run: a signal, or the time limit."""

    def __init__(self, stop: InterruptHandler, deadline: float | None):
        self.stop, self.deadline = stop, deadline

    @property
    def is_late(self) -> bool:
        return self.deadline is not None and time.monotonic() > self.deadline

    def check(self, first: bool = False) -> None:
        """Raise between two runs if a stop was requested or the time is over; the first run may
        always begin."""
        if self.stop.signal:
            raise Interrupted(self.stop.signal)
        if self.is_late and not first:
            raise OutOfTime


class TrialRunner:
    """Runner that trains experiments, or finds runs that were trained before."""

    def __init__(
        self, task: TuningTask, folder: Path, say: Callable[[str], None], show: Show, keep_stale: bool = False
    ):
        self.task, self.folder, self.say, self.show = task, folder, say, show
        self.keep_stale = keep_stale
        self.trained = 0
        """Number of runs that were begun or continued."""
        self._paths: dict[str, Path] = {}
        self._stale: dict[str, str] = {}
        """Messages about runs that are left out, as source files have changed or they failed
        elsewhere."""
        for run in scan(folder) if folder.is_dir() else ():
            if isinstance(run, StoredRun):
                self._index(run)
            else:
                say(f"not looked at: {run.reason}")
        for key, line in self._stale.items():
            if key not in self._paths:
                say(line)

    @property
    def is_stale(self) -> bool:
        """Whether any run is left out and was not replaced."""
        return bool(self._stale.keys() - self._paths.keys())

    def find(self, experiment: Experiment) -> StoredRun | None:
        """Run of an experiment, which may be incomplete."""
        path = self._paths.get(_identity_key(experiment))
        return None if path is None else read_run(path)

    def run_trial(
        self,
        experiment: Experiment,
        label: str,
        stop_conditions: StopConditions,
        cost_limits: CostLimits,
        *,
        failed_again: bool = False,
    ) -> TuningTrial:
        """Train an experiment's run up to the target, to its end, or until it costs more than the
        limits on every network.

        failed_again: whether a failed run begins again; otherwise it is the result.
        """
        before = self.find(experiment)
        if failed_again and before is not None and before.status == format.FAILED:
            before = None
        if before is not None and self._is_settled(before, cost_limits):
            return self._report(TuningTrial.of(before, self.task), label)
        # one run is always begun, so that repeated calls with little time come to an end
        stop_conditions.check(first=not self.trained)
        path = self._train(experiment, label, before, stop_conditions, cost_limits)
        return self._report(TuningTrial.of(read_run(path), self.task), label)

    def _report(self, trial: TuningTrial, label: str) -> TuningTrial:
        best = "" if trial.best is None else f", {trial.goal.metric} {trial.best:.4g}"
        rounds = trial.first or (len(trial.run.rounds) if trial.run else 0)
        self.show(Event(label, "ended", {"status": format.DONE, "reason": f"{trial.outcome}, round {rounds}{best}"}))
        return trial

    def _index(self, run: StoredRun) -> None:
        try:
            experiment = Experiment.from_table(run.config)
        except InvalidInput as problem:
            self.say(f"not looked at: {problem}")
            return
        changed = changed_files_since(run, self.task.experiment)
        if run.status == format.FAILED and not is_computed_alike(run, self.task.experiment):
            # for example for lack of memory, which this device may have
            self._stale[_identity_key(experiment)] = (
                f"{run.name}: failed on another device or in another precision; run again"
            )
        elif changed and not self.keep_stale:
            self._stale[_identity_key(experiment)] = f"{run.name}: {shorten(changed)} since; run again"
        else:
            self._paths[_identity_key(experiment)] = run.path

    def _is_settled(self, run: StoredRun, cost_limits: CostLimits) -> bool:
        if run.status in (format.DONE, format.FAILED) or run.diverged is not None:
            return True
        return bool(run.rounds) and last_round(run, self.task, cost_limits) <= len(run.rounds)

    def _train(
        self,
        experiment: Experiment,
        label: str,
        before: StoredRun | None,
        stop_conditions: StopConditions,
        cost_limits: CostLimits,
    ) -> Path:
        experiment, name = experiment.one_of_many(), run_name(f"{label} seed {experiment.seed}")
        if before is None:
            session = RunSession.start(experiment, name, self.folder)
        else:
            session = RunSession.resume(before.path, experiment, say=self.say, force=self.keep_stale)
        path = session.path
        self._paths[_identity_key(experiment)] = path
        self.trained += 1
        done, rounds = len(session.simulation.history), session.simulation.rounds
        self.show(Event(label, "began", {"rounds": rounds, "done": done}))
        early_stopping = _EarlyStopping(self, session, label, stop_conditions, cost_limits)
        try:
            with session.record_outcome():
                while not session.simulation.done:
                    session.train_round(early_stopping.stop)
                session.finish()
        except Interrupted:
            if early_stopping.stop_reason is None:
                if stop_conditions.stop.signal or not stop_conditions.is_late:
                    raise
                raise OutOfTime from None
            session.set_status(format.INTERRUPTED, early_stopping.stop_reason)
        except (UserCodeError, MissingExtra):
            raise
        except Exception as problem:
            # recorded in its folder: a setting that cannot be trained, such as one too large
            # for the memory, is a result, too
            self.say(f"{label}: {error_message(problem)}")
        finally:
            session.close()
        return path


class _EarlyStopping:
    """Early stopping of one run."""

    def __init__(
        self,
        runner: TrialRunner,
        session: RunSession,
        label: str,
        stop_conditions: StopConditions,
        cost_limits: CostLimits,
    ):
        self.runner, self.session, self.label = runner, session, label
        self.stop_conditions, self.cost_limits = stop_conditions, cost_limits
        self.stop = InterruptHandler()
        """Stop requests for this run, which pass on the signals of the search."""
        self.stop_reason: str | None = None
        self.limit: int | None = None
        self.diverged: int | None = None
        session.simulation.on_sync, session.watch, session.say = self.after_sync, self.after_round, runner.say

    def after_sync(self, meetings: int, of: int) -> None:
        """Check for a stop after every synchronisation inside a global round."""
        if self.stop_conditions.stop.signal or self.stop_conditions.is_late:
            self.stop.signal = self.stop_conditions.stop.signal or signal.SIGTERM

    def after_round(self, record: RoundResult) -> None:
        """Check the limits after every global round."""
        simulation = self.session.simulation
        self.runner.show(Event(self.label, "round", {"round": record.round, "metrics": record.metrics}))
        self.diverged = diverged_after(self.diverged, vars(record))
        if simulation.done:
            return
        if self.limit is None or record.round in LIMIT_ROUNDS:
            stored = read_run(self.session.path)
            self.limit = last_round(stored, self.runner.task, self.cost_limits)
        if self.diverged is not None or record.round >= self.limit:
            self.stop_reason = BEATEN if self.diverged is None else DIVERGED
            self.stop.signal = self.stop.signal or signal.SIGTERM


def _identity_key(experiment: Experiment) -> str:
    return json.dumps(essence(experiment), sort_keys=True)
