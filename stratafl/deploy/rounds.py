"""rounds.jsonl of a deployed run, in which every round is once.

The root's state holds the line of its last round. So whenever the root dies, the file holds at least the lines before
that one, and at its next start that one is added if it is not there.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from stratafl.errors import InvalidInput
from stratafl.store import files, layout


class Rounds:
    """The root's alone to write."""

    def __init__(self, folder: Path, last: str):
        """Bring the file to where the state is; `last` is the line of the last round, empty before the first."""
        self.path = folder / layout.ROUNDS
        before = files.read_bytes(self.path) if self.path.exists() else b""
        lines = []
        if last:
            lines = [
                line for line in _whole_lines(before) if _round(self.path, line) < _round(self.path, last.encode())
            ]
            lines.append(last.encode())
        text = b"".join(line + b"\n" for line in lines)
        if text != before:
            with files.writing(self.path) as file:
                file.write(text)

    def add(self, line: str) -> None:
        """On the disk when this returns: the state of the next round will not hold it."""
        with files.open_to_append(self.path) as file:
            files.append(file, self.path, line.encode() + b"\n")
            try:
                os.fsync(file.fileno())
            except OSError as problem:
                raise files.unwritable(self.path, problem) from None


def read_lines(folder: Path) -> list[str]:
    """Those that are wholly written."""
    path = folder / layout.ROUNDS
    return [line.decode(errors="replace") for line in _whole_lines(files.read_bytes(path))] if path.exists() else []


def _whole_lines(text: bytes) -> list[bytes]:
    return text.split(b"\n")[:-1]


def _round(path: Path, line: bytes) -> float:
    """Of a line; one that is no record of ours comes after all others."""
    try:
        found: Any = files.parse_json(path, line)
    except InvalidInput:
        return float("inf")
    number = found.get("round") if isinstance(found, dict) else None
    return number if isinstance(number, int) else float("inf")
