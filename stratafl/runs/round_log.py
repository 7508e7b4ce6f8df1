"""Append-only log of round records (rounds.jsonl), one line per round.

A checkpoint does not repeat the lines, but has their size and digest.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any, NamedTuple

from stratafl.base import files
from stratafl.metrics.records import RoundResult
from stratafl.runs import format


class LogDigest(NamedTuple):
    """Size and digest of the first lines of the log."""

    size: int
    sha256: str


class RoundLog:
    """Log that is open for appending. Only the process that holds the run's lock may write."""

    def __init__(self, folder: Path, history: Iterable[RoundResult] = ()):
        """Write these records; other lines of the file are dropped."""
        self.path = folder / format.ROUNDS
        text = b"".join(_line(record) for record in history)
        with files.atomic_write(self.path) as file:
            file.write(text)
        self._file = files.open_to_append(self.path)
        self._size, self._digest = len(text), hashlib.sha256(text)

    def add(self, record: RoundResult) -> None:
        line = _line(record)
        files.append(self._file, self.path, line)
        self._size += len(line)
        self._digest.update(line)

    def sync(self) -> LogDigest:
        """Flush all lines to the disk and return their digest."""
        try:
            os.fsync(self._file.fileno())
        except OSError as problem:
            raise files.cannot_write(self.path, problem) from None
        return LogDigest(self._size, self._digest.hexdigest())

    def close(self) -> None:
        self._file.close()


def read_verified(folder: Path, digest: LogDigest) -> list[dict[str, Any]]:
    """Read the records of a digest; raises if they have changed."""
    path = folder / format.ROUNDS
    text = files.read_bytes(path)[: digest.size]
    if (len(text), hashlib.sha256(text).hexdigest()) != digest:
        raise files.cannot_read(path, "its lines are no longer those that the checkpoint was written after")
    return [files.parse_json(path, line) for line in text.splitlines()]


def _line(record: RoundResult) -> bytes:
    return json.dumps(dataclasses.asdict(record)).encode() + b"\n"
