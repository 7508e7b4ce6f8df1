"""What was sent: messages and bytes, up and down, for every node below the root.

A message is one transmission between a child and its parent, whatever it carries; its bytes are
those of the arrays in it (numbers such as a sample count are not counted).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from torch import Tensor

from stratafl.base.state_dict import StateDict, load_like
from stratafl.base.topology import Tree
from stratafl.federation.events import GradientsExchanged, LevelSynchronized, Observer, RoundBegan


@dataclass
class LinkCounts:
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
        def empty() -> LinkCounts:
            return LinkCounts(*([np.zeros(n, dtype=np.int64) for n in tree.sizes] for _ in range(2)))

        self.up, self.down = empty(), empty()

    def saved(self) -> StateDict:
        """Itself as plain data."""
        return {"up": vars(self.up), "down": vars(self.down)}

    def restore(self, state: StateDict) -> None:
        """Go on from a state that fits."""
        self.up, self.down = LinkCounts(**state["up"]), LinkCounts(**state["down"])

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
    def client_bytes(self) -> int:
        """Sent and received by all clients."""
        return int((self.up.bytes[-1] + self.down.bytes[-1]).sum())

    @property
    def bytes_per_client(self) -> float:
        """Mean over the clients, both directions."""
        return float((self.up.bytes[-1] + self.down.bytes[-1]).mean())


class CommunicationMeter(Observer):
    """Keeps the account of a federation by watching it, and with it what each node does not have
    yet."""

    def __init__(self, tree: Tree):
        self.communication = Communication(tree)
        self._stale = [np.ones(n, dtype=bool) for n in tree.sizes]
        """Who has not got its parent's model as it is now."""
        self._owed = [np.zeros(n, dtype=bool) for n in tree.sizes]
        """Who has not got the corrections from above as they are now."""

    def saved(self) -> StateDict:
        return {**self.communication.saved(), "stale": self._stale, "owed": self._owed}

    def fitted(self, state: StateDict) -> StateDict:
        """A copy of a state of the same tree's; one that does not fit is refused."""
        return load_like(self.saved(), state, "traffic")

    def restore(self, fits: StateDict) -> None:
        """Go on from what `fitted` gave."""
        self._stale, self._owed = fits["stale"], fits["owed"]
        self.communication.restore({name: fits[name] for name in ("up", "down")})

    def began(self, beginning: RoundBegan) -> None:
        """Count the models that those who take part get, where they do not have them yet, with the
        corrections from above."""
        level, parcel_bytes = beginning.level, beginning.parcel_bytes
        asking = beginning.active_N & self._stale[level]
        self._stale[level] &= ~asking
        if beginning.restarting:
            self.communication.down.add(level, asking, parcel_bytes)
        else:
            extra = self._owed[level] * beginning.model_bytes
            self.communication.down.add(level, asking, parcel_bytes + extra)
            self._owed[level] &= ~asking

    def restarted(self, restart: GradientsExchanged) -> None:
        """Gradients went up, and their means came down with the corrections that follow from
        them."""
        for level, there_N in restart.sent.items():
            self.communication.up.add(level, there_N, restart.model_bytes)
        for level in range(max(restart.top, 1), len(self._owed)):
            active_N = restart.active[level]
            self._owed[level] |= level > restart.fresh[0]
            vectors = int(level in restart.fresh) + self._owed[level]
            self.communication.down.add(level, active_N & (vectors > 0), vectors * restart.model_bytes)
            self._owed[level] &= ~active_N

    def met(self, meeting: LevelSynchronized) -> None:
        level, present_N = meeting.level, meeting.outcome.present_N
        self.communication.up.add(level, meeting.came_N, meeting.sent_bytes)
        self._stale[level] = np.ones_like(self._stale[level])
        if meeting.is_answered:
            self._stale[level] = ~present_N
            self.communication.down.add(level, present_N, meeting.parcel_bytes)

    def relayed(self, top: int, corrections: Sequence[Tensor | None]) -> None:
        for level in range(top + 1, len(self._owed)):
            self._stale[level][:] = True
            self._owed[level] |= any(correction is not None for correction in corrections[top:level])
