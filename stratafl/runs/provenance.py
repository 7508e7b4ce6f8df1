"""What a run depends on: its config, and the files of the user's own that the config names.

Noted when a run begins and with every checkpoint. It says which run this is, whether that is still
what its config would compute, and what has changed where it is not.
"""

from __future__ import annotations

import ast
import functools
import hashlib
import importlib.util
import json
import os
import re
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path, PurePath
from types import ModuleType
from typing import TYPE_CHECKING, Any, NamedTuple

from stratafl.base.errors import InvalidInput, escape_control
from stratafl.base.tracebacks import is_installed
from stratafl.config.paths import HUB, SUFFIXES, renamed
from stratafl.config.schema import Config
from stratafl.runs import format

if TYPE_CHECKING:
    from stratafl.runs.reader import StoredRun

Table = Mapping[str, Any]
EXECUTION = ("device", "engine", "precision")
"""Keys of `[run]` for where and how exactly a run is computed; its result is the same up to
rounding."""
STORAGE = ("checkpoint_every", "keep_state")
"""Keys of `[run]` for what is kept of a run."""
EXTENT = ("rounds", "stop_at", "stop_when")
"""Keys of `[run]` for how far a run goes: the rounds that two runs both have are the same."""
MISSING = "missing"
NOT_THE_USERS = {"stratafl", "__main__", *sys.stdlib_module_names}
_PATH = re.compile(r"(?:.+\.py|[A-Za-z_][\w.]*):[A-Za-z_]\w*")
"""An import path: "file.py:name" or "package.module:name"."""
TOLD = 5
"""Changes that are told one by one."""
LARGE = 1 << 20
"""Bytes of a file from which on its digest is remembered for as long as its size and time stay."""


class Provenance(NamedTuple):
    """What a run began with, as plain data."""

    config: dict[str, Any]
    files: dict[str, str]
    """SHA-256 by path or by name of a module."""

    @staticmethod
    def of(config: Table, before: Provenance | None = None) -> Provenance:
        """The origins as they are now: the files that the config names, what those import, and
        those that are known from before."""
        found = _depended_on(config)
        files = {name: _digest(path) for name, path in found.items() if path is not None}
        if before is not None:
            short, short_before = _short_names(config), _short_names(before.config)
            named = {_placeless(short, name) for name in found}
            known = {name for name in before.files if _placeless(short_before, name) not in named}
            files |= {name: _digest(_source(name, _folders(config))) for name in known}
        return Provenance(dict(config), files)

    @staticmethod
    def read(path: Path, stored: object) -> Provenance:
        """Read origins from a file, or complain."""
        format.check_fields(path, stored, {"config": dict, "files": dict})
        assert isinstance(stored, dict)
        format.check_depth(path, stored)
        format.check_fields(path, stored["files"], dict.fromkeys(stored["files"], str))
        return Provenance(stored["config"], stored["files"])

    def noted(self) -> dict[str, Any]:
        """The origins for a file that has the config itself, of which a digest is then enough."""
        return {"config": config_digest(self.config), "files": self.files}


# -- which run it is -------------------------------------------------------------------------------


def essence(config: Config | Table, *, extent: bool = True) -> dict[str, Any]:
    """The part of a config that decides the results, with its defaults filled in: neither how a run
    is computed, nor what is kept of it, nor where its files lie.

    extent: include how far it goes.
    """
    tables = config.as_dict() if isinstance(config, Config) else dict(config)
    return _essence(_complete(tables) or tables, extent)


def identity(run: StoredRun, *, seed: bool = True, extent: bool = True) -> str:
    """SHA-256 of everything that decides a stored run's results: its config, and the user's files
    as they were.

    seed: include the seed; without it, runs of one setting are alike.
    extent: include how far it goes.
    """
    decisive = essence(run.config, extent=extent)
    if not seed and isinstance(decisive.get("run"), dict):
        decisive["run"].pop("seed", None)
    return config_digest({"config": decisive, "files": files_of(run), "changed": _changed_on_the_way(run)})


def files_of(run: StoredRun) -> dict[str, str]:
    """SHA-256 of the user's files of a stored run, by names that do not say where they lie."""
    short = _short_names(run.config)
    return {_placeless(short, name): digest for name, digest in (run.files or {}).items()}


def changes_since(run: StoredRun, config: Config) -> list[str]:
    """Why a stored run is not what this config would compute now, one line each; empty where it
    is."""
    return other_settings(run.config, config.as_dict()) + changed_files_since(run, config)


def changed_files_since(run: StoredRun, config: Config) -> list[str]:
    """The files of a stored run that are others now, where this config says that they are, or were
    when it went on; one line each."""
    return _changed_files(Provenance(run.config, run.files or {}), config.as_dict()) + _changed_on_the_way(run)


def changes(before: Provenance, config: Table) -> list[str]:
    """What differs between what a run began with and what there is now, but for how far it goes,
    one line each."""
    return other_settings(before.config, config, extent=False) + _changed_files(before, config)


