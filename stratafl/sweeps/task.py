"""One run of a sweep as a command, `python -m stratafl.sweeps FILE`, for whatever executes it.

The file names the run's folder. Where there is a run already it goes on from its last checkpoint,
so the same command may be started again after its process was killed, on another machine as well.
"""

from __future__ import annotations

import contextlib
import json
import sys
import traceback
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from stratafl.base.errors import InvalidInput, MissingExtra, error_message
from stratafl.base.files import read_json, remove_tree, write_json
from stratafl.base.signals import Interrupted
from stratafl.base.tracebacks import format_frames
from stratafl.experiment.experiment import Experiment
from stratafl.runs import format
from stratafl.runs.provenance import extensions

FAILED = 2
"""Exit code of a run that ended with an error, whose line is the last one in its log."""
JOBS = "jobs"
"""Folder beside the runs of a sweep with the tasks that are not done, and their logs."""


@dataclass(frozen=True)
class RunTask:
    """A run to start in a folder, or to go on with where there is one."""

    name: str
    config: Mapping[str, Any]
    """Experiment as plain tables."""
    path: Path
    """Folder of the run, NAME-ID, in that of the sweep."""
    force: bool = False
    """Whether a run goes on also where the user's files were changed."""

    @staticmethod
    def create(name: str, experiment: Experiment, folder: Path, resume: Path | None, force: bool) -> RunTask:
        """Describe a run in a file for the process that will execute it.

        A task of the same name and config that has not ended keeps its folder: its job may still be
        in the queue of a cluster.
        """
        config, path = experiment.to_table(), resume
        before = _read_if_readable(folder / JOBS / f"{name}.json")
        if before is not None and path is None and before.config == config and not before.path.exists():
            path = before.path
        task = RunTask(name, config, path or folder.absolute() / f"{name}-{format.new_id()}", force)
        task.file.parent.mkdir(exist_ok=True)
        if before is None or before.path != task.path:
            remove_tree(task.log)
        write_json(task.file, {**asdict(task), "path": str(task.path.absolute())}, sync=False)
        return task

    @staticmethod
    def read(file: Path) -> RunTask:
        values = json.loads(file.read_text())
        return RunTask(**{**values, "path": Path(values["path"])})

    @property
    def file(self) -> Path:
        """File that describes the task."""
        return self.path.parent / JOBS / f"{self.name}.json"

    @property
    def log(self) -> Path:
        """File with everything that the process prints."""
        return self.file.with_suffix(".log")

    @property
    def command(self) -> list[str]:
        """Command that executes the task, here or where the same folders can be read."""
        return [sys.executable, "-m", "stratafl.sweeps", str(self.file.absolute())]

    def status(self) -> dict[str, Any]:
        """Contents of the run's status.json; empty where there is none yet."""
        try:
            return dict(read_json(self.path / format.STATUS))
        except (InvalidInput, TypeError, ValueError):
            return {}

    def progress(self) -> tuple[int, int]:
        """Completed rounds, and synchronisations of clients in the next one."""
        status = self.status()
        return status.get("round", 0), status.get("meetings", 0)

    def last_line(self) -> str:
        """Last line that the process printed."""
        try:
            lines = self.log.read_text(errors="replace").strip().splitlines()
        except OSError:
            return ""
        return lines[-1] if lines else ""

    def discard(self) -> None:
        """Remove the files of a task that is done, but not what its run printed."""
        remove_tree(self.file)
        if not self.last_line():
            remove_tree(self.log)
        with contextlib.suppress(OSError):  # others are left
            self.file.parent.rmdir()


def _read_if_readable(file: Path) -> RunTask | None:
    try:
        return RunTask.read(file)
    except (OSError, ValueError, TypeError, KeyError):
        return None


def train(task: RunTask) -> None:
    """Start the run of a task, or go on with the one that is in its folder."""
    from stratafl.runs.resume import is_done
    from stratafl.runs.session import RunSession

    def say(text: str) -> None:
        print(text, flush=True)

    experiment = Experiment.from_table(task.config).one_of_many()
    if not (task.path / format.RUN).exists():
        id = task.path.name.removeprefix(f"{task.name}-")
        session = RunSession.start(experiment, task.name, task.path.parent, id=id)
    elif is_done(task.path) and not extensions(format.read_description(task.path)["config"], task.config):
        return  # it ended right before it was started again
    else:
        session = RunSession.resume(task.path, experiment, say=say, force=task.force)
    session.run(say=say)


def main(file: Path) -> int:
    """Execute the task of a file; returns the exit code."""
    try:
        train(RunTask.read(file))
    except Interrupted as stopped:
        print(stopped)
        return stopped.exit_code
    except (InvalidInput, MissingExtra) as problem:
        print(*filter(None, [format_frames(getattr(problem, "frames", ())), f"error: {problem}"]), sep="\n")
        return getattr(problem, "exit_code", FAILED)
    except Exception as problem:
        traceback.print_exc(file=sys.stdout)
        print(f"error: {error_message(problem)}")
        return FAILED
    return 0
