"""Profile of a module: its side effects and random operations in training.

An engine that trains many clients with one module must know whether the module draws random
numbers, changes buffers or weights, enters autocast, or keeps a counter. All of this is observed
once, on one client's batch: `profile_module` computes the gradient twice under modes that see every
operation, and a third time for a module with integer buffers.

Shape suffixes: P parameters, Z buffer values, B samples of a batch.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from stratafl.base.dispatch import OpObserver
from stratafl.base.errors import describe_exception, reraise_out_of_memory
from stratafl.base.rng import device_generator, preserve_rng, rng_states
from stratafl.core.client_training import ClientTraining
from stratafl.core.flat_module import FlatModule, equal_with_nan
from stratafl.data.inputs import Kind, map_tensors

PROBE_SAMPLES = 4
"""Number of samples that a module is tried on before the first round."""

MAX_ORDINARY_VALUE = 1e6
"""Magnitude from which on a sample's values are replaced by noise."""

SMALL_OUTPUT_BYTES = 128 << 10
"""Mean size of an operation's output, for one client's batch, up to which outputs are small."""


def written(op: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[Any]:
    """Arguments that an operation writes to: in place, in a list, or as `out`."""
    schema = op._schema
    if not schema.is_mutable:
        return []
    bound = dict(zip((argument.name for argument in schema.arguments), args, strict=False)) | dict(kwargs)
    mutable = [argument.name for argument in schema.arguments if argument.alias_info and argument.alias_info.is_write]
    values = [bound[name] for name in mutable if name in bound]
    return [item for value in values for item in (value if isinstance(value, tuple | list) else [value])]


@dataclass(frozen=True)
class ModuleProfile:
    """Observations while a module's gradient was computed."""

    is_random: bool = False
    """Whether it draws from torch's generator. Engines give each client its own numbers instead."""
    foreign_generators: tuple[str, ...] = ()
    """Other generators that it draws from ("NumPy", "Python"), which no engine controls."""
    mutates: tuple[str, ...] = ()
    """Tensors that it writes to: "buffers", "weights", or "frozen weights" (not trained ones)."""
    uses_autocast: bool = False
    """Whether it enters autocast, which a captured graph does not show."""
    is_repeatable: bool = True
    """Whether two gradients from the same weights, batch and seed agree to 0.1 %."""
    counter_increments: Mapping[str, Tensor] = field(default_factory=dict)
    """Increments of the integer buffers that grow by the same amount in every step, by name.

    A client's counters then follow from the number of its step. Other integer buffers that training
    changes begin anew at every synchronisation.
    """
    mean_output_bytes: float = 0.0
    """Mean size of the operations' outputs in the forward pass of a client's batch."""
    has_max_pool: bool = False
    """Whether it max-pools images."""
    has_lstm: bool = False
    """Whether it has an LSTM layer, which a CPU computes by one kernel."""
    failure: str = ""
    """Reason why no gradient could be computed, or "". Training then raises the error itself."""

    @property
    def has_small_outputs(self) -> bool:
        """Whether operations return at most `SMALL_OUTPUT_BYTES` on average."""
        return self.mean_output_bytes <= SMALL_OUTPUT_BYTES


def sanitise_samples(samples: Kind) -> Kind:
    """Replace NaN, infinite and extreme values by noise, since they show nothing about a module."""

    def ordinary(values: Tensor) -> Tensor:
        if not values.is_floating_point():
            return values.clone()
        noise = torch.randn(values.shape, generator=torch.Generator().manual_seed(0)).to(values)
        return torch.where(values.abs() < MAX_ORDINARY_VALUE, values, noise)

    return map_tensors(ordinary, samples)


def profile_module(training: ClientTraining) -> ModuleProfile:
    """Profile of the module on the first batch of the client with most samples.

    The run is not changed by it, and torch's generators are restored.
    """
    longest = training.clients.largest()
    index_B = longest if training.batch_size is None else longest[: training.batch_size]
    with preserve_rng(training.samples.device):
        try:
            return _observe(training, index_B)
        except Exception as problem:
            reraise_out_of_memory(problem)
            # is_random: it is not known, so the cautious answer
            return ModuleProfile(is_random=True, failure=describe_exception(problem))


@contextmanager
def nested(*contexts: AbstractContextManager[Any]) -> Iterator[None]:
    """Enter several contexts, the first one outermost."""
    with ExitStack() as stack:
        for context in contexts:
            stack.enter_context(context)
        yield


def _observe(training: ClientTraining, index_B: Tensor) -> ModuleProfile:
    flat, device = training.flat, training.samples.device
    x_P, b_Z = (row.to(device) for row in flat.flatten_module(flat.module))
    inputs, targets = training.batch(training.first_client, 0, index_B)
    inputs, targets = sanitise_samples(inputs), sanitise_samples(targets)
    flat.train()
    writes, autocast, counter = WriteObserver(flat), AutocastObserver(device), OpCounter()
    initial = flat.integer_buffers()
    mutates: set[str] = set()
    gradients, is_random = [], False

    def gradient(x_P: Tensor, b_Z: Tensor, integers: dict[str, Tensor], **contexts: Any) -> Tensor:
        return flat.gradient(x_P, b_Z, inputs.clone(), targets.clone(), training.loss, integers, **contexts)

    # operations are counted in the first gradient's forward pass alone
    forwards: tuple[AbstractContextManager[Any], ...] = counter, nullcontext()
    _, numpy_before, python_before = rng_states()
    for forward in forwards:
        generator = device_generator(device).manual_seed(0)
        seeded = generator.get_state()
        after_P, after_Z, integers = x_P.clone(), b_Z.clone(), flat.integer_buffers()
        within = partial(nested, autocast, writes)
        gradient_P = gradient(after_P, after_Z, integers, within=within, forward=lambda: forward)
        gradients.append(gradient_P.nan_to_num())
        is_random = is_random or not torch.equal(generator.get_state(), seeded)
        # some of torch's operations write without declaring it
        mutates |= flat.written | writes.owners | ({"weights"} if not equal_with_nan(x_P, after_P) else set())
        pairs = [(b_Z, after_Z), *((value, integers[name]) for name, value in initial.items())]
        if not all(equal_with_nan(*pair) for pair in pairs):
            mutates.add("buffers")
    _, numpy_after, python_after = rng_states()
    unchanged = {"Python": python_before == python_after, "NumPy": numpy_before == numpy_after}
    next_integers = {name: value.clone() for name, value in integers.items()}
    if initial:
        gradient(x_P.clone(), b_Z.clone(), next_integers)
    first_P, second_P = gradients
    return ModuleProfile(
        is_random=is_random,
        foreign_generators=tuple(name for name, same in unchanged.items() if not same),
        mutates=tuple(sorted(mutates)),
        uses_autocast=autocast.is_used,
        # a GPU may sum in another order each time
        is_repeatable=bool((first_P - second_P).norm() <= 1e-3 * first_P.norm()),
        counter_increments=_equal_increments(initial, integers, next_integers),
        mean_output_bytes=counter.output_bytes / max(1, counter.count),
        has_max_pool=counter.has_max_pool,
        has_lstm=counter.has_lstm,
    )


def _equal_increments(
    initial: Mapping[str, Tensor], first: Mapping[str, Tensor], second: Mapping[str, Tensor]
) -> dict[str, Tensor]:
    """Increments of the integer buffers that grow by the same amount in two steps."""
    increments = {name: first[name] - value for name, value in initial.items() if value.dtype != torch.bool}
    is_equal = {name: torch.equal(increment, second[name] - first[name]) for name, increment in increments.items()}
    return {name: increment for name, increment in increments.items() if is_equal[name] and bool(increment.any())}


class AutocastObserver(TorchFunctionMode):
    """Records whether a function is called with autocast switched on or off within the module."""

    def __init__(self, device: torch.device) -> None:
        super().__init__()
        self._device_type, self._outside = device.type, torch.is_autocast_enabled(device.type)
        self.is_used = False

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.is_used |= torch.is_autocast_enabled(self._device_type) != self._outside
        return func(*args, **(kwargs or {}))


class WriteObserver(OpObserver):
    """Records which tensors of a module operations write to: its weights, buffers or frozen
    weights."""

    def __init__(self, flat: FlatModule) -> None:
        super().__init__()
        self._flat = flat
        self.owners: set[str] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        tensors = (argument for argument in written(func, args, kwargs or {}) if isinstance(argument, Tensor))
        self.owners |= {owner for owner in map(self._flat.owner_of_memory, tensors) if owner is not None}
        return func(*args, **(kwargs or {}))


class OpCounter(OpObserver):
    """Counts the operations other than views, and the bytes of their outputs."""

    def __init__(self) -> None:
        super().__init__()
        self.count = self.output_bytes = 0
        self.has_max_pool = self.has_lstm = False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if not func.is_view:
            outputs = result if isinstance(result, tuple | list) else [result]
            self.count += 1
            self.output_bytes += sum(output.nbytes for output in outputs if isinstance(output, Tensor))
            # sequences are pooled as images with one line
            self.has_max_pool |= func._opname == "max_pool2d_with_indices" and outputs[0].shape[-2] > 1
            self.has_lstm |= func._opname == "mkldnn_rnn_layer"
        return result


class RoundingObserver(OpObserver):
    """Records the largest machine epsilon of the types of all results: a part of a module may
    compute in a coarser type."""

    def __init__(self) -> None:
        super().__init__()
        self.eps = 0.0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for output in result if isinstance(result, tuple | list) else (result,):
            if isinstance(output, Tensor) and output.is_floating_point():
                self.eps = max(self.eps, torch.finfo(output.dtype).eps)
        return result


def reproducibility_notes(profile: ModuleProfile) -> list[str]:
    """Notes for the user on why a run with such a module cannot be repeated."""
    if profile.foreign_generators:
        generators = " and ".join(profile.foreign_generators)
        reason = f"the model or loss draws from {generators}'s generator, which no seed here sets"
        return [f"{reason}: this run cannot be repeated"]
    if profile.is_repeatable:
        return []
    reason = "the model or loss gives another gradient the second time, from the same weights, batch and torch seed"
    return [f"{reason}: it keeps something between calls, which all clients share, and this run cannot be repeated"]
