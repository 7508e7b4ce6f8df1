"""What a user's data, partition and model must be, said in one line when they are not."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.data import Dataset

from stratafl.errors import InvalidInput, choice, first_line, guarded, number, whole
from stratafl.flat import Flat
from stratafl.local import Leaf, LearningRate, decay
from stratafl.local import leaf as usual_leaf
from stratafl.rule import Proximal, Rule
from stratafl.schedule import Schedule
from stratafl.streams import Purpose, integer
from stratafl.tree import Tree

MOST_BATCH = 1 << 31
MOST_DRAWN = 1 << 30
"""Sample numbers that an engine of all clients at once draws for the steps to the next meeting: 8 GB."""


def tensors(field: str, data: object) -> tuple[Tensor, Tensor]:
    """Inputs and targets, from a pair of arrays or a map-style data set of pairs."""
    wanted = "must be (inputs, targets) or a map-style data set of such pairs"
    kind = type(data).__name__
    if isinstance(data, Dataset) and hasattr(data, "__len__"):
        with guarded(field, kind, "cannot be read"):
            pairs = [data[i] for i in range(len(data))]
        if not pairs or any(not isinstance(p, Sequence) or len(p) != 2 for p in pairs):
            raise InvalidInput(field, kind, wanted)
        parts = [[tensor(field, pair[i]) for pair in pairs] for i in range(2)]
        with guarded(field, kind, "its samples must be of one shape"):
            data = [torch.stack(part) for part in parts]
    if not isinstance(data, Sequence) or isinstance(data, str | bytes) or len(data) != 2:
        raise InvalidInput(field, kind, wanted)
    inputs, targets = (tensor(field, part) for part in data)
    if inputs.ndim == 0 or targets.ndim == 0 or len(inputs) != len(targets) or len(inputs) == 0:
        shapes = tuple(inputs.shape), tuple(targets.shape)
        raise InvalidInput(f"{field} shapes", shapes, "needs as many targets as inputs, at least one")
    return inputs, targets


def tensor(field: str, value: object) -> Tensor:
    """A dense tensor with values, from one or from an array."""
    if isinstance(value, np.ndarray):
        if np.ma.is_masked(value):
            raise InvalidInput(field, type(value).__name__, "must have all its values, and some are masked")
        if not (value.flags.writeable and value.dtype.isnative and min(value.strides, default=0) >= 0):
            value = value.astype(value.dtype.newbyteorder("="))  # torch warns of the first and cannot take the others
    try:
        made = torch.as_tensor(value).detach()
    except Exception:
        raise InvalidInput(field, type(value).__name__, "must be an array of numbers, as long in every row") from None
    peculiar = _peculiar(made)
    if peculiar:
        raise InvalidInput(field, type(value).__name__, f"must be a dense tensor with values, and this one {peculiar}")
    return made


def _peculiar(given: Tensor) -> str:
    """What keeps a tensor from being used like any other, if anything does."""
    if given.is_nested:
        return "is nested: pad its rows to one length"
    if given.is_meta:
        return "is on the meta device and has none"
    if given.is_quantized:
        return "is quantised: call its dequantize()"
    if given.layout is not torch.strided:
        return f"is of layout {given.layout}: call its to_dense()"
    return ""


def initial(given: object) -> dict[str, Tensor]:
    """A state dict of tensors, from one of tensors or arrays."""
    if not isinstance(given, Mapping):
        raise InvalidInput("initial", given, "must be a state dict: a table of tensors or arrays by name")
    values = {}
    for name, value in given.items():
        if not isinstance(name, str):
            raise InvalidInput("initial key", name, "must be a text")
        values[name] = tensor(f"initial.{name}", value)
        if values[name].is_complex():
            raise InvalidInput(f"initial.{name}", str(values[name].dtype), "must hold real numbers")
    return values


def flattened(model: nn.Module | Callable[[], nn.Module], seed: int) -> Flat:
    """How a module lies in rows, or the one a function makes with torch's generator set from the seed."""
    module = model
    if not isinstance(module, nn.Module) and callable(module):
        with torch.random.fork_rng(), guarded("model", getattr(model, "__name__", model), "cannot be made"):
            torch.manual_seed(integer(seed, Purpose.WEIGHTS))
            module = model()
    flat = Flat(module)
    for name, value in {**dict(flat.module.named_parameters()), **dict(flat.module.named_buffers())}.items():
        peculiar = _peculiar(value)
        if peculiar:
            raise InvalidInput("model", type(flat.module).__name__, f"{name} {peculiar}")
    return flat


