"""Provenance of a run: its config, and the user's files that the config names.

It is recorded when a run begins and with every checkpoint. It identifies the run, tells whether its
result is what the config would compute now, and lists the differences.
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
from stratafl.experiment import legacy
from stratafl.experiment.experiment import Experiment
from stratafl.experiment.toml import HUB, SUFFIXES, renamed_files
from stratafl.runs import format
from stratafl.runs.format import config_digest

if TYPE_CHECKING:
    from stratafl.runs.reader import StoredRun

Table = Mapping[str, Any]
NOT_DECISIVE = ("execution", "storage")
"""Sections that change no result but in its last bits."""
EXTENT = ("rounds", "evaluation.stop_when")
"""Options for the length of a run: the common rounds of two runs are equal."""
MISSING = "missing"
NOT_THE_USERS = {"stratafl", "__main__", *sys.stdlib_module_names}
_PATH = re.compile(r"(?:.+\.py|[A-Za-z_][\w.]*):[A-Za-z_]\w*")
"""Import path: "file.py:name" or "package.module:name"."""
MAX_LISTED_CHANGES = 5
"""Maximum number of changes that are listed."""
CACHED_DIGEST_SIZE = 1 << 20
"""Size of a file from which its digest is cached while its size and time stay the same."""
HASHED_FOLDER_SIZE = 1 << 30
"""Size of a folder up to which its digest covers the contents of its files, and not only their
names and sizes."""


class Provenance(NamedTuple):
    """Inputs of a run, as plain data."""

    config: dict[str, Any]
    files: dict[str, str]
    """SHA-256 by path or by name of a module."""

    @staticmethod
    def of(config: Table, before: Provenance | None = None) -> Provenance:
        """Provenance of a config now: the files that it names, their imports, and the files of an
        earlier provenance."""
        sources = _dependencies(config)
        files = {name: _digest(path) for name, path in sources.items() if path is not None}
        if before is not None:
            names, names_before = _short_names(config), _short_names(before.config)
            portable = {_portable_name(names, name) for name in sources}
            earlier = {name for name in before.files if _portable_name(names_before, name) not in portable}
            files |= {name: _digest(_source(name, _folders(config))) for name in earlier}
        return Provenance(dict(config), files)

    @staticmethod
    def read(path: Path, stored: object) -> Provenance:
        """Read a provenance from a file; raises if it is damaged."""
        format.check_fields(path, stored, {"config": dict, "files": dict})
        assert isinstance(stored, dict)
        format.check_depth(path, stored)
        format.check_fields(path, stored["files"], dict.fromkeys(stored["files"], str))
        return Provenance(legacy.current(stored["config"]), stored["files"])

    def digest(self) -> dict[str, Any]:
        """Short form for a file that has the config itself: with its digest."""
        return {"config": config_digest(self.config), "files": self.files}


# -- which run it is -------------------------------------------------------------------------------


def essence(config: Experiment | Table, *, extent: bool = True) -> dict[str, Any]:
    """Part of a config that decides the results, with its defaults filled in.

    It excludes how a run is computed, what is stored, and the folders of files. extent: include the
    length of the run.
    """
    tables = config.to_table() if isinstance(config, Experiment) else dict(config)
    return _essence(complete(tables) or tables, extent)


def identity(run: StoredRun, *, seed: bool = True, extent: bool = True) -> str:
    """SHA-256 of everything that decides a stored run's results: its config, and the user's files.

    seed: include the seed; without it, runs of one group are equal. extent: include the length of
    the run.
    """
    decisive = essence(run.config, extent=extent)
    if not seed:
        decisive.pop("seed", None)
    return config_digest({"config": decisive, "files": files_of(run), "changed": _recorded_changes(run)})


def files_of(run: StoredRun) -> dict[str, str]:
    """SHA-256 of the user's files of a stored run, by names without their folders."""
    short = _short_names(run.config)
    return {_portable_name(short, name): digest for name, digest in (run.files or {}).items()}


def changes_since(run: StoredRun, experiment: Experiment) -> list[str]:
    """Differences between a stored run and what a config would compute now, one line each."""
    return other_settings(run.config, experiment.to_table()) + changed_files_since(run, experiment)


