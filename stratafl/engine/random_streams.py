"""Counter-based random streams per client, and the mode that feeds them to torch."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from stratafl.base.dispatch import OpObserver
from stratafl.base.rng import CPU, PROCESS_LOCK, Stream, derive_seed, device_generator, mix, random_bits
from stratafl.engine.precision import cudnn_disabled

BLOCK = 1 << 15
"""Words that are hashed at a time on a CPU, so that they stay in its cache."""

MANTISSA_BITS = {torch.float64: 53, torch.float32: 24, torch.float16: 11, torch.bfloat16: 8}
"""Significant bits of each floating type."""


class ClientStream(NamedTuple):
    """Key of the random numbers of a step: integers for one client, tensors (C) for several."""

    seed: int
    client: int | Tensor
    step: int | Tensor

    def select(self, clients: slice | list[int]) -> ClientStream:
        """Streams of some of the clients."""
        assert isinstance(self.client, Tensor)
        step = self.step[clients] if isinstance(self.step, Tensor) and self.step.dim() else self.step
        return self._replace(client=self.client[clients], step=step)

    @property
    def clients(self) -> int:
        return len(self.client) if isinstance(self.client, Tensor) else 1

    def words(self, draw: int, count: int, device: torch.device) -> Tensor:
        """64 random bits for each of `count` values of the random operation with the number `draw`:
        (C, count), or (count) for one client."""
        client, step = self.client, self.step
        if isinstance(client, Tensor):
            if client.device.type != device.type:
                return self.words(draw, count, client.device).to(device)  # a loss that draws on the host
            client = client[:, None]
            step = step[:, None] if isinstance(step, Tensor) and step.dim() else step
        if device.type != "cpu" or count * self.clients <= BLOCK:
            place = torch.arange(count, device=device)
            return random_bits(self.seed, Stream.MODULE, client, step, draw, place)
        state_C1 = random_bits(self.seed, Stream.MODULE, client, step, draw).reshape(-1, 1)
        out, size = torch.empty(self.clients, count, dtype=torch.long), max(1, BLOCK // count)
        for start in range(0, count, BLOCK):
            place = torch.arange(start, min(start + BLOCK, count))
            for first in range(0, self.clients, size):
                part = slice(first, first + size)
                out[part, start : start + BLOCK] = mix(state_C1[part], place)
        return out if isinstance(client, Tensor) else out[0]


class RandomSource:
    """Random numbers of a stream for one operation after another."""

    def __init__(self, stream: ClientStream, count: int = 0):
        """`count`: number of random operations so far."""
        self.stream, self.count = stream, count

    def number(self) -> int:
        """Number of the next random operation; counts it."""
        self.count += 1
        return self.count - 1

    def words(self, shape: Sequence[int], device: torch.device) -> Tensor:
        """64 random bits for each value of this shape; they are the next random operation's."""
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

    def chance(self, probability: float, shape: Sequence[int], device: torch.device) -> Tensor:
        """True with this probability, decided by 32 bits each."""
        count, threshold = math.prod(shape) // self.stream.clients, bernoulli_threshold(probability)
        words = self.stream.words(self.number(), -(-count // 2), device)
        if threshold < -(2**31):
            return torch.zeros(*shape, dtype=torch.bool, device=device)
        return (words.view(torch.int32)[..., :count] <= threshold).view(tuple(shape))

    def order(self, shape: Sequence[int], device: torch.device) -> Tensor:
        """Random permutations of the indices of the last axis."""
        return self.words(shape, device).argsort(dim=-1, stable=True)


def bernoulli_threshold(probability: float) -> int:
    """Largest int32 that counts as True: a random int32 is at most this with the probability."""
    return round(min(max(probability, 0.0), 1.0) * 2**32) - 2**31 - 1


def round_down(values: Tensor, dtype: torch.dtype) -> Tensor:
    """Cast float64 in [0, 1) to another type, rounding down: the result is never one."""
    bits = MANTISSA_BITS.get(dtype, 53)
    return values if bits == 53 else (values * 2.0**bits).floor_().mul_(2.0**-bits).to(dtype)


def multinomial(source: RandomSource, weights: Tensor, count: int, replacement: bool = False) -> Tensor:
    """`torch.multinomial` along the last axis, with any number of axes before it."""
    shape, classes = weights.shape[:-1], weights.shape[-1]
    if not replacement:
        ratio = weights.double() / source.exponential(weights.shape, weights.device)
        return ratio.topk(count, dim=-1).indices
    edges = weights.double().cumsum(dim=-1)
    position = source.uniform((*shape, count), weights.device) * edges[..., -1:]
    return torch.searchsorted(edges, position, right=True).clamp_(max=classes - 1)


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
        result = handler(self.source, func, *args, **kwargs)
        return out.resize_(result.shape).copy_(result)


class RecomputableSource(RandomSource):
    """Random source that repeats its numbers when activation checkpointing recomputes a part.

    It counts random operations in the seed of torch's generator, which torch restores for the
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
    """Let all random operations in a client's step draw from the client's stream.

    torch's generator is overwritten. `module` is the one that is called, if it may have recurrent
    layers with dropout, for which cuDNN draws internally.
    """
    parts = module.modules() if module is not None and device.type == "cuda" else ()
    has_dropout = any(isinstance(part, nn.RNNBase) and part.dropout > 0 for part in parts)
    without_cudnn = cudnn_disabled() if has_dropout else nullcontext()
    with math_attention(device), without_cudnn, RandomOverride(RecomputableSource(stream, device_generator(device))):
        yield


@contextmanager
def math_attention(device: torch.device) -> Iterator[None]:
    """Use attention by plain operations on a GPU, since its fused kernels draw internally."""
    if device.type != "cuda":
        yield
        return
    from torch.nn.attention import SDPBackend, sdpa_kernel

    with PROCESS_LOCK, sdpa_kernel(SDPBackend.MATH):
        yield


# -- operations ------------------------------------------------------------------------------------

Handler = Callable[..., Any]
"""(source, operation, arguments of the operation) -> the operation's result."""


def _result_like(like: Tensor | Sequence[int], dtype: torch.dtype, options: Any) -> tuple[Any, Any, Any]:
    """Size, device and type of a tensor that an operation creates, like another tensor or of a
    size; `dtype` is the default for a size."""
    size, device, dtype = (like.shape, like.device, like.dtype) if isinstance(like, Tensor) else (like, CPU, dtype)
    return size, torch.device(options.get("device") or device), options.get("dtype") or dtype


def _create(kind: str) -> Handler:
    """Handler of operations that create a tensor of this kind of random numbers."""

    def create(source: RandomSource, func: Any, like: Tensor | Sequence[int], **options: Any) -> Tensor:
        size, device, dtype = _result_like(like, torch.get_default_dtype(), options)
        values = getattr(source, kind)(size, device)
        return round_down(values, dtype) if kind == "uniform" else values.to(dtype)

    return create


def _bernoulli(source: RandomSource, func: Any, x: Tensor, p: Any = None) -> Tensor:
    """`x` has the probabilities unless `p` does, a tensor or one number."""
    is_inplace = func._schema.name.endswith("_")
    if p is None:
        p = 0.5 if is_inplace else x  # torch omits the default
    if isinstance(p, Tensor):
        mask = source.uniform(x.shape, x.device) < p
    else:
        mask = source.chance(float(p), x.shape, x.device)
    return x.copy_(mask) if is_inplace else mask.to(x.dtype)


def _native_dropout(source: RandomSource, func: Any, x: Tensor, p: float, train: bool | None = True) -> Any:
    if not train or p == 0:
        return x.clone(), torch.ones_like(x, dtype=torch.bool)
    mask = source.chance(1 - p, x.shape, x.device)
    return x * mask * (0.0 if p == 1 else 1 / (1 - p)), mask


def _randint(source: RandomSource, func: Any, *args: Any, **options: Any) -> Tensor:
    """`randint(high, size)`, `randint(low, high, size)`, or `randint_like` with a tensor first."""
    like, bounds = (args[0], args[1:]) if isinstance(args[0], Tensor) else (args[-1], args[:-1])
    size, device, dtype = _result_like(like, torch.int64, options)
    return _integers(source, bounds, size, device).to(dtype)


def _integers(source: RandomSource, bounds: Sequence[Any], size: Sequence[int], device: torch.device) -> Tensor:
    """Random integers from low up to below high; `bounds` are (low, high), or (high) from zero."""
    low, high = map(int, bounds if len(bounds) == 2 else (0, bounds[0]))
    words = source.words(size, device).bitwise_right_shift_(1).bitwise_and_((1 << 62) - 1)
    return words.remainder_(high - low).add_(low)


def _random(source: RandomSource, func: Any, x: Tensor, *bounds: Any) -> Tensor:
    if not bounds:
        bounds = (2 ** MANTISSA_BITS.get(x.dtype, 53) if x.is_floating_point() else torch.iinfo(x.dtype).max,)
    return x.copy_(_integers(source, bounds, x.shape, x.device))


def _permutation(source: RandomSource, func: Any, count: int, **options: Any) -> Tensor:
    size, device, dtype = _result_like((count,), torch.int64, options)
    return source.order(size, device).to(dtype)


def _uniform(source: RandomSource, func: Any, x: Tensor, low: float = 0.0, high: float = 1.0) -> Tensor:
    return x.copy_(round_down(source.uniform(x.shape, x.device), x.dtype) * (high - low) + low)


def _normal_in_place(source: RandomSource, func: Any, x: Tensor, mean: float = 0.0, std: float = 1.0) -> Tensor:
    return x.copy_(source.normal(x.shape, x.device) * std + mean)


def _normal(source: RandomSource, func: Any, mean: Any, std: Any = 1.0, size: Any = None, **options: Any) -> Tensor:
    like = next((x for x in (mean, std) if isinstance(x, Tensor)), None)
    if like is None:
        size, device, dtype = _result_like(size, torch.get_default_dtype(), options)
        return (source.normal(size, device) * std + mean).to(dtype)
    mean, std = (x if isinstance(x, Tensor) else like.new_tensor(x) for x in (mean, std))
    shape = torch.broadcast_shapes(mean.shape, std.shape)
    return source.normal(shape, like.device).to(like.dtype) * std + mean


def _exponential(source: RandomSource, func: Any, x: Tensor, rate: float = 1.0) -> Tensor:
    return x.copy_(source.exponential(x.shape, x.device) / rate)


def _log_normal(source: RandomSource, func: Any, x: Tensor, mean: float = 1.0, std: float = 2.0) -> Tensor:
    return x.copy_((source.normal(x.shape, x.device) * std + mean).exp_())


def _rrelu(
    source: RandomSource,
    func: Any,
    x: Tensor,
    noise: Tensor,
    low: float = 1 / 8,
    high: float = 1 / 3,
    training: bool = False,
) -> Any:
    if not training:
        return func(x, noise, low, high, training)
    slopes = round_down(source.uniform(x.shape, x.device), x.dtype) * (high - low) + low
    slopes = torch.where(x <= 0, slopes, torch.ones_like(slopes))
    if "functional" in func._schema.name:
        return x * slopes, slopes
    noise.copy_(slopes)
    return x.mul_(slopes) if func._schema.name.endswith("_") else x * slopes


RANDOM_OP_HANDLERS: dict[Any, Handler] = {
    "bernoulli_": _bernoulli,
    "bernoulli": _bernoulli,
    "native_dropout": _native_dropout,
    "rand": _create("uniform"),
    "randn": _create("normal"),
    "rand_like": _create("uniform"),
    "randn_like": _create("normal"),
    "randint": _randint,
    "randint_like": _randint,
    "random_": _random,
    "randperm": _permutation,
    "uniform_": _uniform,
    "normal_": _normal_in_place,
    "normal": _normal,
    "exponential_": _exponential,
    "log_normal_": _log_normal,
    "multinomial": lambda source, func, *args, **options: multinomial(source, *args, **options),
    "rrelu_with_noise": _rrelu,
    "rrelu_with_noise_": _rrelu,
    "rrelu_with_noise_functional": _rrelu,
}
"""Handlers by the name of the operation, for all its overloads."""

FACTORIES = ("rand", "randn", "randint", "randperm")
"""Operations that create a tensor of a given type on a given device."""
