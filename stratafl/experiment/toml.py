"""TOML files of experiments: reading, writing, changes by dotted keys, and the files that they
name.

Paths in a file start at its folder. Only options that may name files are looked at. Of these a text
is the name of a file where it ends like one (`my_rules.py`, `table.csv`), where its part before the
last colon does (`my_model.py:Net`), or where there is something of that name.
"""

from __future__ import annotations

import copy
import json
import os
import re
import tomllib
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from stratafl.base.errors import InvalidInput, describe_exception, first_line_of

SUFFIXES = (".py", ".csv", ".parquet", ".npz", ".safetensors", ".pt", ".pth", ".toml")
"""Endings of files that are read, so that one that is missing is missed beside the config."""
HUB = "hf:"
"""Prefix of the name of a data set of Hugging Face, which may be a folder."""
FILES = re.compile(
    r"data|data\.(source|test|arguments(\..+)?)|model|model\.(?!local_parameters\b|lora\b).+|method\.(?!(.+\.)?name$).+"
    r"|loss(\..+)?|evaluation\.metrics(\..+)?|client\.optimizer(\..+)?|plugins|network|network\.(name|(.+\.)?file)|tune\..+"
)
"""Dotted keys whose texts may name files: those that are paths or import paths, and parameters of a
user's own functions, models and rules."""
MAX_DEPTH = 120
"""Largest depth of lists and tables inside each other; a tree may have a hundred levels."""
MAX_BITS = 1023
"""Most bits of an integer; a larger one has no floating-point value, and could not be stored."""

Tables = dict[str, Any]


# -- reading ---------------------------------------------------------------------------------------


def read_tables(path: Path, changes: Iterable[str] = ()) -> Tables:
    """The tables of a config with "section.key=value" changes on top, and with full paths of its
    files."""
    return with_full_paths(with_changes(read_toml(path), changes), path.parent)


def read_toml(path: Path, field: str = "config") -> Tables:
    """The tables of a TOML file, which errors call `field`."""
    try:
        text = path.read_text(encoding="utf-8-sig")  # some editors begin a file with a byte order mark
    except UnicodeDecodeError:
        raise InvalidInput(field, path, "is not UTF-8 text") from None
    except (OSError, ValueError) as problem:
        raise InvalidInput(field, path, getattr(problem, "strerror", None) or describe_exception(problem)) from None
    try:
        return tomllib.loads(text)
    except (ValueError, RecursionError) as problem:
        raise InvalidInput(field, path, f"not valid TOML: {_reason(problem)}") from None


def _reason(problem: Exception) -> str:
    """Why TOML cannot be read; not everything that Python cannot read is an error of the format."""
    if isinstance(problem, RecursionError):
        return "lists or tables are nested too deeply"
    return first_line_of(problem) if isinstance(problem, tomllib.TOMLDecodeError) else "a number is too long"


def check_plain(value: Any, path: str = "", depth: int = 0) -> None:
    """Reject what cannot be stored with a run: TOML has dates, JSON does not."""
    where = path or "config"
    if depth > MAX_DEPTH:
        raise InvalidInput(where, value, f"at most {MAX_DEPTH} lists or tables in each other")
    if isinstance(value, Mapping):
        for key, entry in value.items():
            if not isinstance(key, str):
                raise InvalidInput(f"{where} key", key, "must be a text")
            check_plain(entry, f"{path}.{key}" if path else key, depth + 1)
    elif isinstance(value, list | tuple):
        for entry in value:
            check_plain(entry, path, depth + 1)
    elif not (value is None or isinstance(value, bool | int | float | str)):
        raise InvalidInput(where, value, "must be a text, a number, true or false, a list or a table")
    elif isinstance(value, int) and value.bit_length() > MAX_BITS:
        raise InvalidInput(where, value, "is too large a number")


# -- changes ---------------------------------------------------------------------------------------


def with_changes(tables: Mapping[str, Any], changes: Iterable[str]) -> Tables:
    """The tables of a config with "section.key=value" changes on top; "section=value" replaces a
    whole section."""
    changed = copy.deepcopy(dict(tables))
    for change in changes:
        keys, value = parse_change(change)
        put(changed, keys, value, "--set")
    check_plain(changed)
    return changed


