"""Where callers are, and how much of something each may have; what was refused to them is said now
and then.

Tables are bounded, whatever calls: somebody with an IPv6 network has more addresses than a table
could hold, so its callers count as one.
"""

from __future__ import annotations

import ipaddress
import time
from collections import Counter, OrderedDict
from collections.abc import Callable, Hashable

from stratafl.base.errors import LONGEST_WORDS, one_line
from stratafl.deploy.notes import log

MOST = 4096
"""Rows of a table; then the one that was longest not asked for goes."""
NETWORK = 64
"""Bits of an IPv6 address that are one caller's."""
EVERY = 30.0
"""Seconds between two lines about what was refused meanwhile."""
LINES = 10
"""About single refusals in that time."""
NAMED = 3
"""Places that such a line names."""


def place_of(host: str) -> str:
    """The place that an address is counted as: the address itself, or its network where it is an
    IPv6 one, of which a host may have many."""
    try:
        address = ipaddress.ip_address(host.partition("%")[0])
    except ValueError:
        return "somewhere unknown"
    if isinstance(address, ipaddress.IPv4Address):
        return str(address)
    if address.ipv4_mapped is not None:
        return str(address.ipv4_mapped)
    return str(ipaddress.ip_network((address, NETWORK), strict=False))


class Allowance:
    """Allows so many of something a second for each, and a reserve for the moments in which it is
    more."""

    def __init__(self, rate: float, reserve: float, now: Callable[[], float] = time.monotonic):
        self._rate, self._reserve, self._now = rate, reserve, now
        self._left: OrderedDict[Hashable, tuple[float, float]] = OrderedDict()

    def take(self, who: Hashable) -> bool:
        """Whether there was one left."""
        now = self._now()
        left, since = self._left.pop(who, (self._reserve, now))
        left = min(self._reserve, left + self._rate * (now - since))
        self._left[who] = max(0.0, left - 1), now
        if len(self._left) > MOST:
            self._left.popitem(last=False)
        return left >= 1

    def __len__(self) -> int:
        return len(self._left)


class Refusals:
    """Says the first of a kind at once, and of the following ones how many they were and from
    where."""

    def __init__(self, now: Callable[[], float] = time.monotonic):
        self._now, self._since = now, now()
        self._first, self._lines = Allowance(1 / EVERY, 1, now), Allowance(LINES / EVERY, LINES, now)
        self._untold: Counter[tuple[str, str]] = Counter()

    def add(self, place: str, why: str, who: str = "") -> None:
        if self._first.take((place, why)) and self._lines.take("all"):
            self._say(f"refused {place}{f', which is {who}' if who else ''}: {why}")
        elif (place, why) in self._untold or len(self._untold) < MOST:
            self._untold[place, why] += 1
        else:
            self._untold["elsewhere", "various"] += 1

    def tell(self) -> None:
        """What came together since the last line, if it is time for one."""
        if not self._untold or self._now() - self._since < EVERY:
            return
        common = self._untold.most_common(NAMED)
        rest = self._untold.total() - sum(count for _, count in common)
        told = [f"{place}, {count} times: {why}" for (place, why), count in common]
        self._say(f"refused since the last such line: {'; '.join(told)}{f'; and {rest} more' if rest else ''}")
        self._untold.clear()
        self._since = self._now()

    def _say(self, what: str) -> None:
        log.warn(one_line(what, LONGEST_WORDS))
