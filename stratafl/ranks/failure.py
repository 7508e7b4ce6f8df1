"""A rank that is gone takes the others with it, at once: they would wait for it for ever.

Each rank listens to the one before it, all in a ring and beside whatever else it does. What it
hears is a farewell, or the end of the connection, which a process cannot help sending however it
ends. A collective on GPUs would not notice, and one on CPUs not before it next speaks to that very
rank.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import threading
from collections.abc import Callable

import torch
import torch.distributed as dist

LOST = 3
"""The exit code of a rank that lost another one."""
STARTED_BY = "STRATAFL_STARTED_BY"
"""Set for ranks that `stratafl run --nproc` started: it watches them, and knows better which one is
gone and why."""
SECONDS_TO_LEAVE = 10.0
GONE = "another process of this run is gone"


class Lifeline:
    """Connects the ranks of a run, so that none waits for ever for one that died."""

    def __init__(self, rank: int, count: int, group: dist.ProcessGroup):
        self.rank, self.count, self.group = rank, count, group
        self.on_loss: Callable[[], str] = lambda: ""
        """What to do before this process ends, too; it may have something to add to the message."""
        self._thread = threading.Thread(target=self._listen, daemon=True)
        self._thread.start()
        if STARTED_BY in os.environ:
            threading.Thread(target=_follow_starter, daemon=True).start()

    def part(self) -> None:
        """Say farewell, and wait until the one before did."""
        with contextlib.suppress(RuntimeError):
            dist.send(torch.ones(1), (self.rank + 1) % self.count, group=self.group)
        self._thread.join(SECONDS_TO_LEAVE)

    def _listen(self) -> None:
        try:
            dist.recv(torch.zeros(1), (self.rank - 1) % self.count, group=self.group)
        except RuntimeError:
            self._lost()

    def _lost(self) -> None:
        try:
            more = self.on_loss()
            if self.rank == 0 and STARTED_BY not in os.environ:
                print(f"error: {GONE}{more}", file=sys.stderr, flush=True)
        finally:
            # the main thread may hang in a collective, or in the middle of anything: as after a
            # kill, the run goes on from its last checkpoint
            os._exit(LOST)


def _follow_starter() -> None:
    """Stop when whoever started this process is no more: its end of our standard input is then
    closed."""
    with contextlib.suppress(OSError):
        while os.read(0, 1):
            pass
    os.kill(os.getpid(), signal.SIGTERM)
