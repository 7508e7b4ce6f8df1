"""Executors of a sweep's runs: processes of this machine, jobs of SLURM, actors of Ray.

An executor starts a task and returns a job that is asked whether it has ended. How far a run is, is
read from its folder, the same for all of them.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import shlex
import shutil
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

from stratafl.base.errors import InvalidInput, MissingExtra, first_line_of
from stratafl.runs import format
from stratafl.sweeps.task import RunTask

ENDED_BY_SIGTERM = 143


@runtime_checkable
class Job(Protocol):
    """A task that was started."""

    def exit_code(self) -> int | None:
        """Exit code of its process, or the negative number of the signal that ended it; None while
        it waits or runs."""

    def stop(self) -> None:
        """Ask for a checkpoint and an orderly end; a second time, for an end at once."""


@runtime_checkable
class Executor(Protocol):
    """Starts the runs of a sweep, each in one of its slots."""

    slots: int
    """Largest number of jobs at a time."""

    def submit(self, task: RunTask, slot: int) -> Job:
        """Start a task. slot: a number below `slots` that no other job has at that time."""


def python_path() -> str:
    """Where this program imports from, for PYTHONPATH of another process."""
    return os.pathsep.join(path or os.getcwd() for path in sys.path)


# -- this machine ----------------------------------------------------------------------------------


class LocalExecutor:
    """Processes of this machine, one for each run; what one of them does stops no other."""

    def __init__(self, slots: int, threads: int | None = None, gpus: Sequence[str] | None = None):
        """threads: of each process; unless given one where there are several slots, and otherwise
        torch's own number. gpus: those that the slots use in turn; unless given all visible ones,
        where the device is "cuda"."""
        self.slots = slots
        self.threads = (1 if slots > 1 else 0) if threads is None else threads
        self._gpus = gpus
        self._server: _Server | None = None

    def submit(self, task: RunTask, slot: int) -> LocalJob:
        if self._server is None or self._server.has_ended:
            self._server = _Server()
        return LocalJob(self._server, self._server.start(task, self.threads, self._environment(task, slot)))

    def _environment(self, task: RunTask, slot: int) -> dict[str, str]:
        """Environment of a slot's processes: one GPU, unless a config has another device."""
        gpus = self._gpus
        if gpus is None:
            gpus = _visible_gpus() if str(task.config["execution"]["device"]) == "cuda" else ()
        return {"CUDA_VISIBLE_DEVICES": gpus[slot % len(gpus)]} if gpus else {}

    def close(self) -> None:
        """End the server; jobs that are left are stopped, and killed if they do not end."""
        if self._server is not None:
            self._server.close()
            self._server = None


class LocalJob:
    """Process that the server forked."""

    def __init__(self, server: _Server, number: int):
        self.server, self.number = server, number

    def exit_code(self) -> int | None:
        self.server.listen()
        return self.server.codes.get(self.number)

    def stop(self) -> None:
        self.server.send(stop=self.number)


