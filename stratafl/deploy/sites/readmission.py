"""Requests that a parent ask a child again that is out: files beside the parent's state, one per
child, which a running parent takes up with the next round of its children, and a stopped one when
it is started.

PARENT/state/readmit/CHILD   there from the request until the parent's stored state has the child in
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterable
from pathlib import Path

from stratafl.base import files
from stratafl.deploy.protocol.bounds import OFFENCES
from stratafl.deploy.protocol.node import NodeState
from stratafl.deploy.sites.site import Site, slug

REQUESTS = "readmit"


def request(folder: Path, child: str) -> None:
    """Have a parent take a child back. `folder`: the parent's."""
    files.make_folder(folder / "state" / REQUESTS)
    with files.atomic_write(folder / "state" / REQUESTS / slug(child), mode=files.PRIVATE):
        pass  # that it is there says it


def requested(folder: Path, site: Site) -> list[str]:
    """The children that a parent is to take back."""
    asked = _there(folder)
    return [name for name in site.children if asked and slug(name) in asked]


def fulfilled(folder: Path, names: Iterable[str]) -> None:
    """Forget the requests for these children, which the parent's stored state has in."""
    asked = _there(folder)
    for name in names if asked else ():
        if slug(name) in asked:
            files.remove_tree(folder / "state" / REQUESTS / slug(name))


def out(site: Site, kept: NodeState) -> dict[str, str]:
    """The children that a parent asks no more: since when, and why."""
    if kept.below is None:
        return {}
    found = {}
    for name, child in zip(site.children, kept.below.children, strict=True):
        if child.offences >= OFFENCES:
            since = "" if child.out_round is None else f" since round {child.out_round}"
            last = f", the last: {child.offence}" if child.offence else ""
            found[name] = f"out{since}: {child.offences} of its messages broke the bounds{last}"
    return found


def _there(folder: Path) -> frozenset[str]:
    with contextlib.suppress(OSError):
        return frozenset(os.listdir(folder / "state" / REQUESTS))
    return frozenset()
