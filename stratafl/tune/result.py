"""A plan from its question to its answers, in the time it has, in one go or several."""

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
from stratafl.tune.selection import NetworkResult, answers, repeat
from stratafl.tune.space import GridPoint
from stratafl.tune.study import BASELINE, JOURNAL, Search, optuna
from stratafl.tune.task import FILE, TuningTask
from stratafl.tune.trials import OutOfTime, Show, StopConditions, TrialRunner, TuningTrial

SEARCH = 0.6
"""The share of the time that the search takes: the rest is for the best settings' further seeds."""
RUNS = "runs"


@dataclass(frozen=True, eq=False)
class TuningResult:
    """A plan as far as it came."""

    question: TuningTask
    search: Search
    repeated: dict[GridPoint | None, list[TuningTrial]]
    answers: list[NetworkResult]
    is_complete: bool
    """Whether all that was asked for was tried, with all seeds."""
    interrupted: Interrupted | None = None

    @property
    def baseline(self) -> TuningTrial:
        assert self.search.baseline is not None
        return self.search.baseline

    @property
    def tried(self) -> list[tuple[str, int, TuningTrial]]:
        """Every run, with its setting and seed, the config as given first."""
        space, seeds = self.search.space, self.question.seed_list
        found = [(BASELINE, seeds[0], self.baseline)]
        found += [
            (space.label(setting), seeds[0], each)
            for setting, each in self.search.tried.items()
            if setting != space.usual
        ]
        for setting, runs in self.repeated.items():
            label = BASELINE if setting in (None, space.usual) else space.label(setting)
            found += [(label, seed, run) for seed, run in zip(seeds[1:], runs[1:], strict=False)]
        return found

    @property
    def is_reached(self) -> bool:
        """Whether any network has a choice that got to the target."""
        return any(each.choice is not None for each in self.answers)


def tune(
    question: TuningTask,
    folder: Path,
    *,
    seconds: float | None = None,
    must_exist: bool = False,
    keep_stale: bool = False,
    say: Callable[[str], None],
    show: Show,
) -> TuningResult:
    """Search, repeat the best with further seeds, and choose.

    The same call goes on where one was interrupted; what was done is in the folder.

    keep_stale: take also runs whose files were changed since for what their configs would compute.
    """
    optuna()
    begun = time.monotonic()
    check_writable("--out", folder)
    if must_exist and not (folder / RUNS).is_dir():
        raise InvalidInput("--resume", folder, "no plan in it that could go on")
    make_folder(folder)
    lock = RunLock(folder, "makes a plan in it")
    try:
        noted = question.check(folder)
        trainer = TrialRunner(question, folder / RUNS, say, show, keep_stale)
        if trainer.is_stale:
            # what the search was told of them is no longer so
            remove_tree(folder / JOURNAL)
        search = Search(question, trainer, folder)
        with InterruptHandler(say) as stop:
            return _made(search, stop, TimeBudget(begun, seconds), lambda: write_json(folder / FILE, noted))
    finally:
        lock.release()


class TimeBudget(NamedTuple):
    """When a plan began, and how long it may take."""

    begun: float
    seconds: float | None

    def until(self, share: float) -> float | None:
        """When a share of it is over."""
        return None if self.seconds is None else self.begun + share * self.seconds


def _made(search: Search, stop: InterruptHandler, time: TimeBudget, note: Callable[[], None]) -> TuningResult:
    repeated: dict[GridPoint | None, list[TuningTrial]] = {}
    interrupted, is_searched, complete = None, False, False
    try:
        try:
            watch = StopConditions(stop, time.until(SEARCH if search.question.seeds > 1 else 1.0))
            search.begin(watch)
            # only now, since until then it might be refused, and asked again otherwise
            note()
            search.run(watch)
            is_searched = True
        except OutOfTime:
            if search.baseline is None:
                raise
        repeat(search, StopConditions(stop, time.until(1.0)), repeated)
        complete = is_searched
    except OutOfTime:
        if search.baseline is None:
            told = "was over before the config as given was done; the same command goes on"
            raise InvalidInput("--max-seconds", time.seconds, told) from None
    except Interrupted as problem:
        if search.baseline is None:
            raise Interrupted(problem.number, _told(search)) from None
        interrupted = Interrupted(problem.number, _told(search))
    return TuningResult(search.question, search, repeated, answers(search, repeated), complete, interrupted)


def _told(search: Search) -> str:
    settings = f"{search.count} of {search.question.trials} settings are tried"
    return f"interrupted; {settings}, and the same command goes on"
