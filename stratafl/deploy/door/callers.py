"""Who calls, told from a request's headers alone: Flower asks only after it has read the body,
whoever sent it.

Flower asks again, and more. What this calls is not its public interface: the version is pinned.
"""

from __future__ import annotations

import binascii
import datetime
import hmac
from base64 import b64decode
from collections import OrderedDict
from collections.abc import Callable, Mapping
from typing import Any, Protocol

from flwr.common.constant import SYSTEM_TIME_TOLERANCE, TIMESTAMP_HEADER, TIMESTAMP_TOLERANCE
from flwr.supercore.auth import derive_auth_secret
from flwr.supercore.auth.superexec import compute_superexec_signature
from flwr.supercore.constant import (
    FLEET_HTTP_PUBLIC_KEY_HEADER,
    FLEET_HTTP_SIGNATURE_HEADER,
    SUPEREXEC_AUTH_BODY_SHA256_HEADER,
    SUPEREXEC_AUTH_NONCE_HEADER,
    SUPEREXEC_AUTH_SIGNATURE_HEADER,
    SUPEREXEC_AUTH_TIMESTAMP_HEADER,
    TASK_TOKEN_HEADER,
)
from flwr.supercore.date import now
from flwr.supercore.primitives.asymmetric import bytes_to_public_key, verify_signature

ACQUIRE = "/v1/runtime/acquire-task"
METHOD = "/flwr.proto.Runtime/AcquireTask"
TOKENS = 64
"""The most tokens that are remembered as good ones."""
OWN = "this site's own process"
Headers = Mapping[str, str]


class Unknown(Exception):
    """Nobody of this run, and how that is known."""


class Callers(Protocol):
    """Knows those that a port is for."""

    def name(self, path: str, headers: Headers, proven: str | None) -> str:
        """Who sends a request, or Unknown. `proven`: who did before on its connection, which nobody
        else can use."""
        ...


class Children(Callers):
    """Knows children by the keys they are registered with, as Flower's Fleet interface asks for
    them."""

    def __init__(self, known: Mapping[str, tuple[str, bytes]]):
        self._keys = {key: (name, bytes_to_public_key(public)) for key, (name, public) in known.items()}

    def name(self, path: str, headers: Headers, proven: str | None) -> str:
        key, stamp = headers.get(FLEET_HTTP_PUBLIC_KEY_HEADER), headers.get(TIMESTAMP_HEADER, "")
        if key is None:
            raise Unknown("no key")
        if key not in self._keys:
            raise Unknown("a key that is no child's")
        name, public = self._keys[key]
        if name == proven:
            return name
        try:
            signature = b64decode(headers[FLEET_HTTP_SIGNATURE_HEADER], validate=True)
            is_signed = verify_signature(public, stamp.encode("ascii"), signature)
            age = (now() - datetime.datetime.fromisoformat(stamp)).total_seconds() if is_signed else 0.0
        except (KeyError, ValueError, TypeError, binascii.Error):
            is_signed = False
        if not is_signed:
            raise Unknown("a child's key without its signature")
        _check(age, name)
        return name


class OwnProcesses(Callers):
    """Knows a site's own processes by the site's secret, or by the token of a task that was given
    for it, as Flower's Runtime interface asks."""

    def __init__(self, secret: bytes, state: Callable[[], Any]):
        self._secret, self._state = derive_auth_secret(secret), state
        self._tokens: OrderedDict[str, None] = OrderedDict()

    def name(self, path: str, headers: Headers, proven: str | None) -> str:
        if not (self._has_secret(headers) if path == ACQUIRE else self._has_token(headers)):
            raise Unknown("not a process of this site")
        return OWN

    def _has_secret(self, headers: Headers) -> bool:
        try:
            stamp = int(headers[SUPEREXEC_AUTH_TIMESTAMP_HEADER])
            wanted = compute_superexec_signature(
                auth_secret=self._secret,
                method=METHOD,
                timestamp=stamp,
                nonce=headers[SUPEREXEC_AUTH_NONCE_HEADER],
                body_sha256=headers[SUPEREXEC_AUTH_BODY_SHA256_HEADER],
            )
            if not hmac.compare_digest(wanted, headers[SUPEREXEC_AUTH_SIGNATURE_HEADER]):
                return False
        except (KeyError, ValueError, TypeError):
            return False
        _check(now().timestamp() - stamp, OWN)
        return True

    def _has_token(self, headers: Headers) -> bool:
        token = headers.get(TASK_TOKEN_HEADER, "")
        if token in self._tokens:
            return True
        if not token or self._state().get_task_by_token(token) is None:
            return False
        self._tokens[token] = None
        if len(self._tokens) > TOKENS:
            self._tokens.popitem(last=False)
        return True


def _check(age: float, name: str) -> None:
    """Flower's own window: an older signature may be somebody else's who saw it."""
    if not -SYSTEM_TIME_TOLERANCE < age < TIMESTAMP_TOLERANCE + SYSTEM_TIME_TOLERANCE:
        raise Unknown(f"a request of {name} signed {abs(age):.0f} s {'ago' if age > 0 else 'ahead'}: clocks differ")
