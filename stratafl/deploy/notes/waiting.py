"""Whom a parent waits for: said in its log after some seconds, then after ever more, and told to
its supervisor."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Mapping

from stratafl.base.errors import join_names
from stratafl.deploy.notes import boards, log

FIRST = 5.0
"""Seconds before anything is said; then twice as many each time."""
PATIENCE = 20.0
"""Seconds of work of which nothing is said."""
LOOK = 0.5
"""Seconds between two looks."""
BUSY, UNCONNECTED = "", "not connected"
"""What is said of a child that has the request, which is nothing, and of one that is not there."""


class Waiting:
    """Says whom a parent still waits for, in one request after another."""

    def __init__(self, own_words: Callable[[str], str]):
        """`own_words`: what a child itself says to stand in its way."""
        self._own_words = own_words
        self._began = self._looked = 0.0
        self._pause = FIRST

    def begin(self) -> None:
        self._began, self._looked, self._pause = time.monotonic(), 0.0, FIRST

    def look(self, waiting: Mapping[str, str]) -> None:
        """Tell of those whose reply is still to come, each with the reason as far as the parent
        knows it."""
        now = time.monotonic()
        if now - self._looked < LOOK:
            return
        self._looked = now
        boards.own.put(waits={name: [self._began, why] for name, why in waiting.items()})
        if now - self._began < self._pause:
            return
        self._pause *= 2
        alike = defaultdict(list)
        for name, why in waiting.items():
            own = self._own_words(name)
            alike[f"{why or 'at work'}; it says: {own}" if own else why].append(name)
        for why, names in alike.items():
            if why == BUSY and now - self._began < PATIENCE:
                continue
            text = f"waiting for {join_names(names)}, for {now - self._began:.0f} s: {why or 'at work'}"
            log.say(text, log.WARNING if why else log.INFO)

    def over(self) -> None:
        boards.own.put(waits={})
