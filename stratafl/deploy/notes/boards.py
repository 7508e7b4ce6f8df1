"""What a site's processes let its supervisor know, in memory that they share: a full disk silences
nobody.

Each process has a board of its own, made before it is started: it writes, others of the site
read.
"""

from __future__ import annotations

import json
import mmap
import struct
import threading
import zlib
from typing import Any

HEAD = struct.Struct("<II")
"""Length and checksum of what follows: who reads while it is being written sees that."""
TRIES = 5


class Board:
    """One value of plain data; one process writes it."""

    def __init__(self, size: int = 1 << 16):
        self._memory, self._size = mmap.mmap(-1, size), size
        self._now: dict[str, Any] = {}
        self._one_at_a_time = threading.Lock()

    def put(self, **facts: Any) -> None:
        """Set some of its facts. What does not fit is left out, as nothing that matters is that
        long."""
        with self._one_at_a_time:
            self._now.update(facts)
            data = json.dumps(self._now, ensure_ascii=False).encode(errors="replace")
            if HEAD.size + len(data) <= self._size:
                self._memory[: HEAD.size + len(data)] = HEAD.pack(len(data), zlib.crc32(data)) + data

    def clear(self) -> None:
        """Forget everything, for a new process."""
        self._now = {}
        self.put()

    def read(self) -> dict[str, Any] | None:
        """What is on it; None before anything is, or where it is just being written."""
        for _ in range(TRIES):
            length, checksum = HEAD.unpack(self._memory[: HEAD.size])
            data = self._memory[HEAD.size : HEAD.size + length]
            if length and zlib.crc32(data) == checksum:
                found: dict[str, Any] = json.loads(data)
                return found
        return None


own = Board()
"""This process's own board; that of one which nobody supervises is read by nobody."""
heard = Board()
"""The SuperLink's, for the site's other processes: what came from the children."""


def use(mine: Board, from_children: Board) -> None:
    """Take these boards for this process's own; to be called when it starts."""
    global own, heard
    own, heard = mine, from_children
