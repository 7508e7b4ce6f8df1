"""Lookups in embeddings, watched: a code beyond the vocabulary must not go unnoticed.

The tables of many clients lie one behind the other in memory, so that a code too large, or below zero, would be looked
up in another client's. The library's own batched lookup does that without a word; on a GPU, of one client, it ends
the process.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode


class Lookups(TorchFunctionMode):
    """While it is on, every lookup is shown to `see`, which gives the codes that are looked up instead."""

    def __init__(self, see: Callable[[Tensor, Tensor], Tensor]):
        """see: (codes, table) -> codes."""
        super().__init__()
        self._see = see

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: Sequence[Any] = (), kwargs: Any = None
    ) -> Any:
        if func is not F.embedding:
            return func(*args, **(kwargs or {}))
        given = dict(zip(("input", "weight"), args, strict=False)) | (kwargs or {})
        return func(**given | {"input": self._see(given["input"], given["weight"])}, **_rest(args))


def _rest(args: Sequence[Any]) -> dict[str, Any]:
    names = ("padding_idx", "max_norm", "norm_type", "scale_grad_by_freq", "sparse")
    return dict(zip(names, args[2:], strict=False))


class Vocabulary(Lookups):
    """Notes in `beyond` whether any code lay beyond its table, and looks up the first entry for those that did."""

    def __init__(self) -> None:
        super().__init__(self._noted)
        self.beyond: list[Tensor] = []

    def _noted(self, codes: Tensor, table: Tensor) -> Tensor:
        outside = (codes < 0) | (codes >= table.shape[0])
        self.beyond.append(outside.any())
        return torch.where(outside, 0, codes)

    @staticmethod
    def check(beyond: Sequence[Tensor]) -> None:
        """Complain, as the library does of one client's lookup, if any code was beyond its table."""
        if beyond and bool(torch.stack([each.any() for each in beyond]).any()):
            raise IndexError("index out of range: a code lies beyond an embedding's vocabulary")
