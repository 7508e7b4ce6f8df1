"""How often to look for what may come.

Flower's interfaces are asked, they do not call. A fixed interval is too long where answers come
quickly, and costs the machine much where a whole tree waits: so the longer nothing has come, the
longer the next wait.
"""

from __future__ import annotations

import time
from typing import Any

SHARE = 0.1
"""The next wait as a share of the time waited so far: waiting then takes at most this much longer
than it must."""
SHORTEST, LONGEST = 0.02, 0.5
"""Seconds between two looks."""
MISSING = 0.05
"""Seconds until a part of a message that was not there is looked for again."""


class Pace:
    """Waits between two looks, the longer the longer nothing has come."""

    def __init__(self) -> None:
        self._since = time.monotonic()

    def begin(self) -> None:
        """Begin to wait anew, since something came or was asked for."""
        self._since = time.monotonic()

    def wait(self) -> None:
        """Wait until the next look."""
        time.sleep(min(max(SHARE * (time.monotonic() - self._since), SHORTEST), LONGEST))


def look_sooner_for_parts() -> None:
    """Have Flower look for missing parts of a message sooner than after its second: messages are
    announced before their parts are there, and who looks often meets many such."""
    from flwr.supercore.inflatable import inflatable_utils

    for each in (inflatable_utils.pull_objects, inflatable_utils.pull_and_inflate_object_from_tree):
        defaults: dict[str, Any] = each.__kwdefaults__
        defaults.update(initial_backoff=MISSING, backoff_cap=LONGEST, max_tries_per_object=None)
