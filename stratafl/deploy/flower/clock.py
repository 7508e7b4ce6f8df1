"""Clocks: no two hosts' agree, and any of them may be put right while a run goes on.

Flower compares times of two hosts: a SuperNode signs the time, and its SuperLink takes that for up
to 5 seconds before its own and 305 after; a reply is dated. And it measures with the host's clock
how long ago it heard of somebody, so that a clock which jumps ends everything. Here
- Flower's clock in a site's processes runs steadily from what the host's said when the site was
  started,
- every answer of a SuperLink says that time, and a SuperNode signs with its parent's, whatever its
  own host's says,
- and a reply has the date of its request. What is left of the hosts' clocks is the validity of
  certificates. That they differ is said, on both sides.
"""

from __future__ import annotations

import contextlib
import datetime
import math
import time
from collections.abc import Awaitable, Callable, Mapping, MutableMapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
from cryptography import x509
from flwr.app import Message
from flwr.app.message import message as flower_message
from flwr.supercore import date
from flwr.supercore.constant import FLEET_HTTP_PUBLIC_KEY_HEADER
from flwr.supernode import fleet_http_connection, node_auth_http_interceptor

from stratafl.base import files
from stratafl.base.errors import InvalidInput
from stratafl.deploy.sites.site import Site

FEW = 3.0
"""Seconds by which two clocks may differ without a word, and by which a difference must change to
be said again."""
SELDOM = 60.0
"""Seconds between two such lines about the same child."""
EARLIEST = 1_740_787_200.0
"""Seconds since 1970: Flower takes no message from before 2025, and a host without a battery begins
long before."""
THEIRS, OURS = "stratafl-time", "stratafl-clock"
"""Headers: of an answer, the time of the SuperLink and that of its host's clock; of a request, how
far ahead the clock of its host is."""
UNITS = (("days", 86400.0), ("h", 3600.0), ("min", 60.0))

Scope = MutableMapping[str, Any]
Send = Callable[[Any], Awaitable[None]]
Say = Callable[[str], None]


def run_steadily() -> None:
    """Have time go on steadily from now on, in this process and in all that begin as copies of it,
    whatever the host's clock does."""
    began = max(time.time(), EARLIEST) - time.monotonic()

    def now(tz: datetime.tzinfo | None = None) -> datetime.datetime:
        return datetime.datetime.fromtimestamp(began + time.monotonic(), tz)

    vars(date)["datetime"] = SimpleNamespace(**{**vars(datetime), "datetime": SimpleNamespace(now=now)})


def date_as_its_request(reply: Message, request: Message) -> Message:
    """Give a reply the date of its request: it is valid for as long, by the clock of whoever
    asked."""
    reply.metadata.__dict__.update(_created_at=request.metadata.created_at, _ttl=request.metadata.ttl)
    return reply


def told(seconds: float) -> str:
    """How far a clock is off, and in which direction."""
    size = abs(seconds)
    shown = next((f"{size / unit:.3g} {name}" for name, unit in UNITS if size > 1.5 * unit), f"{size:.0f} s")
    return f"{shown} {'ahead of' if seconds > 0 else 'behind'}"


# -- the child's side ------------------------------------------------------------------------------


class ParentClock:
    """The parent's time, as a SuperNode learns it from every answer."""

    def __init__(self, site: Site, say: Say):
        self._site, self._say = site, say
        self.said = 0.0
        """Seconds by which this host's clock is known to be ahead, as it was last said."""
        self._ahead = time.time() - time.monotonic()
        """Seconds by which the parent's clock is ahead of this host's steady one; as if the hosts'
        clocks agreed, until there is an answer."""

    def now(self) -> datetime.datetime:
        return datetime.datetime.fromtimestamp(self._ahead + time.monotonic(), datetime.UTC)

    def learn(self, sent: float, answer: httpx.Response) -> bool:
        """Whether the parent's time is another one than was thought, from an answer to what was
        sent then."""
        try:
            theirs, host = map(float, answer.headers.get(THEIRS, "").split())
        except ValueError:
            return False
        if not math.isfinite(theirs + host):
            return False
        came, before = time.monotonic(), self._ahead
        # it was written some time between the two
        self._ahead = max(min(self._ahead, theirs - sent), theirs - came)
        wall = time.time()
        ahead = _least(wall - (came - sent) - host, wall - host)
        self._tell(ahead if abs(ahead) > FEW else 0.0)
        return abs(self._ahead - before) > 1.0

    def _tell(self, ahead: float) -> None:
        if abs(ahead - self.said) <= FEW:
            return
        site, self.said = self._site, ahead
        if ahead:
            how = "its requests are signed with the parent's time; put it right, as certificates and logs go by it"
            self._say(f"the clock of {site.name}'s host is {told(ahead)} that of its parent at {site.parent}: {how}")
        else:
            self._say(f"the clock of {site.name}'s host agrees with that of its parent at {site.parent} again")