def parse_change(change: str) -> tuple[list[str], Any]:
    """Split "section.key=value" into its keys and its value: TOML, or a plain text where it is
    not."""
    path, equals, text = change.partition("=")
    keys = path.strip().split(".")
    if not equals or not all(keys):
        raise InvalidInput("--set", change, "must look like section.key=value")
    return keys, plain_value("--set", text)


def plain_value(field: str, text: str) -> Any:
    """The value that a text stands for: TOML, or the text itself where it is not."""
    try:
        return tomllib.loads(f"value = {text}")["value"]
    except tomllib.TOMLDecodeError:
        return text.strip()
    except (ValueError, RecursionError) as problem:
        raise InvalidInput(field, text, _reason(problem)) from None


def put(tables: Tables, keys: Sequence[str], value: Any, where: str = "") -> None:
    """Set a key of nested tables; a bare value of a section becomes a table first."""
    table = tables
    for depth, key in enumerate(keys[:-1]):
        inside = table.setdefault(key, {})
        if not isinstance(inside, dict):
            from stratafl.experiment.sections import SECTIONS  # with pydantic, which help does without

            section = SECTIONS.get(key) if depth == 0 else None
            inside = section.as_table(inside) if section is not None and section.SHORTHAND else inside
            if not isinstance(inside, dict):
                raise InvalidInput(where or ".".join(keys), value, f"{key} is not a table")
            table[key] = inside
        table = inside
    table[keys[-1]] = copy.deepcopy(value)


# -- paths -----------------------------------------------------------------------------------------


def renamed_files(tables: Mapping[str, Any], new: Callable[[str], str]) -> Tables:
    """The tables of a config with other names for its files; `new` is asked for every text that may
    be one."""

    def rename(value: Any, path: str) -> Any:
        if isinstance(value, Mapping):
            return {key: rename(inside, f"{path}.{key}" if path else key) for key, inside in value.items()}
        if isinstance(value, list | tuple):
            return [rename(inside, path) for inside in value]
        return _renamed(value, new) if isinstance(value, str) and FILES.fullmatch(path) else value

    return {table: rename(inside, table) for table, inside in tables.items()}


def _renamed(text: str, new: Callable[[str], str]) -> str:
    if text.startswith(HUB):
        return HUB + new(text.removeprefix(HUB))
    file, colon, attribute = text.rpartition(":")
    if file.endswith(".py"):
        return new(file) + colon + attribute
    return new(text) if "." in text or os.sep in text else text


def with_full_paths(tables: Mapping[str, Any], folder: Path) -> Tables:
    """The tables of a config with the full paths of its files, whose names start at a folder."""

    def full(text: str) -> str:
        path = folder / text
        # os.path, since to pathlib some texts are errors and not files that are absent
        is_file = text.endswith(SUFFIXES) or (text not in ("", ".") and os.path.exists(path))
        return os.path.abspath(path) if is_file else text

    return renamed_files(tables, full)


# -- writing ---------------------------------------------------------------------------------------


def write_tables(tables: Mapping[str, Any]) -> str:
    """Text of a TOML file; entries that are None are left out."""
    top = [
        f"{_key(key)} = {toml_value(value)}"
        for key, value in tables.items()
        if not _is_table(value) and value is not None
    ]
    texts = ["\n".join(top) + "\n"] if top else []
    for name, table in tables.items():
        if _is_table(table):
            lines = [f"{_key(key)} = {toml_value(value)}" for key, value in table.items() if value is not None]
            texts.append("\n".join([f"[{_key(name)}]", *lines]) + "\n")
    return "\n".join(texts)


def _is_table(value: object) -> bool:
    return isinstance(value, Mapping)


def _key(name: str) -> str:
    return name if name.replace("_", "").replace("-", "").isalnum() and name.isascii() else _text(name)


def _text(text: str) -> str:
    return json.dumps(text, ensure_ascii=False).replace("\x7f", "\\u007f")


def toml_value(value: Any) -> str:
    """Notation of a value in a TOML file."""
    if isinstance(value, str):
        return _text(value)
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, Mapping):
        entries = ", ".join(f"{_key(key)} = {toml_value(entry)}" for key, entry in value.items() if entry is not None)
        return f"{{ {entries} }}" if entries else "{}"
    if isinstance(value, Sequence):
        return f"[{', '.join(map(toml_value, value))}]"
    return repr(value)
