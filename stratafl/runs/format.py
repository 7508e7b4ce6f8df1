"""Files of a run folder: names, versions, ids and the lock."""

from __future__ import annotations

import contextlib
import os
import re
import secrets
import stat
import sys
import time
from collections import Counter
from collections.abc import Iterable, Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from stratafl.base.errors import InvalidInput
from stratafl.base.files import cannot_read, cannot_write, read_json
from stratafl.config.paths import renamed

FORMAT = 1
"""The version of the form of run directories; raised when a reader of the last one would misread
them."""

RUNNING, DONE, INTERRUPTED, FAILED = STATUSES = ("running", "done", "interrupted", "failed")

RUN, STATUS, ROUNDS, TREE = "run.json", "status.json", "rounds.jsonl", "tree.json"

SUMMARY, MODEL, LOCK = "summary.json", "model.safetensors", "lock"

CHECKPOINTS = "checkpoints"

FILES = (RUN, STATUS, ROUNDS, TREE, SUMMARY, MODEL, LOCK)

LONGEST = 100

LARGEST = 1 << 63
"""A count beyond this is no count."""

DEEPEST = 100

_NAME = re.compile(rf"[A-Za-z0-9_][A-Za-z0-9_.=+-]{{0,{LONGEST - 1}}}")


def check_name(name: str) -> str:
    """The name itself if it can be part of a folder's, otherwise the complaint."""
    if not _NAME.fullmatch(name):
        allowed = f"must be 1 to {LONGEST} letters, digits or any of . _ - + =, and begin with none of . - + ="
        raise InvalidInput("--name", name, allowed)
    return name


def slug(text: str) -> str:
    """A name made of any text."""
    return (re.sub(r"[^A-Za-z0-9_.=+-]+", "-", text).strip("-.=+") or "run")[:LONGEST]


def new_id() -> str:
    """Sorts by time, and two of the same millisecond differ."""
    now = datetime.now(UTC)
    return f"{now:%Y%m%d-%H%M%S}-{now.microsecond // 1000:03d}{secrets.token_hex(1)}"


def now() -> str:
    """The time in UTC, as files of a run have it."""
    return datetime.now(UTC).isoformat(timespec="milliseconds")


def check_plain(folder: Path) -> None:
    """Refuse a run directory in which a link or something else stands in the place of a file or a
    folder."""
    for name in FILES:
        path = folder / name
        if path.is_symlink() or (path.exists() and not path.is_file()):
            raise InvalidInput("run folder", folder, f"{name} is not a plain file")
    path = folder / CHECKPOINTS
    if path.is_symlink() or (path.exists() and not path.is_dir()):
        raise InvalidInput("run folder", folder, f"{CHECKPOINTS} is not a plain folder")


def read_description(folder: Path) -> dict[str, Any]:
    """run.json, if it is one this version can read."""
    path = folder / RUN
    if not path.exists() and not path.is_symlink():
        raise InvalidInput("run folder", folder, f"no {RUN} in it" if folder.is_dir() else "no such folder")
    found = read_json(path)
    check_fields(path, found, {"format": int, "name": str, "id": str, "created": str, "config": dict,
                               "engine": str, "data": str, "environment": dict})  # fmt: skip
    if found["format"] != FORMAT:
        raise cannot_read(path, f"format {found['format']}, and this version reads format {FORMAT}")
    # not noted by the first versions
    check_fields(path, found, {key: str for key in ("how", "precision", "folder") if key in found})
    check_fields(path, found, {key: kind for key, kind in {"notes": list, "objects": dict}.items() if key in found})
    check_depth(path, found)
    check_time(path, "created", found["created"])
    if "inputs" in found:
        check_fields(path, found["inputs"], {"config": str, "files": dict})
        check_fields(path, found["inputs"]["files"], dict.fromkeys(found["inputs"]["files"], str))
    if "continued" in found:
        check_fields(path, found, {"continued": list})
        for each in found["continued"]:
            check_fields(path, each, {"after": int, "time": str, "environment": dict})
            kinds = {"changed": list, "meetings": int}
            check_fields(path, each, {key: kind for key, kind in kinds.items() if key in each})
    return found


