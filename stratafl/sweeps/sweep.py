"""Sweeps: what is done is skipped, what was interrupted goes on, several runs at a time."""

from __future__ import annotations

import contextlib
import json
import sys
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from stratafl.base.environment import usable_cores
from stratafl.base.errors import InvalidInput, error_message, escape_control
from stratafl.base.files import check_writable, make_folder
from stratafl.base.signals import Interrupted, InterruptExit, InterruptHandler
from stratafl.base.user_code import load_attribute
from stratafl.base.validation import check_integer, find_name
from stratafl.experiment.experiment import Experiment
from stratafl.metrics.objective import Goal, GoalLike
from stratafl.runs import format
from stratafl.runs.format import RunLock
from stratafl.runs.reader import StoredRun, read_run
from stratafl.simulation.progress import in_notebook
from stratafl.sweeps.executors import Executor, LocalExecutor, RayExecutor, SlurmExecutor
from stratafl.sweeps.grid import Sweep, note_target
from stratafl.sweeps.state import CURRENT, RunState, run_states
from stratafl.sweeps.table import GroupSummary, table
from stratafl.sweeps.task import RunTask

POLL_S = 0.05
"""Seconds between two looks at the jobs."""
PATIENCE_S = 20.0
"""Seconds that jobs which were told to stop at once may take for it."""
NO_TIME = "no time was left to begin it"
STOPPED = "it was stopped"
EXECUTORS = ("local", "slurm", "ray")
TAIL = 1 << 16
"""Bytes at the end of the records in which the last one is looked for."""


@dataclass(frozen=True)
class Outcome:
    """Outcome of one run of a sweep."""

    name: str
    status: str
    reason: str = ""
    path: Path | None = None
    """The run's directory; None if it failed before it had one."""
    was_done: bool = False
    """Whether the run was done before, so that nothing was to do."""


@dataclass(frozen=True)
class Event:
    """Event to show: a run began, has done rounds, or ended."""

    name: str
    kind: str
    values: Mapping[str, Any]


Watch = Callable[[Event], None]


@dataclass(frozen=True)
class SweepResult:
    """Runs of a sweep, and their summary over seeds."""

    runs: list[StoredRun]
    """Runs that are done, in the order of the grid."""
    table: list[GroupSummary]
    """One row for each group of runs that differ only in their seed."""
    outcomes: list[Outcome]
    """Outcome of every run, with the reasons of those that failed."""

    def __str__(self) -> str:
        failed = [f"{o.name}: {o.status}: {o.reason}" for o in self.outcomes if o.status != format.DONE]
        return "\n".join([*map(str, self.table), *failed])


def sweep(
    experiment: Experiment,
    grid: Mapping[str, Any],
    *,
    save: str | Path,
    executor: str | Executor = "local",
    workers: int | None = None,
    target: GoalLike | None = None,
    keep_stale: bool = False,
    progress: bool = True,
) -> SweepResult:
    """Run an experiment with every combination of values, several at a time; what is done is
    skipped.

    grid: values by dotted key, `{"method": ["hfedavg", "mtgc"], "seed": range(3)}`. save: the
    folder of the runs. executor: "local" for processes of this machine, "slurm", "ray",
    "file.py:Class", or an `Executor`. workers: the number of runs at a time; one per GPU or core
    unless given. target: the value of a metric by which the table compares the runs. keep_stale:
    take also runs whose files were changed since. progress: whether to print a line for each run
    that ends.

    Experiments with objects of the program, such as a model's class, are trained in this process,
    one after another; those of names and files are trained wherever the executor says.
    """
    folder = Path(save)
    planned = Sweep.of_grid(experiment, grid, format.slug(folder.name), target)
    experiments = {entry.name: entry.experiment for entry in planned.entries}
    ended: list[str] = []

    def say(text: str) -> None:
        print(escape_control(text), file=sys.stderr)

    def watch(event: Event) -> None:
        if event.kind == "ended" and progress:
            ended.append(event.name)
            reason = f": {event.values['reason']}" if event.values["reason"] else ""
            say(f"{event.name}: {event.values['status']}{reason}  ({len(ended)}/{len(experiments)})")

    try:
        described = not any(map(_has_objects, experiments.values()))
        if not described and (executor != "local" or workers not in (None, 1)):
            raise InvalidInput("executor", executor, "other processes cannot have objects of this program; "
                               'name the model, data and method instead, such as model="my_nets.py:Net"')  # fmt: skip
        if described:
            outcomes = run_all(
                experiments,
                folder,
                workers,
                watch,
                say,
                keep_stale=keep_stale,
                target=planned.target,
                executor=executor,
            )
        else:
            outcomes = _run_here(experiments, folder, planned.target, watch)
    except Interrupted as stopped:
        say(stopped.message)
        raise (KeyboardInterrupt(stopped.message) if in_notebook() else InterruptExit(stopped)) from None
    stored = stored_runs(outcomes)
    return SweepResult(list(stored.values()), table(planned.entries, stored, planned.target), outcomes)


