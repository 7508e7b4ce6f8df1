"""Messages and bytes sent in a tree, up and down, for every node below the root.

A message is one transmission between a child and its parent, whatever its contents; its bytes are
the bytes of its arrays (numbers such as a sample count are not counted).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from stratafl.base.state_dict import StateDict, load_like
from stratafl.base.topology import Topology
from stratafl.federation.events import GradientsExchanged, LevelSynchronized, ModelFromAbove, Observer, RoundBegan


@dataclass
class LinkCounts:
    """Counts per node in one direction, one array per level; entry 0, the root's, stays zero."""

    messages: list[np.ndarray]
    bytes: list[np.ndarray]

    def add(self, level: int, mask_N: np.ndarray, size: int | np.ndarray) -> None:
        """Count one message of this size for every node in the mask."""
        self.messages[level] += mask_N
        self.bytes[level] += mask_N * size


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
    """Counts of all messages sent in a tree."""

    def __init__(self, tree: Topology):
        def empty() -> LinkCounts:
            return LinkCounts(*([np.zeros(size, dtype=np.int64) for size in tree.sizes] for _ in range(2)))

        self.up, self.down = empty(), empty()

    def saved(self) -> StateDict:
        """The counts as plain data."""
        return {"up": vars(self.up), "down": vars(self.down)}

    def restore(self, state: StateDict) -> None:
        """Restore counts that `saved` returned."""
        self.up, self.down = LinkCounts(**state["up"]), LinkCounts(**state["down"])

    def level(self, level: int) -> Total:
        """Messages between the nodes of a level and their parents."""
        return self._total(lambda counts: int(counts[level].sum()))

    def client(self, number: int) -> Total:
        """Messages that one client sent and received."""
        return self.node(-1, number)

    def node(self, level: int, number: int) -> Total:
        """Messages between one node and its parent."""
        return self._total(lambda counts: int(counts[level][number]))

    def _total(self, count: Callable[[list[np.ndarray]], int]) -> Total:
        return Total(
            messages_up=count(self.up.messages),
            messages_down=count(self.down.messages),
            bytes_up=count(self.up.bytes),
            bytes_down=count(self.down.bytes),
        )

    def by_level(self, owned: Sequence[np.ndarray]) -> list[Total]:
        """Messages between the nodes of each level below the root and their parents; counts only
        the nodes in `owned`, a mask per level."""
        return [
            self._total(lambda counts, level=level: int(counts[level][owned[level]].sum()))  # type: ignore[misc]
            for level in range(1, len(owned))
        ]

    @property
    def client_bytes(self) -> int:
        """Bytes sent and received by all clients."""
        return int((self.up.bytes[-1] + self.down.bytes[-1]).sum())

    @property
    def bytes_per_client(self) -> float:
        """Bytes sent and received by a client, mean over the clients."""
        return float((self.up.bytes[-1] + self.down.bytes[-1]).mean())


class CommunicationMeter(Observer):
    """Counts the messages of a federation, and tracks the models and corrections that nodes do not
    have yet."""

    def __init__(self, tree: Topology):
        self.communication = Communication(tree)
        self._outdated = [np.ones(size, dtype=bool) for size in tree.sizes]
        """By level, the nodes without their parent's present model."""
        self._corrections_due = [np.zeros(size, dtype=bool) for size in tree.sizes]
        """By level, the nodes without the present sum of the corrections from above, one vector of
        the model's size."""

    def saved(self) -> StateDict:
        """The meter's state as plain data."""
        due = {"outdated": self._outdated, "corrections_due": self._corrections_due}
        return {**self.communication.saved(), **due}

    def fitted(self, state: StateDict) -> StateDict:
        """Copy a state that `saved` made for the same tree; raise for any other."""
        return load_like(self.saved(), state, "traffic")

    def restore(self, fitted: StateDict) -> None:
        """Restore a state that `fitted` returned."""
        self._outdated, self._corrections_due = fitted["outdated"], fitted["corrections_due"]
        self.communication.restore({name: fitted[name] for name in ("up", "down")})

    def on_round_begin(self, event: RoundBegan) -> None:
        """Count the models that participants get where they do not have them yet, with the
        corrections from above."""
        level, down = event.level, self.communication.down
        receiving_N = event.active_N & self._outdated[level]
        self._outdated[level] &= ~receiving_N
        if event.restarts_from_gradients:
            down.add(level, receiving_N, event.broadcast_bytes)
        else:
            correction_bytes_N = self._corrections_due[level] * event.model_bytes
            down.add(level, receiving_N, event.broadcast_bytes + correction_bytes_N)
            self._corrections_due[level] &= ~receiving_N

    def on_gradients_exchanged(self, event: GradientsExchanged) -> None:
        """Count the gradients that went up, and the messages that came down: with the mean gradient
        where a level restarts, and with the correction where it has changed."""
        for level, sent_N in event.sent.items():
            self.communication.up.add(level, sent_N, event.model_bytes)
        for level in range(max(event.top_level, 1), len(self._corrections_due)):
            active_N, due_N = event.active[level], self._corrections_due[level]
            # a node's correction includes those of the levels above, so all below the first are new
            due_N |= level > event.restarted_levels[0]
            vectors_N = int(level in event.restarted_levels) + due_N
            self.communication.down.add(level, active_N & (vectors_N > 0), vectors_N * event.model_bytes)
            due_N &= ~active_N

    def on_level_synchronized(self, event: LevelSynchronized) -> None:
        """Count the reports that went up and, where children are answered, the models that came
        back; all other nodes of the level then lack their parent's model."""
        level, counts = event.level, event.counts
        self.communication.up.add(level, counts.reported_N, counts.upload_bytes)
        self._outdated[level] = np.ones_like(self._outdated[level])
        if counts.is_answered:
            self._outdated[level] = ~counts.accepted_N
            self.communication.down.add(level, counts.accepted_N, counts.broadcast_bytes)

    def on_model_from_above(self, event: ModelFromAbove) -> None:
        """Note that all nodes below the top level lack the new model, and lack the corrections if a
        level between has some."""
        for level in range(event.top_level + 1, len(self._corrections_due)):
            self._outdated[level][:] = True
            self._corrections_due[level] |= any(event.has_correction[event.top_level : level])
