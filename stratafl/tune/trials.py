"""One trial: train, price, stop early."""

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
from stratafl.config.schema import Config
from stratafl.cost.costs import CumulativeCost, PriceableRun, RunCosts
from stratafl.metrics.objective import Goal
from stratafl.metrics.records import RoundResult, diverged_after, measured
from stratafl.runs import StoredRun, format
from stratafl.runs.launch import Launch
from stratafl.runs.provenance import changed_files_since, essence, shorten
from stratafl.runs.reader import read_run, scan
from stratafl.runs.sweep.plan import run_name
from stratafl.runs.sweep.pool import Event, is_computed_alike
from stratafl.tune.task import Cost, TuningTask

Outcome = Literal["reached", "stopped", "never", "diverged", "failed"]
"""How a run ended: it got to the target; it was stopped as it could not be among the best any more;
it did all its rounds, and never got there; its loss was no number any more; it broke down."""


@dataclass(frozen=True, eq=False)
class TuningTrial:
    """A run with what it cost, round by round, on every network."""

    run: StoredRun | None
    """None where it failed before it had a folder."""
    outcome: Outcome
    reason: str
    goal: Goal
    first: int | None
    """The first round that is as good as the target."""
    costs: Mapping[str, RunCosts]
    """What it cost by the network's name; nothing for a run without rounds."""

    @staticmethod
    def of(run: StoredRun, question: TuningTask) -> TuningTrial:
        """A stored run, priced for every network that is asked about."""
        goal = question.target.with_direction(run.better)
        curve = curve_of(run, goal.metric)
        first = goal.first_round([round for round, _ in curve], [value for _, value in curve])
        ready = PriceableRun.of(run) if run.rounds else None
        costs = {} if ready is None else {each.name: ready.on(each) for each in question.networks}
        return TuningTrial(run, _outcome(run, first), run.reason, goal, first, costs)

    @staticmethod
    def failed(question: TuningTask, reason: str) -> TuningTrial:
        """A run that could not be set up."""
        return TuningTrial(None, "failed", reason, question.target, None, {})

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

    def total(self, network: str) -> CumulativeCost | None:
        """What it cost up to the target; where it did not get there, what was spent."""
        if network not in self.costs or self.run is None:
            return None
        return self.costs[network].until(self.first or len(self.run.rounds))

    def cost(self, network: str, kind: Cost) -> float:
        """One of the costs on a network; infinite where it never got there."""
        total = self.total(network)
        return math.inf if total is None else cost_in(total, kind)

    def wins(self, network: str, question: TuningTask) -> float:
        """What is minimised, if the target was reached within the budgets; infinite otherwise."""
        within = all(self.cost(network, kind) <= limit for kind, limit in question.budgets.items())
        return self.cost(network, question.minimise) if self.first is not None and within else math.inf


def cost_in(total: CumulativeCost, kind: Cost) -> float:
    """One cost of several; bytes are those of all levels."""
    return float(sum(total.bytes)) if kind == "bytes" else float(getattr(total, kind))


def curve_of(run: StoredRun, metric: str) -> list[tuple[int, float]]:
    """The evaluated rounds that have this metric, and its values."""
    evaluated = [(int(record["round"]), measured(record).get(metric, math.nan)) for record in run.rounds]
    return [(round, value) for round, value in evaluated if not math.isnan(value)]


def last_round(run: StoredRun, question: TuningTask, bars: Mapping[str, float]) -> int:
    """Up to which round a run can still cost less than the bar on any network, and stay within the
    budgets there: what it will send and compute is known before it does."""
    ready, rounds = PriceableRun.of(run), run.total
    story = replace(ready.recovered.story, rounds=rounds)
    whole = replace(ready, recovered=replace(ready.recovered, story=story))
    return max(_within(whole.on(network), question, bars[network.name], rounds) for network in question.networks)


def spent_R(costs: RunCosts, kind: Cost) -> np.ndarray:
    """A cost up to the end of each round."""
    if kind == "bytes":
        return np.cumsum(np.sum(costs.bytes, axis=0))
    each_R = {"seconds": costs.seconds_R, "joules": costs.joules_R, "money": costs.money_R}[kind]
    return np.cumsum(each_R)


def _within(costs: RunCosts, question: TuningTask, bar: float, rounds: int) -> int:
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


LOOKED_AT = (1, 3)
"""Rounds after which it is computed how long a run may go on: a run's bytes tell the size of its
model, after the third exactly also where that has buffers."""

BEATEN = "stopped: it cannot be among the best settings any more"

DIVERGED = "stopped: its loss is no number any more"

CostLimits = Mapping[str, float]
"""The cost that a run must stay below, by network."""

Show = Callable[[Event], None]


class OutOfTime(Exception):
    """The time that a plan may take is over."""


class StopConditions:
    """Whether anything asks a run to stop: a signal, the clock, or that it cannot win any more."""

    def __init__(self, stop: InterruptHandler, deadline: float | None):
        self.stop, self.deadline = stop, deadline

    @property
    def is_late(self) -> bool:
        return self.deadline is not None and time.monotonic() > self.deadline

    def check(self, first: bool = False) -> None:
        """Stop between two runs where that was asked for or the time is over; the first may begin
        however late it is."""
        if self.stop.asked:
            raise Interrupted(self.stop.asked)
        if self.is_late and not first:
            raise OutOfTime


