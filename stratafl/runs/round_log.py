"""rounds.jsonl, written: a line per round. A checkpoint does not repeat the lines, it knows them
again: by how many bytes they are, and by their digest."""

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
    """The first lines of the file, to be known again."""

    size: int
    sha256: str


class RoundLog:
    """Open to append. Only the process that holds the run's lock may write."""

    def __init__(self, folder: Path, history: Iterable[RoundResult] = ()):
        """Begin with these; whatever else is there is dropped."""
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

    def mark(self) -> LogDigest:
        """All lines so far; they are on the disk when this returns."""
        try:
            os.fsync(self._file.fileno())
        except OSError as problem:
            raise files.cannot_write(self.path, problem) from None
        return LogDigest(self._size, self._digest.hexdigest())

    def close(self) -> None:
        self._file.close()


def read_verified(folder: Path, mark: LogDigest) -> list[dict[str, Any]]:
    """The records that were marked, or the complaint where they are not what they were."""
    path = folder / format.ROUNDS
    text = files.read_bytes(path)[: mark.size]
    if (len(text), hashlib.sha256(text).hexdigest()) != mark:
        raise files.cannot_read(path, "its lines are no longer those that the checkpoint was written after")
    return [files.parse_json(path, line) for line in text.splitlines()]


def _line(record: RoundResult) -> bytes:
    return json.dumps(dataclasses.asdict(record)).encode() + b"\n"
