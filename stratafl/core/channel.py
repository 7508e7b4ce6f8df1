"""The channel contract: how the messages on an edge are encoded, for example compressed.

A rule determines the content of a message, and a channel its bytes on the network; each edge level
has one channel per direction. The only channel here is `identity`, which sends messages unchanged.

Rules do not see channels: the parent aggregates decoded messages. The child decodes its own
message, too, and rules compare the parent's new model with the result instead of the child's exact
model, so that corrections still sum to zero over siblings.

A channel is a tuple of pure functions over rows, like a rule: it is called with all rows of a level
in a simulation, and with one row at a deployed node. A payload is a table of named matrices with
one row per sender; its size in bytes is counted as communication.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from stratafl.core.rule import Edge, Rows

MODEL, BUFFERS = "model", "buffers"
"""Names of the matrices that every message has, besides those that a rule adds."""


class ChannelKey(NamedTuple):
    """Key of a channel's random numbers: position of a message in a run."""

    seed: int
    level: int
    """Edge level."""
    round: int
    """Number of rounds that this edge level has begun."""
    nodes_N: np.ndarray
    """Numbers of the senders in the whole tree."""


class Channel(NamedTuple):
    """The functions of one edge level in one direction."""

    init: Callable[[Rows], Rows]
    """init(message) -> memory: what the sender keeps from message to message, such as the error of
    the last compression, before its first message; from an example of one."""
    encode: Callable[[Rows, Rows, Edge | None, ChannelKey], tuple[Rows, Rows]]
    """encode(memory, message, edge, key) -> (memory, payload): `edge` has the values that both
    sides know (see `core.rule.Edge`); it is None on the way down, where a child may have missed the
    last message."""
    decode: Callable[[Rows, Edge | None], Rows]
    """decode(payload, edge) -> message, as the receiver gets it."""


def identity() -> Channel:
    """A channel that sends messages unchanged."""
    return Channel(
        init=lambda message: {},
        encode=lambda memory, message, edge, key: (memory, message),
        decode=lambda payload, edge: payload,
    )


class Channels(NamedTuple):
    """The channels of one edge level."""

    up: Channel = identity()
    down: Channel = identity()


EXACT = Channels()
"""Channels that send messages unchanged."""


def row_bytes(payload: Rows) -> int:
    """Size of each sender's row in bytes."""
    return sum(matrix.shape[1] * matrix.element_size() for matrix in payload.values())
