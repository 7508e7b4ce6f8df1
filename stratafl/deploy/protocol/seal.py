"""Every message is signed with the key of its edge, which only the parent and the child have.

TLS and Flower's node keys protect a connection; a seal protects a message from end to end, past
SuperLinks, SuperNodes and the socket inside a site. A reply's seal covers the request, so an old
reply fits no new request.
"""

from __future__ import annotations

import hashlib
import hmac
import secrets
from typing import NamedTuple

from stratafl.base.errors import InvalidInput

KEY = SEAL = 32


def new_key() -> bytes:
    """A new secret that the two ends of an edge share."""
    return secrets.token_bytes(KEY)


class Exchange(NamedTuple):
    """A request and its reply over an edge, each sealed under a name of its own, so that neither
    passes for anything else."""

    asked: bytes
    answered: bytes

    def seal_request(self, key: bytes, data: bytes) -> bytes:
        return data + _seal(key, self.asked, b"", data)

    def open_request(self, key: bytes, sealed: bytes) -> bytes:
        return _opened(key, self.asked, b"", sealed)

    def seal_reply(self, key: bytes, request: bytes, data: bytes) -> bytes:
        return data + _seal(key, self.answered, request, data)

    def open_reply(self, key: bytes, request: bytes, sealed: bytes) -> bytes:
        return _opened(key, self.answered, request, sealed)


WORK = Exchange(b"down", b"up")
"""What a parent asks of a child."""
NEWS = Exchange(b"news", b"heard")
"""What a child tells its parent unasked, and that this was heard."""


def _opened(key: bytes, name: bytes, request: bytes, sealed: bytes) -> bytes:
    data, found = sealed[:-SEAL], sealed[-SEAL:]
    if not hmac.compare_digest(found, _seal(key, name, request, data)):
        raise InvalidInput("message", f"{len(sealed)} bytes", "its seal is not that of this edge: altered or forged")
    return data


def _seal(key: bytes, name: bytes, request: bytes, data: bytes) -> bytes:
    made = hmac.new(key, name + hashlib.sha256(request).digest(), "sha256")
    made.update(data)  # megabytes, which need not be copied for this
    return made.digest()
