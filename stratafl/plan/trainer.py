"""The runs of a plan: ordinary ones, in the plan's own folder, and none is trained twice."""

from __future__ import annotations

import json
import signal
import time
from collections.abc import Callable, Mapping
from pathlib import Path

from stratafl.base.errors import InvalidInput, MissingExtra, UserCodeError, told
from stratafl.base.signals import Interrupted, Stop
from stratafl.config.schema import Config
from stratafl.metrics.records import RoundResult, diverged_after
from stratafl.plan.priced import Tried, last_round
from stratafl.plan.question import Question
from stratafl.runs import StoredRun, format
from stratafl.runs.launch import Launch
from stratafl.runs.provenance import changed_files_since, essence, in_short
from stratafl.runs.reader import read_run, scan
from stratafl.runs.sweep.plan import run_name
from stratafl.runs.sweep.pool import Event, is_computed_alike

LOOKED_AT = (1, 3)
"""Rounds after which it is computed how long a run may go on: a run's bytes tell the size of its
model, after the third exactly also where that has buffers."""
BEATEN = "stopped: it cannot be among the best settings any more"
DIVERGED = "stopped: its loss is no number any more"
Bars = Mapping[str, float]
"""The cost that a run must stay below, by network."""
Show = Callable[[Event], None]


class OutOfTime(Exception):
    """The time that a plan may take is over."""


class Watch:
    """Whether anything asks a run to stop: a signal, the clock, or that it cannot win any more."""

    def __init__(self, stop: Stop, deadline: float | None):
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


class Trainer:
    """Trains settings, or finds that it has."""

    def __init__(
        self, question: Question, folder: Path, say: Callable[[str], None], show: Show, keep_stale: bool = False
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

    def tried(self, config: Config, label: str, watch: Watch, bars: Bars, *, failed_again: bool = False) -> Tried:
        """A config's run, trained until it is settled: at the target, at its end, or where it costs
        more than the bars on every network.

        failed_again: whether one that failed begins anew; otherwise that is its answer.
        """
        before = self.find(config)
        if failed_again and before is not None and before.status == format.FAILED:
            before = None
        if before is not None and self._is_settled(before, bars):
            return self._ended(Tried.of(before, self.question), label)
        # one run is always begun, so that calls with however little time come to an end
        watch.check(first=not self.trained)
        path = self._train(config, label, before, watch, bars)
        return self._ended(Tried.of(read_run(path), self.question), label)

    def _ended(self, tried: Tried, label: str) -> Tried:
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
            self._stale[_key(config)] = f"{run.name}: {in_short(changed)} since; run again"
        else:
            self._known[_key(config)] = run.path

    def _is_settled(self, run: StoredRun, bars: Bars) -> bool:
        if run.status in (format.DONE, format.FAILED) or run.diverged is not None:
            return True
        return bool(run.rounds) and last_round(run, self.question, bars) <= len(run.rounds)

    def _train(self, config: Config, label: str, before: StoredRun | None, watch: Watch, bars: Bars) -> Path:
        name = run_name(f"{label} seed {config.run.seed}")
        launch = Launch.new(config, name, self.folder) if before is None else self._resumed(before, config)
        path = launch.folder.path
        self._known[_key(config)] = path
        self.trained += 1
        done, rounds = len(launch.simulation.history), launch.simulation.rounds
        self.show(Event(label, "began", {"rounds": rounds, "done": done}))
        guard = _Guard(self, launch, label, watch, bars)
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
            self.say(f"{label}: {told(problem)}")
        finally:
            launch.folder.close()
        return path

    def _resumed(self, before: StoredRun, config: Config) -> Launch:
        return Launch.resume(before.path, self.say, force=self.keep_stale, config=config)


class _Guard:
    """Looks after one run while it is trained."""

    def __init__(self, trainer: Trainer, launch: Launch, label: str, watch: Watch, bars: Bars):
        self.trainer, self.launch, self.label, self.watch, self.bars = trainer, launch, label, watch, bars
        self.stop = Stop()
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
