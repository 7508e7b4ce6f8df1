"""The runs that a command line names: run folders, folders of runs, and archives of runs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import datetime
from pathlib import Path

from stratafl.base.errors import InvalidInput
from stratafl.runs import StoredRun, layout, read_run
from stratafl.runs.archive import ENDINGS, unpacked
from stratafl.runs.origins import identity
from stratafl.runs.read import Broken, Reader, scan, stamp_of

Found = list[StoredRun | Broken]


def in_archive(path: Path) -> Found:
    """The runs of an archive, and what cannot be read there."""
    with unpacked(path) as place:
        return scan(place)


def gather(
    folders: Sequence[Path],
    read: Callable[[Path], StoredRun] = read_run,
    unpack: Callable[[Path], Found] = in_archive,
) -> tuple[list[StoredRun], list[str]]:
    """The runs, each once and oldest first in each folder, and a line for each that cannot be read.

    Of copies of a run, as in an archive and in its own folder, the one that was updated last.
    """
    runs: dict[tuple[str, str, str], StoredRun] = {}
    unreadable = []
    for folder in folders:
        found: Found
        if folder.name.endswith(ENDINGS) and folder.is_file():
            found = unpack(folder)
        elif (folder / layout.RUN).exists():
            try:
                found = [read(folder)]
            except InvalidInput as problem:
                found = [Broken(folder, str(problem))]
        else:
            found = scan(folder, read)
        for each in found:
            if isinstance(each, StoredRun):
                # a copy that went on with something else is another run
                which = each.id, each.name, identity(each, extent=False)
                if which not in runs or _age(runs[which]) < _age(each):
                    runs[which] = each
            else:
                unreadable.append(each.reason)
    return list(runs.values()), list(dict.fromkeys(unreadable))


class Gatherer:
    """Gathers again and again: a run or an archive is read anew only where it has changed, and is
    the same object otherwise."""

    def __init__(self) -> None:
        self._reader = Reader()
        self._archives: dict[Path, tuple[object, Found]] = {}

    def __call__(self, folders: Sequence[Path]) -> tuple[list[StoredRun], list[str]]:
        """As `gather` does."""
        try:
            return gather(folders, self._reader, self._unpacked)
        finally:
            self._reader.forget_the_rest()

    def _unpacked(self, path: Path) -> Found:
        # it is unpacked elsewhere each time, so that its runs are not known by their folders
        stamp = stamp_of(path)
        if path not in self._archives or self._archives[path][0] != stamp:
            self._archives[path] = stamp, in_archive(path)
        return self._archives[path][1]


def _age(run: StoredRun) -> tuple[datetime, int]:
    return datetime.fromisoformat(run.updated), run.round
