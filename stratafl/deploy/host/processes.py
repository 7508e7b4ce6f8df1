"""Processes that begin as a copy of this one: what was imported here, seconds of work, is not
imported again there."""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import sys
import time
from collections import deque
from collections.abc import Callable, Collection, Mapping
from pathlib import Path

from stratafl.deploy.notes import log

PRCTL = getattr(ctypes.CDLL(None), "prctl", None)
"""Linux's; elsewhere a process outlives one that was killed, and is ended by hand."""
END_WITH_PARENT = 1
ENDING = (signal.SIGTERM, signal.SIGINT)
PAUSE, LONGEST_PAUSE = 1.0, 15.0
"""Seconds before a process that ended is started again; twice as long each time, where it does not
live long."""
LONG = 10.0
"""Seconds: a process that lived as long has started well."""
MOST, WITHIN = 10, 600.0
"""How often a process may end within how many seconds; what ends more often than that will not
live."""


class Restarts:
    """When to start again what ended."""

    def __init__(self) -> None:
        self._pause = PAUSE / 2
        self._ends: deque[float] = deque(maxlen=MOST + 1)

    def after(self, age: float) -> float:
        """Seconds to wait now that it ended, so many seconds old."""
        self._pause = PAUSE if age > LONG else min(2 * self._pause, LONGEST_PAUSE)
        self._ends.append(time.monotonic())
        return self._pause

    @property
    def too_many(self) -> bool:
        return len(self._ends) > MOST and self._ends[-1] - self._ends[0] < WITHIN


class Forked:
    """A process in a session of its own, which ends with the one that started it, however that
    ends."""

    def __init__(
        self, work: Callable[[], object], output: Path, folder: Path, environment: Mapping[str, str] | None = None
    ):
        for stream in (sys.stdout, sys.stderr):
            stream.flush()
        parent = os.getpid()
        self.returncode: int | None = None
        self._began = time.monotonic()
        # until it has handlers of its own, a signal for the new process would meet this one's
        mask = signal.pthread_sigmask(signal.SIG_BLOCK, ENDING)
        try:
            self.pid = os.fork()
            if self.pid == 0:
                _live(work, parent, output, folder, environment or {}, mask)
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, mask)

    @property
    def age(self) -> float:
        """Seconds since it was started."""
        return time.monotonic() - self._began

    def poll(self) -> int | None:
        if self.returncode is None:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            if pid:
                self.returncode = os.waitstatus_to_exitcode(status)
        return self.returncode

    def wait(self, timeout: float | None = None) -> int | None:
        """How it ended; None if it had not in time."""
        until = None if timeout is None else time.monotonic() + timeout
        while self.poll() is None and (until is None or time.monotonic() < until):
            time.sleep(0.02)
        return self.returncode

    def signal(self, number: int) -> None:
        """Send a signal to the process and all that it started, which are in its session."""
        if self.poll() is None:
            try:
                os.killpg(self.pid, number)
            except ProcessLookupError:  # it has just been started, and has no session yet
                os.kill(self.pid, number)


def _live(
    work: Callable[[], object],
    parent: int,
    output: Path,
    folder: Path,
    environment: Mapping[str, str],
    mask: Collection[int],
) -> None:
    """The new process, from its first moment to its last."""
    code = 1
    try:
        os.setsid()
        if PRCTL is not None:
            PRCTL(END_WITH_PARENT, signal.SIGKILL)
        if os.getppid() != parent:
            os._exit(1)
        for number in ENDING:
            signal.signal(number, signal.SIG_DFL)
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        nothing = os.open(os.devnull, os.O_RDONLY)
        written = os.open(output, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        os.fchmod(written, 0o600)
        for to, source in ((0, nothing), (1, written), (2, written)):
            os.dup2(source, to)
        os.environ.update(environment)
        os.chdir(folder)
        work()
        code = 0
    except SystemExit as problem:
        code = problem.code if isinstance(problem.code, int) else int(problem.code is not None)
    except BaseException as problem:
        log.fail("", problem)
    finally:
        for stream in (sys.stdout, sys.stderr):
            with contextlib.suppress(Exception):
                stream.flush()
        os._exit(code)
