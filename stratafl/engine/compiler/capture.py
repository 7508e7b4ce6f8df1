"""Tracing of a function into an fx graph of torch's operations, without computing values."""

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
from stratafl.base.rng import PROCESS_LOCK
from stratafl.engine.precision import cudnn_disabled


class UnsupportedModule(Exception):
    """Error: the module has something that a captured program cannot run; the message says what."""


DATA_DEPENDENT = "what it does depends on values"


def trace_fx(function: Callable[..., Any], args: list[Tensor]) -> fx.GraphModule:
    """Graph of what a function does with tensors like these; only shapes and dtypes are used."""

    def traced(*args: Any) -> Any:
        with KnownComparisons():
            return function(*args)

    try:
        with ExitStack() as stack:
            stack.enter_context(torch.enable_grad())
            stack.enter_context(checkpointing_disabled())
            stack.enter_context(validation_disabled())
            stack.enter_context(causal_mask_detection_disabled())
            if any(arg.is_cuda for arg in args):
                # cuDNN asks for the addresses of recurrent weights, and traced tensors have none
                stack.enter_context(cudnn_disabled())
            return make_fx(traced, _decompositions(), "fake", pre_dispatch=True, _allow_non_fake_inputs=True)(*args)
    except UnsupportedModule:
        raise
    except Exception as problem:
        errors.reraise_out_of_memory(problem)
        if any(word in type(problem).__name__ for word in ("DataDependent", "DynamicOutputShape")):
            raise UnsupportedModule(DATA_DEPENDENT) from problem
        raise UnsupportedModule(f"cannot be recorded: {errors.describe_exception(problem)}") from problem


DECOMPOSED_OPS = (
    "atleast_1d", "atleast_2d", "atleast_3d", "cartesian_prod", "column_stack", "cross", "dsplit",
    "dstack", "fft_fftshift", "fft_ifftshift", "fliplr", "flipud", "gradient", "hsplit", "hstack", "kron",
    "linalg_cond", "linalg_multi_dot", "linalg_vecdot", "matrix_power", "meshgrid", "msort", "nanquantile", "quantile",
    "trapezoid", "vsplit", "vstack",
)  # fmt: skip
"""Composite operations that are traced as their parts, since vmap and `padding` know the parts."""


@functools.cache
def _decompositions() -> dict[Any, Callable[..., Any]]:
    """Decompositions by operation, as `make_fx` takes them."""
    packets = [getattr(torch.ops.aten, name) for name in DECOMPOSED_OPS]
    ops = [getattr(packet, name) for packet in packets for name in packet.overloads()]
    composite = torch._C.DispatchKey.CompositeImplicitAutograd
    return {op: op.decompose for op in ops if op.has_kernel_for_dispatch_key(composite)}


@contextmanager
def patched(owner: Any, name: str, value: Any) -> Iterator[None]:
    """Context in which an attribute of a module or class of torch is replaced."""
    with PROCESS_LOCK:
        before = vars(owner)[name]
        setattr(owner, name, value)
        try:
            yield
        finally:
            setattr(owner, name, before)


def checkpointing_disabled() -> Any:
    """Context in which activation checkpointing is ignored: it would hide operations from the
    trace, and saves little memory for one client."""

    class WithoutRecomputation:
        @staticmethod
        def apply(function: Any, preserve_rng_state: bool, *args: Any) -> Any:
            return function(*args)

    return patched(torch.utils.checkpoint, "CheckpointFunction", WithoutRecomputation)


def validation_disabled() -> Any:
    """Context in which distributions do not validate their parameters, which would need values.
    Invalid parameters are reported by the loop, and lead to NaN here."""
    return patched(Distribution, "_validate_args", False)


def causal_mask_detection_disabled() -> Any:
    """Context in which transformers use a mask as it is, without looking at its values to see
    whether it is causal, on which only speed depends."""
    return patched(transformer, "_detect_is_causal_mask", lambda mask, is_causal=None, size=None: bool(is_causal))


class KnownComparisons(TorchFunctionMode):
    """Mode in which `torch.rand(()) < p` is False for p <= 0, as in stochastic depth with a
    probability of zero; otherwise `bool` of a traced tensor is an error."""

    def __init__(self) -> None:
        super().__init__()
        self._uniform: list[Tensor] = []
        self._false: list[Tensor] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is Tensor.__bool__ and any(args[0] is value for value in self._false):
            return False
        result = func(*args, **(kwargs or {}))
        if func is torch.rand:
            self._uniform.append(result)
        elif func is Tensor.lt or func is Tensor.__lt__:
            value, bound = args
            if any(value is uniform for uniform in self._uniform) and isinstance(bound, int | float) and bound <= 0:
                self._false.append(result)
        return result


class OpaqueFunction:
    """A user's `autograd.Function` as one operation of a graph."""

    def __init__(self, function: type[torch.autograd.Function]):
        self.function, self.__name__, self.__module__ = function, function.__name__, function.__module__

    def __call__(self, *args: Any) -> Any:
        return self.function.apply(*args)


@contextmanager
def opaque_autograd_functions() -> Iterator[None]:
    """Context in which a user's `autograd.Function` is traced as one operation: the operations of
    its forward pass do not tell its gradient."""
    with PROCESS_LOCK:
        original = torch.autograd.Function.apply.__func__  # type: ignore[attr-defined]

        def apply(function: Any, *args: Any, **kwargs: Any) -> Any:
            mode: Any = get_proxy_mode()
            if mode is None or kwargs or function.__module__.partition(".")[0] == "torch":
                return original(function, *args, **kwargs)
            proxies = pytree.tree_map(mode.tracer.unwrap_proxy, args)
            with disable_proxy_modes_tracing():
                result = original(function, *args)
            proxy = mode.tracer.create_proxy("call_function", OpaqueFunction(function), proxies, {})
            return track_tensor_tree(result, proxy, constant=None, tracer=mode.tracer)

        with patched(torch.autograd.Function, "apply", classmethod(apply)):
            yield