def partition(given: Sequence, tree: Tree, samples: int) -> list[Tensor]:
    """Index tensors in leaf order: one per leaf, none empty, no sample twice or beyond the data."""
    try:
        count = len(given)
    except TypeError:
        count = 0
    if isinstance(given, str | bytes | Mapping) or not count:
        raise InvalidInput("partition", given, "must be a list of sample numbers for each leaf")
    if count != tree.leaves:
        raise InvalidInput("partition", f"{count} lists", f"needs one per leaf of the tree, {tree.leaves} of them")
    owner = np.full(samples, -1)
    parts = []
    for leaf, indices in enumerate(given):
        name = tree.names[-1][leaf]
        try:
            mine = np.asarray(indices)
        except Exception:
            raise InvalidInput(f"partition[{leaf}]", indices, "must be a list of whole numbers") from None
        if mine.size == 0:
            raise InvalidInput(f"partition[{leaf}]", [], f"client {name} has no samples")
        if mine.ndim != 1 or mine.dtype.kind not in "iu":
            raise InvalidInput(f"partition[{leaf}]", indices, "must be a list of whole numbers")
        if mine.min() < 0 or mine.max() >= samples:
            outside = mine[(mine < 0) | (mine >= samples)][0]
            raise InvalidInput(f"partition[{leaf}]", int(outside), f"sample numbers go from 0 to {samples - 1}")
        values, counts = np.unique(mine, return_counts=True)
        taken = values[(owner[values] >= 0) | (counts > 1)]
        if taken.size:
            other = owner[taken[0]] if owner[taken[0]] >= 0 else leaf
            raise InvalidInput(
                f"partition[{leaf}]",
                int(taken[0]),
                f"each sample may be used once; client {tree.names[-1][other]} has it already",
            )
        owner[mine] = leaf
        parts.append(torch.as_tensor(mine.astype(np.int64)))
    return parts


def levels(field: str, given: Sequence[int], depth: int) -> list[int]:
    if not isinstance(given, Sequence) or isinstance(given, str | bytes):
        raise InvalidInput(field, given, "must be a list of levels")
    return [whole(field, level, at_least=0, at_most=depth) for level in given]


def chain(given: Leaf | float | LearningRate) -> Leaf:
    """The clients' chain, whose learning rate is tried for the first round."""
    made = given if isinstance(given, Leaf) else usual_leaf(given)
    with guarded("leaf.lr", getattr(made.lr, "__name__", made.lr)):
        number("leaf.lr", made.lr(0), at_least=0)
    return made


def strengths(dtype: torch.dtype, chain: Leaf, rules: Sequence[Rule]) -> None:
    """Refuse what a direction is multiplied with where the model's own type cannot hold it."""
    largest = torch.finfo(dtype).max
    number("leaf.lr", chain.lr(0), at_most=largest)
    for stage in chain.stages:
        if isinstance(stage, decay):
            number("leaf.weight_decay", stage.rate, at_most=largest)
    for rule in rules:
        if isinstance(rule.local, Proximal):
            number("rules", rule.local.strength, at_most=largest)


def batching(batch: int | None, sampling: str) -> int | None:
    choice("sampling", sampling, ("epochs", "replacement"))
    return None if batch is None else whole("batch", batch, at_least=1, at_most=MOST_BATCH)


def drawn(schedule: Schedule, clients: float, largest: int, batch: int | None) -> None:
    """Refuse a period whose batches cannot be held, for an engine that draws those of all clients in one go."""
    steps, places = schedule.periods[-1], largest if batch is None else min(batch, largest)
    if clients * steps * places > MOST_DRAWN:
        each = f"{steps:,} steps of {round(clients):,} clients with batches of {places:,}"
        allowed = f"at most {MOST_DRAWN:,} samples between two meetings, not {each}; the loop engine has no such limit"
        raise InvalidInput("periods", list(schedule.periods), allowed)


def place(device: str | torch.device, field: str = "device") -> torch.device:
    """Where a tensor that is made there lies, if it can hold values."""
    try:
        made = torch.zeros(1, device=device)
        float(made)
    except Exception as problem:
        raise InvalidInput(field, device, first_line(problem) or "is no device of this machine") from None
    return made.device
