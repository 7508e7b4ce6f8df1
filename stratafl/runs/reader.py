"""Stored runs, read from folders and archives."""

from __future__ import annotations

import gzip
import json
import os
import tarfile
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath
from typing import Any

from stratafl.base import files
from stratafl.base.errors import InvalidInput, first_line_of
from stratafl.base.files import cannot_read, read_bytes, read_json
from stratafl.runs import format
from stratafl.runs.format import is_locked

DEEPEST = 3
"""Folders in each other that are looked into for runs."""

READ = (format.RUN, format.STATUS, format.ROUNDS, format.TREE, format.SUMMARY)
"""Files that `read_run` reads."""


@dataclass(frozen=True)
class StoredRun:
    """A run directory as it stands; also of a run that is going on."""

    path: Path
    name: str
    id: str
    status: str
    """running, done, interrupted or failed."""
    reason: str
    """Why it failed or was interrupted; empty otherwise."""
    round: int
    """Global rounds done."""
    total: int
    """Global rounds to do."""
    created: str
    updated: str
    config: dict[str, Any] = field(repr=False)
    environment: dict[str, Any] = field(repr=False)
    rounds: list[dict[str, Any]] = field(repr=False)
    """One record per global round, as in rounds.jsonl."""
    tree: dict[str, Any] = field(repr=False)
    summary: dict[str, Any] | None = field(repr=False)
    """The run in numbers, once it is done."""
    continued: list[dict[str, Any]] = field(default_factory=list, repr=False)
    """Where it went on: `after` which round, `time` and `environment`, and what was `changed`, if
    it was."""
    engine: str = ""
    """What trained it: "loop", "stacked" or "vmap", whatever its config asked for."""
    how: str = ""
    """The engine that ran, and why it is not what was asked for."""
    notes: tuple[str, ...] = ()
    """What its user should know about how it was done, such as why another engine trained it than
    was asked for: said once when it was set up."""
    precision: str = ""
    """What its products were computed in; empty where an early version did not note that."""
    better: dict[str, str] = field(default_factory=dict, repr=False)
    """Which way its metrics are better, "higher" or "lower"; those it does not say are known by
    their names."""

    clock: dict[str, Any] = field(default_factory=dict, repr=False)
    """The network of a run in virtual time, as `network`."""

    workload: dict[str, Any] = field(default_factory=dict, repr=False)
    """What decides its time and traffic on any network; empty where an early version did not note
    that."""
    files: dict[str, str] | None = field(default=None, repr=False)
    """SHA-256 of the user's files it began or last went on with, by path or name of a module; None
    where an early version did not note them."""

    @property
    def method(self) -> str:
        """The method's name, or those of its rules, root first; empty where its config has none."""
        given = self.config.get("method")
        rules = given.get("rules") if isinstance(given, dict) else None
        named = rules if isinstance(rules, list) else [given]
        return " / ".join(str(each.get("name", "")) if isinstance(each, dict) else str(each or "") for each in named)

    @property
    def diverged(self) -> int | None:
        """The round from which on its test loss is not finite; None where it lives."""
        from stratafl.metrics.records import diverged  # with torch, which a list of runs does without

        return diverged(self.rounds)

    @property
    def left_out(self) -> dict[str, dict[str, int]]:
        """How often each node was left out of a meeting, by why: refused, too_large; of a deployed
        run absent, too, and late where its parents wait by time."""
        return format.exclusion_counts(self.rounds)

    def environments(self, until: int | None = None) -> list[dict[str, Any]]:
        """The environments that its records, or those up to a round, were computed in: the first it
        began in, unless all of them were made anew."""
        last = self.round if until is None else until
        begun = [(0, self.environment)] + [(each["after"], each["environment"]) for each in self.continued]
        ends = [after for after, _ in begun[1:]] + [last]
        return [each for (after, each), end in zip(begun, ends, strict=True) if after < min(end, last)]

    def frame(self) -> Any:
        """The records as a pandas table, with a column per value ("metrics.accuracy")."""
        from stratafl.simulation.result import to_frame

        return to_frame(self.rounds)


