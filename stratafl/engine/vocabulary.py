"""Lookups in embeddings, watched: a code beyond the vocabulary must not go unnoticed.

The tables of many clients lie one behind the other in memory, so that a code too large, or below
zero, would be looked up in another client's. The library's own batched lookup does that without a
word; on a GPU, of one client, it ends the process.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode

ARGUMENTS = ("input", "weight", "padding_idx", "max_norm", "norm_type", "scale_grad_by_freq", "sparse")


class Vocabulary(TorchFunctionMode):
    """While it is on, notes of every lookup whether a code lay beyond its table, and takes the
    first entry for it."""

    def __init__(self) -> None:
        super().__init__()
        self.beyond: list[Tensor] = []
        self.sizes: list[int] = []
        """Of the tables."""

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: Sequence[Any] = (), kwargs: Any = None
    ) -> Any:
        if func is not F.embedding:
            return func(*args, **(kwargs or {}))
        given = dict(zip(ARGUMENTS, args, strict=False)) | (kwargs or {})
        codes, size = given["input"], len(given["weight"])
        outside = (codes < 0) | (codes >= size)
        self.beyond.append(outside.any())
        self.sizes.append(size)
        return func(**given | {"input": torch.where(outside, 0, codes)})

    @staticmethod
    def check(beyond: Sequence[Tensor]) -> None:
        """Complain, as the library does of one client's lookup, if any code was beyond its
        table."""
        if beyond and bool(torch.stack([each.any() for each in beyond]).any()):
            raise IndexError("index out of range: a code lies beyond an embedding's vocabulary")

    @staticmethod
    def mark(g_CP: Tensor, beyond: Sequence[Tensor]) -> Tensor:
        """The same without waiting for the device, which a step that is captured must not do: the
        gradients of whoever had such a code are no numbers, by which its update is refused."""
        return g_CP.masked_fill_(torch.stack(list(beyond)).any(dim=0)[:, None], torch.nan) if beyond else g_CP
