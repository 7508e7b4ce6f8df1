"""A supervisor's news: what its own processes say, what came from below, and what of it is said
here and sent upward.

SITE/news.json holds it for `deploy status` and `deploy up`: the site and all below it.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import time
import zlib
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from stratafl.base import files, version
from stratafl.base.errors import InvalidInput
from stratafl.base.topology import Topology
from stratafl.deploy.host.processes import Forked
from stratafl.deploy.news import entries
from stratafl.deploy.news.changes import Changes
from stratafl.deploy.news.entries import TRAFFIC, Entry, Sites
from stratafl.deploy.notes import boards, log
from stratafl.deploy.sites.site import Site, stored_experiment, subtrees, tree_of
from stratafl.deploy.sites.state_file import status

NEWS = "news.json"
FORMAT = 1
"""Of that file; one without a number has this one, too."""
LOOK = 0.5
"""Seconds between two looks."""
STEADY = 5.0
"""Seconds: one of Flower's processes that lives as long does its work."""
FLOWERS = ("superlink", "supernode")


def parents(tree: Topology, top: str) -> dict[str, str]:
    """The parent of a site and of each below it, in the order of the tree; the top's is empty."""
    level, number = tree.find(top)
    inside, found = tree.subtree(level, number), {top: ""}
    for below in range(level + 1, tree.depth + 1):
        for name, parent in zip(tree.names[below], tree.parents[below], strict=True):
            if name in inside:
                found[name] = tree.names[below - 1][parent]
    return found


def read(folder: Path) -> Sites:
    """What a site last knew of itself and of all below it; nothing where there is no such file."""
    with contextlib.suppress(InvalidInput):
        return current(files.read_json(folder / NEWS))
    return {}


def current(found: object) -> Sites:
    """The news in what a news.json holds, as old as they are by now; another format's are none."""
    if not isinstance(found, dict) or found.get("format", FORMAT) != FORMAT or not isinstance(found.get("sites"), dict):
        return {}
    later = max(0.0, time.time() - found["at"]) if isinstance(found.get("at"), float) else 0.0
    return {str(name): Entry.of(entry).older(later) for name, entry in found["sites"].items()}