def read_run(path: Path | str) -> StoredRun:
    """The run in a directory; a complaint that names the file where something in it is broken."""
    folder = Path(path)
    described = format.moved_along(format.read_description(folder), folder)
    status_path, tree_path, summary_path = (folder / name for name in (format.STATUS, format.TREE, format.SUMMARY))
    status = read_json(status_path)
    format.check_fields(
        status_path, status, {"status": str, "reason": str, "round": int, "rounds": int, "updated": str}
    )
    if status["status"] not in format.STATUSES:
        raise cannot_read(status_path, "unknown status")
    format.check_time(status_path, "updated", status["updated"])
    tree = read_json(tree_path)
    format.check_fields(tree_path, tree, {"classes": list, "levels": list})
    summary = read_json(summary_path) if summary_path.exists() else None
    if summary is not None:
        format.check_fields(summary_path, summary, {"rounds": int, "final": dict, "seconds": (int, float)})
    state, reason = status["status"], status["reason"]
    if state == format.RUNNING and not is_locked(folder):
        state, reason = format.INTERRUPTED, "its process has ended"
    rounds = read_rounds(folder)
    return StoredRun(
        path=folder,
        name=described["name"],
        id=described["id"],
        status=state,
        reason=reason,
        round=len(rounds),
        total=status["rounds"],
        created=described["created"],
        updated=status["updated"],
        engine=described["engine"],
        how=described.get("how", described["engine"]),
        precision=described.get("precision", ""),
        config=described["config"],
        environment=described["environment"],
        rounds=rounds,
        tree=tree,
        summary=summary,
        continued=format.continuations(described),
        notes=tuple(format.strings_in(described.get("notes"))),
        better=format.directions(described),
        clock=described["clock"] if isinstance(described.get("clock"), dict) else {},
        workload=described["workload"] if isinstance(described.get("workload"), dict) else {},
        files=described["inputs"]["files"] if "inputs" in described else None,
    )


class Reader:
    """Reads runs again and again, each anew only where something in its folder has changed."""

    def __init__(self) -> None:
        self._known: dict[Path, tuple[Stamp, StoredRun]] = {}
        self._asked: set[Path] = set()

    def __call__(self, path: Path) -> StoredRun:
        """The run in a directory: the same object while its files are the same, and its process
        lives or not."""
        self._asked.add(path)
        known, stamp = self._known.get(path), _stamp(path)
        if known is not None and known[0] == stamp:
            return known[1]
        # taken before it is read, so what changes meanwhile is read again the next time
        run = read_run(path)
        self._known[path] = stamp, run
        return run

    def forget_the_rest(self) -> None:
        """Forget all runs but those that were asked for since the last time."""
        self._known = {path: known for path, known in self._known.items() if path in self._asked}
        self._asked.clear()


Stamp = tuple[bool, tuple[tuple[int, int, int] | None, ...]]


def _stamp(folder: Path) -> Stamp:
    return is_locked(folder), tuple(stamp_of(folder / name) for name in READ)


def stamp_of(path: Path) -> tuple[int, int, int] | None:
    """A number for a file as it stands, which another file in its place would not have; None where
    there is none."""
    try:
        found = os.stat(path)
    except OSError:
        return None
    return found.st_mtime_ns, found.st_size, found.st_ino


def read_rounds(folder: Path) -> list[dict[str, Any]]:
    """The records so far; a last line that is still being written, or never was to its end, is left
    out."""
    path = folder / format.ROUNDS
    if not path.exists() and not path.is_symlink():
        return []
    complete, _, _ = read_bytes(path).rpartition(b"\n")
    records = []
    for number, line in enumerate(complete.splitlines(), 1):
        try:
            record = json.loads(line)
        except (ValueError, RecursionError):
            record = None
        if not _is_record(record, number):
            raise cannot_read(path, f"line {number} is not the record of round {number}")
        records.append(record)
    return records


def _is_record(found: Any, round: int) -> bool:
    """Whether every field that somebody reads is of its kind."""
    if not isinstance(found, dict) or type(found.get("round")) is not int or found["round"] != round:
        return False
    tables = [found.get("metrics"), found.get("nodes", {}), found.get("drift", {})]
    if not all(isinstance(table, dict) for table in tables):
        return False
    metrics, nodes, drift = tables
    named = [found.get(why, []) for why in ("refused", "too_large", "absent", "late")]
    return (
        all(_is_number(found.get(name)) for name in ("steps", "bytes_per_client", "seconds"))
        and all(_is_number(found.get(name, 0.0)) for name in ("lr", "clock_seconds", "clock_total"))
        and all(isinstance(names, list) and all(isinstance(name, str) for name in names) for names in named)
        and all(
            isinstance(table, dict) and all(map(_is_number, table.values()))
            for table in (metrics, *nodes.values(), *drift.values())
        )
    )


