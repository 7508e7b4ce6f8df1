"""Labels held against the classes that a model scores."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

from stratafl.base.errors import InvalidInput


class Classes(NamedTuple):
    """The labels that a loss of classes takes."""

    size: int
    """They are numbered from 0 on."""
    ignored: int
    """The label that the loss passes over."""

    def outside(self, labels: Tensor) -> Tensor:
        """Which labels are neither a class nor the one that is passed over."""
        wide = labels.long()  # in a narrow type the one that is passed over may be another's number
        return ((wide < 0) | (wide >= self.size)) & (wide != self.ignored)

    def check(self, field: str, labels: Tensor) -> None:
        """Refuse labels that the loss cannot take: on a CPU it would stop in some round, and on a
        GPU it may not even do that."""
        if not bool(self.outside(labels).any()):
            return
        counted = labels[labels.long() != self.ignored]
        low, high = int(counted.min()), int(counted.max())
        if low < 0:
            told = f"of {field} begin at {low}: classes are counted from 0, and {self.ignored} is a label to ignore"
            raise InvalidInput("labels", f"{low} to {high}", told)
        told = f"{field} labels go from {low} to {high}, so {high + 1} classes are needed"
        raise InvalidInput("model output", f"{self.size} classes", told)
