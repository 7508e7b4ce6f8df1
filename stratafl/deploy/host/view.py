"""A tree as an operator sees it: of all sites whose folders are here, and of what they know of
others."""

from __future__ import annotations

import contextlib
import dataclasses
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from stratafl.base import version
from stratafl.base.errors import InvalidInput
from stratafl.deploy.host import newsroom
from stratafl.deploy.news.changes import CONNECTING, times
from stratafl.deploy.news.entries import SKEWED, TRAFFIC, Entry
from stratafl.deploy.sites.site import Site, stored_experiment, tree_of
from stratafl.deploy.sites.state_file import status
from stratafl.runs.format import is_locked

FROM_PARENT = ("clock", "waited", "why", "took_part", "out")
"""Fields that only a parent knows."""
AT_FAULT = ("failing", "damaged", "refused", "stopped")
"""States in which a site does no work of a run that is not over."""
RECENT = 600.0
"""Seconds for which it is said that a process was started again."""


def seen(folders: dict[str, Path]) -> dict[str, Any]:
    """One document, as `deploy status --json` prints it. `folders`: of the sites here, root
    first."""
    known: dict[str, Entry] = {}
    for name, folder in folders.items():
        told = newsroom.read(folder)
        for each, entry in told.items():
            known[each] = _newer(known.get(each), entry)
        known[name] = _here(folder, known.get(name, Entry()))
    places = _places(folders)
    order = {name: known.get(name, Entry()) for name in places} | known
    return {
        "at": time.time(),
        "sites": {
            name: {
                "parent": places.get(name),
                "here": name in folders,
                "missing": entry.is_silent or entry.age is None,
                **{key: _short(value) for key, value in entry.as_dict().items()},
            }
            for name, entry in order.items()
        },
    }


def _short(value: Any) -> Any:
    """Seconds to a tenth."""
    return round(value, 1) if isinstance(value, float) else value


def _newer(above: Entry | None, own: Entry) -> Entry:
    """What a parent and what the site itself says of it, whichever is fresher."""
    if above is None:
        return own
    fresher = own if above.age is None or (own.age is not None and own.age < above.age) else above
    return dataclasses.replace(fresher, **{name: getattr(above, name) for name in FROM_PARENT})


def _here(folder: Path, entry: Entry) -> Entry:
    """A site on this machine: whether it runs is seen directly."""
    if is_locked(folder):
        return entry
    shown = status(folder / "state")
    doing = shown.get("doing")
    facts = {"round": shown.get("round", 0), **{name: shown.get(name, 0) for name in TRAFFIC}}
    checked = Entry.of({**facts, "state": doing if doing in ("done", "damaged") else "stopped"})
    fields = {name: getattr(checked, name) for name in ("state", *facts)}
    # one that was never started has nothing to tell
    return entry if entry.age is None and not shown else dataclasses.replace(entry, **fields)


def _places(folders: dict[str, Path]) -> dict[str, str]:
    """The parent of every site that is seen from here, in the order of the tree; that of the top is
    empty."""
    for folder in folders.values():
        with contextlib.suppress(InvalidInput):
            site, tree = Site.load(folder), tree_of(stored_experiment(folder))
            if site.is_root:
                return newsroom.parents(tree, site.name)
            whole = newsroom.parents(tree, tree.names[0][0])
            below = {name for each in folders for name in tree.subtree(*tree.find(each))}
            return {name: parent for name, parent in whole.items() if name in below}
    return {}


def faults(document: dict[str, Any]) -> Iterator[tuple[str, str]]:
    """Each site that does not work as it should, and why; nobody's once the run is over."""
    sites = document["sites"]
    if any(site["parent"] == "" and site["state"] == "done" for site in sites.values()):
        return
    for name, site in sites.items():
        texts = list(_faults(site, CONNECTING)) or [f"its state is {site['state']}"] * (site["state"] in AT_FAULT)
        if texts:
            yield name, "; ".join(texts)


def _faults(seen: dict[str, Any], patience: float) -> Iterator[str]:
    """What keeps a site from its work. `patience`: seconds that its parent may wait for it."""
    if seen["missing"]:
        yield "nothing was heard from it" + ("" if seen["age"] is None else f" for {seen['age']:.0f} s")
    if seen["problem"]:
        yield f"{seen['problem']} (for {seen['problem_for']:.0f} s)"
    if seen["waited"] is not None and seen["waited"] >= patience and seen["why"]:
        yield f"{seen['parent']} has waited for it for {seen['waited']:.0f} s: {seen['why']}"
    if seen["out"]:
        yield f"{seen['out']} (`stratafl deploy readmit` takes it back)"


def remarks(seen: dict[str, Any]) -> Iterator[str]:
    """What is worth a line about a site."""
    yield from _faults(seen, 0.0)
    if seen["restarted"] is not None and seen["restarted"] < RECENT:
        for process, count in seen["restarts"].items():
            yield f"its {process} was started again, {times(count)} in {seen['up']:.0f} s"
    if seen["version"] not in ("", version.__version__):
        yield f"it works with stratafl {seen['version']}, and this is {version.__version__}"
    if seen["clock"] is not None and abs(seen["clock"]) > SKEWED:
        way = "ahead of" if seen["clock"] > 0 else "behind"
        yield f"its clock is {abs(seen['clock']):.1f} s {way} that of {seen['parent']}"