def stored_runs(outcomes: list[Outcome]) -> dict[str, StoredRun]:
    """Runs that are done, by name."""
    return {o.name: read_run(o.path) for o in outcomes if o.status == format.DONE and o.path is not None}


def _has_objects(experiment: Experiment) -> bool:
    try:
        experiment.to_table()
    except InvalidInput:
        return True
    return False


def _run_here(experiments: Mapping[str, Experiment], folder: Path, target: Goal | None, watch: Watch) -> list[Outcome]:
    """Run experiments in this process, one after another, each in its folder."""
    outcomes = []
    with _locked(folder):
        note_target(folder, target)
        for name, experiment in experiments.items():
            path = folder / format.check_name(name)
            was_done = (path / format.STATUS).exists() and read_run(path).status == format.DONE
            try:
                experiment.run(save=path, progress=False)
                outcomes.append(Outcome(name, format.DONE, path=path, was_done=was_done))
            except Exception as problem:
                outcomes.append(Outcome(name, format.FAILED, error_message(problem), path if path.exists() else None))
            watch(_ended(outcomes[-1]))
    return outcomes


@contextlib.contextmanager
def _locked(folder: Path) -> Iterator[None]:
    """Make the folder of a sweep and lock it: one sweep at a time works in it."""
    check_writable("--runs", folder)
    make_folder(folder)
    lock = RunLock(folder, "is at a sweep in it: let it end, or give another --runs")
    try:
        yield
    finally:
        lock.release()


def run_all(
    experiments: Mapping[str, Experiment],
    folder: Path | str,
    workers: int | None = None,
    watch: Watch = lambda event: None,
    say: Callable[[str], None] = lambda text: None,
    seconds: float | None = None,
    keep_stale: bool = False,
    target: Goal | None = None,
    computed_alike: bool = False,
    executor: str | Executor = "local",
) -> list[Outcome]:
    """Run every experiment on an executor, each in its own directory in the folder, and say what
    became of each.

    A run of the same name and experiment that is there already is skipped if it is done and goes on
    if it is not. One that fails does not stop the others. A signal stops all of them at their
    clients' next synchronisation, a second one at once; either way `Interrupted` is raised, and the
    same call continues. When so many `seconds` have passed, runs in progress are stopped in the
    same way and no more are begun: the outcomes say so, and the same call continues. One round is
    always done, so that calls with however little time come to an end.

    keep_stale: take also runs whose files were changed since for what their experiments would
        compute.
    target: what the runs are compared by, noted in the folder.
    computed_alike: take only runs that were computed on the device, by the engine and in the
        precision that their experiments ask for; all others are left as they are.
    """
    deadline = None if seconds is None else time.monotonic() + seconds
    folder = Path(folder)
    for name in experiments:
        format.check_name(name)
    if workers is not None:
        check_integer("--workers", workers, at_least=1)
    if isinstance(executor, str) and not executor.partition(":")[2]:
        executor = find_name("--executor", executor, EXECUTORS)
    with _locked(folder):
        note_target(folder, target)
        states = run_states(experiments, folder, say, keep_stale, computed_alike)
        outcomes: dict[str, Outcome] = {}
        for name, state in states.items():
            for message in state.messages:
                say(f"{name}: {message}")
            if state.is_settled:
                outcomes[name] = _settled(state)
                watch(_ended(outcomes[name]))
        waiting = {name: experiment for name, experiment in experiments.items() if name not in outcomes}
        if waiting:
            with _executor(executor, workers, waiting) as started:
                tasks = [
                    RunTask.create(name, experiment, folder, states[name].path, keep_stale)
                    for name, experiment in waiting.items()
                ]
                slots = min(len(tasks), started.slots, workers or started.slots)
                _Supervisor(started, slots, tasks, outcomes, watch).run(say, deadline, len(experiments))
    return [outcomes.get(name, Outcome(name, format.INTERRUPTED, NO_TIME)) for name in experiments]


