"""How what two nodes exchange travels over an edge.

A rule says what a child and its parent tell each other; a channel says in which form that goes over
the network, one channel per edge level and direction. Rules never know of it: a parent reduces what
it decoded, and a child later compares the parent's answer with what the parent decoded of it, so
that corrections still sum to zero over siblings.

A channel is a tuple of pure functions over rows, like a rule: called with all rows of a level (a
simulation) or with one row (a deployed node), it is the same channel. A payload is a table of named
matrices with one row per sender; its bytes are what is counted and what is sent.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from stratafl.core.rule import Edge, Rows

MODEL, BUFFERS = "model", "buffers"
"""Names of the rows that every message has besides those that a rule adds."""


class ChannelKey(NamedTuple):
    """Key of a channel's random numbers: the place of a message in a run."""

    seed: int
    level: int
    """The level of the edge."""
    round: int
    """Number of rounds that this edge level has begun."""
    nodes_N: np.ndarray
    """The senders' numbers in the whole tree."""


class Channel(NamedTuple):
    """The functions of one edge level in one direction."""

    init: Callable[[Rows], Rows]
    """The sender's initial memory of this channel, from a message of the form it will send."""
    encode: Callable[[Rows, Rows, Edge | None, ChannelKey], tuple[Rows, Rows]]
    """The sender's new memory and the payload, from its memory, the message, values that both sides
    know (None on the way down, where a child may have missed the last message) and the key."""
    decode: Callable[[Rows, Edge | None], Rows]
    """The message as the receiver understands it, from the payload and the values both know."""


def identity() -> Channel:
    """A channel that sends everything as it is."""
    return Channel(
        init=lambda message: {},
        encode=lambda memory, message, known, key: (memory, message),
        decode=lambda payload, known: payload,
    )


class Channels(NamedTuple):
    """The channels of one edge level."""

    up: Channel = identity()
    down: Channel = identity()


EXACT = Channels()
"""Channels that send everything as it is."""


def row_bytes(payload: Rows) -> int:
    """Size of each sender's row in bytes."""
    return sum(matrix.shape[1] * matrix.element_size() for matrix in payload.values())