def sign_with(clock: ParentClock) -> None:
    """Have this SuperNode date and sign its messages by this clock from now on."""
    for module in (node_auth_http_interceptor, flower_message):
        vars(module)["now"] = clock.now

    class Timed(node_auth_http_interceptor.NodeAuthHttpInterceptor):
        """Signs anew, once, what was refused for its time."""

        def intercept(self, context: Any, call_next: Any) -> httpx.Response:
            before = httpx.Headers(context.request.headers)
            for last in (False, True):
                context.request.headers = httpx.Headers(before)
                context.request.headers[OURS] = f"{clock.said:.1f}"
                sent = time.monotonic()
                answer = super().intercept(context, call_next)
                if not clock.learn(sent, answer) or answer.status_code != httpx.codes.UNAUTHORIZED or last:
                    break
            return answer

    vars(fleet_http_connection)["NodeAuthHttpInterceptor"] = Timed


def check_certificates(folder: Path, name: str) -> None:
    """Refuse to go on where this host's clock is outside of what the run's certificates are valid
    for."""
    authority = x509.load_pem_x509_certificate(files.read_bytes(folder / "ca.pem"))
    now, since, until = time.time(), authority.not_valid_before_utc, authority.not_valid_after_utc
    off = _least(now - until.timestamp(), now - since.timestamp())
    if off:
        wanted = f"the certificates of this run are valid from {since:%Y-%m-%d} to {until:%Y-%m-%d}"
        shown = f"{datetime.datetime.fromtimestamp(now, datetime.UTC):%Y-%m-%d %H:%M} UTC"
        raise InvalidInput(f"the clock of {name}'s host", shown, f"is {told(off)} what can be: {wanted}")


# -- the parent's side -----------------------------------------------------------------------------


class Stamp:
    """Puts this SuperLink's time into every answer, and what its children say of their clocks into
    its log."""

    def __init__(self, known: Mapping[str, str], say: Say):
        """known: children by their public keys as a request names them."""
        self._known, self._say = known, say
        self._said: dict[str, tuple[float, float]] = {}
        """What each child was last said to be ahead by, and when."""

    def __call__(self, scope: Scope, send: Send) -> Send:
        """What sends answers to this request."""

        async def stamped(event: Any) -> None:
            if event["type"] == "http.response.start":
                if event["status"] < 400:  # then it is from whom it says
                    self._hear({name.decode("latin-1"): value.decode("latin-1") for name, value in scope["headers"]})
                stamp = f"{date.now().timestamp():.3f} {time.time():.3f}"
                event = {**event, "headers": [*event.get("headers", ()), (THEIRS.encode(), stamp.encode())]}
            await send(event)

        return stamped

    def _hear(self, headers: Mapping[str, str]) -> None:
        name = self._known.get(headers.get(FLEET_HTTP_PUBLIC_KEY_HEADER, ""))
        with contextlib.suppress(ValueError):
            ahead, now = float(headers.get(OURS, "")), time.monotonic()
            before, at = self._said.get(name or "", (0.0, -math.inf))
            if name is None or not math.isfinite(ahead) or abs(ahead - before) <= FEW or now - at < SELDOM:
                return
            self._said[name] = ahead, now
            self._say(f"the clock of {name}'s host {f'is {told(ahead)}' if ahead else 'agrees with'} this one's")


def _least(low: float, high: float) -> float:
    """What is nearest to nothing between the two."""
    return max(low, 0.0) or min(high, 0.0)
