"""What a run depends on besides its data: its config, and the files of the user's own that the
config names.

Noted when a run begins and with every checkpoint, so that a run does not go on with something else
in silence.
"""

from __future__ import annotations

import hashlib
import importlib.util
import json
import os
import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

from stratafl.base.errors import printable
from stratafl.base.frames import is_installed
from stratafl.runs import layout

MISSING = "missing"
NOT_THE_USERS = {"stratafl", "__main__", *sys.stdlib_module_names}
_PATH = re.compile(r"(?:.+\.py|[A-Za-z_][\w.]*):[A-Za-z_]\w*")
"""An import path: "file.py:name" or "package.module:name"."""
TOLD = 5
"""Changes that are told one by one."""


class Origins(NamedTuple):
    """What a run began with, as plain data."""

    config: dict[str, Any]
    files: dict[str, str]
    """SHA-256 by path or by name of a module."""

    @staticmethod
    def of(config: Mapping[str, Any], known: Mapping[str, str] | None = None) -> Origins:
        """The origins as they are now: the files that the config names, what those imported from
        beside them, and those that are known from before."""
        before = known or {}
        found = {**sources(config), **{name: _source(name) for name in before}}
        files = {name: _digest(path) for name, path in found.items() if path is not None or name in before}
        return Origins(dict(config), files)

    @staticmethod
    def read(path: Path, stored: object) -> Origins:
        """Read origins from a file, or complain."""
        layout.check_fields(path, stored, {"config": dict, "files": dict})
        assert isinstance(stored, dict)
        layout.check_depth(path, stored)
        layout.check_fields(path, stored["files"], dict.fromkeys(stored["files"], str))
        return Origins(stored["config"], stored["files"])

    def noted(self) -> dict[str, Any]:
        """The origins for a file that has the config itself, of which a digest is then enough."""
        return {"config": _text_digest(self.config), "files": self.files}


def sources(config: Mapping[str, Any]) -> dict[str, Path | None]:
    """Where the files are that a config names and the modules that those imported from beside them,
    by their names."""
    named = dict.fromkeys(_named(config))
    return {name: _source(name) for name in (*named, *_imported(named))}


def changes(before: Origins, now: Origins) -> list[str]:
    """What differs, one line each."""
    was, is_ = (layout.flat_config(each.config) for each in (before, now))
    keys = [key for key in sorted({*was, *is_}) if json.dumps(was.get(key)) != json.dumps(is_.get(key))]
    told = [f"{printable(key)} was {_short(was.get(key))} and is {_short(is_.get(key))}" for key in keys]
    return told + _changed_files(before.files, now.files)


def changes_since(noted: Mapping[str, Any], now: Origins) -> list[str]:
    """What has changed since, where only digests were noted."""
    told = [] if noted["config"] == _text_digest(now.config) else ["the config was changed"]
    return told + _changed_files(noted["files"], now.files)


def in_short(told: Sequence[str]) -> str:
    """The first of several changes in a line, and how many there are more."""
    more = len(told) - TOLD
    return "; ".join(told[:TOLD]) + (f"; and {more} more" if more > 0 else "")


def _changed_files(before: Mapping[str, str], now: Mapping[str, str]) -> list[str]:
    return [
        f"{printable(name)} {'is missing' if now.get(name, MISSING) == MISSING else 'was changed'}"
        for name, digest in before.items()
        if now.get(name, MISSING) != digest
    ]


def _named(value: Any) -> Iterator[str]:
    """Every text in a config that is a file, or the file or module of a "file.py:Class" or
    "package.module:Class"."""
    if isinstance(value, Mapping):
        name = value.get("name")
        if isinstance(name, str) and ":" in name:
            yield name.rpartition(":")[0]
        value = list(value.values())
    if isinstance(value, list | tuple):
        for each in value:
            yield from _named(each)
    elif isinstance(value, str) and _PATH.fullmatch(value):
        yield value.rpartition(":")[0]
    elif isinstance(value, str) and ("." in value or os.sep in value) and _is_file(value):
        yield value


def _imported(named: Mapping[str, None]) -> Iterator[str]:
    """The modules in this process that lie beside a named file, or in the package of a named
    module."""
    places = set()
    for name in named:
        source = _source(name)
        if source is not None and source.suffix == ".py" and not is_installed(source):
            # as many folders up as the outermost package is
            up = 0 if name.endswith(".py") else name.count(".") + (source.name == "__init__.py")
            places.add(source.parents[min(max(up, 1), len(source.parents)) - 1])
    for name, module in list(sys.modules.items()) if places else ():
        path = vars(module).get("__file__") if isinstance(module, ModuleType) else None
        if isinstance(path, str) and path.endswith(".py") and name.partition(".")[0] not in NOT_THE_USERS:
            source = Path(path).absolute()
            if not is_installed(source) and any(place in source.parents for place in places):
                yield name


def _source(name: str) -> Path | None:
    """Where a file or a module is; None where that is not known."""
    if name.endswith(".py") or _is_file(name):
        return Path(name).absolute()
    if name == "__main__":
        # of a program's own objects there are digests, and its other lines matter nothing
        return None
    try:
        found = importlib.util.find_spec(name)
    except Exception:
        # looking for a module runs the packages it is in, which may raise anything
        return None
    origin = None if found is None else found.origin
    return Path(origin).absolute() if origin is not None and found is not None and found.has_location else None


def _is_file(name: str) -> bool:
    try:
        return Path(name).is_file()
    except (OSError, ValueError):
        return False


def _digest(path: Path | None) -> str:
    try:
        if path is None or not path.is_file():
            return MISSING
        with path.open("rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()
    except OSError:
        return MISSING


def _text_digest(config: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(config, sort_keys=True).encode()).hexdigest()


def _short(value: object, limit: int = 60) -> str:
    text = printable(json.dumps(value))
    return text if len(text) <= limit else text[: limit - 3] + "..."
