"""Changes between what was known of a tree and what is known now, as lines for an operator: one for
each change, never a flood."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass, field

from stratafl.base import version
from stratafl.base.errors import escape_control, join_names
from stratafl.deploy.news.entries import SKEWED, Entry
from stratafl.deploy.notes.log import INFO, WARNING
from stratafl.deploy.notes.waiting import UNCONNECTED

GRACE, START = 10.0, 60.0
"""Seconds that a site gets to be heard for the first time, once the top was; and those that the top
gets."""
CONNECTING = 10.0
"""Seconds that one which is heard may take to come to its parent's SuperLink."""
AGAIN = 60.0
"""Seconds before the same warning of a site is said again."""
MOST = 10
"""Warnings of one site that are said in as many seconds as that."""
Line = tuple[str, int]
"""A text and its level."""


@dataclass
class Known:
    """What was said of a site."""

    entry: Entry = field(default_factory=Entry)
    trouble: str = ""
    """What kind of trouble it was last said to have."""
    since: float = 0.0
    clock: float = 0.0
    """Seconds by which its clock was said to be off."""
    warned: dict[str, float] = field(default_factory=dict)
    """Which warnings were passed on, and when."""


class Changes:
    """Tells what changed at the sites below a site, and at the site itself where it is `whole`."""

    def __init__(self, parents: Mapping[str, str], whole: bool = False):
        """`parents`: by site, the top's is empty; the order is that of the lines."""
        self._parents, self._whole = parents, whole
        self._began = time.monotonic()
        self._top_heard = False
        self._known: dict[str, Known] = {name: Known() for name in parents}

    def lines(self, sites: Mapping[str, Entry]) -> list[Line]:
        """What is to be said now."""
        found: list[Line] = []
        if not self._top_heard and any(entry.age is not None for entry in sites.values()):
            self._top_heard, self._began = True, time.monotonic()
        for name, parent in self._parents.items():
            if parent or self._whole:
                known, now = self._known[name], sites.get(name, Entry())
                if self._is_cut_off(parent):
                    continue
                found += self._trouble(name, known, now)
                found += self._restarts(name, known.entry, now)
                found += self._clock(name, parent, known, now)
                found += self._version(name, known.entry, now)
                found += self._warnings(name, known, now)
                known.entry = now
        return [(escape_control(text), level) for text, level in found]

    def _is_cut_off(self, name: str) -> bool:
        """Whether nothing of those below a site can be known."""
        while name and (name in self._known):
            known = self._known[name]
            if known.trouble in ("missing", "stopped") or known.entry.state == "done":
                return True
            name = self._parents[name]
        return False

    def _below(self, name: str) -> str:
        inside = [each for each, parent in self._parents.items() if parent == name]
        return f"; with it {join_names(inside)}" if inside else ""

    def _trouble(self, name: str, known: Known, now: Entry) -> list[Line]:
        """What keeps it from its work, and when nothing does any more."""
        waited, trouble, text = time.monotonic() - self._began, "", ""
        if now.age is None:
            if waited > (GRACE if self._top_heard else START):
                trouble, text = "missing", f"nothing was heard from it in {waited:.0f} s{self._below(name)}"
        elif now.is_silent:
            last = now.problem or f"its state was {now.state}, round {now.round}"
            trouble, text = "missing", f"nothing was heard from it in {now.age:.0f} s, before that: {last}"
            text += self._below(name)
        elif now.state == "stopped":
            trouble, text = "stopped", f"it was stopped{self._below(name)}"
        elif now.problem:
            trouble, text = now.problem, now.problem
        elif now.state == "unknown" or (known.trouble and now.state == "starting"):
            return []
        elif now.why and now.waited is not None and (now.why != UNCONNECTED or now.waited > CONNECTING):
            trouble, text = now.why, f"waited for, for {now.waited:.0f} s: {now.why}"
        if trouble == known.trouble:
            return []
        before, since = known.trouble, known.since
        known.trouble, known.since = trouble, since if before else time.monotonic()
        if before not in ("", "missing", "stopped") and before in trouble:
            return []  # its parent's words for it, and then its own
        if not trouble:
            return [(f"{name} is back after {time.monotonic() - since:.0f} s", INFO)]
        return [(f"{name} is missing: {text}" if trouble == "missing" else f"{name}: {text}", WARNING)]

    def _restarts(self, name: str, before: Entry, now: Entry) -> list[Line]:
        """The first, the second, the fourth, ...: it may go on for days."""
        if now.age is not None and before.age is not None and now.up + 1 < before.up:
            return [(f"{name}: it was started again as a whole", WARNING)]
        return [
            (f"{name}: its {process} was started again, {times(count)} in {now.up:.0f} s", WARNING)
            for process, count in now.restarts.items()
            if count.bit_length() > before.restarts.get(process, 0).bit_length()
        ]

    def _clock(self, name: str, parent: str, known: Known, now: Entry) -> list[Line]:
        off = now.clock if now.clock is not None and abs(now.clock) > SKEWED else 0.0
        if abs(off - known.clock) <= SKEWED:
            return []
        known.clock = off
        if not off:
            return [(f"the clock of {name} is right again", INFO)]
        way = "ahead of" if off > 0 else "behind"
        return [(f"the clock of {name} is {abs(off):.1f} s {way} that of {parent}", WARNING)]

    def _version(self, name: str, before: Entry, now: Entry) -> list[Line]:
        """Versions of stratafl that speak the same protocol work together: an operator may want to
        know."""
        if now.version in ("", before.version, version.__version__):
            return []
        return [(f"{name} works with stratafl {now.version}, this site with {version.__version__}", WARNING)]

    def _warnings(self, name: str, known: Known, now: Entry) -> list[Line]:
        moment = time.monotonic()
        known.warned = {text: at for text, at in known.warned.items() if moment - at < AGAIN}
        found = []
        for each in now.said:
            if each not in known.entry.said and each[1] not in known.warned and len(known.warned) < MOST:
                known.warned[each[1]] = moment
                found.append((f"{name}: {each[1]}", WARNING))
        return found


def times(count: int) -> str:
    """How often something happened, in words."""
    return "once" if count == 1 else f"{count} times"
