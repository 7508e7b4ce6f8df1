"""Counter-based random streams per client, and the mode that feeds them to torch."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from stratafl.base.rng import PROCESS, Stream, derive_seed, device_generator, mix, random_bits
from stratafl.engine.module_profile import OpObserver
from stratafl.engine.precision import cudnn_disabled

BLOCK = 1 << 15
"""Words that are hashed at a time on a CPU, so that they stay in its cache."""

MANTISSA_BITS = {torch.float64: 53, torch.float32: 24, torch.float16: 11, torch.bfloat16: 8}
"""Bits of a number below one that a type holds."""


class ClientStream(NamedTuple):
    """Random numbers of a step: of one client by integers, of several by tensors (C)."""

    seed: int
    client: int | Tensor
    step: int | Tensor

    def select(self, clients: slice | list[int]) -> ClientStream:
        """Streams of some of several clients."""
        assert isinstance(self.client, Tensor)
        step = self.step[clients] if isinstance(self.step, Tensor) and self.step.dim() else self.step
        return self._replace(client=self.client[clients], step=step)

    @property
    def clients(self) -> int:
        return len(self.client) if isinstance(self.client, Tensor) else 1

    def words(self, draw: int, count: int, device: torch.device) -> Tensor:
        """64 random bits each, (C, count), or (count) of one client."""
        if not isinstance(self.client, Tensor):
            return _hashed((self.seed, self.client, self.step, draw), count, device)
        if self.client.device.type != device.type:
            return self.words(draw, count, self.client.device).to(device)  # of a loss that draws on the host
        step = self.step[:, None] if isinstance(self.step, Tensor) and self.step.dim() else self.step
        if device.type != "cpu":
            place = torch.arange(count, device=device)
            return random_bits(self.seed, Stream.MODULE, self.client[:, None], step, draw, place)
        key_C1 = random_bits(self.seed, Stream.MODULE, self.client[:, None], step, draw)
        out, some = torch.empty(self.clients, count, dtype=torch.long), max(1, BLOCK // max(count, 1))
        for start in range(0, count, BLOCK):
            place = torch.arange(start, min(start + BLOCK, count))
            for first in range(0, self.clients, some):
                part = slice(first, first + some)
                out[part, start : start + BLOCK] = mix(key_C1[part], place)
        return out


def _hashed(key: tuple[int, int | Tensor, int | Tensor, int], count: int, device: torch.device) -> Tensor:
    seed, *where = key
    if device.type != "cpu" or count <= BLOCK:
        return random_bits(seed, Stream.MODULE, *where, torch.arange(count, device=device))
    out = torch.empty(count, dtype=torch.long)
    for first in range(0, count, BLOCK):
        part = out[first : first + BLOCK]
        part.copy_(random_bits(seed, Stream.MODULE, *where, torch.arange(first, first + len(part))))
    return out


class RandomSource:
    """Random source: the draws of a stream, one after another."""

    def __init__(self, stream: ClientStream, count: int = 0):
        """`count`: number of draws before."""
        self.stream, self.count = stream, count

    def number(self) -> int:
        """Number of the next draw."""
        self.count += 1
        return self.count - 1

    def words(self, shape: Sequence[int], device: torch.device) -> Tensor:
        """64 random bits each."""
        count = math.prod(shape) // self.stream.clients
        return self.stream.words(self.number(), count, device).view(tuple(shape))

    def uniform(self, shape: Sequence[int], device: torch.device) -> Tensor:
        """Float64 in [0, 1)."""
        return self.words(shape, device).bitwise_right_shift_(11).bitwise_and_((1 << 53) - 1).double() * 2.0**-53

    def normal(self, shape: Sequence[int], device: torch.device) -> Tensor:
        """Standard normal numbers in float64, by the Box-Muller transform."""
        first, second = self.uniform(shape, device), self.uniform(shape, device)
        return (-2 * torch.log1p(-first)).sqrt_() * torch.cos(2 * math.pi * second)

    def exponential(self, shape: Sequence[int], device: torch.device) -> Tensor:
        """Exponential numbers in float64, above zero."""
        return -torch.log1p(-self.uniform(shape, device)) + 2.0**-54

    def chance(self, share: float, shape: Sequence[int], device: torch.device) -> Tensor:
        """Bernoulli draws: True with this probability, by 32 bits each."""
        count, below = math.prod(shape) // self.stream.clients, bernoulli_threshold(share)
        words = self.stream.words(self.number(), -(-count // 2), device)
        if below < -(2**31):
            return torch.zeros(*shape, dtype=torch.bool, device=device)
        return (words.view(torch.int32)[..., :count] <= below).view(tuple(shape))

    def order(self, shape: Sequence[int], device: torch.device) -> Tensor:
        """A permutation of the last axis."""
        return self.words(shape, device).argsort(dim=-1, stable=True)


def bernoulli_threshold(share: float) -> int:
    """Threshold below which a random int32 falls with the given probability."""
    return round(min(max(share, 0.0), 1.0) * 2**32) - 2**31 - 1


def round_down(values: Tensor, dtype: torch.dtype) -> Tensor:
    """Cast float64 in [0, 1) to another type, rounding down: the result is never one."""
    digits = MANTISSA_BITS.get(dtype, 53)
    return values if digits == 53 else (values * 2.0**digits).floor_().mul_(2.0**-digits).to(dtype)


def multinomial(source: RandomSource, weights: Tensor, count: int, replacement: bool) -> Tensor:
    """`torch.multinomial` along the last axis, with any axes in front."""
    shape, kinds = weights.shape[:-1], weights.shape[-1]
    if not replacement:
        ratio = weights.double() / source.exponential(weights.shape, weights.device)
        return ratio.topk(count, dim=-1).indices
    edges = weights.double().cumsum(dim=-1)
    at = source.uniform((*shape, count), weights.device) * edges[..., -1:]
    return torch.searchsorted(edges, at, right=True).clamp_(max=kinds - 1)


Handler = Callable[..., Any]

CPU = torch.device("cpu")


class RandomOverride(OpObserver):
    """Mode that makes torch's random operations draw from a client's stream."""

    def __init__(self, source: RandomSource):
        super().__init__()
        self.source = source

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        handler = RANDOM_OP_HANDLERS.get(func._opname)
        if handler is None or kwargs.get("generator") is not None:
            return func(*args, **kwargs)
        kwargs.pop("generator", None)
        out = kwargs.pop("out", None)
        if out is None:
            return handler(self.source, func, *args, **kwargs)
        if func._opname in FACTORIES:
            kwargs |= {"dtype": out.dtype, "device": out.device}
        drawn = handler(self.source, func, *args, **kwargs)
        return out.resize_(drawn.shape).copy_(drawn)


class RecomputableSource(RandomSource):
    """Random source that repeats its numbers when activation checkpointing recomputes a part.

    It counts its draws in the seed of torch's generator, which torch restores for the
    recomputation.
    """

    def __init__(self, stream: ClientStream, generator: torch.Generator):
        super().__init__(stream)
        assert isinstance(stream.client, int) and isinstance(stream.step, int)
        self._generator = generator
        self._base = derive_seed(stream.seed, Stream.MODULE, stream.client, stream.step)
        generator.manual_seed(self._base)

    def number(self) -> int:
        seed = self._generator.initial_seed()
        self._generator.manual_seed(seed + 1)
        return seed - self._base


@contextmanager
def client_rng(stream: ClientStream, device: torch.device, module: nn.Module | None = None) -> Iterator[None]:
    """Let everything in a client's step draw from the client's stream.

    torch's generator is overwritten. `module` is the one that is called, if it may have recurrent
    layers, for which cuDNN draws internally.
    """
    inside = device.type == "cuda" and module is not None and any(map(_has_internal_dropout, module.modules()))
    without_cudnn = cudnn_disabled() if inside else nullcontext()
    with math_attention(device), without_cudnn, RandomOverride(RecomputableSource(stream, device_generator(device))):
        yield


def _has_internal_dropout(part: nn.Module) -> bool:
    return isinstance(part, nn.RNNBase) and part.dropout > 0


@contextmanager
def math_attention(device: torch.device) -> Iterator[None]:
    """Use the attention of plain operations on a GPU, whose fused kernels draw internally."""
    if device.type != "cuda":
        yield
        return
    from torch.nn.attention import SDPBackend, sdpa_kernel

    with PROCESS, sdpa_kernel(SDPBackend.MATH):
        yield


# -- draws of each operation -----------------------------------------------------------------------


def _bernoulli(source: RandomSource, func: Any, given: Tensor, p: Any = None) -> Tensor:
    """Probabilities are a tensor, or one number for all."""
    writes = func._schema.name.endswith("_")
    if p is None and writes:
        p = 0.5  # torch omits the default
    share = given if p is None else p
    if isinstance(share, Tensor):
        taken = source.uniform(given.shape, given.device) < share
    else:
        taken = source.chance(float(share), given.shape, given.device)
    return given.copy_(taken) if writes else taken.to(given.dtype)


def _native_dropout(source: RandomSource, func: Any, given: Tensor, p: float, train: bool | None = True) -> Any:
    if not train or p == 0:
        return given.clone(), torch.ones_like(given, dtype=torch.bool)
    kept = source.chance(1 - p, given.shape, given.device)
    return given * kept * (0.0 if p == 1 else 1 / (1 - p)), kept


def _factory(kind: str) -> Handler:
    def made(source: RandomSource, func: Any, size: Sequence[int], **more: Any) -> Tensor:
        dtype = more.get("dtype") or torch.get_default_dtype()
        device = torch.device(more.get("device") or CPU)
        return _of(source, kind, size, device, dtype)

    return made


def _like(kind: str) -> Handler:
    def made(source: RandomSource, func: Any, given: Tensor, **more: Any) -> Tensor:
        device = torch.device(more.get("device") or given.device)
        return _of(source, kind, given.shape, device, more.get("dtype") or given.dtype)

    return made


def _of(source: RandomSource, kind: str, size: Sequence[int], device: torch.device, dtype: torch.dtype) -> Tensor:
    values = getattr(source, kind)(size, device)
    return round_down(values, dtype) if kind == "uniform" else values.to(dtype)


def _integers(source: RandomSource, func: Any, *args: Any, **more: Any) -> Tensor:
    """`randint(high, size)`, `randint(low, high, size)` and their likes of a tensor."""
    if isinstance(args[0], Tensor):
        given, *bounds = args
        size, device, dtype = given.shape, given.device, given.dtype
    else:
        *bounds, size = args
        device, dtype = torch.device(more.get("device") or CPU), torch.int64
    low, high = bounds if len(bounds) == 2 else (0, bounds[0])
    return _between(source, int(low), int(high), size, device).to(more.get("dtype") or dtype)


def _between(source: RandomSource, low: int, high: int, size: Sequence[int], device: torch.device) -> Tensor:
    words = source.words(size, device).bitwise_right_shift_(1).bitwise_and_((1 << 62) - 1)
    return words.remainder_(high - low).add_(low)


def _random(source: RandomSource, func: Any, given: Tensor, *bounds: Any) -> Tensor:
    if not bounds:
        wide = torch.iinfo(given.dtype).max if not given.is_floating_point() else 2 ** min(53, _digits(given.dtype))
        bounds = (wide,)
    low, high = bounds if len(bounds) == 2 else (0, bounds[0])
    return given.copy_(_between(source, int(low), int(high), given.shape, given.device))


def _digits(dtype: torch.dtype) -> int:
    return round(-torch.log2(torch.tensor(torch.finfo(dtype).eps)).item()) + 1


def _permutation(source: RandomSource, func: Any, count: int, **more: Any) -> Tensor:
    order = source.order((count,), torch.device(more.get("device") or CPU))
    return order.to(more.get("dtype") or torch.int64)


def _uniform(source: RandomSource, func: Any, given: Tensor, low: float = 0.0, high: float = 1.0) -> Tensor:
    values = round_down(source.uniform(given.shape, given.device), given.dtype)
    return given.copy_(values * (high - low) + low)


def _normal_in_place(source: RandomSource, func: Any, given: Tensor, mean: float = 0.0, std: float = 1.0) -> Tensor:
    return given.copy_(source.normal(given.shape, given.device) * std + mean)


def _normal(source: RandomSource, func: Any, mean: Any, std: Any = 1.0, size: Any = None, **more: Any) -> Tensor:
    like = next((each for each in (mean, std) if isinstance(each, Tensor)), None)
    if like is None:
        device = torch.device(more.get("device") or CPU)
        dtype = more.get("dtype") or torch.get_default_dtype()
        return (source.normal(size, device) * std + mean).to(dtype)
    both = [each if isinstance(each, Tensor) else like.new_tensor(each) for each in (mean, std)]
    shape = torch.broadcast_shapes(*(each.shape for each in both))
    return source.normal(shape, like.device).to(like.dtype) * both[1] + both[0]


def _exponential(source: RandomSource, func: Any, given: Tensor, rate: float = 1.0) -> Tensor:
    return given.copy_(source.exponential(given.shape, given.device) / rate)


def _log_normal(source: RandomSource, func: Any, given: Tensor, mean: float = 1.0, std: float = 2.0) -> Tensor:
    return given.copy_((source.normal(given.shape, given.device) * std + mean).exp_())


def _multinomial(source: RandomSource, func: Any, weights: Tensor, count: int, replacement: bool = False) -> Tensor:
    return multinomial(source, weights, count, replacement)


def _rrelu(
    source: RandomSource,
    func: Any,
    given: Tensor,
    noise: Tensor,
    low: float = 1 / 8,
    high: float = 1 / 3,
    training: bool = False,
) -> Any:
    if not training:
        return func(given, noise, low, high, training)
    slopes = round_down(source.uniform(given.shape, given.device), given.dtype) * (high - low) + low
    slopes = torch.where(given <= 0, slopes, torch.ones_like(slopes))
    if "functional" in func._schema.name:
        return given * slopes, slopes
    noise.copy_(slopes)
    return given.mul_(slopes) if func._schema.name.endswith("_") else given * slopes


RANDOM_OP_HANDLERS: dict[Any, Handler] = {
    "bernoulli_": _bernoulli,
    "bernoulli": _bernoulli,
    "native_dropout": _native_dropout,
    "rand": _factory("uniform"),
    "randn": _factory("normal"),
    "rand_like": _like("uniform"),
    "randn_like": _like("normal"),
    "randint": _integers,
    "randint_like": _integers,
    "random_": _random,
    "randperm": _permutation,
    "uniform_": _uniform,
    "normal_": _normal_in_place,
    "normal": _normal,
    "exponential_": _exponential,
    "log_normal_": _log_normal,
    "multinomial": _multinomial,
    "rrelu_with_noise": _rrelu,
    "rrelu_with_noise_": _rrelu,
    "rrelu_with_noise_functional": _rrelu,
}
"""By name of the operation, for all its overloads."""

FACTORIES = ("rand", "randn", "randint", "randperm")
"""Operations that create a tensor of a given type on a given device."""
