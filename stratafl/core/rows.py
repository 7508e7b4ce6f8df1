"""Matrices of rows: rows that several nodes share, and replacement of some rows.

A parent's model is the same for all its children, and is not copied for each.

Shape suffixes: N nodes, M rows they share, A or C some of the nodes, P parameters.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from stratafl.base.device import to_device
from stratafl.core.rule import Rows, drift

DriftKernel = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor | None], Tensor]
"""(x_NP, rows_MP, index_N, lr_sum_N1, plus_NP) -> (x - the node's row) / lr_sum + plus, without a
copy of the rows."""
BLOCK = 2**25
"""Elements of a matrix that are processed at once."""


class IndexedRows(NamedTuple):
    """M rows, and for each of N nodes the index of its row."""

    rows_MP: Tensor
    index_N: np.ndarray | None = None
    """None if every node has its own row."""
    device_index_N: Tensor | None = None
    """`index_N` on the rows' device, if it has been copied there."""
    drift_kernel: DriftKernel | None = None
    """Kernel for float32 rows on a GPU, if there is one."""

    @property
    def nodes(self) -> int:
        return len(self.rows_MP) if self.index_N is None else len(self.index_N)

    def row(self, node: int) -> Tensor:
        """A node's row, as a matrix of one row."""
        row = node if self.index_N is None else int(self.index_N[node])
        return self.rows_MP[row : row + 1]

    def take(self, nodes: Sequence[int]) -> Tensor:
        """The rows of these nodes; a view if they lie one after another in `rows_MP`.

        With a `device_index_N`, the rows of all nodes are always a copy.
        """
        selector = self._selector(nodes)
        return self.rows_MP[selector] if isinstance(selector, slice) else self.rows_MP.index_select(0, selector)

    def slice_columns(self, columns: slice) -> IndexedRows:
        """The same rows, restricted to these columns."""
        return self._replace(rows_MP=self.rows_MP[:, columns])

    def dense(self) -> Tensor:
        """Matrix with one row per node, without a copy if every node has its own."""
        return self.rows_MP if self.index_N is None else self.take(range(len(self.index_N)))

    def copy_into(self, out_CP: Tensor, nodes: Sequence[int]) -> None:
        """Copy the rows of these nodes into `out_CP`."""
        selector = self._selector(nodes)
        if isinstance(selector, slice):
            out_CP.copy_(self.rows_MP[selector])
        else:
            torch.index_select(self.rows_MP, 0, selector, out=out_CP)

    def drift(self, x_NP: Tensor, lr_sum_N1: Tensor, plus_NP: Tensor | None = None) -> Tensor:
        """(x - the node's row) / lr_sum, plus `plus`."""
        kernel = self.drift_kernel
        if kernel is not None and self.index_N is not None and x_NP.is_cuda and x_NP.dtype == torch.float32:
            index_N = self.device_index_N
            index_N = to_device(self.index_N, x_NP.device) if index_N is None else index_N
            return kernel(x_NP, self.rows_MP, index_N, lr_sum_N1, plus_NP)
        return drift(x_NP, self.dense(), lr_sum_N1, plus_NP)

    def _selector(self, nodes: Sequence[int]) -> slice | Tensor:
        rows = np.asarray(nodes, dtype=np.int64)
        if self.index_N is not None:
            if self.device_index_N is not None and np.array_equal(rows, np.arange(len(self.index_N))):
                return self.device_index_N
            rows = self.index_N[rows]
        if len(rows) and (np.diff(rows) == 1).all():
            return slice(int(rows[0]), int(rows[-1]) + 1)
        return to_device(rows, self.rows_MP.device)


def column_blocks(rows_NP: Tensor, shared_MP: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
    """Split two matrices into blocks of the same columns, so that differences of their rows can be
    computed with little memory."""
    columns = max(1, BLOCK // len(rows_NP))
    return zip(rows_NP.split(columns, dim=1), shared_MP.split(columns, dim=1), strict=True)


def where_rows(mask_N: np.ndarray, new_NP: Tensor, old_NP: Tensor) -> Tensor:
    """The new rows for the nodes in the mask, the old ones for the others."""
    if mask_N.all():
        return new_NP
    return torch.where(to_device(mask_N, new_NP.device)[:, None], new_NP, old_NP)


def where_tables(mask_N: np.ndarray, new: Rows, old: Rows) -> Rows:
    """The new rows for the nodes in the mask, the old ones for the others, matrix by matrix of
    `new`."""
    return {name: where_rows(mask_N, rows, old[name]) for name, rows in new.items()}


def scatter_rows(mask_N: np.ndarray, new_AP: Tensor, old_NP: Tensor) -> Tensor:
    """The old rows, with those of the nodes in the mask replaced by the A new rows."""
    if mask_N.all():
        return new_AP
    return old_NP.index_copy(0, to_device(np.flatnonzero(mask_N), old_NP.device), new_AP)
