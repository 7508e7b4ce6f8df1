"""Memory given back soon.

An answer of Flower's HTTP client refers to itself, and to the model that came with it. Python looks
for such garbage when many objects were made, however large they are, and a process that began as a
copy of a large one, later still: one model after another would stay. And what is freed, the C
library keeps for later, for every thread apart. So every process of a site looks for garbage
regularly, and large pieces go back to the system at once.
"""

from __future__ import annotations

import ctypes
import gc
import threading
import time

EVERY = 2.0
"""Seconds between two collections."""
LARGE = 1 << 20
"""Bytes. The C library begins lower, and then raises it to the size of whatever was freed."""
MMAP_THRESHOLD = -3


def give_back_soon() -> None:
    """Have this process give freed memory back to the system soon, from now on."""
    adjust = getattr(ctypes.CDLL(None), "mallopt", None)  # glibc's
    if adjust is not None:
        adjust(MMAP_THRESHOLD, LARGE)
    threading.Thread(target=_collect, name="garbage", daemon=True).start()


def _collect() -> None:
    while True:
        time.sleep(EVERY)
        if gc.isenabled():  # not where somebody must not be disturbed
            gc.collect()