def other_settings(before: Table, config: Table, *, extent: bool = True) -> list[str]:
    """What of two configs that decides the results differs, one line each.

    extent: include how far a run goes.
    """
    was, is_ = _complete(before), _complete(config)
    if was is None or is_ is None:
        was, is_ = dict(before), dict(config)
    return _differences(_essence(was, extent), _essence(is_, extent))


def extensions(before: Table, config: Table) -> list[str]:
    """What of how far a run goes differs between two configs, one line each."""
    was, is_ = ({key: each.get("run", {}).get(key) for key in EXTENT} for each in (before, config))
    return _differences({"run": was}, {"run": is_})


def shorten(told: Sequence[str]) -> str:
    """The first of several changes in a line, and how many there are more."""
    more = len(told) - TOLD
    return "; ".join(told[:TOLD]) + (f"; and {more} more" if more > 0 else "")


def config_digest(config: Table) -> str:
    """SHA-256 of plain data."""
    return hashlib.sha256(json.dumps(config, sort_keys=True).encode()).hexdigest()


def _complete(config: Table) -> dict[str, Any] | None:
    """A config as this version writes it, with defaults that are new; None for the tables of a run
    from Python, which no config file can have."""
    try:
        found = Config.of(config)
        name, parameters = found.leaf.rates(found.run.rounds)
    except InvalidInput:
        return None
    tables = found.as_dict()
    tables["leaf"]["schedule"] = {"name": name, **parameters} if parameters else name
    return tables


def _essence(tables: Table, extent: bool) -> dict[str, Any]:
    short = _short_names(tables)
    found = renamed(tables, lambda text: short.get(text, text))
    run = found.get("run")
    if isinstance(run, dict):
        ignored = (*EXECUTION, *STORAGE, *(() if extent else EXTENT))
        found["run"] = {key: value for key, value in run.items() if key not in ignored}
    return found


def _differences(was: Table, is_: Table) -> list[str]:
    """Keys whose values differ, one line each."""
    before, now = format.flat_config(was), format.flat_config(is_)
    keys = [key for key in sorted({*before, *now}) if json.dumps(before.get(key)) != json.dumps(now.get(key))]
    return [f"{escape_control(key)} was {_short(before.get(key))} and is {_short(now.get(key))}" for key in keys]


def _changed_on_the_way(run: StoredRun) -> list[str]:
    """What was changed when a run went on all the same: its rounds are not those of one config."""
    return [f"on the way {text}" for each in run.continued for text in format.strings_in(each.get("changed"))]


def _changed_files(before: Provenance, config: Table) -> list[str]:
    """The files of before that are others now or gone, those that the config has full names of
    looked for there."""
    names, names_before = _short_names(config), _short_names(before.config)
    named = {_placeless(names, name): name for name in _named(config) if os.path.isabs(name)}
    folders, changed = _folders(config), []
    for name, digest in before.files.items():
        short = _placeless(names_before, name)
        now = _digest(_source(named.get(short, name), folders))
        if now != digest:
            changed.append(f"{escape_control(short)} {'is missing' if now == MISSING else 'was changed'}")
    return changed


def _placeless(short: Mapping[str, str], name: str) -> str:
    """The name of a file or module without the place it is in, which changes where a project is
    moved; `short` has those of a config's files."""
    return short.get(name, PurePath(name).name if os.path.isabs(name) else name)


def _short_names(config: Table) -> dict[str, str]:
    """The last parts of each file's name in a config, as many as tell the files apart."""
    texts: dict[str, tuple[str, ...]] = {}

    def look(text: str) -> str:
        if text.endswith(SUFFIXES) or os.path.isabs(text):
            texts[text] = PurePath(text).parts
        return text

    renamed(config, look)
    count, longest = 1, max(map(len, texts.values()), default=1)
    while count < longest and len({parts[-count:] for parts in texts.values()}) < len(set(texts.values())):
        count += 1
    return {text: "/".join(parts[-count:]) for text, parts in texts.items()}


# -- the files -------------------------------------------------------------------------------------


def source_files(config: Table) -> dict[str, Path | None]:
    """Where the files are that a config names and the modules that lie beside them and are loaded
    in this process, by their names."""
    named, folders = dict.fromkeys(_named(config)), _folders(config)
    return {name: _source(name, folders) for name in (*named, *_loaded_beside(named))}


def _depended_on(config: Table) -> dict[str, Path | None]:
    """Where the files are that a config names and the modules that those say they import, by their
    names: the same in whatever process, and whatever else it has loaded."""
    folders, left = _folders(config), list(dict.fromkeys(_named(config)))
    found = {name: _source(name, folders) for name in left}
    while left:
        importer = left.pop()
        source = found[importer]
        if source is None or source.suffix != ".py" or is_installed(source):
            continue
        for name in _imports(importer, source):
            if name not in found and (place := _users_module(name, folders)) is not None:
                found[name] = place
                left.append(name)
    return found