class Newsroom:
    """Gathers what a supervisor hears of its own processes and of the sites below, tells the
    operator of changes, and passes it on to the parent."""

    def __init__(self, folder: Path, site: Site):
        self._folder, self._site, self._subtrees = folder, site, subtrees(folder, site)
        below = frozenset[str]().union(*self._subtrees.values())
        room = entries.largest(below | {site.name})
        self.boards = {name: boards.Board(room) for name in ("node", "superlink", "supernode", "news")}
        self.telling = boards.Board(room)
        """What is to be told to the parent."""
        self._began, self._looked, self._written = time.monotonic(), 0.0, 0.0
        self._restarts: Counter[str] = Counter()
        self._restarted: float | None = None
        self._held: dict[str, tuple[str, float]] = {}
        """Why a process ended, and since when that is so, by its name."""
        before = read(folder)
        self._took_part = {name for name, entry in before.items() if entry.took_part}
        self._out = {child: before[child].out for child in site.children if child in before}
        self._run_began = 0.0
        """What was heard before is of another run."""
        self._heard: dict[str, Any] = {}
        self._changes = Changes({site.name: "", **{n: c for c, names in self._subtrees.items() for n in sorted(names)}})
        with contextlib.suppress(InvalidInput):
            self._changes = Changes(parents(tree_of(stored_experiment(folder)), site.name))

    def begin_anew(self) -> None:
        """Forget who took part, and what was heard: the site's state was set aside."""
        self._took_part, self._out, self._run_began = set(), {}, time.monotonic()

    def starts(self, name: str) -> None:
        """A process of this site is about to be."""
        self.boards[name].clear()

    def ended(self, name: str, code: int) -> None:
        """One has ended, and will be started again."""
        how = f"was ended by signal {-code}" if code < 0 else f"ended with {code}"
        found = self.boards[name].read() or {}
        text = found.get("problem") or f"its {name} {how}; see logs/{name}.log"
        before, since = self._held.get(name, ("", 0.0))
        self._held[name] = text, since if text == before else time.monotonic()
        self._restarts[name] += 1
        self._restarted = time.monotonic()

    def look(self, running: Mapping[str, Forked], stopping: bool = False) -> None:
        """Gather the news, say what has changed, and pass it on; to be called from time to time."""
        now = time.monotonic()
        if now - self._looked < LOOK and not stopping:
            return
        self._looked = now
        boards = {name: board.read() or {} for name, board in self.boards.items()}
        sites = {self._site.name: self._own(running, boards, stopping), **self._below(boards)}
        for text, level in self._changes.lines(sites):
            log.say(text, level)
        summary = _summary(sites)
        told = {name: entry.as_dict() for name, entry in sites.items()}
        self.telling.put(sites=told, summary=summary, at=now)
        if now - self._written > entries.EVERY or stopping:
            self._written = now
            with contextlib.suppress(InvalidInput):  # a full disk
                content = {"format": FORMAT, "at": time.time(), "site": self._site.name, "sites": told}
                files.write_json(self._folder / NEWS, content, indent=None, sync=False, mode=files.PRIVATE)

    def _own(self, running: Mapping[str, Forked], boards: Mapping[str, Any], stopping: bool) -> Entry:
        node, now = boards["node"], time.monotonic()
        shown = node.get("shown") or status(self._folder / "state")
        text, since = self._problem(running, boards)
        said = [tuple(each) for name in ("node", *FLOWERS) for each in boards[name].get("said", [])]
        return Entry.of(
            {
                "state": self._state(running, node, str(shown.get("doing", "")), bool(text), stopping),
                "round": shown.get("round", 0),
                "problem": text,
                "problem_for": now - since if text else 0.0,
                "restarts": self._restarts,
                "restarted": None if self._restarted is None else now - self._restarted,
                "version": version.__version__,
                "up": now - self._began,
                "said": said,
                "age": 0.0,
                "took_part": self._site.is_root,
                **{name: shown.get(name, 0) for name in TRAFFIC},
            }
        )

    def _state(self, running: Mapping[str, Forked], node: Any, doing: str, failing: bool, stopping: bool) -> str:
        if doing in ("done", "damaged"):
            return doing
        if stopping:
            return "stopped"
        alive = "node" in running and running["node"].poll() is None
        if failing:
            return "failing"
        if not alive or not node.get("well"):
            return "starting"
        return "refused" if doing.startswith("refused") else doing

    def _problem(self, running: Mapping[str, Forked], boards: Mapping[str, Any]) -> tuple[str, float]:
        """What stands in the way of this site now, and since when."""
        for name in ("node", *FLOWERS):
            if name in running and running[name].poll() is None:
                steady = name in FLOWERS and running[name].age > STEADY
                if boards[name].get("well") or steady:
                    self._held.pop(name, None)
            if boards[name].get("problem"):
                return boards[name]["problem"], self._held.get(name, ("", boards[name]["since"]))[1]
            if name in self._held:
                return self._held[name]
        return "", 0.0

    def _below(self, boards: Mapping[str, Any]) -> Sites:
        """What the children told, and what this site knows of them."""
        came_in = boards["superlink"].get("heard", {})
        self._heard = {c: e for c, e in {**self._heard, **came_in}.items() if e["at"] >= self._run_began}
        node, now, sites = boards["node"], time.monotonic(), Sites()
        self._took_part.update(node.get("took_part", ()))
        self._out = node.get("out", self._out)
        waits = node.get("waits", {})
        for child, names in self._subtrees.items():
            came = self._heard.get(child, {"at": now, "clock": None, "sites": {}})
            for name in names:
                sites[name] = Entry.of(came["sites"].get(name)).older(now - came["at"])
                # that the child itself did, this site knows better
                if sites[name].took_part and name != child:
                    self._took_part.add(name)
            since, why = waits.get(child, (None, ""))
            sites[child] = dataclasses.replace(
                sites[child],
                clock=came["clock"],
                waited=None if since is None else now - since,
                why=why,
                out=self._out.get(child, ""),
            )
        took = {name: dataclasses.replace(sites[name], took_part=name in self._took_part) for name in sites}
        return took


def _summary(sites: Mapping[str, Entry]) -> int:
    """A number that stays the same as long as nothing has changed but ages and counts of bytes."""
    told = [
        (name, e.state, e.round, e.problem, e.restarts, e.said, e.why, e.took_part, e.out, e.is_silent, e.age is None)
        for name, e in sites.items()
    ]
    return zlib.crc32(json.dumps(told).encode())
