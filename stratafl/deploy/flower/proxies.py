"""A proxy that the environment names (HTTPS_PROXY, HTTP_PROXY, ALL_PROXY) is for the way out, to a
parent's host.

A site's own processes meet on loopback, where no proxy can take them.
"""

from __future__ import annotations

from functools import partial
from types import SimpleNamespace

import httpx
from flwr.supercore.protobuf import client


def ignore() -> None:
    """Have Flower's clients in this process connect without any proxy from now on."""
    straight = partial(httpx.Client, trust_env=False)
    vars(client)["httpx"] = SimpleNamespace(**{**vars(httpx), "Client": straight})
