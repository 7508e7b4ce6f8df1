"""Reader of stored runs, from folders and archives."""

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
from typing import TYPE_CHECKING, Any

from stratafl.base import files
from stratafl.base.errors import InvalidInput, first_line_of
from stratafl.base.files import cannot_read, read_bytes, read_json
from stratafl.runs import format
from stratafl.runs.format import is_locked

if TYPE_CHECKING:
    from torch import Tensor

    from stratafl.metrics.records import RoundResult

MAX_FOLDER_DEPTH = 3
"""Maximum depth of folders that are searched for runs."""

READ_FILES = (format.RUN, format.STATUS, format.ROUNDS, format.TREE, format.SUMMARY)
"""Files that `read_run` reads and archives contain; models and checkpoints are a thousand times
larger."""


@dataclass(frozen=True)
class StoredRun:
    """Contents of a run folder, which may be of an unfinished run."""

    path: Path
    name: str
    id: str
    status: str
    """running, done, interrupted or failed."""
    reason: str
    """Reason of a failure or interruption; empty otherwise."""
    round: int
    """Number of completed global rounds."""
    total: int
    """Number of planned global rounds."""
    created: str
    updated: str
    config: dict[str, Any] = field(repr=False)
    environment: dict[str, Any] = field(repr=False)
    rounds: list[dict[str, Any]] = field(repr=False)
    """Records of the global rounds, as in rounds.jsonl."""
    tree: dict[str, Any] = field(repr=False)
    summary: dict[str, Any] | None = field(repr=False)
    """Summary of a finished run."""
    continued: list[dict[str, Any]] = field(default_factory=list, repr=False)
    """Continuations: `after` which round, `time` and `environment`, and what was `changed`, if
    anything."""
    engine: str = ""
    """Engine that trained it: "loop", "stacked" or "vmap", whatever its config requests."""
    how: str = ""
    """Engine, and the reason if another one was requested."""
    notes: tuple[str, ...] = ()
    """Remarks for the user about the execution, such as why another engine trained it than was
    requested."""
    precision: str = ""
    """Precision of its products; empty if an early version did not record it."""
    better: dict[str, str] = field(default_factory=dict, repr=False)
    """Direction in which each metric is better, "higher" or "lower"; for metrics that are not in it
    their names decide."""

    clock: dict[str, Any] = field(default_factory=dict, repr=False)
    """Network that the run was simulated on, under the key `network`; empty if on none."""

    workload: dict[str, Any] = field(default_factory=dict, repr=False)
    """Quantities that decide time and traffic on any network; empty if an early version did not
    record them."""
    files: dict[str, str] | None = field(default=None, repr=False)
    """SHA-256 of the user's files when it began or was last continued, by path or name of a module;
    None if an early version did not record them."""

    @property
    def method(self) -> str:
        """Name of the method, or those of its rules, root first; empty if its config has none."""
        table = self.config.get("method")
        rules = table.get("rules") if isinstance(table, dict) else None
        names = rules if isinstance(rules, list) else [table]
        return " / ".join(str(rule.get("name", "")) if isinstance(rule, dict) else str(rule or "") for rule in names)

    @property
    def diverged(self) -> int | None:
        """Round from which on no test loss is finite, or None."""
        from stratafl.metrics.records import diverged  # with torch, which a list of runs does without

        return diverged(self.rounds)

    @property
    def left_out(self) -> dict[str, dict[str, int]]:
        """Number of times each node was left out, {reason: {node: number of times}}: refused,
        too_large; in deployed runs absent, too, and late where parents wait by time."""
        return format.exclusion_counts(self.rounds)

    def environments(self, until: int | None = None) -> list[dict[str, Any]]:
        """Environments in which its records, or those up to a round, were computed."""
        last = self.round if until is None else until
        starts = [(0, self.environment)] + [(entry["after"], entry["environment"]) for entry in self.continued]
        ends = [after for after, _ in starts[1:]] + [last]
        return [environment for (after, environment), end in zip(starts, ends, strict=True) if after < min(end, last)]

    def frame(self) -> Any:
        """Return the records as a pandas table, with a column per value ("metrics.accuracy")."""
        from stratafl.simulation.result import to_frame

        return to_frame(self.rounds)

    @property
    def records(self) -> list[RoundResult]:
        """Records of the global rounds, as a loop over the simulation gave them."""
        from stratafl.metrics.records import RoundResult

        return [RoundResult.of(record) for record in self.rounds]

    def model_state(self) -> dict[str, Tensor]:
        """State dict of the root's model, of a finished run: `model.load_state_dict` takes it."""
        from stratafl.runs.checkpoint import read_tensors

        if self.status != format.DONE:
            raise InvalidInput("run", self.path, f"is {self.status}: the root's model is stored when a run is done")
        return read_tensors(self.path / format.MODEL)


def load_run(path: Path | str) -> StoredRun:
    """Load the run in a folder: its config, records, summary and model, also while it goes on."""
    if not isinstance(path, str | Path):
        raise InvalidInput("path", path, "must be the path of a run's folder")
    return read_run(path)