def changed_files_since(run: StoredRun, experiment: Experiment) -> list[str]:
    """Files of a stored run that have changed, according to this config or to its continuations;
    one line each."""
    return _changed_files(Provenance(run.config, run.files or {}), experiment.to_table()) + _recorded_changes(run)


def changes(before: Provenance, config: Table) -> list[str]:
    """Differences between a provenance and a config, except for the length of the run; one line
    each."""
    return other_settings(before.config, config, extent=False) + _changed_files(before, config)


def other_settings(before: Table, config: Table, *, extent: bool = True) -> list[str]:
    """Differences between two configs that change the results, one line each.

    extent: include the length of the run.
    """
    old, new = complete(before), complete(config)
    if old is None or new is None:
        old, new = dict(before), dict(config)
    return _differences(_essence(old, extent), _essence(new, extent))


def extensions(before: Table, config: Table) -> list[str]:
    """Differences in the length of the run, one line each."""
    old, new = (format.flat_config(table) for table in (before, config))
    return _differences(*({key: flat.get(key) for key in EXTENT} for flat in (old, new)))


def shorten(changes: Sequence[str]) -> str:
    """Join the first changes in a line, with the number of others."""
    rest = len(changes) - MAX_LISTED_CHANGES
    return "; ".join(changes[:MAX_LISTED_CHANGES]) + (f"; and {rest} more" if rest > 0 else "")


def complete(config: Table) -> dict[str, Any] | None:
    """Complete a config with the defaults of this version; None for the tables of a run from
    Python, which no file can contain."""
    try:
        return Experiment.from_table(config).to_table()
    except InvalidInput:
        return None


def _essence(tables: Table, extent: bool) -> dict[str, Any]:
    short = _short_names(tables)
    decisive = _with_rounds_of_schedule(renamed_files(tables, lambda text: short.get(text, text)))
    decisive = {name: entry for name, entry in decisive.items() if name not in NOT_DECISIVE}
    if not extent:
        decisive.pop("rounds", None)
        if isinstance(decisive.get("evaluation"), dict):
            decisive["evaluation"] = {k: v for k, v in decisive["evaluation"].items() if k != "stop_when"}
    return decisive


def _with_rounds_of_schedule(tables: dict[str, Any]) -> dict[str, Any]:
    """The tables with the length of a learning rate that falls until the last round."""
    client = tables.get("client")
    if not isinstance(client, dict):
        return tables
    schedule = client.get("lr_schedule")
    if not isinstance(schedule, dict) or schedule.get("name") != "cosine" or schedule.get("rounds") is not None:
        return tables
    return {**tables, "client": {**client, "lr_schedule": {**schedule, "rounds": tables.get("rounds")}}}


def _differences(old_table: Table, new_table: Table) -> list[str]:
    """Keys whose values differ, one line each."""
    old, new = format.flat_config(old_table), format.flat_config(new_table)
    keys = [key for key in sorted({*old, *new}) if json.dumps(old.get(key)) != json.dumps(new.get(key))]
    return [_difference(escape_control(key), _shortened(old.get(key)), _shortened(new.get(key))) for key in keys]


def _difference(key: str, old: str, new: str) -> str:
    # digests of long values are beyond what is shown
    return f"{key} was {old} and is {new}" if old != new else f"{key} was changed"


def _recorded_changes(run: StoredRun) -> list[str]:
    """Changes with which a run was continued: its rounds are not those of one config."""
    return [f"on the way {text}" for entry in run.continued for text in format.strings_in(entry.get("changed"))]


def _changed_files(before: Provenance, config: Table) -> list[str]:
    """Files of a provenance that have changed or are missing; those that the config names by full
    paths are looked for there."""
    names, names_before = _short_names(config), _short_names(before.config)
    references = {_portable_name(names, name): name for name in _references(config) if os.path.isabs(name)}
    folders, changed = _folders(config), []
    for name, digest in before.files.items():
        short = _portable_name(names_before, name)
        source = _source(references.get(short, name), folders)
        current = _digest(source)
        if current != digest and not _is_listed_folder(source, digest):
            changed.append(f"{escape_control(short)} {'is missing' if current == MISSING else 'was changed'}")
    return changed


