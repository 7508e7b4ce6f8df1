"""How often to look for what Flower does not announce.

A look costs both sides some milliseconds of work, whoever waits. So it comes the later the longer nothing came: waiting
then costs at most a small share of the time that is waited anyway, and an idle tree is nearly idle.
"""

from __future__ import annotations

import time
from typing import Any

SHARE = 0.1
"""Of the time waited so far: the pause before the next look."""
SHORTEST, LONGEST = 0.1, 1.0
"""Seconds."""
MISSING = 0.05
"""Seconds until a part of a message that had not come yet is looked for again: Flower's waits a second."""


class Pace:
    """One wait after another."""

    def __init__(self) -> None:
        self._since = time.monotonic()

    def begin(self) -> None:
        """Something came: the next wait begins."""
        self._since = time.monotonic()

    def pause(self) -> None:
        """Until the next look."""
        time.sleep(min(max(SHARE * (time.monotonic() - self._since), SHORTEST), LONGEST))


def look_sooner_for_parts() -> None:
    """A message is announced before its parts are there. Who looks often meets many such; Flower waits a second."""
    from flwr.supercore.inflatable import inflatable_utils

    for each in (inflatable_utils.pull_objects, inflatable_utils.pull_and_inflate_object_from_tree):
        defaults: dict[str, Any] = each.__kwdefaults__
        defaults.update(initial_backoff=MISSING, backoff_cap=LONGEST)
