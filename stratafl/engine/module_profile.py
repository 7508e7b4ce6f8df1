"""Profile of a module: what it does in training besides computing its output.

An engine that trains many clients with one module must know whether the module draws random
numbers, changes buffers or weights, enters autocast, or keeps a counter. All of this is observed
once, on one client's batch: `profile_module` computes the gradient twice under modes that see every
operation, and a third time where there are integer buffers.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from stratafl.base.errors import describe_exception, pass_on_no_room
from stratafl.base.rng import device_generator, preserve_rng, rng_states
from stratafl.core.client_training import ClientTraining
from stratafl.core.flat_module import FlatModule, equal_with_nan
from stratafl.data.inputs import Kind, map_tensors

PROBE_SAMPLES = 4
"""Samples that a module is tried on."""

MAX_ORDINARY_VALUE = 1e6
"""Bound of the magnitude of a sample's ordinary values."""

SMALL_OUTPUT_BYTES = 128 << 10
"""Mean bytes of an operation's output, for one client's batch, up to which outputs are small."""


class OpObserver(TorchDispatchMode):
    """A mode that sees every operation."""

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # torch would load its compiler, for seconds, only to keep out of this mode


def written(op: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[Any]:
    """The arguments that an operation writes to: in place, several in a list, or as `out`."""
    schema = op._schema
    if not schema.is_mutable:
        return []
    bound = dict(zip((argument.name for argument in schema.arguments), args, strict=False)) | dict(kwargs)
    mutable = [argument.name for argument in schema.arguments if argument.alias_info and argument.alias_info.is_write]
    values = [bound[name] for name in mutable if name in bound]
    return [item for value in values for item in (value if isinstance(value, tuple | list) else [value])]


@dataclass(frozen=True)
class ModuleProfile:
    """What was observed while a module's gradient was computed."""

    is_random: bool = False
    """It draws from torch's generator. Engines give each client its own numbers instead."""
    foreign_generators: tuple[str, ...] = ()
    """Other generators it draws from ("NumPy", "Python"), which no engine controls."""
    mutates: tuple[str, ...] = ()
    """What it writes to: its "buffers", its "weights", or "frozen weights", which nobody trains."""
    uses_autocast: bool = False
    """It enters autocast, of which a captured graph knows nothing."""
    is_repeatable: bool = True
    """Two gradients from the same weights, batch and seed are equal."""
    counter_increments: Mapping[str, Tensor] = field(default_factory=dict)
    """Integer buffers that grow by the same amount in every step, and by how much.

    A client's counters then follow from the number of the step, wherever and whenever it trains.
    Other integer buffers that training changes begin anew at every synchronisation.
    """
    mean_output_bytes: float = 0.0
    """Mean bytes of the operations' outputs in the forward pass of a client's batch."""
    has_max_pool: bool = False
    """It takes the largest values of neighbourhoods of images."""
    failure: str = ""
    """Why no gradient could be computed, if so. The error itself appears in training."""

    @property
    def has_small_outputs(self) -> bool:
        """Whether operations return at most `SMALL_OUTPUT_BYTES` on average."""
        return self.mean_output_bytes <= SMALL_OUTPUT_BYTES


def sanitise_samples(samples: Kind) -> Kind:
    """Replace NaN, infinite and extreme values in probe samples by noise.

    They say nothing about the module.
    """

    def ordinary(values: Tensor) -> Tensor:
        if not values.is_floating_point():
            return values.clone()
        noise = torch.randn(values.shape, generator=torch.Generator().manual_seed(0)).to(values)
        return torch.where(values.abs() < MAX_ORDINARY_VALUE, values, noise)

    return map_tensors(ordinary, samples)


def profile_module(training: ClientTraining) -> ModuleProfile:
    """Profile of the module on the first batch of the client with most samples.

    Nothing of the run is changed by it, and torch's generators are left as they were.
    """
    longest = training.clients.largest()
    index_B = longest if training.batch_size is None else longest[: training.batch_size]
    with preserve_rng(training.samples.device):
        try:
            return _observe(training, index_B)
        except Exception as problem:
            pass_on_no_room(problem)
            return ModuleProfile(is_random=True, failure=describe_exception(problem))


def _observe(training: ClientTraining, index_B: Tensor) -> ModuleProfile:
    flat, device = training.flat, training.samples.device
    x_P, b_B = (row.to(device) for row in flat.flatten_module(flat.module))
    inputs, targets = training.batch(training.first_client, 0, index_B)
    inputs, targets = sanitise_samples(inputs), sanitise_samples(targets)
    flat.train()
    integers = flat.integer_buffers()
    effects, counter = _SideEffects(flat, device), OpCounter()
    mutates: set[str] = set()
    gradients, is_random = [], False
    contexts: tuple[AbstractContextManager[Any], ...] = counter, nullcontext()
    _, numpy_before, python_before = rng_states()
    for forward in contexts:
        generator = device_generator(device).manual_seed(0)
        seeded = generator.get_state()
        after_P, after_B, after = x_P.clone(), b_B.clone(), flat.integer_buffers()
        samples = inputs.clone(), targets.clone()
        gradient_P = flat.gradient(
            after_P, after_B, *samples, training.loss, after, within=effects.observed, forward=lambda: forward
        )
        gradients.append(gradient_P.nan_to_num())
        is_random = is_random or not torch.equal(generator.get_state(), seeded)
        # some of torch's operations write without saying so
        mutates |= flat.written | effects.mutates | ({"weights"} if not equal_with_nan(x_P, after_P) else set())
        pairs = [(b_B, after_B), *((value, after[name]) for name, value in integers.items())]
        if not all(equal_with_nan(*pair) for pair in pairs):
            mutates.add("buffers")
    _, numpy_after, python_after = rng_states()
    unchanged = {"Python": python_before == python_after, "NumPy": numpy_before == numpy_after}
    first_P, second_P = gradients
    return ModuleProfile(
        is_random=is_random,
        foreign_generators=tuple(name for name, same in unchanged.items() if not same),
        mutates=tuple(sorted(mutates)),
        uses_autocast=effects.uses_autocast,
        # a GPU may add up in another order each time
        is_repeatable=bool((first_P - second_P).norm() <= 1e-3 * first_P.norm()),
        counter_increments=_increments(training, x_P, b_B, (inputs, targets), integers, after),
        mean_output_bytes=counter.output_bytes / max(1, counter.count),
        has_max_pool=counter.has_max_pool,
    )


def _increments(
    training: ClientTraining,
    x_P: Tensor,
    b_B: Tensor,
    samples: tuple[Any, Tensor],
    before: Mapping[str, Tensor],
    after: Mapping[str, Tensor],
) -> dict[str, Tensor]:
    """By how much integer buffers grow in a step, where it is the same in the next one."""
    if not before:
        return {}
    inputs, targets = samples
    next_step = {name: value.clone() for name, value in after.items()}
    training.flat.gradient(x_P.clone(), b_B.clone(), inputs.clone(), targets.clone(), training.loss, next_step)
    numbers = [name for name, value in before.items() if value.dtype != torch.bool]
    first = {name: after[name] - before[name] for name in numbers}
    second = {name: next_step[name] - after[name] for name in numbers}
    return {name: more for name, more in first.items() if bool(more.any()) and torch.equal(more, second[name])}


class _SideEffects:
    """Effects of a call that its result need not show: writes, and contexts it enters."""

    def __init__(self, flat: FlatModule, device: torch.device):
        self.uses_autocast = False
        self.mutates: set[str] = set()
        outside = torch.is_autocast_enabled(device.type)
        effects = self

        class Calls(TorchFunctionMode):
            """Sees torch's functions before a context such as autocast changes them."""

            def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
                effects.uses_autocast = effects.uses_autocast or torch.is_autocast_enabled(device.type) != outside
                return func(*args, **(kwargs or {}))

        class Writes(OpObserver):
            """Sees the operations that functions come down to, and which of them write into the
            module."""

            def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
                arguments = written(func, args, kwargs or {})
                owners = {flat.owner_of_memory(argument) for argument in arguments if isinstance(argument, Tensor)}
                effects.mutates |= {owner for owner in owners if owner is not None}
                return func(*args, **(kwargs or {}))

        self._calls, self._writes = Calls, Writes

    @contextmanager
    def observed(self) -> Iterator[None]:
        with self._calls(), self._writes():
            yield


class OpCounter(OpObserver):
    """Counts the operations that compute something, and the bytes of their outputs."""

    def __init__(self) -> None:
        super().__init__()
        self.count = self.output_bytes = 0
        self.has_max_pool = False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if not func.is_view:
            outputs = result if isinstance(result, tuple | list) else [result]
            self.count += 1
            self.output_bytes += sum(output.nbytes for output in outputs if isinstance(output, Tensor))
            # one axis alone is pooled as an image of one line
            self.has_max_pool |= func._opname == "max_pool2d_with_indices" and outputs[0].shape[-2] > 1
        return result


class CoarsestDtype(OpObserver):
    """Records the largest rounding error of all results: some modules compute a part in a type of
    their own."""

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
    """What keeps a run with such a module from being repeated, in words for the user."""
    if profile.foreign_generators:
        generators = " and ".join(profile.foreign_generators)
        reason = f"the model or loss draws from {generators}'s generator, which no seed here sets"
        return [f"{reason}: this run cannot be repeated"]
    if profile.is_repeatable:
        return []
    reason = "the model or loss gives another gradient the second time, from the same weights, batch and torch seed"
    return [f"{reason}: it keeps something between calls, which all clients share, and this run cannot be repeated"]
