"""The runs that a command line names: run folders, folders of runs, and archives of runs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import datetime
from pathlib import Path

from stratafl.base.errors import InvalidInput
from stratafl.runs import StoredRun, layout, read_run
from stratafl.runs.archive import ENDINGS, unpacked
from stratafl.runs.origins import identity
from stratafl.runs.read import Broken, scan


def gather(folders: Sequence[Path], read: Callable[[Path], StoredRun] = read_run) -> tuple[list[StoredRun], list[str]]:
    """The runs, each once and oldest first in each folder, and a line for each that cannot be read.

    Of copies of a run, as in an archive and in its own folder, the one that was updated last.
    """
    runs: dict[tuple[str, str, str], StoredRun] = {}
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
                # a copy that went on with something else is another run
                which = each.id, each.name, identity(each, extent=False)
                if which not in runs or _age(runs[which]) < _age(each):
                    runs[which] = each
            else:
                unreadable.append(each.reason)
    return list(runs.values()), list(dict.fromkeys(unreadable))


def _age(run: StoredRun) -> tuple[datetime, int]:
    return datetime.fromisoformat(run.updated), run.round
