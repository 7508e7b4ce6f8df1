"""A round of a node's children: ask them, hear what came in time, and merge it; or greet them.

Whatever a child sends, nothing but that child suffers for it.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping
from typing import Protocol

from torch import Tensor

from stratafl.base.errors import escape_control
from stratafl.deploy.protocol.downward import Downward
from stratafl.deploy.protocol.job import Job
from stratafl.deploy.protocol.messages import Bundle, Refused, Reply

FAREWELL = 20.0
"""Seconds: what is lost with a farewell is one last update of a correction that nobody will use."""
LOG = logging.getLogger(__name__)


class Link(Protocol):
    """A parent's way to its children."""

    def ask(self, bundles: Mapping[str, Bundle], deadline: float | None) -> Mapping[str, Reply | Refused]:
        """What came in time."""
        ...


def meet(job: Job, level: int, down: Downward, link: Link, path: Tensor | None, relayed: bool) -> None:
    """One round of a node's children, from the model it gives them to the one it makes of
    theirs."""
    drawn, deadline, began = down.drawn(), job.patience_at(level + 1).deadline, time.monotonic()
    bundles = down.bundles([name for name in drawn if not down.is_out(name)], path)
    came = dict(link.ask(bundles, deadline))
    lost = [name for name in bundles if is_lost(bundles[name], came.get(name)) and not is_stranger(job, came[name])]
    for name in lost:
        down.forget(name)
        del came[name]
    left = None if deadline is None else deadline - (time.monotonic() - began)
    # a leaf begins anew at once; an aggregator in the next round, as its children may have done
    # some of this one
    if lost and level + 1 == job.tree.depth and (left is None or left > 0):
        whole = down.bundles(lost, path)
        bundles |= whole
        came |= link.ask(whole, left)
    replies = {}
    for name in drawn:
        if name not in bundles or is_stranger(job, came.get(name)):
            down.refuse_unheard(name)
        elif name not in came:
            down.now.absent += (name,)
        elif (reply := hear(down, bundles[name], came[name])) is not None:
            if reply.report is None:
                down.now.absent += (name,)
            else:
                replies[name] = reply
    try:
        down.merge(replies, relayed)
    except Exception as problem:
        # no message can be told to be the cause: the parent keeps its model, as if it had heard
        # nobody
        down.refuse_all()
        LOG.error("what came from %s cannot be merged: %s", escape_control(", ".join(replies)), problem)
    down.settle()


def hear(down: Downward, bundle: Bundle, came: Reply | Refused) -> Reply | None:
    """What came from a child, if it is a reply that may count; whatever else it is, nothing but its
    sender suffers."""
    why: str | Exception
    if isinstance(came, Refused):
        why, offence = came.reason, came.sealed
    else:
        try:
            down.check(bundle, came)
            down.delivered(bundle, came)
            return came
        except Exception as problem:
            why, offence = problem, True
    down.refuse(bundle.site, why, offence)
    return None


def greet(job: Job, level: int, down: Downward, link: Link, end: bool) -> None:
    """Before the run, learn who is there and with how many samples; at its end say so, and wait for
    nobody long."""
    bundles, deadline = down.greetings(end), job.patience_at(level + 1).deadline
    if end:
        # each level's wait holds those of the levels below it
        deadline = FAREWELL * (job.tree.depth - level)
    for name, came in link.ask(bundles, deadline).items():
        if name in bundles and not is_stranger(job, came):
            hear(down, bundles[name], came)


def is_lost(bundle: Bundle, came: Reply | Refused | None) -> bool:
    """Whether a child that was asked to go on says that it has lost what it had."""
    going_on = bundle.begin is not None and bundle.begin.known is not None
    return going_on and isinstance(came, Reply) and came.report is None


def is_stranger(job: Job, came: Reply | Refused | None) -> bool:
    """Whether a child works with something else than its parent: that is said, and no offence."""
    return isinstance(came, Reply) and came.fingerprint != job.fingerprint
