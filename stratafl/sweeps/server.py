"""Process that has imported torch and forks a process for every run, which begins at once.

It is one of our own rather than one of `multiprocessing`, whose processes import the program that
started them, which a script without `if __name__ == "__main__"` does not survive.

It reads one JSON value per line: {"job": 3, "file": ..., "log": ..., "folder": ..., "threads": ...,
"environment": ...} starts a job, {"stop": 3} sends it SIGTERM. It answers {"job": 3, "pid": ...}
and {"job": 3, "code": ...}. When nobody is there to write to it any more, it stops all jobs and
ends.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import sys
import time
import traceback
from pathlib import Path
from typing import Any

import torch

# what a run imports only when it begins to train is imported before the first fork: the capture of
# a model's operations takes longer to import than torch
import torch._inductor

import stratafl.runs.session  # noqa: F401
from stratafl.sweeps import task

PATIENCE_S = 20.0
"""Seconds that jobs may take to write a checkpoint when their sweep has ended."""


class Server:
    """Jobs that are running, by number, and the pipes to the sweep."""

    def __init__(self, requests: int, answers: int):
        self.requests, self.answers = requests, answers
        self.pids: dict[int, int] = {}
        self.asked: set[int] = set()
        """Jobs that were asked to stop."""
        # the end of a process wakes the loop up
        self.wakes, self.wake = os.pipe()
        os.set_blocking(self.wake, False)
        signal.set_wakeup_fd(self.wake, warn_on_full_buffer=False)
        signal.signal(signal.SIGCHLD, lambda *_: None)

    def serve(self) -> None:
        """Start and stop jobs until the sweep has closed its end."""
        lines = bytearray()
        while True:
            ready, _, _ = select.select([self.requests, self.wakes], [], [])
            if self.wakes in ready:
                os.read(self.wakes, 1 << 16)
                self.report_ended()
            if self.requests in ready:
                received = os.read(self.requests, 1 << 16)
                if not received:
                    break
                *complete, rest = (lines + received).split(b"\n")
                lines = bytearray(rest)
                for line in complete:
                    self.handle(json.loads(line))
        self.end()

    def handle(self, request: dict[str, Any]) -> None:
        if "stop" not in request:
            self.start(request)
        elif request["stop"] in self.pids:
            self.asked.add(request["stop"])
            os.kill(self.pids[request["stop"]], signal.SIGTERM)

    def start(self, request: dict[str, Any]) -> None:
        # a stop that comes before the new process can obey it waits until it can
        signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGTERM])
        pid = os.fork()
        if pid == 0:
            try:
                code = self.run(request)
            except BaseException:
                traceback.print_exc(file=sys.stdout)
                code = 1
            finally:
                sys.stdout.flush()
                sys.stderr.flush()
                os._exit(code)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGTERM])
        self.pids[request["job"]] = pid
        self.answer(job=request["job"], pid=pid)

    def run(self, request: dict[str, Any]) -> int:
        """Execute a task in the process that was forked for it."""
        signal.set_wakeup_fd(-1)
        for number in (signal.SIGCHLD, signal.SIGTERM):
            signal.signal(number, signal.SIG_DFL)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGTERM])
        for handle in (self.wakes, self.wake, self.answers):
            os.close(handle)
        nothing, log = os.open(os.devnull, os.O_RDONLY), os.open(request["log"], os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        for place, handle in enumerate((nothing, log, log)):
            os.dup2(handle, place)
        os.chdir(request["folder"])
        os.environ.update(request["environment"])
        if request["threads"]:
            torch.set_num_threads(request["threads"])
        return task.main(Path(request["file"]))

    def report_ended(self) -> None:
        for job, pid in list(self.pids.items()):
            ended, status = os.waitpid(pid, os.WNOHANG)
            if ended:
                del self.pids[job]
                self.answer(job=job, code=os.waitstatus_to_exitcode(status))

    def answer(self, **values: int) -> None:
        with contextlib.suppress(OSError):  # the sweep is gone, which the next read notices
            os.write(self.answers, (json.dumps(values) + "\n").encode())

    def end(self) -> None:
        """Stop the jobs that are left, and kill those that do not end."""
        for job in set(self.pids) - self.asked:
            self.handle({"stop": job})
        give_up = time.monotonic() + PATIENCE_S
        while self.pids and time.monotonic() < give_up:
            select.select([self.wakes], [], [], 0.2)
            self.report_ended()
        for pid in self.pids.values():
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)


def serve() -> None:
    """Serve the sweep that started this process, over its standard input and output."""
    # these may reach every process of a terminal; the sweep decides what they mean, and its end
    # stops all jobs
    for number in (signal.SIGINT, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, lambda *_: None)
    answers = os.dup(1)
    os.dup2(2, 1)  # what is printed must not be taken for an answer
    Server(0, answers).serve()
