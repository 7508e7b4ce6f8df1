"""A proxy that the environment names (HTTPS_PROXY, HTTP_PROXY, ALL_PROXY) is for the way out, to a
parent's host.

A site's own processes meet on loopback, where no proxy can take them.
"""

from __future__ import annotations

import ipaddress
from functools import partial
from types import SimpleNamespace

import httpx
from flwr.supercore.protobuf import client


def ignore() -> None:
    """From now on, in this process: Flower's clients go straight to where they go."""
    straight = partial(httpx.Client, trust_env=False)
    vars(client)["httpx"] = SimpleNamespace(**{**vars(httpx), "Client": straight})


def is_loopback(address: str) -> bool:
    """Whether a host and port are on this machine."""
    host = address.rsplit(":", 1)[0].strip("[]")
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost" or host.endswith(".localhost")
