"""A user's own files of a run: plugins, those of a model, a loss or a metric, what these import
from beside them, and files they are told to read.

`init` copies them into every site's folder; a node looks for them there and nowhere else.

code/...    each where it lay beside the others, a module where its name puts it
"""

from __future__ import annotations

import hashlib
import importlib
import os
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

from stratafl.base import files
from stratafl.base.errors import InvalidInput
from stratafl.base.tracebacks import is_installed
from stratafl.experiment.experiment import Experiment
from stratafl.experiment.toml import renamed_files
from stratafl.runs.provenance import source_files

CODE = "code"


class UserFiles(NamedTuple):
    """The user's files that are copied into a site's folder."""

    names: dict[str, str]
    """Where each file is in the folder of code, by the name that the config has for it."""
    contents: dict[str, bytes]
    """What each file holds, by its place in that folder."""
    sources: dict[str, Path]
    """Where each file was found, by its place in that folder."""

    @property
    def digests(self) -> dict[str, str]:
        return {place: hashlib.sha256(data).hexdigest() for place, data in self.contents.items()}

    def write(self, folder: Path) -> None:
        for place, data in self.contents.items():
            path = folder / CODE / place
            files.make_folder(path.parent)
            with files.create_anew(path) as file:
                file.write(data)


def named(experiment: Experiment, folder: Path) -> dict[str, Path]:
    """The files that a config names, by how it does, from its own folder."""
    found: dict[str, Path] = {}

    def look(text: str) -> str:
        # os.path, since to pathlib some texts are errors and not files that are absent
        if os.path.isfile(folder / text):
            found[text] = (folder / text).absolute()
        return text

    renamed_files(experiment.to_table(), look)
    return found


def renamed(experiment: Experiment, names: Mapping[str, str]) -> Experiment:
    """The config with other names for its files."""
    return Experiment.from_table(renamed_files(experiment.to_table(), lambda text: names.get(text, text)))


def collected(experiment: Experiment, found: Mapping[str, Path]) -> UserFiles:
    """What this process, which has just made the run, read of the user's. `experiment` has the
    files' full paths."""
    base = os.path.commonpath([path.parent for path in found.values()]) if found else ""
    names = {text: path.relative_to(base).as_posix() for text, path in found.items()}
    places = {names[text]: path for text, path in found.items()}
    for name, path in source_files(experiment.to_table()).items():
        if path is None or path in found.values() or is_installed(path) or path.suffix != ".py":
            continue
        parts = [*name.split("."), "__init__"] if path.name == "__init__.py" else name.split(".")
        place = "/".join(parts) + ".py"
        if places.setdefault(place, path) != path:
            raise InvalidInput("file", path, f"and {places[place]} would both be {place} at a site: rename one")
    return UserFiles(names, {place: files.read_bytes(path.resolve()) for place, path in places.items()}, places)


def check(folder: Path, digests: Mapping[str, str]) -> None:
    """Refuse a site's folder in which a file is missing, or another than `init` put there."""
    for place, digest in digests.items():
        path = folder / CODE / place
        if not path.is_file():
            raise InvalidInput("file", path, "is missing: `stratafl deploy init` put it there")
        if hashlib.sha256(files.read_bytes(path)).hexdigest() != digest:
            raise InvalidInput("file", path, "was changed since `stratafl deploy init` put it there")


_folders: list[str] = []
_before: set[str] = set()


def import_from(*folders: Path) -> None:
    """Look for modules there first, and no longer where the last call said: what came from there is
    forgotten."""
    for name in set(sys.modules) - _before if _folders else ():
        path = getattr(sys.modules[name], "__file__", None)
        if isinstance(path, str) and any(Path(folder) in Path(path).parents for folder in _folders):
            del sys.modules[name]
    for folder in _folders:
        if folder in sys.path:
            sys.path.remove(folder)
    _folders[:] = dict.fromkeys(str(folder.absolute()) for folder in folders)
    _before.clear()
    _before.update(sys.modules)
    sys.path[:0] = _folders
    importlib.invalidate_caches()
