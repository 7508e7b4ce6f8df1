"""Files of a run folder: names, versions, ids and the lock."""

from __future__ import annotations

import contextlib
import hashlib
import json
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
from stratafl.experiment import legacy
from stratafl.experiment.toml import renamed_files

FORMAT = 1
"""Version of the format of run folders; raised when a reader of the last version would misread
them."""

RUNNING, DONE, INTERRUPTED, FAILED = STATUSES = ("running", "done", "interrupted", "failed")
RUN, STATUS, ROUNDS, TREE = "run.json", "status.json", "rounds.jsonl", "tree.json"
SUMMARY, MODEL, LOCK = "summary.json", "model.safetensors", "lock"
CHECKPOINTS = "checkpoints"
FILES = (RUN, STATUS, ROUNDS, TREE, SUMMARY, MODEL, LOCK)
MAX_NAME_LENGTH = 100
LARGEST = 1 << 63
"""Largest valid count."""

MAX_DEPTH = 100
_NAME = re.compile(rf"[A-Za-z0-9_][A-Za-z0-9_.=+-]{{0,{MAX_NAME_LENGTH - 1}}}")


def check_name(name: str) -> str:
    """Return a name if it can be part of a folder's name; raises otherwise."""
    if not _NAME.fullmatch(name):
        allowed = f"must be 1 to {MAX_NAME_LENGTH} letters, digits or any of . _ - + =, and begin with none of . - + ="
        raise InvalidInput("--name", name, allowed)
    return name


def slug(text: str) -> str:
    """Create a file name from any text."""
    return (re.sub(r"[^A-Za-z0-9_.=+-]+", "-", text).strip("-.=+") or "run")[:MAX_NAME_LENGTH]


def new_id() -> str:
    """Create an id; ids sort by time, and two of the same millisecond differ in all but 1 of 256
    cases."""
    created = datetime.now(UTC)
    return f"{created:%Y%m%d-%H%M%S}-{created.microsecond // 1000:03d}{secrets.token_hex(1)}"


def now() -> str:
    """Current UTC time, as stored in a run's files."""
    return datetime.now(UTC).isoformat(timespec="milliseconds")


def check_plain(folder: Path) -> None:
    """Reject a run folder in which a link or another special file replaces a file or folder."""
    for name in FILES:
        path = folder / name
        if path.is_symlink() or (path.exists() and not path.is_file()):
            raise InvalidInput("run folder", folder, f"{name} is not a plain file")
    path = folder / CHECKPOINTS
    if path.is_symlink() or (path.exists() and not path.is_dir()):
        raise InvalidInput("run folder", folder, f"{CHECKPOINTS} is not a plain folder")


def read_description(folder: Path) -> dict[str, Any]:
    """Read run.json, if this version can."""
    path = folder / RUN
    if not path.exists() and not path.is_symlink():
        raise InvalidInput("run folder", folder, f"no {RUN} in it" if folder.is_dir() else "no such folder")
    described = read_json(path)
    check_fields(path, described, {"format": int, "name": str, "id": str, "created": str, "config": dict,
                               "engine": str, "data": str, "environment": dict})  # fmt: skip
    if described["format"] != FORMAT:
        raise cannot_read(path, f"format {described['format']}, and this version reads format {FORMAT}")
    # not recorded by the first versions, or only where there is something to record
    texts = dict.fromkeys(("how", "precision", "folder"), str)
    check_fields(path, described, {}, {**texts, "notes": list, "objects": dict, "continued": list})
    check_depth(path, described)
    check_time(path, "created", described["created"])
    if "inputs" in described:
        check_fields(path, described["inputs"], {"config": str, "files": dict})
        check_fields(path, described["inputs"]["files"], dict.fromkeys(described["inputs"]["files"], str))
    if legacy.is_old(described["config"]):
        described = _translated(described)
    for continuation in described.get("continued", ()):
        required = {"after": int, "time": str, "environment": dict}
        check_fields(path, continuation, required, {"changed": list, "meetings": int})
    return described


def _translated(described: dict[str, Any]) -> dict[str, Any]:
    """A description with its config in the names of this version."""
    config, inputs = legacy.translated(described["config"]), described.get("inputs")
    translated = {**described, "config": config}
    if inputs is not None and inputs["config"] == config_digest(described["config"]):
        translated["inputs"] = {**inputs, "config": config_digest(config)}
    return translated


def config_digest(config: Mapping[str, Any]) -> str:
    """SHA-256 of plain data."""
    return hashlib.sha256(json.dumps(config, sort_keys=True).encode()).hexdigest()


