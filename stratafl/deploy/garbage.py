"""Memory given back soon.

An answer of Flower's HTTP client refers to itself, and to the model that came with it. Python looks for such garbage
when many objects were made, however large they are, and a process that began as a copy of a large one, later still: one
model after another would stay. So every process of a site looks regularly; what was imported is left out of it.
"""

from __future__ import annotations

import gc
import threading
import time

EVERY = 2.0
"""Seconds."""


def collect_regularly() -> None:
    """From now on, in this process."""
    threading.Thread(target=_collect, name="garbage", daemon=True).start()


def _collect() -> None:
    while True:
        time.sleep(EVERY)
        gc.collect()
