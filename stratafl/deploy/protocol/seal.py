"""Every message is sealed with the key of its edge, which only the parent and the child have.

TLS and Flower's node keys protect a connection; a seal protects a message from end to end, past
SuperLinks, SuperNodes and the socket inside a site. A reply's seal covers the request, so an old
reply fits no new request.
"""

from __future__ import annotations

import hashlib
import hmac
import secrets

from stratafl.base.errors import InvalidInput

KEY = SEAL = 32


def new_key() -> bytes:
    return secrets.token_bytes(KEY)


def seal_request(key: bytes, data: bytes) -> bytes:
    return data + _seal(key, b"down", b"", data)


def open_request(key: bytes, sealed: bytes) -> bytes:
    return _opened(key, b"down", b"", sealed)


def seal_reply(key: bytes, request: bytes, data: bytes) -> bytes:
    return data + _seal(key, b"up", request, data)


def open_reply(key: bytes, request: bytes, sealed: bytes) -> bytes:
    return _opened(key, b"up", request, sealed)


def seal_news(key: bytes, data: bytes) -> bytes:
    return data + _seal(key, b"news", b"", data)


def open_news(key: bytes, sealed: bytes) -> bytes:
    return _opened(key, b"news", b"", sealed)


def seal_heard(key: bytes, request: bytes, data: bytes) -> bytes:
    """The answer to news."""
    return data + _seal(key, b"heard", request, data)


def open_heard(key: bytes, request: bytes, sealed: bytes) -> bytes:
    return _opened(key, b"heard", request, sealed)


def _opened(key: bytes, direction: bytes, request: bytes, sealed: bytes) -> bytes:
    data, found = sealed[:-SEAL], sealed[-SEAL:]
    if not hmac.compare_digest(found, _seal(key, direction, request, data)):
        raise InvalidInput("message", f"{len(sealed)} bytes", "its seal is not that of this edge: altered or forged")
    return data


def _seal(key: bytes, direction: bytes, request: bytes, data: bytes) -> bytes:
    made = hmac.new(key, direction + hashlib.sha256(request).digest(), "sha256")
    made.update(data)  # megabytes, which need not be copied for this
    return made.digest()
