"""The files that a config names: found beside it, wherever a command is given.

Only keys that may name files are looked at. Of these a text is the name of a file where it ends
like one (`my_rules.py`, `table.csv`), where its part before the last colon does
(`my_model.py:Net`), or where there is something of that name.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

SUFFIXES = (".py", ".csv", ".parquet", ".npz", ".safetensors", ".pt", ".pth", ".toml")
"""The endings of files that are read, so that one that is missing is missed beside the config."""
HUB = "hf:"
"""What stands before the name of a data set of Hugging Face's, which may be a folder."""
FILES = re.compile(
    r"data\.(name|test|arguments(\..+)?)|model(?!\.(keep_at_home|lora)\b)\..+|method\.(?!(.+\.)?name$).+|objective\..+"
    r"|leaf\.optimiser(\..+)?|run\.(initial|plugins)|network\.(name|(.+\.)?file)|plan\..+"
)
"""The dotted keys whose texts may name files: those that are paths or import paths, and parameters
of a user's own functions, models and rules."""


def renamed(values: Mapping[str, Any], new: Callable[[str], str]) -> dict[str, Any]:
    """A config's tables with other names for its files; `new` is asked of every text that may be
    one."""

    def each(value: Any, path: str) -> Any:
        if isinstance(value, Mapping):
            return {key: each(inside, f"{path}.{key}" if path else key) for key, inside in value.items()}
        if isinstance(value, list | tuple):
            return [each(inside, path) for inside in value]
        return _renamed(value, new) if isinstance(value, str) and FILES.fullmatch(path) else value

    return {table: each(inside, table) for table, inside in values.items()}


def _renamed(text: str, new: Callable[[str], str]) -> str:
    if text.startswith(HUB):
        return HUB + new(text.removeprefix(HUB))
    file, colon, attribute = text.rpartition(":")
    if file.endswith(".py"):
        return new(file) + colon + attribute
    return new(text) if "." in text or os.sep in text else text


def anchored(values: Mapping[str, Any], folder: Path) -> dict[str, Any]:
    """A config's tables with the full paths of its files, which lie in a folder or are named from
    there."""

    def full(text: str) -> str:
        path = folder / text
        # os.path, since to pathlib some texts are errors and not files that are absent
        is_one = text.endswith(SUFFIXES) or (text not in ("", ".") and os.path.exists(path))
        return os.path.abspath(path) if is_one else text

    return renamed(values, full)
