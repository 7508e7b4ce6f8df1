"""Capture a module's operations as a graph, without running them."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
import torch.utils.checkpoint
from torch import Tensor, fx
from torch.distributions import Distribution
from torch.fx.experimental.proxy_tensor import disable_proxy_modes_tracing, get_proxy_mode, make_fx, track_tensor_tree
from torch.nn.modules import transformer
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree

from stratafl.base import errors
from stratafl.base.rng import PROCESS
from stratafl.engine.precision import cudnn_disabled


class UnsupportedModule(Exception):
    """The module has something that has no client-batched form, and what."""


COMPOSITE = torch._C.DispatchKey.CompositeImplicitAutograd

DATA_DEPENDENT = "what it does depends on values"


def trace_fx(call: Callable[..., Any], given: list[Tensor]) -> fx.GraphModule:
    """What is done with these, of which only shapes and types are looked at."""

    def foreseeing(*given: Tensor) -> Any:
        with KnownComparisons():
            return call(*given)

    try:
        with ExitStack() as stack:
            for context in (
                torch.enable_grad(),
                checkpointing_disabled(),
                validation_disabled(),
                causal_mask_detection_disabled(),
            ):
                stack.enter_context(context)
            if any(each.is_cuda for each in given):
                # a GPU's library looks at where recurrent weights lie, and these lie nowhere
                stack.enter_context(cudnn_disabled())
            made = make_fx(foreseeing, _parts(), "fake", pre_dispatch=True, _allow_non_fake_inputs=True)
            return made(*given)
    except UnsupportedModule:
        raise
    except Exception as problem:
        errors.pass_on_no_room(problem)
        if any(word in type(problem).__name__ for word in ("DataDependent", "DynamicOutputShape")):
            raise UnsupportedModule(DATA_DEPENDENT) from problem
        raise UnsupportedModule(f"cannot be recorded: {errors.describe_exception(problem)}") from problem


DECOMPOSED_OPS = (
    "atleast_1d", "atleast_2d", "atleast_3d", "cartesian_prod", "column_stack", "cross", "dsplit",
    "dstack", "fft_fftshift", "fft_ifftshift", "fliplr", "flipud", "gradient", "hsplit", "hstack", "kron",
    "linalg_cond", "linalg_multi_dot", "linalg_vecdot", "matrix_power", "meshgrid", "msort", "nanquantile", "quantile",
    "trapezoid", "vsplit", "vstack",
)  # fmt: skip
"""Operations that are noted as what they consist of, of which each has a form."""


@functools.cache
def _parts() -> dict[Any, Callable[..., Any]]:
    """What takes the place of composed operations."""

    def decomposed(op: Any) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            return op.decompose(*args, **kwargs)

        return call

    packets = [getattr(torch.ops.aten, name) for name in DECOMPOSED_OPS]
    ops = [getattr(packet, name) for packet in packets for name in packet.overloads()]
    return {op: decomposed(op) for op in ops if op.has_kernel_for_dispatch_key(COMPOSITE)}


@contextmanager
def patched(owner: Any, name: str, value: Any) -> Iterator[None]:
    """Something of the library's replaced for a while."""
    with PROCESS:
        before = vars(owner)[name]
        setattr(owner, name, value)
        try:
            yield
        finally:
            setattr(owner, name, before)


def checkpointing_disabled() -> Any:
    """A part that would be computed once without gradients, and again on the way back, is computed
    once: what one client saves by it is not much."""

    class Once:
        @staticmethod
        def apply(function: Any, preserve: bool, *given: Any) -> Any:
            return function(*given)

    return patched(torch.utils.checkpoint, "CheckpointFunction", Once)


def validation_disabled() -> Any:
    """Parameters of a distribution are looked at only for a complaint. The loop makes it, and here
    what comes of them is no number."""
    return patched(Distribution, "_validate_args", False)


def causal_mask_detection_disabled() -> Any:
    """A transformer looks whether a mask is that of the past alone, which may be left out then; it
    is as good to use it."""
    return patched(transformer, "_detect_is_causal_mask", lambda mask, is_causal=None, size=None: bool(is_causal))


class KnownComparisons(TorchFunctionMode):
    """Answers whether a random number from zero to one is below zero, by which layers are left out
    with a probability that is zero."""

    def __init__(self) -> None:
        super().__init__()
        self._drawn: list[Tensor] = []
        self._never: list[Tensor] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is Tensor.__bool__ and any(args[0] is each for each in self._never):
            return False
        result = func(*args, **(kwargs or {}))
        if func is torch.rand:
            self._drawn.append(result)
        elif func is Tensor.lt or func is Tensor.__lt__:
            value, bound = args
            if any(value is each for each in self._drawn) and isinstance(bound, int | float) and bound <= 0:
                self._never.append(result)
        return result


class OpaqueFunction:
    """A user's `autograd.Function`, as an operation of a recording."""

    def __init__(self, function: type[torch.autograd.Function]):
        self.function, self.__name__, self.__module__ = function, function.__name__, function.__module__

    def __call__(self, *args: Any) -> Any:
        return self.function.apply(*args)


@contextmanager
def opaque_autograd_functions() -> Iterator[None]:
    """While it is on, a user's `autograd.Function` is noted as one operation, not as what it does:
    what it does says nothing of its gradient."""
    with PROCESS:
        plain = torch.autograd.Function.apply.__func__  # type: ignore[attr-defined]

        def noted(function: Any, *args: Any, **kwargs: Any) -> Any:
            mode: Any = get_proxy_mode()
            if mode is None or kwargs or function.__module__.partition(".")[0] == "torch":
                return plain(function, *args, **kwargs)
            proxies = pytree.tree_map(mode.tracer.unwrap_proxy, args)
            with disable_proxy_modes_tracing():
                result = plain(function, *args)
            proxy = mode.tracer.create_proxy("call_function", OpaqueFunction(function), proxies, {})
            return track_tensor_tree(result, proxy, constant=None, tracer=mode.tracer)

        with patched(torch.autograd.Function, "apply", classmethod(noted)):
            yield
