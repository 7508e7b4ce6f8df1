"""What was sent: messages and bytes, up and down, for every node below the root.

A message is one transmission between a child and its parent, whatever it carries; its bytes are those of the arrays
in it (numbers such as a sample count are not counted).
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from stratafl.state import State
from stratafl.tree import Tree


@dataclass
class Direction:
    """Counts per node, one array per level; entry 0, the root's, stays zero."""

    messages: list[np.ndarray]
    bytes: list[np.ndarray]

    def add(self, level: int, who: np.ndarray, size: int | np.ndarray) -> None:
        self.messages[level] += who
        self.bytes[level] += who * size


@dataclass(frozen=True)
class Total:
    """Sums over some nodes."""

    messages_up: int
    messages_down: int
    bytes_up: int
    bytes_down: int

    @property
    def bytes(self) -> int:
        return self.bytes_up + self.bytes_down


class Communication:
    """A running account of everything sent in a tree."""

    def __init__(self, tree: Tree):
        def empty() -> Direction:
            return Direction(*([np.zeros(n, dtype=np.int64) for n in tree.sizes] for _ in range(2)))

        self.up, self.down = empty(), empty()

    def saved(self) -> State:
        """Itself as plain data."""
        return {"up": vars(self.up), "down": vars(self.down)}

    def restore(self, state: State) -> None:
        """Go on from a state that fits."""
        self.up, self.down = Direction(**state["up"]), Direction(**state["down"])

    def level(self, level: int) -> Total:
        """Everything between level m and its parents."""
        return Total(
            *(
                int(counts[level].sum())
                for counts in (self.up.messages, self.down.messages, self.up.bytes, self.down.bytes)
            )
        )

    def client(self, number: int) -> Total:
        """What one client sent and received."""
        return self.node(-1, number)

    def node(self, level: int, number: int) -> Total:
        return Total(
            *(
                int(counts[level][number])
                for counts in (self.up.messages, self.down.messages, self.up.bytes, self.down.bytes)
            )
        )

    @property
    def bytes_per_client(self) -> float:
        """Mean over the clients, both directions."""
        return float((self.up.bytes[-1] + self.down.bytes[-1]).mean())