def with_moved_paths(described: dict[str, Any], folder: Path) -> dict[str, Any]:
    """Adapt the paths in a run's description: files that were moved together with the run are found
    at their new place."""
    old_folder, new_folder = described.get("folder", ""), os.path.abspath(folder)
    if old_folder in ("", new_folder):
        return described

    def relocate(text: str) -> str:
        if not os.path.isabs(text):
            return text
        relocated = os.path.normpath(os.path.join(new_folder, os.path.relpath(text, old_folder)))
        return relocated if os.path.exists(relocated) else text

    moved = {**described, "config": renamed_files(described["config"], relocate)}
    if "inputs" in described:
        inputs = described["inputs"]
        moved["inputs"] = {**inputs, "files": {relocate(name): digest for name, digest in inputs["files"].items()}}
    return moved


def flat_config(config: Mapping[str, Any], path: str = "") -> dict[str, Any]:
    """Flatten a nested table to dotted keys; empty tables are dropped."""
    flat: dict[str, Any] = {}
    for key, value in config.items():
        name = f"{path}.{key}" if path else str(key)
        if isinstance(value, dict):
            flat |= flat_config(value, name)
        else:
            flat[name] = value
    return flat


def strings_in(value: object) -> list[str]:
    """Strings of a list; empty for any other value."""
    return [entry for entry in value if isinstance(entry, str)] if isinstance(value, list | tuple) else []


def directions(described: Mapping[str, Any]) -> dict[str, str]:
    """Direction in which each metric of a run is better, "higher" or "lower", if it is recorded."""
    better = described.get("better")
    return {str(k): v for k, v in better.items() if v in ("higher", "lower")} if isinstance(better, dict) else {}


def exclusion_counts(records: Iterable[Mapping[str, Any]]) -> dict[str, dict[str, int]]:
    """Number of times each node was left out: {reason: {node: number of times}}.

    Reasons are refused, too_large (a part of those), absent in deployed runs, and late where
    parents wait by time.
    """
    counts: dict[str, Counter[str]] = {"refused": Counter(), "too_large": Counter()}
    for record in records:
        for reason in ("refused", "too_large", *(reason for reason in ("absent", "late") if reason in record)):
            counts.setdefault(reason, Counter()).update(strings_in(record.get(reason)))
    return {reason: dict(counter) for reason, counter in counts.items()}


def check_fields(
    path: Path, table: object, required: Mapping[str, type | tuple[type, ...]], optional: Mapping[str, type] = {}
) -> None:
    """Reject a JSON file that is not a table with these keys and types of values; none of them may
    be a truth value."""
    if not isinstance(table, dict):
        raise cannot_read(path, "not a table")
    for key, kind in (*required.items(), *optional.items()):
        if key not in table:
            if key in optional:
                continue
            raise cannot_read(path, f"{key!r} is missing")
        value = table[key]
        if not isinstance(value, kind) or isinstance(value, bool) or (isinstance(value, int) and abs(value) > LARGEST):
            raise cannot_read(path, f"{key!r} has the wrong kind of value")


def check_time(path: Path, key: str, text: str) -> None:
    """Reject a text that is not a time."""
    try:
        datetime.fromisoformat(text)
    except ValueError:
        raise cannot_read(path, f"{key!r} is no time") from None


def check_depth(path: Path, value: object) -> None:
    """Reject values that are nested too deeply for recursive functions."""
    values, depth = [value], 0
    while values:
        if depth > MAX_DEPTH:
            raise cannot_read(path, "nested too deeply")
        containers = [table for table in values if isinstance(table, dict | list)]
        values = [value for table in containers for value in (table.values() if isinstance(table, dict) else table)]
        depth += 1


LOCK_TIMEOUT_S = 1.0
"""Seconds to wait for the lock: a process that checks whether a run is alive holds it briefly."""


class RunLock:
    """Lock of a folder (of a run, tuning or deployment): one process writes at a time; the lock
    ends with the process."""

    def __init__(self, folder: Path, activity: str = "is writing it"):
        """activity: what the process does that has the lock, in words."""
        path = folder / LOCK
        try:
            self._handle = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK, 0o644)
        except OSError as problem:
            raise cannot_write(path, problem) from None
        if not _is_regular(self._handle):
            os.close(self._handle)
            raise cannot_read(path, "not a plain file")
        deadline = time.monotonic() + LOCK_TIMEOUT_S
        while not _try_lock(self._handle):
            if time.monotonic() > deadline:
                pid = os.read(self._handle, 20).decode(errors="replace").strip() or "unknown"
                os.close(self._handle)
                raise InvalidInput("run folder", folder, f"process {pid} {activity}")
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

    def close_in_child(self) -> None:
        """Close the lock in a forked child; the parent keeps it."""
        os.close(self._handle)


def is_locked(folder: Path) -> bool:
    """Whether a living process holds the lock of a folder."""
    try:
        # a pipe in its place must not keep us waiting for somebody to write into it
        handle = os.open(folder / LOCK, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
    except OSError:
        return False
    try:
        return _is_regular(handle) and not _try_lock(handle, shared=True)
    finally:
        os.close(handle)


def _is_regular(handle: int) -> bool:
    return stat.S_ISREG(os.fstat(handle).st_mode)


def _try_lock(handle: int, shared: bool = False) -> bool:
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