def _is_number(value: object) -> bool:
    if isinstance(value, int) and not isinstance(value, bool):
        return abs(value) <= format.LARGEST
    return isinstance(value, float)


@dataclass(frozen=True)
class UnreadableRun:
    """A folder that looks like a run and cannot be read."""

    path: Path
    reason: str


def list_runs(folder: Path | str = "runs") -> list[StoredRun]:
    """Every readable run in a folder and in the folders in it, oldest first."""
    return [run for run in scan(Path(folder)) if isinstance(run, StoredRun)]


def scan(folder: Path, read: Callable[[Path], StoredRun] = read_run) -> list[StoredRun | UnreadableRun]:
    """Likewise, with what cannot be read."""
    if not folder.is_dir():
        raise InvalidInput("folder", folder, "no such folder")
    found: list[StoredRun | UnreadableRun] = []
    try:
        paths = sorted(_folders(folder))
    except OSError as problem:
        raise InvalidInput("folder", folder, problem.strerror or str(problem)) from None
    for path in paths:
        try:
            found.append(read(path))
        except InvalidInput as problem:
            found.append(UnreadableRun(path, str(problem)))
        except OSError as problem:
            found.append(UnreadableRun(path, str(cannot_read(path, problem.strerror or str(problem)))))
    # those that cannot be read have no time and come last
    return sorted(found, key=lambda run: (isinstance(run, UnreadableRun), run.id if isinstance(run, StoredRun) else ""))


def _folders(folder: Path, depth: int = DEEPEST) -> Iterator[Path]:
    """Run folders in a folder; of those in a project, runs/SWEEP/RUN are the deepest."""
    # os.path's questions are answered also where something may not be looked at
    for path in [path for path in folder.iterdir() if os.path.isdir(path) and not path.name.startswith(".")]:
        if os.path.lexists(path / format.RUN):
            yield path
        elif depth > 1:
            try:
                yield from _folders(path, depth - 1)
            except OSError:
                yield path  # whoever reads it will be told


CARRIED = (format.RUN, format.STATUS, format.ROUNDS, format.TREE, format.SUMMARY)
"""Models and checkpoints stay: they are a thousand times larger."""

ENDINGS = (".tar.gz", ".tgz")


def pack_runs(runs: Sequence[StoredRun], folder: Path, path: Path) -> int:
    """Write a .tar.gz that `tar xzf` unpacks into a folder of runs; its size in bytes. Same runs,
    same bytes.

    A run that is not done begins again when it goes on elsewhere, as its checkpoints are not
    carried.
    """
    if not path.name.endswith(ENDINGS) or path.is_dir():
        raise InvalidInput("--pack", path, "must be a file that ends in .tar.gz or .tgz")
    files.make_folder(path.absolute().parent)
    with (
        files.atomic_write(path) as out,
        gzip.GzipFile("", "wb", fileobj=out, mtime=0) as squeezed,
        tarfile.open(fileobj=squeezed, mode="w") as archive,
    ):
        for run in sorted(runs, key=lambda run: run.path):
            for name in CARRIED:
                if (run.path / name).is_file() and not (run.path / name).is_symlink():
                    archive.add(run.path / name, str((run.path / name).relative_to(folder)), filter=_plain)
    return path.stat().st_size


@contextmanager
def unpacked(path: Path) -> Iterator[Path]:
    """A folder with the runs of an archive, for as long as they are read."""
    with tempfile.TemporaryDirectory(prefix="stratafl-runs-") as folder:
        try:
            with tarfile.open(path, "r:gz") as archive:
                for entry in archive:
                    # nothing but the files of runs, wherever their names point to
                    if entry.isfile() and PurePosixPath(entry.name).name in CARRIED:
                        archive.extract(entry, folder, filter="data")
        except (OSError, EOFError, tarfile.TarError) as problem:
            raise InvalidInput("archive", path, f"cannot be read: {first_line_of(problem)}") from None
        yield Path(folder)


def _plain(entry: tarfile.TarInfo) -> tarfile.TarInfo:
    """A file in an archive without whose it was and when it was written, which a run's own records
    say better."""
    entry.uid = entry.gid = entry.mtime = 0
    entry.uname = entry.gname = ""
    entry.mode = 0o644
    return entry
