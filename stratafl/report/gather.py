"""The runs that a command line names: run folders, folders of runs, and archives of runs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

from stratafl.base.errors import InvalidInput
from stratafl.runs import StoredRun, layout, read_run
from stratafl.runs.archive import ENDINGS, unpacked
from stratafl.runs.read import Broken, scan


def gather(folders: Sequence[Path], read: Callable[[Path], StoredRun] = read_run) -> tuple[list[StoredRun], list[str]]:
    """The runs, each once and oldest first in each folder, and a line for each that cannot be
    read."""
    runs: dict[Path, StoredRun] = {}
    unreadable = []
    for folder in folders:
        found: list[StoredRun | Broken]
        if folder.name.endswith(ENDINGS) and folder.is_file():
            with unpacked(folder) as place:
                found = scan(place, read)
        elif (folder / layout.RUN).exists():
            try:
                found = [read(folder)]
            except InvalidInput as problem:
                found = [Broken(folder, str(problem))]
        else:
            found = scan(folder, read)
        for each in found:
            if isinstance(each, StoredRun):
                runs.setdefault(each.path.resolve(), each)
            else:
                unreadable.append(each.reason)
    return list(runs.values()), list(dict.fromkeys(unreadable))
