"""How parameters lie in the rows an engine computes with.

Rules, stores and users see a row in the module's own order. Kernels of our own want a convolution's
filters channels-last, and between two meetings the rows of an engine that does all of a step itself
have them so, each bank of filters within its own place: to sums, clips and decay one order is like
the other.

Shape suffixes: M rows, C clients of a chunk, P parameters, Z buffer values.
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
    """A convolution's filters: where they lie in a row, and their shape (O, I, h, w)."""

    where: slice
    shape: torch.Size

    def plain(self, part: Tensor) -> Tensor:
        """The filters of many rows, from their part of rows in the module's order."""
        return part.unflatten(1, self.shape)

    def last(self, part: Tensor) -> Tensor:
        """The filters of many rows, in the same shape, from rows that have them channels-last."""
        outputs, inputs, height, width = self.shape
        return part.unflatten(1, (outputs, height, width, inputs)).permute(0, 1, 4, 2, 3)


def _copy(given: Tensor, out: Tensor) -> None:
    out.copy_(given)


class ParameterLayout:
    """The module's own order, but for these parameters, which lie channels-last."""

    def __init__(self, flat: FlatModule, last: Collection[str] = (), copy: Callable[[Tensor, Tensor], None] = _copy):
        """`copy` brings filters from one order to the other."""
        self._flat, self._copy = flat, copy
        views = flat.unflatten(
            torch.empty(1, flat.parameters, device="meta"), torch.empty(1, flat.buffers, device="meta")
        )
        self._banks: dict[str, FilterBlock] = {}
        for name in flat.names:
            view_1OIhw = views[name]
            # with one channel or one tap both orders are the same
            if name in last and min(view_1OIhw.shape[2], view_1OIhw.shape[3:].numel()) > 1:
                start = int(view_1OIhw.storage_offset())
                self._banks[name] = FilterBlock(slice(start, start + view_1OIhw.numel()), view_1OIhw.shape[1:])
        edges = [0, *(at for bank in self._banks.values() for at in (bank.where.start, bank.where.stop))]
        between = list(pairwise([*edges, flat.parameters]))[::2]
        self._others = [slice(start, end) for start, end in between if start < end]

    @property
    def plain(self) -> bool:
        """Whether it is the module's own order."""
        return not self._banks

    def named(self, x_CP: Tensor, b_CZ: Tensor) -> dict[str, Tensor]:
        """Views of such rows under the module's names and in its shapes."""
        return self._flat.unflatten(x_CP, b_CZ) | {
            name: bank.last(x_CP[:, bank.where]) for name, bank in self._banks.items()
        }

    def into(self, out_CP: Tensor, given: IndexedRows, leaves: Sequence[int]) -> None:
        """Copy these leaves' rows, which are given in the module's order."""
        if not self._orders(given):
            given.copy_into(out_CP, leaves)
        elif given.index_N is None:
            # bank by bank: where leaves do not lie together, theirs are copied on the way
            for stretch in self._others:
                out_CP[:, stretch].copy_(given.slice_columns(stretch).take(leaves))
            for bank in self._banks.values():
                self._copy(bank.plain(given.slice_columns(bank.where).take(leaves)), bank.last(out_CP[:, bank.where]))
        else:
            # rows that leaves share are ordered first, then copied for each
            if len(leaves) < len(given.index_N):
                used, of_C = np.unique(given.index_N[list(leaves)], return_inverse=True)
                given, leaves = IndexedRows(IndexedRows(given.rows_MP).take(used.tolist()), of_C), range(len(leaves))
            ordered_MP = torch.empty_like(given.rows_MP)
            self.into(ordered_MP, IndexedRows(given.rows_MP), range(len(ordered_MP)))
            given._replace(rows_MP=ordered_MP).copy_into(out_CP, leaves)

    def some(self, given: IndexedRows, leaves: Sequence[int]) -> Tensor:
        """These leaves' rows, which are given in the module's order."""
        if not self._orders(given):
            return given.take(leaves)
        out_CP = given.rows_MP.new_empty(len(leaves), given.rows_MP.shape[1])
        self.into(out_CP, given, leaves)
        return out_CP

    def restore(self, x_CP: Tensor, out_CP: Tensor) -> None:
        """Copy rows back to the module's order."""
        if x_CP.shape[1] != self._flat.parameters:
            # a count of steps for each leaf is no row of parameters
            out_CP.copy_(x_CP)
            return
        for stretch in self._others:
            out_CP[:, stretch].copy_(x_CP[:, stretch])
        for bank in self._banks.values():
            self._copy(bank.last(x_CP[:, bank.where]), bank.plain(out_CP[:, bank.where]))

    def _orders(self, given: IndexedRows) -> bool:
        """A learning rate for each leaf is no row of parameters."""
        return not self.plain and given.rows_MP.shape[1] == self._flat.parameters