class TrialRunner:
    """Trains settings, or finds that it has."""

    def __init__(
        self, question: TuningTask, folder: Path, say: Callable[[str], None], show: Show, keep_stale: bool = False
    ):
        self.question, self.folder, self.say, self.show = question, folder, say, show
        self.keep_stale = keep_stale
        self.trained = 0
        """Runs that were begun or gone on with."""
        self._known: dict[str, Path] = {}
        self._stale: dict[str, str] = {}
        """What to say of runs that are left out, as files they began with were changed since, or
        they failed elsewhere."""
        for run in scan(folder) if folder.is_dir() else ():
            if isinstance(run, StoredRun):
                self._keep(run)
            else:
                say(f"not looked at: {run.reason}")
        for key, line in self._stale.items():
            if key not in self._known:
                say(line)

    @property
    def is_stale(self) -> bool:
        """Whether any run is left out whose place no other has taken."""
        return bool(self._stale.keys() - self._known.keys())

    def find(self, config: Config) -> StoredRun | None:
        """The run of a config, as far as it came."""
        path = self._known.get(_key(config))
        return None if path is None else read_run(path)

    def tried(
        self, config: Config, label: str, watch: StopConditions, bars: CostLimits, *, failed_again: bool = False
    ) -> TuningTrial:
        """A config's run, trained until it is settled: at the target, at its end, or where it costs
        more than the bars on every network.

        failed_again: whether one that failed begins anew; otherwise that is its answer.
        """
        before = self.find(config)
        if failed_again and before is not None and before.status == format.FAILED:
            before = None
        if before is not None and self._is_settled(before, bars):
            return self._ended(TuningTrial.of(before, self.question), label)
        # one run is always begun, so that calls with however little time come to an end
        watch.check(first=not self.trained)
        path = self._train(config, label, before, watch, bars)
        return self._ended(TuningTrial.of(read_run(path), self.question), label)

    def _ended(self, tried: TuningTrial, label: str) -> TuningTrial:
        best = "" if tried.best is None else f", {tried.goal.metric} {tried.best:.4g}"
        rounds = tried.first or (len(tried.run.rounds) if tried.run else 0)
        self.show(Event(label, "ended", {"status": format.DONE, "reason": f"{tried.outcome}, round {rounds}{best}"}))
        return tried

    def _keep(self, run: StoredRun) -> None:
        try:
            config = Config.of(run.config)
        except InvalidInput as problem:
            self.say(f"not looked at: {problem}")
            return
        changed = changed_files_since(run, self.question.config)
        if run.status == format.FAILED and not is_computed_alike(run, self.question.config):
            # such as for lack of memory, of which there may be more here
            self._stale[_key(config)] = f"{run.name}: failed on another device or in another precision; run again"
        elif changed and not self.keep_stale:
            self._stale[_key(config)] = f"{run.name}: {shorten(changed)} since; run again"
        else:
            self._known[_key(config)] = run.path

    def _is_settled(self, run: StoredRun, bars: CostLimits) -> bool:
        if run.status in (format.DONE, format.FAILED) or run.diverged is not None:
            return True
        return bool(run.rounds) and last_round(run, self.question, bars) <= len(run.rounds)

    def _train(
        self, config: Config, label: str, before: StoredRun | None, watch: StopConditions, bars: CostLimits
    ) -> Path:
        name = run_name(f"{label} seed {config.run.seed}")
        launch = Launch.new(config, name, self.folder) if before is None else self._resumed(before, config)
        path = launch.folder.path
        self._known[_key(config)] = path
        self.trained += 1
        done, rounds = len(launch.simulation.history), launch.simulation.rounds
        self.show(Event(label, "began", {"rounds": rounds, "done": done}))
        guard = _EarlyStopping(self, launch, label, watch, bars)
        try:
            with launch.ending():
                while not launch.simulation.done:
                    launch.round(guard.stop, guard.saw)
                launch.finish(self.say)
        except Interrupted:
            if guard.why is None:
                if watch.stop.asked or not watch.is_late:
                    raise
                raise OutOfTime from None
            launch.folder.end(format.INTERRUPTED, launch.place, guard.why)
        except (UserCodeError, MissingExtra):
            raise
        except Exception as problem:
            # noted down in its folder: a setting that cannot be trained, such as one that is too
            # large for the memory, is an answer, too
            self.say(f"{label}: {error_message(problem)}")
        finally:
            launch.folder.close()
        return path

    def _resumed(self, before: StoredRun, config: Config) -> Launch:
        return Launch.resume(before.path, self.say, force=self.keep_stale, config=config)


class _EarlyStopping:
    """Looks after one run while it is trained."""

    def __init__(self, trainer: TrialRunner, launch: Launch, label: str, watch: StopConditions, bars: CostLimits):
        self.trainer, self.launch, self.label, self.watch, self.bars = trainer, launch, label, watch, bars
        self.stop = InterruptHandler()
        """The run's own: it asks for the signals that the plan's has heard."""
        self.why: str | None = None
        self.limit: int | None = None
        self.diverged: int | None = None
        launch.simulation.met = self.met

    def met(self, meetings: int, of: int) -> None:
        """Look at the run after every meeting of the leaves with their parents."""
        if self.watch.stop.asked or self.watch.is_late:
            self.stop.asked = self.watch.stop.asked or signal.SIGTERM

    def saw(self, record: RoundResult) -> None:
        """Look at the run after every global round."""
        simulation = self.launch.simulation
        self.trainer.show(Event(self.label, "round", {"round": record.round, "metrics": record.metrics}))
        self.diverged = diverged_after(self.diverged, vars(record))
        if simulation.done:
            return
        if self.limit is None or record.round in LOOKED_AT:
            stored = read_run(self.launch.folder.path)
            self.limit = last_round(stored, self.trainer.question, self.bars)
        if self.diverged is not None or record.round >= self.limit:
            self.why = BEATEN if self.diverged is None else DIVERGED
            self.stop.asked = self.stop.asked or signal.SIGTERM


def _key(config: Config) -> str:
    return json.dumps(essence(config), sort_keys=True)
