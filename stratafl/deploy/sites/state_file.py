"""A node's state on its own disk, in its site's folder: written aside, synced and renamed.

SITE/state/state.safetensors   what the node must not lose, with a checksum behind it
SITE/state/lock                held by the process that writes it
SITE/state/status.json         what an operator sees
SITE/state/aside-TIME/         what `deploy reset` has set aside; in run/, the run folder of a root
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import shlex
import time
from pathlib import Path
from typing import Any

from stratafl.base import files
from stratafl.base.errors import InvalidInput
from stratafl.deploy.notes import boards
from stratafl.deploy.protocol.node import NodeState
from stratafl.deploy.protocol.wire import OtherFormat, decode, encode
from stratafl.runs import format
from stratafl.runs.format import RunLock

STATE, STATUS, RUN = "state.safetensors", "status.json", "run"
DIGEST = 32
DAMAGED = 3
"""The exit code of a process whose state is damaged: only a reset helps."""
PATIENCE = 20.0
"""Seconds: the process before may still be ending."""


def _lock(folder: Path) -> RunLock:
    until = time.monotonic() + PATIENCE
    while True:
        try:
            return RunLock(folder)
        except InvalidInput:
            if time.monotonic() > until:
                raise


class Damaged(InvalidInput):
    """A state that cannot be gone on with, and the way back."""

    def __init__(self, folder: Path, reason: str):
        command = f"`stratafl deploy reset {shlex.quote(str(folder.absolute().parent))}`"
        super().__init__("state", folder / STATE, f"damaged; {command} sets it aside: {reason}")


class Durable:
    """The state of one site in one run; only one process may have it."""

    def __init__(self, folder: Path, job: str):
        files.make_folder(folder)
        self.folder, self._job = folder, job
        self._lock = _lock(folder)
        files.remove_partials(folder)
        self._began = time.time()

    def read(self) -> NodeState | None:
        """Where the node stood, None before its first round; a damaged state is refused, never
        guessed at."""
        return stored(self.folder, self._job)

    def write(self, kept: NodeState) -> None:
        digest = hashlib.sha256()
        with files.atomic_write(self.folder / STATE, mode=files.PRIVATE) as file:
            for part in (self._job.encode() + b"\n", encode(kept, once=True)):
                digest.update(part)
                file.write(part)
            file.write(digest.digest())

    def show(self, **facts: Any) -> None:
        """What `deploy status` shows; losing it in a power cut, or to a full disk, costs
        nothing."""
        told = {"began": self._began, "at": time.time(), **facts}
        boards.own.put(shown=told)
        with contextlib.suppress(InvalidInput):
            files.write_json(self.folder / STATUS, told, sync=False, mode=files.PRIVATE)

    def close(self) -> None:
        self._lock.release()


def stored(folder: Path, job: str) -> NodeState | None:
    """The state of a node as it lies in a folder; None where there is none."""
    state = checked(folder, job)
    if state is None:
        return None
    try:
        return decode(state, NodeState)
    except OtherFormat as problem:  # nothing is wrong with it, so that it is not to be set aside
        raise files.cannot_read(folder / STATE, str(problem)) from None
    except InvalidInput as problem:
        raise Damaged(folder, f"written by another version? {problem}") from None


def checked(folder: Path, job: str) -> bytes | None:
    """The state in a folder, None where there is none; one that is damaged, or another run's, is
    refused."""
    path = folder / STATE
    if not os.path.lexists(path):
        return None
    if not path.is_file() or path.is_symlink():
        raise Damaged(folder, "not a plain file")
    data = files.read_bytes(path)
    body, digest = data[:-DIGEST], data[-DIGEST:]
    head, _, state = body.partition(b"\n")
    if hashlib.sha256(body).digest() != digest:
        raise Damaged(folder, "its checksum is not that of its contents")
    if head.decode(errors="replace") != job:
        raise Damaged(folder, f"it is the state of another run, {head[:60]!r}")
    return state


def status(folder: Path) -> dict[str, Any]:
    """What the node last showed."""
    try:
        found = files.read_json(folder / STATUS)
    except InvalidInput:
        return {}
    return found if isinstance(found, dict) else {}


def set_aside(folder: Path, *others: Path) -> Path:
    """Take a state, and what belongs to it, out of the way; where it is now."""
    files.make_folder(folder)
    try:
        lock = RunLock(folder)
    except InvalidInput:
        raise InvalidInput("site", folder.parent, "runs: `stratafl deploy down`, or SIGTERM, stops it") from None
    aside = folder / f"aside-{format.new_id()}"
    try:
        files.make_folder(aside)
        kept = {path: aside / path.name for path in (folder / STATE, folder / STATUS)}
        kept |= {path: aside / RUN / path.name for path in others}
        for path, place in kept.items():
            if os.path.lexists(path):
                place.parent.mkdir(exist_ok=True)
                os.replace(path, place)
        files.sync_folder(folder)
    except OSError as problem:
        raise files.cannot_write(aside, problem) from None
    finally:
        lock.release()
    return aside