def _settled(state: RunState) -> Outcome:
    if state.state == CURRENT:
        return Outcome(state.name, format.DONE, path=state.path, was_done=True)
    return Outcome(state.name, format.RUNNING, "another process is at it", state.path)


def _ended(outcome: Outcome) -> Event:
    return Event(outcome.name, "ended", {"status": outcome.status, "reason": outcome.reason})


@contextlib.contextmanager
def _executor(
    executor: str | Executor, workers: int | None, experiments: Mapping[str, Experiment]
) -> Iterator[Executor]:
    """Executor by its name, which is closed at the end; one that was given is left open."""
    if not isinstance(executor, str):
        yield _checked(executor, executor)
        return
    uses_gpus = any(str(e.execution.device).startswith("cuda") for e in experiments.values())
    started: Any
    if executor == "local":
        count = (_gpu_count() if uses_gpus else usable_cores()) if workers is None else workers
        started = LocalExecutor(min(count, len(experiments)))
    elif executor == "slurm":
        started = SlurmExecutor()
    elif executor == "ray":
        started = RayExecutor(gpus=1 if uses_gpus else 0)
    else:
        started = _checked(executor, load_attribute("--executor", executor)())
    try:
        yield started
    finally:
        if hasattr(started, "close"):
            started.close()


def _gpu_count() -> int:
    import torch

    return max(torch.cuda.device_count(), 1)


def _checked(field: object, executor: Any) -> Executor:
    if not isinstance(executor, Executor):
        raise InvalidInput("--executor", field, "must have `slots` and `submit(task, slot)`; see docs/how-to/sweep.md")
    check_integer("executor.slots", executor.slots, at_least=1)
    return executor


class _Running:
    """A job of a sweep, and how far its run was at the last look."""

    def __init__(self, task: RunTask, executor: Executor, slot: int):
        self.task = task
        self.before = task.status().get("updated")
        """When the run's status was written last before this job."""
        self.job = executor.submit(task, slot)
        self.round: int | None = None
        """Completed rounds; None before the run begins."""
        self.code: int | None = None
        self.ended_at = 0.0

    def events(self) -> Iterator[Event]:
        """What is new in the run's folder."""
        status = self.task.status()
        if not status or status.get("updated") == self.before:
            return
        if self.round is None:
            self.round = _first_round(self.task)
            yield Event(self.task.name, "began", {"rounds": status["rounds"], "done": self.round})
        if status["round"] > self.round:
            self.round = status["round"]
            yield Event(self.task.name, "round", {"round": self.round, "metrics": _last_metrics(self.task.path)})

    def outcome(self, stopped: bool, lag_s: float) -> Outcome | None:
        """Outcome of a job that has ended; None while its files may still be on their way here.

        stopped: whether the sweep asked it to stop.
        """
        if self.code is None:
            self.code, self.ended_at = self.job.exit_code(), time.monotonic()
        if self.code is None:
            return None
        status = self.task.status()
        path = self.task.path if status else None
        name, is_new = self.task.name, status.get("updated") != self.before
        if self.code == 0 and status.get("status") == format.DONE:
            return Outcome(name, format.DONE, path=path)
        if self.code == 0 and time.monotonic() < self.ended_at + lag_s:
            return None
        if is_new and status.get("status") in (format.FAILED, format.INTERRUPTED):
            return Outcome(name, status["status"], status["reason"], path)
        last = self.task.last_line()
        if stopped and self.code:
            return Outcome(name, format.INTERRUPTED, STOPPED, path)
        if self.code > 0 and last.startswith("error: "):
            return Outcome(name, format.FAILED, last.removeprefix("error: "), path)
        how = f"signal {-self.code}" if self.code < 0 else f"exit code {self.code}"
        return Outcome(name, format.FAILED, f"its process ended with {how}" + (f": {last}" if last else ""), path)


