"""A node's state on its own disk, under its site's name: written aside, synced and renamed.

STATE_FOLDER/SITE/state.safetensors   what the node must not lose, with a checksum behind it
STATE_FOLDER/SITE/lock                held by the process that writes it
STATE_FOLDER/SITE/status.json         what an operator sees
"""

from __future__ import annotations

import hashlib
import time
from pathlib import Path
from typing import Any

from stratafl.deploy.node import Kept
from stratafl.deploy.wire import decode, encode
from stratafl.errors import InvalidInput
from stratafl.store import files
from stratafl.store.lock import Lock

STATE, STATUS = "state.safetensors", "status.json"
DIGEST = 32


PATIENCE = 20.0
"""Seconds: the process before may still be ending."""


def _lock(folder: Path) -> Lock:
    until = time.monotonic() + PATIENCE
    while True:
        try:
            return Lock(folder)
        except InvalidInput:
            if time.monotonic() > until:
                raise


class Durable:
    """The state of one site in one run; only one process may have it."""

    def __init__(self, folder: Path, job: str):
        files.make_folder(folder)
        self.folder, self._job = folder, job
        self._lock = _lock(folder)
        files.remove_partials(folder)
        self._began = time.time()

    def read(self) -> Kept | None:
        """Where the node stood, None before its first round; a damaged state is refused, never guessed at."""
        path = self.folder / STATE
        if not path.exists():
            return None
        data = files.read_bytes(path)
        body, digest = data[:-DIGEST], data[-DIGEST:]
        head, _, state = body.partition(b"\n")
        if hashlib.sha256(body).digest() != digest:
            raise files.unreadable(path, "its checksum is not that of its contents")
        if head.decode(errors="replace") != self._job:
            raise InvalidInput("state folder", self.folder, f"holds the state of another run, {head[:60]!r}")
        return decode(state, Kept)

    def write(self, kept: Kept) -> None:
        digest = hashlib.sha256()
        with files.writing(self.folder / STATE, mode=files.PRIVATE) as file:
            for part in (self._job.encode() + b"\n", encode(kept, once=True)):
                digest.update(part)
                file.write(part)
            file.write(digest.digest())

    def show(self, **facts: Any) -> None:
        """What `deploy status` shows; losing it in a power cut costs nothing."""
        told = {"began": self._began, "at": time.time(), **facts}
        files.write_json(self.folder / STATUS, told, sync=False, mode=files.PRIVATE)

    def close(self) -> None:
        self._lock.release()