def moved_along(described: dict[str, Any], folder: Path) -> dict[str, Any]:
    """A run's description with its files where they are now: one that was moved or copied together
    with its run is where it was from there."""
    before, now = described.get("folder", ""), os.path.abspath(folder)
    if before in ("", now):
        return described

    def new(text: str) -> str:
        if not os.path.isabs(text):
            return text
        place = os.path.normpath(os.path.join(now, os.path.relpath(text, before)))
        return place if os.path.exists(place) else text

    found = {**described, "config": renamed(described["config"], new)}
    if "inputs" in described:
        inputs = described["inputs"]
        found["inputs"] = {**inputs, "files": {new(name): digest for name, digest in inputs["files"].items()}}
    return found


def flat_config(config: Mapping[str, Any], path: str = "") -> dict[str, Any]:
    """A nested table as one of dotted keys; an empty table says nothing."""
    flat: dict[str, Any] = {}
    for key, value in config.items():
        name = f"{path}.{key}" if path else str(key)
        if isinstance(value, dict):
            flat |= flat_config(value, name)
        else:
            flat[name] = value
    return flat


def continuations(described: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Where a run went on, of those there is a record of: after which round, when, with what, and
    what was changed."""
    return list(described.get("continued", ()))


def strings_in(found: object) -> list[str]:
    """The texts in a list; none where a file holds something else."""
    return [each for each in found if isinstance(each, str)] if isinstance(found, list | tuple) else []


def directions(described: Mapping[str, Any]) -> dict[str, str]:
    """Which way each metric of a run is better, as far as its description says so."""
    told = described.get("better")
    return {str(k): v for k, v in told.items() if v in ("higher", "lower")} if isinstance(told, dict) else {}


def exclusion_counts(records: Iterable[Mapping[str, Any]]) -> dict[str, dict[str, int]]:
    """How often each node was left out of a meeting, by the reason: refused, of these too large,
    absent where the run was deployed, and late where its parents wait by time."""
    counts: dict[str, Counter[str]] = {"refused": Counter(), "too_large": Counter()}
    for record in records:
        for why in ("refused", "too_large", *(why for why in ("absent", "late") if why in record)):
            counts.setdefault(why, Counter()).update(excluded_nodes(record, why))
    return {why: dict(found) for why, found in counts.items()}


def excluded_nodes(record: Mapping[str, Any], why: str) -> list[str]:
    """The nodes that a round's record names; none where it holds something else."""
    return strings_in(record.get(why))


def check_fields(path: Path, found: object, wanted: Mapping[str, type | tuple[type, ...]]) -> None:
    """Refuse a JSON file that is not a table with these keys and kinds of values."""
    if not isinstance(found, dict):
        raise cannot_read(path, "not a table")
    for key, kind in wanted.items():
        if key not in found:
            raise cannot_read(path, f"{key!r} is missing")
        value = found[key]
        if not isinstance(value, kind) or isinstance(value, bool) or (isinstance(value, int) and abs(value) > LARGEST):
            raise cannot_read(path, f"{key!r} has the wrong kind of value")


def check_time(path: Path, key: str, text: str) -> None:
    """Refuse a text in a run's file that is no time."""
    try:
        datetime.fromisoformat(text)
    except ValueError:
        raise cannot_read(path, f"{key!r} is no time") from None


def check_depth(path: Path, found: object) -> None:
    """Refuse what only a program nests so deeply; whoever walks through it would give up
    somewhere."""
    inside, depth = [found], 0
    while inside:
        if depth > DEEPEST:
            raise cannot_read(path, "nested too deeply")
        tables = [each for each in inside if isinstance(each, dict | list)]
        inside = [value for each in tables for value in (each.values() if isinstance(each, dict) else each)]
        depth += 1


LOCK_TIMEOUT_S = 1.0
"""Seconds: somebody who only looks whether a run is alive holds the lock for a moment."""


class RunLock:
    """The right to write a run directory, which one process has at a time and loses when it
    ends."""

    def __init__(self, folder: Path, doing: str = "is writing it"):
        """doing: what the process does that has it, in words."""
        path = folder / LOCK
        try:
            self._handle = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK, 0o644)
        except OSError as problem:
            raise cannot_write(path, problem) from None
        if not _is_plain(self._handle):
            os.close(self._handle)
            raise cannot_read(path, "not a plain file")
        give_up = time.monotonic() + LOCK_TIMEOUT_S
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
            raise cannot_write(path, problem) from None

    def release(self) -> None:
        with contextlib.suppress(OSError):
            os.ftruncate(self._handle, 0)
        os.close(self._handle)

    def leave(self) -> None:
        """Let go of the lock in a copy of the process that holds it: it stays with the original
        alone."""
        os.close(self._handle)


def is_locked(folder: Path) -> bool:
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