def _named(value: Any) -> Iterator[str]:
    """Every text in a config that is a file or the full path of a folder, or the file or module of
    a "file.py:Class" or "package.module:Class"."""
    if isinstance(value, Mapping):
        name = value.get("name")
        if isinstance(name, str) and ":" in name and not name.startswith(HUB):
            yield name.rpartition(":")[0]
        value = list(value.values())
    if isinstance(value, list | tuple):
        for each in value:
            yield from _named(each)
    elif isinstance(value, str) and _PATH.fullmatch(value):
        yield value.rpartition(":")[0]
    elif isinstance(value, str):
        text = value.removeprefix(HUB)
        if (("." in text or os.sep in text) and _is_file(text)) or _is_folder(text):
            yield text


def _folders(config: Table) -> list[Path]:
    """The folders of the Python files that a config names, beside which their modules may lie."""
    return list(dict.fromkeys(Path(name).absolute().parent for name in _named(config) if name.endswith(".py")))


def _loaded_beside(named: Iterable[str]) -> Iterator[str]:
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


def _imports(importer: str, source: Path) -> Iterator[str]:
    """The modules that a Python file says it imports, also inside its functions, and the packages
    they are in."""
    try:
        nodes = list(ast.walk(ast.parse(source.read_bytes())))
    except (OSError, SyntaxError, ValueError, RecursionError, MemoryError):
        return
    package = importer if source.name == "__init__.py" else importer.rpartition(".")[0]
    found = [] if importer.endswith(".py") else [importer]
    for node in nodes:
        if isinstance(node, ast.Import):
            found += [each.name for each in node.names]
        elif isinstance(node, ast.ImportFrom) and not (node.level and importer.endswith(".py")):
            above = package.split(".")[: len(package.split(".")) + 1 - node.level] if node.level else []
            module = ".".join(filter(None, [*above, node.module]))
            found += [module, *(f"{module}.{each.name}" for each in node.names)]
    for name in dict.fromkeys(found):
        parts = name.split(".")
        yield from (".".join(parts[:count]) for count in range(1, len(parts) + 1))


def _users_module(name: str, folders: Sequence[Path]) -> Path | None:
    """Where a module is, if it is neither Python's, nor the library's, nor of an installed
    package."""
    top = name.partition(".")[0]
    # the outermost package first: to look for what is in one, it is imported
    outermost = None if top in NOT_THE_USERS else _source(top, folders)
    if top in NOT_THE_USERS or (outermost is not None and is_installed(outermost)):
        return None
    source = _source(name, folders)
    return source if source is not None and source.suffix == ".py" and not is_installed(source) else None


def _source(name: str, folders: Sequence[Path] = ()) -> Path | None:
    """Where a file, a folder or a module is; None where that is not known."""
    if name.endswith(".py") or os.path.isabs(name) or _is_file(name):
        return Path(name).absolute()
    if name == "__main__":
        # of a program's own objects there are digests, and its other lines matter nothing
        return None
    try:
        found = importlib.util.find_spec(name)
    except Exception:
        # looking for a module runs the packages it is in, which may raise anything
        found = None
    if found is not None:
        return Path(found.origin).absolute() if found.origin is not None and found.has_location else None
    # a file that is told where to import from may have been the only one to know
    places = [folder.joinpath(*name.split(".")) for folder in folders]
    beside = [path for place in places for path in (place.with_name(f"{place.name}.py"), place / "__init__.py")]
    return next((path for path in beside if _is_file(str(path))), None)


def _is_file(name: str) -> bool:
    try:
        return Path(name).is_file()
    except (OSError, ValueError):
        return False


def _is_folder(name: str) -> bool:
    return os.path.isabs(name) and os.path.isdir(name)


def _digest(path: Path | None) -> str:
    """SHA-256 of a file, or of the names and sizes of all files in a folder."""
    try:
        if path is not None and path.is_dir():
            return config_digest({"files": sorted(_listed(path))})
        if path is None or not path.is_file():
            return MISSING
        is_ = path.stat()
        if is_.st_size >= LARGE:
            return _large_digest(path, is_.st_size, is_.st_mtime_ns)
        return hashlib.sha256(path.read_bytes()).hexdigest()
    except (OSError, ValueError):
        return MISSING


@functools.lru_cache(maxsize=256)
def _large_digest(path: Path, size: int, time: int) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _listed(folder: Path) -> Iterator[tuple[str, int]]:
    for place, _, names in os.walk(folder):
        for name in names:
            path = os.path.join(place, name)
            if os.path.isfile(path):
                yield os.path.relpath(path, folder), os.path.getsize(path)


def _short(value: object, limit: int = 60) -> str:
    text = escape_control(json.dumps(value))
    return text if len(text) <= limit else text[: limit - 3] + "..."
