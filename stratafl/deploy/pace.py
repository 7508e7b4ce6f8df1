"""How often to look for what may come.

Flower's interfaces are asked, they do not call. A fixed interval is too long where answers come quickly, and costs the
machine much where a whole tree waits: so the longer nothing has come, the longer the next wait.
"""

from __future__ import annotations

import time

SHARE = 0.1
"""Of the time waited so far: so waiting takes at most this much longer than it must."""
SHORTEST, LONGEST = 0.02, 0.5
"""Seconds between two looks."""


class Pace:
    def __init__(self) -> None:
        self._since = time.monotonic()

    def begin(self) -> None:
        """Something came, or something was asked for."""
        self._since = time.monotonic()

    def wait(self) -> None:
        """Until the next look."""
        time.sleep(min(max(SHARE * (time.monotonic() - self._since), SHORTEST), LONGEST))