def _first_round(task: RunTask) -> int:
    """Completed rounds with which a run begins or goes on."""
    with contextlib.suppress(InvalidInput, IndexError, KeyError):
        return int(format.read_description(task.path)["continued"][-1]["after"])
    return 0


def _last_metrics(path: Path) -> dict[str, float]:
    """Metrics of the last round on record."""
    with contextlib.suppress(OSError, ValueError, IndexError, KeyError), (path / format.ROUNDS).open("rb") as file:
        file.seek(max(0, file.seek(0, 2) - TAIL))
        return dict(json.loads(file.read().rpartition(b"\n")[0].split(b"\n")[-1])["metrics"])
    return {}


class _Supervisor:
    """Tasks that wait, and jobs in the slots of an executor."""

    def __init__(
        self, executor: Executor, slots: int, tasks: list[RunTask], outcomes: dict[str, Outcome], watch: Watch
    ):
        self.executor, self.slots, self.outcomes, self.watch = executor, slots, outcomes, watch
        self.waiting = deque(tasks)
        self.running: dict[int, _Running] = {}
        self.stopped = False
        self.advanced = False
        """Whether any run did a round or ended."""

    def run(self, say: Callable[[str], None], deadline: float | None, total: int) -> None:
        asked = 0
        try:
            with InterruptHandler(say) as stop:
                while self.waiting or self.running:
                    is_late = deadline is not None and self.advanced and time.monotonic() > deadline
                    if (stop.signal or is_late) and not self.stopped:
                        self.stop()
                    asked = stop.signal
                    self.fill()
                    self.look()
                    time.sleep(POLL_S if self.running else 0)
                asked = stop.signal
        except Interrupted as second:
            asked, self.watch = second.number, lambda event: None
            self.stop()
            give_up = time.monotonic() + PATIENCE_S
            while self.running and time.monotonic() < give_up:
                self.look()
                time.sleep(POLL_S)
        except BaseException:
            self.stop()
            raise
        if asked:
            done = sum(outcome.status == format.DONE for outcome in self.outcomes.values())
            raise Interrupted(asked, f"interrupted; {done} of {total} runs are done, and the same command goes on")

    def stop(self) -> None:
        """Begin no more, and ask the jobs to stop; a second time, to stop at once."""
        self.stopped = True
        self.waiting.clear()
        for running in self.running.values():
            running.job.stop()

    def fill(self) -> None:
        """Give waiting tasks to free slots."""
        for slot in range(self.slots):
            if slot not in self.running and self.waiting:
                task = self.waiting.popleft()
                self.running[slot] = _Running(task, self.executor, slot)

    def look(self) -> None:
        """Show how far the jobs are, and free the slots of those that have ended."""
        lag_s = getattr(self.executor, "file_lag_s", 0.0)
        for slot, running in list(self.running.items()):
            outcome = running.outcome(self.stopped, lag_s)
            for event in running.events():
                self.advanced |= event.kind == "round"
                self.watch(event)
            if outcome is not None:
                del self.running[slot]
                self.advanced = True
                self.outcomes[outcome.name] = outcome
                if outcome.status == format.DONE:
                    running.task.discard()
                self.watch(_ended(outcome))
