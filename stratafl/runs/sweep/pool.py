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
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import IO, Any

import torch

from stratafl.base.environment import usable_cores
from stratafl.base.errors import InvalidInput, integer
from stratafl.base.files import check_writable
from stratafl.base.signals import Interrupted, Stop
from stratafl.config.schema import Config
from stratafl.runs import layout
from stratafl.runs.read import StoredRun, scan

PATIENCE = 20.0
"""Seconds a worker that was told to stop at once may take for it."""
NO_TIME = "no time was left to begin it"


@dataclass(frozen=True)
class Outcome:
    """What became of one run."""

    name: str
    status: str
    reason: str = ""
    path: Path | None = None
    """The run's directory; None if it failed before it had one."""
    was_done: bool = False
    """Whether it was there before."""


@dataclass(frozen=True)
class Event:
    """Something to show: a run began, did a round, said something or ended."""

    name: str
    kind: str
    values: Mapping[str, Any]


Watch = Callable[[Event], None]


@dataclass
class Worker:
    """A process that does one run of a sweep after another."""

    process: subprocess.Popen
    number: int
    """Which GPU it uses, counted round; whoever takes its place gets the same."""
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

    def give(self, name: str, config: Config, folder: Path, resume: Path | None) -> None:
        self.name, self.path = name, resume
        task = {"name": name, "config": config.as_dict(), "folder": str(folder)}
        line = json.dumps({**task, "resume": None if resume is None else str(resume)}) + "\n"
        with contextlib.suppress(OSError):  # one that died is noticed by the end of its answers
            self.tasks.write(line.encode())

    def answers(self) -> Iterator[dict[str, Any]] | None:
        """What it said since the last time; None when it will say no more."""
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
    configs: Mapping[str, Config],
    folder: Path | str,
    workers: int | None = None,
    watch: Watch = lambda event: None,
    say: Callable[[str], None] = lambda text: None,
    seconds: float | None = None,
) -> list[Outcome]:
    """Run every config in a process of a few, each in its own directory in the folder, and say what
    became of each.

    A run of the same name and config that is there already is skipped if it is done and goes on if
    it is not. One that fails does not stop the others. A signal stops all of them after their group
    rounds in progress, a second one at once; either way `Interrupted` is raised, and the same call
    continues. When so many `seconds` have passed, what goes on is stopped after its group round in
    progress and no more is begun: the outcomes say so, and the same call continues. One round is
    always done, so that calls with however little time come to an end.
    """
    deadline = None if seconds is None else time.monotonic() + seconds
    folder = Path(folder)
    for name in configs:
        layout.check_name(name)
    check_writable("--runs", folder)
    outcomes, waiting = _sorted_out(configs, folder, say)
    for outcome in outcomes.values():
        watch(Event(outcome.name, "ended", {"status": outcome.status, "reason": outcome.reason}))
    count = min(
        default_workers(configs) if workers is None else integer("--workers", workers, at_least=1), len(waiting)
    )
    if count:
        _Pool(configs, folder, waiting, outcomes, count, watch).run(say, deadline)
    return [outcomes.get(name, Outcome(name, layout.INTERRUPTED, NO_TIME)) for name in configs]


def default_workers(configs: Mapping[str, Config]) -> int:
    """One for each GPU where runs use them, otherwise one for each core."""
    if any(config.run.device.startswith("cuda") for config in configs.values()):
        return max(torch.cuda.device_count(), 1)
    return usable_cores()


def _sorted_out(
    configs: Mapping[str, Config], folder: Path, say: Callable[[str], None]
) -> tuple[dict[str, Outcome], dict[str, Path | None]]:
    """The runs that there is nothing to do for, and the others, each with the directory it goes on
    in."""
    found: dict[str, StoredRun] = {}
    for run in scan(folder) if folder.is_dir() else ():
        if not isinstance(run, StoredRun):
            say(f"not looked at: {run.reason}")
        elif run.name in configs and _same(run.config, configs[run.name]):
            before = found.get(run.name)
            if before is None or before.status != layout.DONE:
                found[run.name] = run
    outcomes: dict[str, Outcome] = {}
    waiting: dict[str, Path | None] = {}
    for name in configs:
        there = found.get(name)
        if there is not None and there.status == layout.DONE:
            outcomes[name] = Outcome(name, layout.DONE, path=there.path, was_done=True)
        elif there is not None and there.status == layout.RUNNING:
            outcomes[name] = Outcome(name, layout.RUNNING, "another process is at it", there.path)
        else:
            waiting[name] = None if there is None else there.path
    return outcomes, waiting


def meaning(config: Config) -> Any:
    """What a config says of its run, as plain data; how the run is kept does not matter."""
    kept = replace(config.run, checkpoint_every=0, keep_state=False)
    return json.loads(json.dumps(replace(config, run=kept).as_dict()))


def _same(stored: Mapping[str, Any], config: Config) -> bool:
    """Whether both mean the same run."""
    try:
        return bool(meaning(Config.of(stored)) == meaning(config))
    except InvalidInput:
        return False


class _Pool:
    def __init__(
        self,
        configs: Mapping[str, Config],
        folder: Path,
        waiting: Mapping[str, Path | None],
        outcomes: dict[str, Outcome],
        count: int,
        watch: Watch,
    ):
        self.configs, self.folder, self.outcomes, self.watch = configs, folder, outcomes, watch
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
            with Stop(say) as stop:
                for number in range(self.count):
                    self._start(number)
                while any(worker.name for worker in self.workers):
                    for key, _ in self.selector.select(timeout=0.2):
                        self._hear(key.data, stopping=bool(stop.asked) or late)
                    is_late = deadline is not None and self.advanced and time.monotonic() > deadline
                    if (stop.asked or is_late) and not (asked or late):
                        self.waiting.clear()
                        for worker in self.workers:
                            worker.ask_to_stop()
                    asked, late = stop.asked, late or is_late
        except Interrupted as second:
            asked = second.number
            for worker in self.workers:
                worker.ask_to_stop()
        finally:
            for worker in self.workers:
                worker.close()
            self.selector.close()
        if asked:
            done = sum(outcome.status == layout.DONE for outcome in self.outcomes.values())
            raise Interrupted(
                asked, f"interrupted; {done} of {len(self.configs)} runs are done, and the same command goes on"
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
            worker.give(name, self.configs[name], self.folder, resume)

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
            status = layout.INTERRUPTED if stopping else layout.FAILED
            reason = "it was stopped" if stopping else worker.last_words()
            self.outcomes[worker.name] = Outcome(worker.name, status, reason, worker.path)
            self.watch(Event(worker.name, "ended", {"status": status, "reason": reason}))
        worker.close()
        self.advanced = True
        if self.waiting:
            self._start(worker.number)
