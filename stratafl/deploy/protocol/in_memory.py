"""A whole tree in one process: every bundle is handed over in memory."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

from stratafl.deploy.protocol.messages import Bundle, Reply


class Handler(Protocol):
    def handle(self, bundle: Bundle) -> Reply: ...


class MemoryLink:
    """Children by name, asked one after another."""

    def __init__(self, children: Mapping[str, Handler]):
        self.children = dict(children)

    def ask(self, bundles: Mapping[str, Bundle], deadline: float | None) -> dict[str, Reply]:
        return {name: self.children[name].handle(bundle) for name, bundle in bundles.items() if name in self.children}