def _portable_name(short: Mapping[str, str], name: str) -> str:
    """Name of a file or module without its folder, which changes when a project is moved."""
    return short.get(name, PurePath(name).name if os.path.isabs(name) else name)


def _short_names(config: Table) -> dict[str, str]:
    """Last parts of each file's path in a config, as many as distinguish the files."""
    texts: dict[str, tuple[str, ...]] = {}

    def look(text: str) -> str:
        if text.endswith(SUFFIXES) or os.path.isabs(text):
            texts[text] = PurePath(text).parts
        return text

    renamed_files(config, look)
    count, longest = 1, max(map(len, texts.values()), default=1)
    while count < longest and len({parts[-count:] for parts in texts.values()}) < len(set(texts.values())):
        count += 1
    return {text: "/".join(parts[-count:]) for text, parts in texts.items()}


# -- the files -------------------------------------------------------------------------------------


def source_files(config: Table) -> dict[str, Path | None]:
    """Source files of a config: the files that it names, and the modules beside them that this
    process has loaded, by name."""
    named, folders = dict.fromkeys(_references(config)), _folders(config)
    return {name: _source(name, folders) for name in (*named, *_loaded_beside(named))}


def _dependencies(config: Table) -> dict[str, Path | None]:
    """Source files of a config: the files that it names, and the modules that these import, by
    name.

    The result does not depend on the modules that a process has loaded.
    """
    folders, pending = _folders(config), list(dict.fromkeys(_references(config)))
    sources = {name: _source(name, folders) for name in pending}
    while pending:
        importer = pending.pop()
        source = sources[importer]
        if source is None or source.suffix != ".py" or is_installed(source):
            continue
        for name in _imports(importer, source):
            if name not in sources and (path := _user_module(name, folders)) is not None:
                sources[name] = path
                pending.append(name)
    return sources


def _references(value: Any) -> Iterator[str]:
    """Files and modules that a config refers to: files, full paths of folders, and those of
    "file.py:Class" or "package.module:Class"."""
    if isinstance(value, Mapping):
        name = value.get("name")
        if isinstance(name, str) and ":" in name and not name.startswith(HUB):
            yield name.rpartition(":")[0]
        value = list(value.values())
    if isinstance(value, list | tuple):
        for entry in value:
            yield from _references(entry)
    elif isinstance(value, str) and _PATH.fullmatch(value):
        yield value.rpartition(":")[0]
    elif isinstance(value, str):
        text = value.removeprefix(HUB)
        if (("." in text or os.sep in text) and _is_file(text)) or (os.path.isabs(text) and os.path.isdir(text)):
            yield text


def _folders(config: Table) -> list[Path]:
    """Folders of the Python files that a config names, where their modules may be."""
    return list(dict.fromkeys(Path(name).absolute().parent for name in _references(config) if name.endswith(".py")))


def _loaded_beside(names: Iterable[str]) -> Iterator[str]:
    """Loaded modules beside a named file, or in the package of a named module."""
    folders = set()
    for name in names:
        source = _source(name)
        if source is not None and source.suffix == ".py" and not is_installed(source):
            # the folder that contains the outermost package
            levels = 0 if name.endswith(".py") else name.count(".") + (source.name == "__init__.py")
            folders.add(source.parents[min(max(levels, 1), len(source.parents)) - 1])
    for name, module in list(sys.modules.items()) if folders else ():
        path = vars(module).get("__file__") if isinstance(module, ModuleType) else None
        if isinstance(path, str) and path.endswith(".py") and name.partition(".")[0] not in NOT_THE_USERS:
            source = Path(path).absolute()
            if not is_installed(source) and any(folder in source.parents for folder in folders):
                yield name


