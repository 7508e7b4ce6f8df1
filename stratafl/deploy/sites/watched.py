"""Files that are looked at many times a second and change seldom: what has not changed is not read
again."""

from __future__ import annotations

import contextlib
import os
import stat
from pathlib import Path
from typing import Any

from stratafl.base import files
from stratafl.base.errors import InvalidInput


class WatchedTable:
    """A JSON file that others replace."""

    def __init__(self, path: Path):
        self._path = path
        self._mark: tuple[int, int, int] | None = None
        self._table: dict[str, Any] = {}

    def read(self) -> dict[str, Any]:
        """What is in it, empty where it cannot be read."""
        mark = self._look()
        if mark != self._mark:
            self._mark, self._table = mark, {}
            with contextlib.suppress(InvalidInput):
                found = files.read_json(self._path) if mark is not None else {}
                self._table = found if isinstance(found, dict) else {}
        return self._table

    def _look(self) -> tuple[int, int, int] | None:
        try:
            found = os.stat(self._path, follow_symlinks=False)
        except OSError:
            return None
        return found.st_ino, found.st_mtime_ns, found.st_size


class NewLines:
    """The lines that others add to a file, each once. One that was written anew goes on after as
    many lines as were there before, and one that was taken away begins anew."""

    def __init__(self, path: Path):
        self._path = path
        self._file, self._end, self._count = 0, 0, 0

    def take(self) -> list[str]:
        """The lines that are wholly written and were not taken yet."""
        try:
            handle = os.open(self._path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
        except FileNotFoundError:
            self._file, self._end, self._count = 0, 0, 0
            return []
        except OSError:
            return []
        try:
            found = os.fstat(handle)
            if not stat.S_ISREG(found.st_mode):
                return []
            is_anew = found.st_ino != self._file or found.st_size < self._end
            if is_anew:
                self._file, self._end = found.st_ino, 0
            text, newline, _ = os.pread(handle, found.st_size - self._end, self._end).rpartition(b"\n")
        finally:
            os.close(handle)
        self._end += len(text + newline)
        lines = text.decode(errors="replace").split("\n") if newline else []
        new = lines[self._count :] if is_anew else lines
        self._count = len(lines) if is_anew else self._count + len(lines)
        return new
