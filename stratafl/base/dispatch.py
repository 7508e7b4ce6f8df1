"""Modes in which the operations that PyTorch executes are observed."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry

from stratafl.base.rng import PROCESS_LOCK


class OpObserver(TorchDispatchMode):
    """Mode that sees every operation."""

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # with True torch loads its compiler, for seconds, to keep it out of this mode


class FlopCounter(OpObserver):
    """Counts floating-point operations by the formulas of `torch.utils.flop_counter`, whose own
    mode loads the compiler."""

    total = 0

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        formula = flop_registry.get(func._overloadpacket)
        if formula is None:
            with self:
                result = func.decompose(*args, **kwargs)
            if result is not NotImplemented:
                return result
        result = func(*args, **kwargs)
        if formula is not None:
            self.total += formula(*args, **kwargs, out_val=result)
        return result


@contextmanager
def library_layers_disabled() -> Iterator[None]:
    """Compute recurrent layers, transformer layers and attention by plain operations.

    Otherwise a library may compute one of them in a single operation that no mode sees inside of.
    """
    attention = torch.backends.mha
    libraries: tuple[Any, ...] = (torch.backends.cudnn, torch.backends.mkldnn)
    with PROCESS_LOCK:
        before, had_fastpath = [library.enabled for library in libraries], attention.get_fastpath_enabled()
        for library in libraries:
            library.enabled = False
        attention.set_fastpath_enabled(False)
        try:
            with sdpa_kernel(SDPBackend.MATH):
                yield
        finally:
            for library, enabled in zip(libraries, before, strict=True):
                library.enabled = enabled
            attention.set_fastpath_enabled(had_fastpath)
