"""Named configs, all of them run: what is done is skipped, what was interrupted goes on, several at
a time."""

from __future__ import annotations

import contextlib
import json
import os
import selectors
import signal
import subprocess
import sys
import tempfile
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

import torch

from stratafl.base.environment import usable_cores
from stratafl.base.files import check_writable, make_folder
from stratafl.base.signals import Interrupted, InterruptHandler
from stratafl.base.validation import check_integer
from stratafl.experiment.experiment import Experiment
from stratafl.experiment.sections import Execution
from stratafl.metrics.objective import Goal
from stratafl.runs import format
from stratafl.runs.format import RunLock
from stratafl.runs.provenance import changes_since, extensions, other_settings, shorten
from stratafl.runs.reader import StoredRun, scan
from stratafl.runs.sweep.plan import note_target

PATIENCE = 20.0
"""Seconds a worker that was told to stop at once may take for it."""
NO_TIME = "no time was left to begin it"


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
    """Event to show: a run began, did a round, gave a message or ended."""

    name: str
    kind: str
    values: Mapping[str, Any]


Watch = Callable[[Event], None]


@dataclass
class Worker:
    """A process that does one run of a sweep after another."""

    process: subprocess.Popen
    number: int
    """Number by which its GPU is chosen; a worker that takes its place gets the same."""
    tasks: IO[bytes]
    """Where it reads what to do."""
    said: IO[bytes]
    """Where it says what it does."""
    log: IO[bytes]
    name: str = ""
    """The run it is at; empty when it has none."""
    path: Path | None = None
    heard: bytearray = field(default_factory=bytearray)

    @staticmethod
    def start(threads: int, number: int) -> Worker:
        # beside it rather than in between: what a user's code prints must not run through the
        # progress display
        log = tempfile.TemporaryFile()  # noqa: SIM115  # closed with the worker
        command = [sys.executable, "-m", "stratafl.runs.sweep.worker", str(threads), str(number)]
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(path or os.getcwd() for path in sys.path)}
        process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log, env=environment, bufsize=0
        )
        assert process.stdin is not None and process.stdout is not None
        return Worker(process, number, process.stdin, process.stdout, log)

    def give(self, name: str, experiment: Experiment, folder: Path, resume: Path | None, force: bool) -> None:
        self.name, self.path = name, resume
        task = {"name": name, "config": experiment.to_table(), "folder": str(folder), "force": force}
        line = json.dumps({**task, "resume": None if resume is None else str(resume)}) + "\n"
        with contextlib.suppress(OSError):  # one that died is noticed by the end of its answers
            self.tasks.write(line.encode())

    def answers(self) -> Iterator[dict[str, Any]] | None:
        """Answers since the last call; None if the worker has ended."""
        said = os.read(self.said.fileno(), 1 << 16)
        self.heard += said
        *lines, rest = self.heard.split(b"\n")
        self.heard = bytearray(rest)
        return (json.loads(line) for line in lines) if said else None

    def last_words(self) -> str:
        code = self.process.wait()
        self.log.seek(0)
        lines = self.log.read().decode(errors="replace").strip().splitlines()
        how = f"signal {-code}" if code < 0 else f"exit code {code}"
        return f"its process ended with {how}" + (f": {lines[-1]}" if lines else "")

    def ask_to_stop(self) -> None:
        with contextlib.suppress(OSError):
            self.process.send_signal(signal.SIGTERM)

    def close(self) -> None:
        for pipe in (self.tasks, self.said):
            with contextlib.suppress(OSError):
                pipe.close()
        try:
            self.process.wait(PATIENCE)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
        self.log.close()


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
) -> list[Outcome]:
    """Run every experiment in a process of a few, each in its own directory in the folder, and say
    what became of each.

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
    check_writable("--runs", folder)
    make_folder(folder)
    lock = RunLock(folder, "is at a sweep in it: let it end, or give another --runs")
    try:
        note_target(folder, target)
        outcomes, waiting = _sorted_out(experiments, folder, say, keep_stale, computed_alike)
        for outcome in outcomes.values():
            watch(Event(outcome.name, "ended", {"status": outcome.status, "reason": outcome.reason}))
        count = min(
            default_workers(experiments) if workers is None else check_integer("--workers", workers, at_least=1),
            len(waiting),
        )
        if count:
            _Pool(experiments, folder, waiting, outcomes, count, watch, keep_stale).run(say, deadline)
    finally:
        lock.release()
    return [outcomes.get(name, Outcome(name, format.INTERRUPTED, NO_TIME)) for name in experiments]


def default_workers(experiments: Mapping[str, Experiment]) -> int:
    """Number of workers: one per GPU if runs use GPUs, otherwise one per core."""
    if any(str(e.execution.device).startswith("cuda") for e in experiments.values()):
        return max(torch.cuda.device_count(), 1)
    return usable_cores()


def _sorted_out(
    experiments: Mapping[str, Experiment],
    folder: Path,
    say: Callable[[str], None],
    keep_stale: bool,
    computed_alike: bool,
) -> tuple[dict[str, Outcome], dict[str, Path | None]]:
    """The runs that there is nothing to do for, and the others, each with the directory it goes on
    in."""
    found: dict[str, list[StoredRun]] = {name: [] for name in experiments}
    for run in scan(folder):
        if not isinstance(run, StoredRun):
            say(f"not looked at: {run.reason}")
        elif run.name in experiments and (not computed_alike or is_computed_alike(run, experiments[run.name])):
            found[run.name].insert(0, run)
    outcomes: dict[str, Outcome] = {}
    waiting: dict[str, Path | None] = {}
    for name, experiment in experiments.items():
        there, told = _there(found[name], experiment, keep_stale)
        for line in told:
            say(f"{name}: {line}")
        if there is not None and there.status == format.DONE and not extensions(there.config, experiment.to_table()):
            outcomes[name] = Outcome(name, format.DONE, path=there.path, was_done=True)
        elif there is not None and there.status == format.RUNNING:
            outcomes[name] = Outcome(name, format.RUNNING, "another process is at it", there.path)
        else:
            waiting[name] = None if there is None else there.path
    return outcomes, waiting


def _there(runs: Sequence[StoredRun], experiment: Experiment, keep_stale: bool) -> tuple[StoredRun | None, list[str]]:
    """Which of the runs of a name, the newest first, is what its experiment would compute now, or
    goes on to be; and what the user should know about that."""
    # such as for lack of memory, of which there may be more on another device
    failed = [run for run in runs if run.status == format.FAILED and not is_computed_alike(run, experiment)]
    runs = [run for run in runs if run not in failed]
    changed = {run.id: changes_since(run, experiment) for run in runs}
    current = [run for run in runs if not changed[run.id]]
    chosen = next((run for run in current if run.status == format.DONE), current[0] if current else None)
    going_on = next((run for run in runs if run.status == format.RUNNING), None)
    if chosen is not None and (chosen.status == format.DONE or going_on is None):
        return chosen, _other_execution(chosen, experiment)
    if going_on is not None:
        return going_on, []
    longer = next((run for run in runs if _goes_further(run, experiment)), None)
    if longer is not None:
        return longer, [f"goes on: {each}" for each in extensions(longer.config, experiment.to_table())]
    if not runs:
        return None, ["failed on another device, engine or precision; run again"] if failed else []
    if keep_stale:
        same = [run for run in runs if not other_settings(run.config, experiment.to_table())]
        kept = next((run for run in same if run.status == format.DONE), same[0] if same else None)
        if kept is not None:
            return kept, [f"{shorten(changed[kept.id])} since; kept all the same"]
    return None, [f"{shorten(changed[runs[0].id])} since; run again"]


def _goes_further(run: StoredRun, experiment: Experiment) -> bool:
    """Whether a run becomes that of an experiment by more rounds, and has something to go on
    from."""
    before, table = run.config.get("evaluation", {}), experiment.to_table()
    if before.get("stop_when") != table["evaluation"]["stop_when"] or run.round > experiment.rounds:
        return False
    has_state = run.status != format.DONE or any((run.path / format.CHECKPOINTS).glob("*"))
    return has_state and changes_since(run, experiment) == extensions(run.config, table)


def is_computed_alike(run: StoredRun, experiment: Experiment) -> bool:
    """Whether a stored run was computed where and how exactly an experiment asks for."""
    defaults, asked = Execution().__dict__, experiment.execution.__dict__
    return {**defaults, **run.config.get("execution", {})} == {**defaults, **asked}


def _other_execution(run: StoredRun, experiment: Experiment) -> list[str]:
    """A precision that was asked for and is not that of the run."""
    asked = experiment.execution.precision
    was = run.config.get("execution", {}).get("precision", asked)
    return [] if was == asked else [f"was computed in {was}, and is not again in {asked}"]


class _Pool:
    def __init__(
        self,
        experiments: Mapping[str, Experiment],
        folder: Path,
        waiting: Mapping[str, Path | None],
        outcomes: dict[str, Outcome],
        count: int,
        watch: Watch,
        force: bool,
    ):
        self.experiments, self.folder, self.outcomes, self.watch = experiments, folder, outcomes, watch
        self.force = force
        """Whether a run goes on also where something of it was changed."""
        self.waiting = deque(waiting.items())
        # several at a time would fight over the cores with more than one thread each
        self.threads = 1 if count > 1 else 0
        self.selector = selectors.DefaultSelector()
        self.workers: list[Worker] = []
        self.count = count
        self.advanced = False
        """Whether any run did a round or ended."""

    def run(self, say: Callable[[str], None], deadline: float | None) -> None:
        asked, late = 0, False
        try:
            with InterruptHandler(say) as stop:
                for number in range(self.count):
                    self._start(number)
                while any(worker.name for worker in self.workers):
                    for key, _ in self.selector.select(timeout=0.2):
                        self._hear(key.data, stopping=bool(stop.signal) or late)
                    is_late = deadline is not None and self.advanced and time.monotonic() > deadline
                    if (stop.signal or is_late) and not (asked or late):
                        self.waiting.clear()
                        for worker in self.workers:
                            worker.ask_to_stop()
                    asked, late = stop.signal, late or is_late
        except Interrupted as second:
            asked = second.number
            for worker in self.workers:
                worker.ask_to_stop()
        finally:
            for worker in self.workers:
                worker.close()
            self.selector.close()
        if asked:
            done = sum(outcome.status == format.DONE for outcome in self.outcomes.values())
            raise Interrupted(
                asked, f"interrupted; {done} of {len(self.experiments)} runs are done, and the same command goes on"
            )

    def _start(self, number: int) -> None:
        worker = Worker.start(self.threads, number)
        self.workers.append(worker)
        self.selector.register(worker.said, selectors.EVENT_READ, worker)
        self._next(worker)

    def _next(self, worker: Worker) -> None:
        worker.name, worker.path = "", None
        if self.waiting:
            name, resume = self.waiting.popleft()
            worker.give(name, self.experiments[name], self.folder, resume, self.force)

    def _hear(self, worker: Worker, stopping: bool) -> None:
        answers = worker.answers()
        if answers is None:
            self._lost(worker, stopping)
            return
        for answer in answers:
            kind = answer.pop("event")
            if "path" in answer:
                worker.path = Path(answer["path"]) if answer["path"] else None
            self.advanced |= kind in ("round", "ended")
            if kind != "ready":
                self.watch(Event(worker.name, kind, answer))
            if kind == "ended":
                self.outcomes[worker.name] = Outcome(worker.name, answer["status"], answer["reason"], worker.path)
                self._next(worker)

    def _lost(self, worker: Worker, stopping: bool) -> None:
        """A worker is gone: killed, out of memory, or told to stop before it had begun."""
        self.selector.unregister(worker.said)
        self.workers.remove(worker)
        if worker.name:
            status = format.INTERRUPTED if stopping else format.FAILED
            reason = "it was stopped" if stopping else worker.last_words()
            self.outcomes[worker.name] = Outcome(worker.name, status, reason, worker.path)
            self.watch(Event(worker.name, "ended", {"status": status, "reason": reason}))
        worker.close()
        self.advanced = True
        if self.waiting:
            self._start(worker.number)
