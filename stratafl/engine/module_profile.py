"""What a module does in training: random numbers, side effects, casts, operations."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import pairwise
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from stratafl.base.errors import pass_on_no_room
from stratafl.base.rng import device_generator, preserve_rng, rng_states
from stratafl.core.client_training import ClientTraining
from stratafl.core.flat_module import FlatModule, equal_with_nan
from stratafl.core.losses import Loss
from stratafl.data.dataset import BatchKey
from stratafl.data.inputs import Inputs, Kind, map_tensors

PROBE_SAMPLES = 4
"""Samples that a module is tried on."""

MAX_ORDINARY_VALUE = 1e6
"""What a sample's values are below."""


class OpObserver(TorchDispatchMode):
    """A mode that sees every operation."""

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # the library would load its compiler, for seconds, only to keep out of here


def written(op: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[Any]:
    """The arguments that an operation writes to: in place, several in a list, or as `out`."""
    schema = op._schema
    if not schema.is_mutable:
        return []
    given = dict(zip((argument.name for argument in schema.arguments), args, strict=False)) | dict(kwargs)
    told = [argument.name for argument in schema.arguments if argument.alias_info and argument.alias_info.is_write]
    found = [given[name] for name in told if name in given]
    return [one for each in found for one in (each if isinstance(each, tuple | list) else [each])]


class ModuleProfile(NamedTuple):
    """What a module did when its gradient was computed twice, from the same weights, samples and
    torch seed."""

    draws: bool
    """From torch's generator, which every client has to itself, or from another."""
    draws_from: tuple[str, ...]
    """Whose generators, where they are not torch's: no engine sets these."""
    writes: tuple[str, ...]
    """To its "buffers", its "weights", or weights that are not trained, "frozen weights"."""
    autocasts: bool
    """Whether it computes in another precision by a context of its own, of which a trace knows
    nothing."""
    repeats: bool
    """Whether both gradients are the same."""


def sanitise_samples(samples: Kind) -> Kind:
    """Samples to try a module on: what is no number there, or no ordinary one, says nothing about
    the module."""

    def ordinary(values: Tensor) -> Tensor:
        if not values.is_floating_point():
            return values.clone()
        noise = torch.randn(values.shape, generator=torch.Generator().manual_seed(0)).to(values)
        return torch.where(values.abs() < MAX_ORDINARY_VALUE, values, noise)

    return map_tensors(ordinary, samples)


def profile_module(
    flat: FlatModule, loss: Loss, x_P: Tensor, b_B: Tensor, inputs: Inputs, targets: Tensor
) -> ModuleProfile:
    """A module's habits in training, at these rows and samples; nothing that is given is
    changed."""
    flat.train()
    gradients = []
    drawn = False
    wrote: set[str] = set()
    before = flat.integer_buffers()
    watched = _SideEffects(flat, inputs.device)
    with preserve_rng(inputs.device):
        _, numpy, python = rng_states()
        for _ in range(2):
            generator = device_generator(inputs.device).manual_seed(0)
            seeded = generator.get_state()
            after_P, after_B, after = x_P.clone(), b_B.clone(), flat.integer_buffers()
            samples = inputs.clone(), targets.clone()
            gradients.append(flat.gradient(after_P, after_B, *samples, loss, after, within=watched.on))
            drawn = drawn or not torch.equal(generator.get_state(), seeded)
            # some of the library's operations write without saying so
            wrote |= flat.written | watched.wrote | ({"weights"} if not equal_with_nan(x_P, after_P) else set())
            pairs = [(b_B, after_B), *((value, after[name]) for name, value in before.items())]
            if not all(equal_with_nan(*pair) for pair in pairs):
                wrote.add("buffers")
        _, numpy_now, python_now = rng_states()
    others = tuple(name for name, same in (("Python", python == python_now), ("NumPy", numpy == numpy_now)) if not same)
    first, second = (gradient.nan_to_num() for gradient in gradients)
    # a GPU may add up in another order each time
    close = bool((first - second).norm() <= 1e-3 * first.norm())
    return ModuleProfile(drawn or bool(others), others, tuple(sorted(wrote)), watched.autocast, close)


class _SideEffects:
    """What a call does that its result need not show."""

    def __init__(self, flat: FlatModule, device: torch.device):
        self.autocast = False
        self.wrote: set[str] = set()
        outside = torch.is_autocast_enabled(device.type)
        watched = self

        class Calls(TorchFunctionMode):
            """Of the library's functions, seen before a context such as autocast changes them."""

            def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
                watched.autocast = watched.autocast or torch.is_autocast_enabled(device.type) != outside
                return func(*args, **(kwargs or {}))

        class Writes(OpObserver):
            """Of the operations that functions come down to, those that write into what is the
            module's."""

            def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
                whose = {
                    flat.owner_of_memory(each) for each in written(func, args, kwargs or {}) if isinstance(each, Tensor)
                }
                watched.wrote |= {each for each in whose if each is not None}
                return func(*args, **(kwargs or {}))

        self._calls, self._writes = Calls, Writes

    @contextmanager
    def on(self) -> Iterator[None]:
        with self._calls(), self._writes():
            yield


class CoarsestDtype(OpObserver):
    """While it is on, notes how coarsely the coarsest of all results is rounded: some modules
    compute a part in a type of their own."""

    def __init__(self) -> None:
        super().__init__()
        self.eps = 0.0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for each in result if isinstance(result, tuple | list) else (result,):
            if isinstance(each, Tensor) and each.is_floating_point():
                self.eps = max(self.eps, torch.finfo(each.dtype).eps)
        return result


def reproducibility_notes(known: ModuleProfile) -> list[str]:
    """What keeps a run with such a module from being repeated, in words for the user."""
    if known.draws_from:
        whose = " and ".join(known.draws_from)
        return [
            f"the model or loss draws from {whose}'s generator, which no seed here sets: this run cannot be repeated"
        ]
    if known.repeats:
        return []
    again = "the model or loss gives another gradient the second time, from the same weights, batch and torch seed"
    return [f"{again}: it keeps something between calls, which all clients share, and this run cannot be repeated"]


def is_random(training: ClientTraining) -> bool:
    """Whether the module or the loss draws from torch's generator in training."""
    flat, device = training.flat, training.samples.device
    few = max(training.partition, key=len)[:PROBE_SAMPLES].to(device)
    x_P, b_B = (row.to(device) for row in flat.flatten_module(flat.module))
    flat.train()
    with preserve_rng(device):
        seeded = device_generator(device).manual_seed(0).get_state()
        try:
            samples = training.samples.batch(few, BatchKey(training.seed, 0, 0))
            flat.gradient(x_P.clone(), b_B.clone(), *samples, training.loss)
        except Exception as problem:
            pass_on_no_room(problem)
            return True  # what is wrong with the module is said where it is used in earnest
        return not torch.equal(device_generator(device).get_state(), seeded)


def counter_increments(training: ClientTraining) -> dict[str, Tensor]:
    """How much each integer buffer grows with every step, where that is always the same.

    So a client's counters follow from the number of the step, wherever and whenever it trains.
    Other integer buffers that training changes begin anew at every meeting.
    """
    flat = training.flat
    counts = [flat.integer_buffers()]
    if not counts[0]:
        return {}
    device = training.samples.device
    few = max(training.partition, key=len)[:PROBE_SAMPLES].to(device)
    x_P, b_B = (row.to(device) for row in flat.flatten_module(flat.module))
    flat.train()
    with preserve_rng(device):
        for _ in range(2):
            counts.append({name: value.clone() for name, value in counts[-1].items()})
            try:
                samples = training.samples.batch(few, BatchKey(training.seed, 0, 0))
                flat.gradient(x_P.clone(), b_B.clone(), *samples, training.loss, counts[-1])
            except Exception as problem:
                pass_on_no_room(problem)
                return {}  # what is wrong with the module is said where it is used in earnest
    numbers = [name for name, value in counts[0].items() if value.dtype != torch.bool]
    first, second = ({name: after[name] - before[name] for name in numbers} for before, after in pairwise(counts))
    return {name: more for name, more in first.items() if bool(more.any()) and torch.equal(more, second[name])}


SMALL_BYTES = 128 << 10
"""Bytes that an operation on one client's batch gives on average, up to which it is small."""


class OpCounter(OpObserver):
    """Counts the operations that compute something, and how much they give."""

    def __init__(self) -> None:
        super().__init__()
        self.count = self.given = 0
        self.pools = False
        """Whether the largest values of images' neighbourhoods are among them."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if not func.is_view:
            every = result if isinstance(result, tuple | list) else [result]
            self.count += 1
            self.given += sum(each.nbytes for each in every if isinstance(each, Tensor))
            # one axis alone is pooled as an image of one line
            self.pools |= func._opname == "max_pool2d_with_indices" and every[0].shape[-2] > 1
        return result

    @property
    def small(self) -> bool:
        return self.given <= SMALL_BYTES * self.count


def count_operations(training: ClientTraining, index_B: Tensor) -> OpCounter | None:
    """Those of a client's batch on the way forward; None where they cannot be seen."""
    flat, device, seen = training.flat, training.samples.device, OpCounter()
    x_P, b_Z = (row.to(device).clone() for row in flat.flatten_module(flat.module))
    flat.train()
    with preserve_rng(device):
        try:
            samples = training.batch(0, 0, index_B)
            flat.gradient(x_P, b_Z, *samples, training.loss, flat.integer_buffers(), forward=lambda: seen)
        except Exception as problem:
            pass_on_no_room(problem)
            return None  # what is wrong with the module is said where it is used in earnest
    return seen
