"""Rows that several nodes share: a parent's model is the same for all its children, and need not be
copied for each.

Shape suffixes: N nodes, M rows they share, C some of the nodes, P parameters.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from stratafl.base.device import to_device
from stratafl.core.rule import drift

DriftKernel = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor | None], Tensor]
"""(x_NP, rows_MP, of_N, rate_N1, plus_NP) -> (x - a node's row) / rate + plus, without a copy of
the rows."""
BLOCK = 2**25
"""Numbers of a matrix that are looked at in one go."""


class IndexedRows(NamedTuple):
    """M rows, and which of them is each node's."""

    rows_MP: Tensor
    of_N: np.ndarray | None = None
    """None where every node has its own."""
    on_device_N: Tensor | None = None
    """`of_N` beside the rows on their device, if it is there already."""
    drift_kernel: DriftKernel | None = None
    """A kernel for rows in float32 on a GPU, if there is one."""

    @property
    def nodes(self) -> int:
        return len(self.rows_MP) if self.of_N is None else len(self.of_N)

    def one(self, node: int) -> Tensor:
        """A node's row, as a matrix."""
        row = node if self.of_N is None else int(self.of_N[node])
        return self.rows_MP[row : row + 1]

    def some(self, nodes: Sequence[int]) -> Tensor:
        """These nodes' rows; a view where they lie together."""
        chosen = self._which(nodes)
        return self.rows_MP[chosen] if isinstance(chosen, slice) else self.rows_MP.index_select(0, chosen)

    def columns(self, which: slice) -> IndexedRows:
        """A part of every row."""
        return self._replace(rows_MP=self.rows_MP[:, which])

    def all(self) -> Tensor:
        """Every node's row."""
        return self.rows_MP if self.of_N is None else self.some(range(len(self.of_N)))

    def into(self, out_CP: Tensor, nodes: Sequence[int]) -> None:
        """Copy these nodes' rows."""
        chosen = self._which(nodes)
        if isinstance(chosen, slice):
            out_CP.copy_(self.rows_MP[chosen])
        else:
            torch.index_select(self.rows_MP, 0, chosen, out=out_CP)

    def drift(self, x_NP: Tensor, rate_N1: Tensor, plus_NP: Tensor | None = None) -> Tensor:
        """(x - a node's row) / rate, added to `plus` if that is given."""
        kernel = self.drift_kernel
        if kernel is not None and self.of_N is not None and x_NP.is_cuda and x_NP.dtype == torch.float32:
            of_N = to_device(self.of_N, x_NP.device) if self.on_device_N is None else self.on_device_N
            return kernel(x_NP, self.rows_MP, of_N, rate_N1, plus_NP)
        return drift(x_NP, self.all(), rate_N1, plus_NP)

    def _which(self, nodes: Sequence[int]) -> slice | Tensor:
        chosen = np.asarray(nodes, dtype=np.int64)
        if self.of_N is not None:
            if self.on_device_N is not None and np.array_equal(chosen, np.arange(len(self.of_N))):
                return self.on_device_N
            chosen = self.of_N[chosen]
        if len(chosen) and (np.diff(chosen) == 1).all():
            return slice(int(chosen[0]), int(chosen[-1]) + 1)
        return to_device(chosen, self.rows_MP.device)


def column_blocks(rows_NP: Tensor, shared_MP: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
    """Blocks of the same columns of nodes' rows and of those they share, one after another: the
    difference of the two then needs no room of their size."""
    columns = max(1, BLOCK // len(rows_NP))
    return zip(rows_NP.split(columns, dim=1), shared_MP.split(columns, dim=1), strict=True)