def _imports(importer: str, source: Path) -> Iterator[str]:
    """Modules that a Python file imports, also inside functions, and their packages."""
    try:
        nodes = list(ast.walk(ast.parse(source.read_bytes())))
    except (OSError, SyntaxError, ValueError, RecursionError, MemoryError):
        return
    package = importer if source.name == "__init__.py" else importer.rpartition(".")[0]
    modules = [] if importer.endswith(".py") else [importer]
    for node in nodes:
        if isinstance(node, ast.Import):
            modules += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and not (node.level and importer.endswith(".py")):
            above = package.split(".")[: len(package.split(".")) + 1 - node.level] if node.level else []
            module = ".".join(filter(None, [*above, node.module]))
            modules += [module, *(f"{module}.{alias.name}" for alias in node.names)]
    for name in dict.fromkeys(modules):
        parts = name.split(".")
        yield from (".".join(parts[:count]) for count in range(1, len(parts) + 1))


def _user_module(name: str, folders: Sequence[Path]) -> Path | None:
    """Path of a module of the user; None for modules of Python, of the library and of installed
    packages."""
    top = name.partition(".")[0]
    # the outermost package first, since finding a submodule imports its package
    outermost = None if top in NOT_THE_USERS else _source(top, folders)
    if top in NOT_THE_USERS or (outermost is not None and is_installed(outermost)):
        return None
    source = _source(name, folders)
    return source if source is not None and source.suffix == ".py" and not is_installed(source) else None


def _source(name: str, folders: Sequence[Path] = ()) -> Path | None:
    """Path of a file, a folder or a module; None if unknown."""
    if name.endswith(".py") or os.path.isabs(name) or _is_file(name):
        return Path(name).absolute()
    if name == "__main__":
        # the objects of a program have digests, and its other lines do not matter
        return None
    try:
        spec = importlib.util.find_spec(name)
    except Exception:
        # finding a module imports its packages, which may raise anything
        spec = None
    if spec is not None:
        return Path(spec.origin).absolute() if spec.origin is not None and spec.has_location else None
    # the module may be found only relative to the folders of the named files
    bases = [folder.joinpath(*name.split(".")) for folder in folders]
    candidates = [path for base in bases for path in (base.with_name(f"{base.name}.py"), base / "__init__.py")]
    return next((path for path in candidates if _is_file(str(path))), None)


def _is_file(name: str) -> bool:
    try:
        return Path(name).is_file()
    except (OSError, ValueError):
        return False


def _digest(path: Path | None) -> str:
    """SHA-256 of a file or of a folder."""
    try:
        if path is not None and path.is_dir():
            files = tuple(sorted(_file_stamps(path)))
            if sum(size for _, size, _ in files) > HASHED_FOLDER_SIZE:
                return _listing_digest(files)
            return _contents_digest(path, files)
        if path is None or not path.is_file():
            return MISSING
        stat = path.stat()
        if stat.st_size >= CACHED_DIGEST_SIZE:
            return _large_digest(path, stat.st_size, stat.st_mtime_ns)
        return hashlib.sha256(path.read_bytes()).hexdigest()
    except (OSError, ValueError):
        return MISSING


@functools.lru_cache(maxsize=256)
def _large_digest(path: Path, size: int, time: int) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


FileStamp = tuple[str, int, int]
"""Name of a file within a folder, its size and its time."""


def _is_listed_folder(path: Path | None, digest: str) -> bool:
    """Whether a digest is that of the names and sizes of a folder's files, as all were once."""
    return path is not None and path.is_dir() and _listing_digest(sorted(_file_stamps(path))) == digest


def _listing_digest(files: Sequence[FileStamp]) -> str:
    return config_digest({"files": [(name, size) for name, size, _ in files]})


@functools.lru_cache(maxsize=16)
def _contents_digest(folder: Path, files: tuple[FileStamp, ...]) -> str:
    digest = hashlib.sha256()
    for name, size, _ in files:
        digest.update(json.dumps([name, size]).encode())
        with (folder / name).open("rb") as file:
            digest.update(hashlib.file_digest(file, "sha256").digest())
    return digest.hexdigest()


def _file_stamps(folder: Path) -> Iterator[FileStamp]:
    for root, _, names in os.walk(folder):
        for name in names:
            path = os.path.join(root, name)
            if os.path.isfile(path):
                stat = os.stat(path)
                yield os.path.relpath(path, folder), stat.st_size, stat.st_mtime_ns


def _shortened(value: object) -> str:
    text = escape_control(json.dumps(value))
    return text if len(text) <= 60 else f"{text[:57]}..."
