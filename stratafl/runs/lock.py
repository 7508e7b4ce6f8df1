"""One writer per run directory.

The lock is the kernel's (flock), so it ends with the process that holds it, however that ends; the
number in the file only says whom to look for.
"""

from __future__ import annotations

import contextlib
import os
import stat
import sys
import time
from pathlib import Path

from stratafl.base.errors import InvalidInput
from stratafl.base.files import unreadable, unwritable
from stratafl.runs.layout import LOCK

PATIENCE = 1.0
"""Seconds: somebody who only looks whether a run is alive holds the lock for a moment."""


class Lock:
    """The right to write a run directory, which one process has at a time and loses when it
    ends."""

    def __init__(self, folder: Path, doing: str = "is writing it"):
        """doing: what the process does that has it, in words."""
        path = folder / LOCK
        try:
            self._handle = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK, 0o644)
        except OSError as problem:
            raise unwritable(path, problem) from None
        if not _is_plain(self._handle):
            os.close(self._handle)
            raise unreadable(path, "not a plain file")
        give_up = time.monotonic() + PATIENCE
        while not _taken(self._handle):
            if time.monotonic() > give_up:
                pid = os.read(self._handle, 20).decode(errors="replace").strip() or "unknown"
                os.close(self._handle)
                raise InvalidInput("run folder", folder, f"process {pid} {doing}")
            time.sleep(0.02)
        try:
            os.ftruncate(self._handle, 0)
            os.pwrite(self._handle, f"{os.getpid()}\n".encode(), 0)
        except OSError as problem:
            os.close(self._handle)
            raise unwritable(path, problem) from None

    def release(self) -> None:
        with contextlib.suppress(OSError):
            os.ftruncate(self._handle, 0)
        os.close(self._handle)

    def leave(self) -> None:
        """Let go of the lock in a copy of the process that holds it: it stays with the original
        alone."""
        os.close(self._handle)


def is_held(folder: Path) -> bool:
    """Whether a living process writes this run."""
    try:
        # a pipe in its place must not keep us waiting for somebody to write into it
        handle = os.open(folder / LOCK, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
    except OSError:
        return False
    try:
        return _is_plain(handle) and not _taken(handle, shared=True)
    finally:
        os.close(handle)


def _is_plain(handle: int) -> bool:
    return stat.S_ISREG(os.fstat(handle).st_mode)


def _taken(handle: int, shared: bool = False) -> bool:
    try:
        import fcntl
    except ImportError:
        allowed = "must be Linux or macOS, whose locks keep two processes from writing one run; on Windows use WSL"
        raise InvalidInput("system", sys.platform, allowed) from None
    try:
        fcntl.flock(handle, (fcntl.LOCK_SH if shared else fcntl.LOCK_EX) | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True
