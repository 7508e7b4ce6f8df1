"""What a run directory is called and what is in it; docs/runs.md describes the files."""

from __future__ import annotations

import re
import secrets
from collections.abc import Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from stratafl.errors import InvalidInput
from stratafl.store.files import read_json, unreadable

FORMAT = 1
"""Of run directories; raised when a reader of the last format would misread them."""
RUNNING, DONE, INTERRUPTED, FAILED = STATUSES = ("running", "done", "interrupted", "failed")
RUN, STATUS, ROUNDS, TREE = "run.json", "status.json", "rounds.jsonl", "tree.json"
SUMMARY, MODEL, LOCK = "summary.json", "model.safetensors", "lock"
CHECKPOINTS, FIGURES = "checkpoints", "figures"
FILES = (RUN, STATUS, ROUNDS, TREE, SUMMARY, MODEL, LOCK)
FOLDERS = (CHECKPOINTS, FIGURES)
LONGEST = 100
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
    return datetime.now(UTC).isoformat(timespec="milliseconds")


def check_plain(folder: Path) -> None:
    """Refuse a run directory in which a link or something else stands in the place of a file or a folder."""
    for name in FILES:
        path = folder / name
        if path.is_symlink() or (path.exists() and not path.is_file()):
            raise InvalidInput("run folder", folder, f"{name} is not a plain file")
    for name in FOLDERS:
        path = folder / name
        if path.is_symlink() or (path.exists() and not path.is_dir()):
            raise InvalidInput("run folder", folder, f"{name} is not a plain folder")


def read_description(folder: Path) -> dict[str, Any]:
    """run.json, if it is one this version can read."""
    path = folder / RUN
    if not path.exists() and not path.is_symlink():
        raise InvalidInput("run folder", folder, f"no {RUN} in it" if folder.is_dir() else "no such folder")
    found = read_json(path)
    check_fields(path, found, {"format": int, "name": str, "id": str, "created": str, "config": dict,
                               "engine": str, "data": str, "environment": dict})  # fmt: skip
    if found["format"] != FORMAT:
        raise unreadable(path, f"format {found['format']}, and this version reads format {FORMAT}")
    if "continued" in found:
        check_fields(path, found, {"continued": list})
        for each in found["continued"]:
            check_fields(path, each, {"after": int, "time": str, "environment": dict})
    return found


def continuations(described: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Where a run went on, of those there is a record of: after which round, when, and with what."""
    return list(described.get("continued", ()))


def check_fields(path: Path, found: object, wanted: Mapping[str, type | tuple[type, ...]]) -> None:
    """Refuse a JSON file that is not a table with these keys and kinds of values."""
    if not isinstance(found, dict):
        raise unreadable(path, "not a table")
    for key, kind in wanted.items():
        if key not in found:
            raise unreadable(path, f"{key!r} is missing")
        if not isinstance(found[key], kind) or isinstance(found[key], bool):
            raise unreadable(path, f"{key!r} has the wrong kind of value")
