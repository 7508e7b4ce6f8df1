"""What says that a module has no form over all clients."""

from __future__ import annotations


class Unsupported(Exception):
    """The module has something that has no client-batched form, and what."""
