"""Order of the parameters within the rows that an engine computes with.

Rules, stores and users see rows in the module's own order. Triton kernels need the filters of
convolutions channels-last, so between two synchronisations the rows of a stacked engine have them
in this order, each filter tensor within its own columns. Sums, clips and decay do not depend on it.

Shape suffixes: M rows, C clients of a chunk, P parameters, F of them in a block of filters,
Z buffer values.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from itertools import pairwise
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from stratafl.core.flat_module import FlatModule
from stratafl.core.rows import IndexedRows


class FilterBlock(NamedTuple):
    """Filters of a convolution: their columns in a row, and their shape (O, I, h, w)."""

    columns: slice
    shape: torch.Size

    def channels_first(self, part_MF: Tensor) -> Tensor:
        """View (M, O, I, h, w) of the filters, from these columns of rows in the module's order."""
        return part_MF.unflatten(1, self.shape)

    def channels_last(self, rows_MP: Tensor) -> Tensor:
        """View (M, O, I, h, w) of the filters in rows that have them channels-last."""
        outputs, inputs, height, width = self.shape
        return rows_MP[:, self.columns].unflatten(1, (outputs, height, width, inputs)).permute(0, 1, 4, 2, 3)


def _copy(source: Tensor, out: Tensor) -> None:
    out.copy_(source)


class ParameterLayout:
    """The module's own order of parameters, except for some filters, which are channels-last."""

    def __init__(self, flat: FlatModule, filters: Collection[str] = (), copy: Callable[[Tensor, Tensor], None] = _copy):
        """`filters`: names of the parameters that are channels-last; `copy`: copies filters from
        one order to the other."""
        self._flat, self._copy = flat, copy
        views = flat.unflatten(
            torch.empty(1, flat.parameters, device="meta"), torch.empty(1, flat.buffers, device="meta")
        )
        self._filters: dict[str, FilterBlock] = {}
        for name in flat.names:
            view_1OIhw = views[name]
            # with one input channel or one tap both orders are the same
            if name in filters and min(view_1OIhw.shape[2], view_1OIhw.shape[3:].numel()) > 1:
                start = int(view_1OIhw.storage_offset())
                self._filters[name] = FilterBlock(slice(start, start + view_1OIhw.numel()), view_1OIhw.shape[1:])
        edges = [0, *(edge for block in self._filters.values() for edge in (block.columns.start, block.columns.stop))]
        between = list(pairwise([*edges, flat.parameters]))[::2]
        self._others = [slice(start, end) for start, end in between if start < end]

    @property
    def plain(self) -> bool:
        """Whether it is the module's own order."""
        return not self._filters

    def named(self, x_CP: Tensor, b_CZ: Tensor) -> dict[str, Tensor]:
        """Views of rows in this layout, by the module's names and in its shapes."""
        filters = {name: block.channels_last(x_CP) for name, block in self._filters.items()}
        return self._flat.unflatten(x_CP, b_CZ) | filters

    def into(self, out_CP: Tensor, rows: IndexedRows, clients: Sequence[int]) -> None:
        """Copy the clients' rows, which are in the module's order, into rows in this layout."""
        if not self._reorders(rows.rows_MP):
            rows.copy_into(out_CP, clients)
        elif rows.index_N is None:
            # part by part: rows of clients that are not neighbours are copied on the way
            for columns in self._others:
                out_CP[:, columns].copy_(rows.slice_columns(columns).take(clients))
            for block in self._filters.values():
                part_CF = rows.slice_columns(block.columns).take(clients)
                self._copy(block.channels_first(part_CF), block.channels_last(out_CP))
        else:
            # rows that clients share are reordered once, then copied for each client
            if len(clients) < len(rows.index_N):
                used, index_C = np.unique(rows.index_N[list(clients)], return_inverse=True)
                rows = IndexedRows(IndexedRows(rows.rows_MP).take(used.tolist()), index_C)
                clients = range(len(clients))
            reordered_MP = torch.empty_like(rows.rows_MP)
            self.into(reordered_MP, IndexedRows(rows.rows_MP), range(len(reordered_MP)))
            rows._replace(rows_MP=reordered_MP).copy_into(out_CP, clients)

    def take(self, rows: IndexedRows, clients: Sequence[int]) -> Tensor:
        """The clients' rows, which are in the module's order, in this layout."""
        if not self._reorders(rows.rows_MP):
            return rows.take(clients)
        out_CP = rows.rows_MP.new_empty(len(clients), rows.rows_MP.shape[1])
        self.into(out_CP, rows, clients)
        return out_CP

    def restore(self, x_CP: Tensor, out_CP: Tensor) -> None:
        """Copy rows in this layout into rows in the module's order."""
        if not self._reorders(x_CP):
            out_CP.copy_(x_CP)
            return
        for columns in self._others:
            out_CP[:, columns].copy_(x_CP[:, columns])
        for block in self._filters.values():
            self._copy(block.channels_last(x_CP), block.channels_first(out_CP[:, block.columns]))

    def _reorders(self, rows_MP: Tensor) -> bool:
        """Whether these rows differ in this layout: a learning rate or a count of steps per client
        is no row of parameters."""
        return not self.plain and rows_MP.shape[1] == self._flat.parameters