class _Server:
    """The process of `stratafl.sweeps.server`, seen from the sweep."""

    def __init__(self) -> None:
        self.codes: dict[int, int] = {}
        self.pids: dict[int, int] = {}
        self.has_ended = False
        self._count, self._heard = 0, bytearray()
        self._process = subprocess.Popen(
            [sys.executable, "-m", "stratafl.sweeps"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env={**os.environ, "PYTHONPATH": python_path()},
            bufsize=0,
        )
        assert self._process.stdin is not None and self._process.stdout is not None
        self._requests, self._answers = self._process.stdin, self._process.stdout
        os.set_blocking(self._answers.fileno(), False)

    def start(self, task: RunTask, threads: int, environment: dict[str, str]) -> int:
        self._count += 1
        where = {"file": str(task.file.absolute()), "log": str(task.log.absolute()), "folder": os.getcwd()}
        self.send(job=self._count, threads=threads, environment=environment, **where)
        return self._count

    def send(self, **request: Any) -> None:
        # a server that died is noticed by the end of its answers
        with contextlib.suppress(OSError, ValueError):
            self._requests.write((json.dumps(request) + "\n").encode())

    def listen(self) -> None:
        """Take note of the jobs that have ended, all of them where the server has."""
        while not self.has_ended:
            received = self._answers.read(1 << 16)
            if received is None:
                return
            self._heard += received
            *lines, rest = self._heard.split(b"\n")
            self._heard = bytearray(rest)
            for answer in map(json.loads, lines):
                (self.codes if "code" in answer else self.pids)[answer["job"]] = answer.get("code", answer.get("pid"))
            if not received:
                self._lost()

    def _lost(self) -> None:
        self.has_ended = True
        self._requests.close()
        self._answers.close()
        for job in range(1, self._count + 1):
            if job not in self.codes and job in self.pids:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(self.pids[job], ENDED_BY_SIGTERM - 128)
            self.codes.setdefault(job, self._process.wait())

    def close(self) -> None:
        if not self.has_ended:
            self._requests.close()
            self._process.wait()
            self.listen()


def _visible_gpus() -> list[str]:
    import torch

    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is not None:
        return [name.strip() for name in visible.split(",") if name.strip()]
    return [str(number) for number in range(torch.cuda.device_count())]


# -- SLURM -----------------------------------------------------------------------------------------

ENDED = {
    *("BOOT_FAIL", "CANCELLED", "COMPLETED", "DEADLINE", "FAILED", "NODE_FAIL", "OUT_OF_MEMORY"),
    *("PREEMPTED", "REVOKED", "TIMEOUT"),
}
"""States of SLURM in which a job has ended; in all others it waits, runs or is queued again."""


class SlurmExecutor:
    """Jobs of SLURM, whose nodes share the folder of the runs.

    A job that is preempted is queued again by SLURM, and one that reaches its time limit by the
    sweep; either goes on to the same bits. What `sbatch` should ask for is set as always, by
    `SBATCH_PARTITION`, `SBATCH_TIMELIMIT` and the like.
    """

    file_lag_s = 60.0
    """Seconds after which this machine sees a file of another one."""

    def __init__(self, slots: int = 1000, options: Sequence[str] = (), poll_s: float = 5.0):
        """slots: largest number of jobs in the queue. options: for `sbatch`, such as "--gpus=1".
        poll_s: seconds between two questions to SLURM."""
        if shutil.which("sbatch") is None:
            raise InvalidInput("--executor", "slurm", "needs a machine that has SLURM's command sbatch")
        self.slots, self.options, self.poll_s = slots, tuple(options), poll_s
        self._states: dict[str, str] = {}
        self._ids: list[str] = []
        self._asked = float("-inf")

    def submit(self, task: RunTask, slot: int) -> SlurmJob:
        return SlurmJob(self, task, self._adopted(task) or self.queue(task))

    def queue(self, task: RunTask) -> str:
        """Queue a task; returns the id of its job."""
        described = ["--parsable", "--requeue", "--signal=B:TERM@120", "--open-mode=append"]
        described += [f"--job-name={task.name}", f"--output={task.log}", *self.options]
        # exec, since the signal goes to the shell alone
        done = _slurm("sbatch", *described, "--wrap", f"exec {shlex.join(task.command)}")
        if done.returncode != 0:
            raise InvalidInput("--executor", "slurm", f"sbatch failed: {_last_line(done)}")
        id = done.stdout.strip().partition(";")[0]
        task.file.with_suffix(".slurm").write_text(f"{id}\n")
        self._ids.append(id)
        return id

    def _adopted(self, task: RunTask) -> str | None:
        """Job that a sweep whose terminal was lost has queued for the same task."""
        try:
            id = task.file.with_suffix(".slurm").read_text().strip()
        except OSError:
            return None
        self._ids.append(id)
        self._asked = float("-inf")
        return id if self.state(id) not in ENDED else None

    def state(self, id: str) -> str:
        """State of a job, as SLURM names it."""
        if time.monotonic() - self._asked >= self.poll_s:
            self._asked = time.monotonic()
            done = _slurm("squeue", "--noheader", "--format=%i %T", f"--jobs={','.join(self._ids)}")
            if done.returncode == 0 or "invalid job id" in done.stderr.lower():
                listed = dict(line.split()[:2] for line in done.stdout.splitlines() if len(line.split()) > 1)
                # those that are not listed ended a while ago
                self._states = {known: listed.get(known, "COMPLETED") for known in self._ids}
        return self._states.get(id, "PENDING")

    def forget(self, id: str) -> None:
        """Ask no more about a job."""
        self._ids.remove(id)


class SlurmJob:
    """Job of SLURM, or several one after another, that executes a task."""

    def __init__(self, executor: SlurmExecutor, task: RunTask, id: str):
        self.executor, self.task, self.id = executor, task, id
        self._stops = 0
        self._progress = task.progress()

    def exit_code(self) -> int | None:
        if self.executor.state(self.id) not in ENDED:
            return None
        code = self._code()
        if code is None:
            return None
        self.executor.forget(self.id)
        progress = self.task.progress()
        if code in (ENDED_BY_SIGTERM, -15) and not self._stops and progress > self._progress:
            # its time was over: it goes on in another job
            self._progress, self.id = progress, self.executor.queue(self.task)
            return None
        self.task.file.with_suffix(".slurm").unlink(missing_ok=True)
        return code

    def _code(self) -> int | None:
        """Exit code by SLURM's accounting; where there is none, by what the run's folder says."""
        done = _slurm(
            "sacct", "--noheader", "--parsable2", "--allocations", "--format=State,ExitCode", "--jobs", self.id
        )
        fields = _last_line(done).split("|")
        if done.returncode != 0 or len(fields) != 2:
            return 0 if self.task.status().get("status") == format.DONE else 1
        state = fields[0].split(" ")[0]
        code, _, number = fields[1].partition(":")
        if state not in ENDED:
            return None  # the accounting is behind
        if state in ("NODE_FAIL", "PREEMPTED", "TIMEOUT"):
            return ENDED_BY_SIGTERM
        return int(code) or -int(number or 0) or (0 if state == "COMPLETED" else 1)

    def stop(self) -> None:
        self._stops += 1
        if self._stops > 1:
            _slurm("scancel", self.id)
        else:
            _slurm("scancel", "--state=PENDING", self.id)
            _slurm("scancel", "--batch", "--signal=TERM", self.id)


def _slurm(*command: str) -> subprocess.CompletedProcess[str]:
    try:
        environment = {**os.environ, "PYTHONPATH": python_path()}  # a job gets that of its sbatch
        return subprocess.run(command, capture_output=True, text=True, check=False, env=environment)
    except OSError as problem:
        raise InvalidInput("--executor", "slurm", f"{command[0]} cannot be started: {first_line_of(problem)}") from None


def _last_line(done: subprocess.CompletedProcess[str]) -> str:
    return (done.stdout.strip() or done.stderr.strip() or "it printed nothing").splitlines()[-1]


# -- Ray -------------------------------------------------------------------------------------------


class RayExecutor:
    """Processes on the machines of a Ray cluster, which share the folder of the runs."""

    file_lag_s = 60.0
    """Seconds after which this machine sees a file of another one."""

    def __init__(self, slots: int = 1000, cpus: float = 1, gpus: float = 0, address: str | None = None):
        """slots: largest number of runs that Ray is given at a time. cpus, gpus: of each run.
        address: of the cluster; unless given that of RAY_ADDRESS, or a cluster on this machine."""
        try:
            self._ray = importlib.import_module("ray")
        except ImportError:
            raise MissingExtra("--executor ray", "ray", "ray") from None
        self.slots = slots
        self._starts = not self._ray.is_initialized()
        if self._starts:
            self._ray.init(address, log_to_driver=False, configure_logging=False, include_dashboard=False)
        # two methods at a time: one waits for the process, and the other stops it
        self._actor = self._ray.remote(num_cpus=cpus, num_gpus=gpus, max_concurrency=2)(_RayProcess)

    def submit(self, task: RunTask, slot: int) -> RayJob:
        environment = {"PYTHONPATH": python_path(), "OMP_NUM_THREADS": "1"}
        return RayJob(self._ray, self._actor.remote(task.command, str(task.log), os.getcwd(), environment))

    def close(self) -> None:
        """Leave the cluster, and end one that was started for this executor."""
        if self._starts:
            self._ray.shutdown()


class _RayProcess:
    """Actor that runs a task in a process, whose main thread gets the signals."""

    def __init__(self, command: list[str], log: str, folder: str, environment: dict[str, str]):
        with Path(log).open("ab") as file:
            self.process = subprocess.Popen(
                command,
                cwd=folder,
                env={**os.environ, **environment},
                stdout=file,
                stderr=file,
                stdin=subprocess.DEVNULL,
            )

    def wait(self) -> int:
        return self.process.wait()

    def stop(self) -> None:
        self.process.terminate()


class RayJob:
    """Actor of Ray that executes a task."""

    def __init__(self, ray: Any, actor: Any):
        self._ray, self._actor = ray, actor
        self._ended = actor.wait.remote()

    def exit_code(self) -> int | None:
        ready, _ = self._ray.wait([self._ended], timeout=0)
        if not ready:
            return None
        try:
            code = int(self._ray.get(self._ended))
        except self._ray.exceptions.RayError:
            code = 1  # its worker or machine is lost
        self._ray.kill(self._actor)
        return code

    def stop(self) -> None:
        self._actor.stop.remote()
