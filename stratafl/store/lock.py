"""One writer per run directory.

The lock is the kernel's (flock), so it ends with the process that holds it, however that ends; the number in the file
only says whom to look for.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import time
from pathlib import Path

from stratafl.errors import InvalidInput
from stratafl.store.files import unwritable
from stratafl.store.layout import LOCK

PATIENCE = 1.0
"""Seconds: somebody who only looks whether a run is alive holds the lock for a moment."""


class Lock:
    def __init__(self, folder: Path):
        path = folder / LOCK
        try:
            self._handle = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o644)
        except OSError as problem:
            raise unwritable(path, problem) from None
        give_up = time.monotonic() + PATIENCE
        while not _taken(self._handle, fcntl.LOCK_EX):
            if time.monotonic() > give_up:
                pid = os.read(self._handle, 20).decode(errors="replace").strip() or "unknown"
                os.close(self._handle)
                raise InvalidInput("run folder", folder, f"process {pid} is writing it")
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
        """In a copy of the process that holds it: the lock stays with the original alone."""
        os.close(self._handle)


def is_held(folder: Path) -> bool:
    """Whether a living process writes this run."""
    try:
        handle = os.open(folder / LOCK, os.O_RDONLY | os.O_NOFOLLOW)
    except OSError:
        return False
    try:
        return not _taken(handle, fcntl.LOCK_SH)
    finally:
        os.close(handle)


def _taken(handle: int, how: int) -> bool:
    try:
        fcntl.flock(handle, how | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True