def read_run(path: Path | str) -> StoredRun:
    """Read a run folder; raises with the name of a damaged file."""
    folder = Path(path)
    described = format.with_moved_paths(format.read_description(folder), folder)
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
        continued=list(described.get("continued", ())),
        notes=tuple(format.strings_in(described.get("notes"))),
        better=format.directions(described),
        clock=described["clock"] if isinstance(described.get("clock"), dict) else {},
        workload=described["workload"] if isinstance(described.get("workload"), dict) else {},
        files=described["inputs"]["files"] if "inputs" in described else None,
    )


def stamp_of(path: Path) -> tuple[int, int, int] | None:
    """Stamp that changes with a file's contents; None without a file."""
    try:
        stat = os.stat(path)
    except OSError:
        return None
    return stat.st_mtime_ns, stat.st_size, stat.st_ino


def read_rounds(folder: Path) -> list[dict[str, Any]]:
    """Read the round records; an incomplete last line is left out."""
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


def _is_record(record: Any, round: int) -> bool:
    """Whether a record is that of this round, and its fields have valid types."""
    if not isinstance(record, dict) or type(record.get("round")) is not int or record["round"] != round:
        return False
    tables = [record.get("metrics"), record.get("nodes", {}), record.get("drift", {})]
    if not all(isinstance(table, dict) for table in tables):
        return False
    metrics, nodes, drift = tables
    name_lists = [record.get(reason, []) for reason in ("refused", "too_large", "absent", "late")]
    return (
        all(_is_number(record.get(name)) for name in ("steps", "bytes_per_client", "seconds"))
        and all(_is_number(record.get(name, 0.0)) for name in ("lr", "clock_seconds", "clock_total"))
        and all(isinstance(names, list) and all(isinstance(name, str) for name in names) for names in name_lists)
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
    """Run folder that cannot be read."""

    path: Path
    reason: str


def list_runs(folder: Path | str = "runs") -> list[StoredRun]:
    """List the readable runs in a folder and its subfolders, oldest first."""
    return [run for run in scan(Path(folder)) if isinstance(run, StoredRun)]


def scan(folder: Path, read: Callable[[Path], StoredRun] = read_run) -> list[StoredRun | UnreadableRun]:
    """Read the runs in a folder and its subfolders, with those that cannot be read."""
    if not folder.is_dir():
        raise InvalidInput("folder", folder, "no such folder")
    runs: list[StoredRun | UnreadableRun] = []
    try:
        paths = sorted(_folders(folder))
    except OSError as problem:
        raise InvalidInput("folder", folder, problem.strerror or str(problem)) from None
    for path in paths:
        try:
            runs.append(read(path))
        except InvalidInput as problem:
            runs.append(UnreadableRun(path, str(problem)))
        except OSError as problem:
            runs.append(UnreadableRun(path, str(cannot_read(path, problem.strerror or str(problem)))))
    # ids sort by time; unreadable runs have none, and come last
    return sorted(runs, key=lambda run: (isinstance(run, UnreadableRun), run.id if isinstance(run, StoredRun) else ""))


def _folders(folder: Path, depth: int = MAX_FOLDER_DEPTH) -> Iterator[Path]:
    """Run folders in a folder; runs/SWEEP/RUN in a project is the deepest."""
    # os.path also answers without permission to read
    for path in [path for path in folder.iterdir() if os.path.isdir(path) and not path.name.startswith(".")]:
        if os.path.lexists(path / format.RUN):
            yield path
        elif depth > 1:
            try:
                yield from _folders(path, depth - 1)
            except OSError:
                yield path  # reported when it is read


ENDINGS = (".tar.gz", ".tgz")


def pack_runs(runs: Sequence[StoredRun], folder: Path, path: Path) -> int:
    """Write a .tar.gz that unpacks into a folder of runs; returns its size in bytes. Equal runs
    yield equal bytes.

    An unfinished run begins again if it is resumed elsewhere, as its checkpoints are not packed.
    """
    if not path.name.endswith(ENDINGS) or path.is_dir():
        raise InvalidInput("FILE", path, "must be a file that ends in .tar.gz or .tgz")
    files.make_folder(path.absolute().parent)
    with (
        files.atomic_write(path) as file,
        gzip.GzipFile("", "wb", fileobj=file, mtime=0) as compressed,
        tarfile.open(fileobj=compressed, mode="w") as archive,
    ):
        for run in sorted(runs, key=lambda run: run.path):
            for name in READ_FILES:
                if (run.path / name).is_file() and not (run.path / name).is_symlink():
                    archive.add(run.path / name, str((run.path / name).relative_to(folder)), filter=_plain)
    return path.stat().st_size


@contextmanager
def unpacked(path: Path) -> Iterator[Path]:
    """Yield a temporary folder with the runs of an archive."""
    with tempfile.TemporaryDirectory(prefix="stratafl-runs-") as folder:
        try:
            with tarfile.open(path, "r:gz") as archive:
                for entry in archive:
                    # only files of runs, wherever their names point to
                    if entry.isfile() and PurePosixPath(entry.name).name in READ_FILES:
                        archive.extract(entry, folder, filter="data")
        except (OSError, EOFError, tarfile.TarError) as problem:
            raise InvalidInput("archive", path, f"cannot be read: {first_line_of(problem)}") from None
        yield Path(folder)


def _plain(entry: tarfile.TarInfo) -> tarfile.TarInfo:
    """Remove owner and time of an archive's entry, which the run's own records have."""
    entry.uid = entry.gid = entry.mtime = 0
    entry.uname = entry.gname = ""
    entry.mode = 0o644
    return entry
