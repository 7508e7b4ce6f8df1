"""Runs in one small file, to carry from one machine to another: what a finished run is read from,
nothing else."""

from __future__ import annotations

import gzip
import tarfile
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path, PurePosixPath

from stratafl.base import files
from stratafl.base.errors import InvalidInput, first_line
from stratafl.runs import layout
from stratafl.runs.read import StoredRun

CARRIED = (layout.RUN, layout.STATUS, layout.ROUNDS, layout.TREE, layout.SUMMARY)
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
        files.writing(path) as out,
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
            raise InvalidInput("archive", path, f"cannot be read: {first_line(problem)}") from None
        yield Path(folder)


def _plain(entry: tarfile.TarInfo) -> tarfile.TarInfo:
    """A file in an archive without whose it was and when it was written, which a run's own records
    say better."""
    entry.uid = entry.gid = entry.mtime = 0
    entry.uname = entry.gname = ""
    entry.mode = 0o644
    return entry
