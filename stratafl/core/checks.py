"""What a user's partition, model and settings must be, said in one line when they are not."""

from __future__ import annotations

import hashlib
import math
import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import get_args

import numpy as np
import torch
from torch import Tensor, nn

from stratafl.base.errors import InvalidInput, MissingExtra, guarded
from stratafl.base.rng import Purpose, seed_of, seeded
from stratafl.base.topology import Tree, balanced_hint, groups_of
from stratafl.base.validation import check_choice, check_integer, check_number, plain
from stratafl.core.flat import Flat
from stratafl.core.leaf import Leaf, LearningRate, decay, leaf
from stratafl.core.rule import Proximal, Rule
from stratafl.core.schedule import Schedule
from stratafl.data.inputs import peculiar, tensor
from stratafl.data.sampling import Sampling, steps_of_pass

MOST_BATCH = 1 << 31

MOST_DRAWN = 1 << 30
"""Sample numbers that an engine of all clients at once draws for the steps to the next meeting: 8
GB."""


def started(flat: Flat, given: object) -> tuple[Tensor, Tensor]:
    """The rows a run starts from: the module's own, unless others are given."""
    if given is None:
        return flat.row(flat.module)
    rows = flat.start(initial(given))
    for name, values in flat.named(*rows).items():
        # a buffer may be a mask, in which infinity has a meaning
        if name in flat.names and not bool(values.isfinite().all()):
            kind = str(flat.dtype).removeprefix("torch.")
            raise InvalidInput(f"initial.{name}", tuple(values.shape), f"must hold numbers that are finite in {kind}")
    return rows


def initial(given: object, field: str = "initial") -> dict[str, Tensor]:
    """A state dict of tensors, from one of tensors or arrays, or from the file of one."""
    if isinstance(given, str | Path):
        given = _state_file(Path(given), field)
    if not isinstance(given, Mapping):
        allowed = "must be a state dict, a table of tensors or arrays by name, or the path of one"
        raise InvalidInput(field, given, allowed)
    values = {}
    for name, value in given.items():
        if not isinstance(name, str):
            raise InvalidInput(f"{field} key", name, "must be a text")
        values[name] = tensor(f"{field}.{name}", value)
        if values[name].is_complex():
            raise InvalidInput(f"{field}.{name}", str(values[name].dtype), "must hold real numbers")
    return values


def _state_file(path: Path, field: str) -> object:
    """What a file holds; nothing that it holds is run."""
    if path.suffix not in (".safetensors", ".pt", ".pth"):
        raise InvalidInput(field, path, "must be a .safetensors or .pt file")
    if not os.path.isfile(path):
        raise InvalidInput(field, path, "there is no such file")
    with guarded(field, path, "cannot be read"):
        if path.suffix != ".safetensors":
            return torch.load(path, map_location="cpu", weights_only=True)
        try:
            from safetensors.torch import load_file
        except ImportError:
            raise MissingExtra("reading .safetensors files", "safetensors", "all") from None
        return load_file(path)


def flattened(model: nn.Module | Callable[[], nn.Module], seed: int) -> Flat:
    """How a module lies in rows, or the one a function makes with all generators set from the
    seed."""
    module = model
    if not isinstance(module, nn.Module) and callable(module):
        key = seed_of(seed, Purpose.WEIGHTS)
        with seeded(key, devices=True), guarded("model", getattr(model, "__name__", model), "cannot be made"):
            module = model()
    flat = Flat(module)
    for name, value in {**dict(flat.module.named_parameters()), **dict(flat.module.named_buffers())}.items():
        odd = peculiar(value)
        if odd:
            raise InvalidInput("model", type(flat.module).__name__, f"{name} {odd}")
    return flat


def frozen_digest(flat: Flat) -> str:
    """The SHA-256 of the parameters that are not trained; empty where there are none. They are in
    no row, no message and no checkpoint, so that all who work with the same rows must have the
    same."""
    trained = set(flat.names)
    frozen = [(name, each) for name, each in flat.module.named_parameters() if name not in trained]
    digest = hashlib.sha256()
    for name, each in frozen:
        digest.update(f"{name} {each.dtype} {tuple(each.shape)}\n".encode())
        digest.update(memoryview(each.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data))
    return digest.hexdigest() if frozen else ""


def check_frozen(flat: Flat, expected: str) -> None:
    """Refuse a module whose parameters that are not trained are others than those a run was made
    with."""
    if frozen_digest(flat) != expected:
        told = "its frozen weights are others than those the run was made with: give them as a file, [model] base"
        raise InvalidInput("model", type(flat.module).__name__, told)


def partition(given: Sequence, tree: Tree, samples: int) -> list[Tensor]:
    """Index tensors in leaf order: one per leaf, none empty, no sample twice or beyond the data."""
    try:
        count = len(given)
    except TypeError:
        count = 0
    if isinstance(given, str | bytes | Mapping) or not count:
        raise InvalidInput("partition", given, "must be a list of sample numbers for each leaf")
    if count != tree.leaves:
        hint = balanced_hint(tree) if math.prod(groups_of(tree)) == count else ""
        allowed = f"needs one per leaf of the tree, {tree.leaves} of them{hint}"
        raise InvalidInput("partition", f"{count} lists", allowed)
    owner = np.full(samples, -1)
    parts = []
    for client, indices in enumerate(given):
        name = tree.names[-1][client]
        mine = sample_numbers(f"partition[{client}]", indices, samples)
        if mine.size == 0:
            raise InvalidInput(f"partition[{client}]", [], f"client {name} has no samples")
        values, counts = np.unique(mine, return_counts=True)
        taken = values[(owner[values] >= 0) | (counts > 1)]
        if taken.size:
            other = owner[taken[0]] if owner[taken[0]] >= 0 else client
            raise InvalidInput(
                f"partition[{client}]",
                int(taken[0]),
                f"each sample may be used once; client {tree.names[-1][other]} has it already",
            )
        owner[mine] = client
        parts.append(torch.as_tensor(mine))
    return parts


def sample_numbers(field: str, given: object, samples: int) -> np.ndarray:
    """A list of numbers of samples, of which there are so many; it may be empty."""
    try:
        numbers = np.asarray(given)
    except Exception:
        raise InvalidInput(field, given, "must be a list of whole numbers") from None
    if numbers.size == 0:
        return np.empty(0, dtype=np.int64)
    if numbers.ndim != 1 or numbers.dtype.kind not in "iu":
        raise InvalidInput(field, given, "must be a list of whole numbers")
    if numbers.min() < 0 or numbers.max() >= samples:
        outside = numbers[(numbers < 0) | (numbers >= samples)][0]
        raise InvalidInput(field, int(outside), f"sample numbers go from 0 to {samples - 1}")
    return numbers.astype(np.int64)


def levels(field: str, given: Sequence[int], depth: int) -> list[int]:
    """A list of levels of a tree, or the complaint."""
    given = plain(given)
    if not isinstance(given, Sequence) or isinstance(given, str | bytes):
        raise InvalidInput(field, given, "must be a list of levels")
    return [check_integer(field, level, at_least=0, at_most=depth) for level in given]


def chain(given: Leaf | float | LearningRate) -> Leaf:
    """The clients' chain, whose learning rate is tried for the first round."""
    made = given if isinstance(given, Leaf) else leaf(given)
    with guarded("leaf.lr", getattr(made.lr, "__name__", made.lr)):
        check_number("leaf.lr", made.lr(0), at_least=0)
    return made


def strengths(dtype: torch.dtype, chain: Leaf, rules: Sequence[Rule]) -> None:
    """Refuse what a direction is multiplied with where the model's own type cannot hold it."""
    largest = torch.finfo(dtype).max
    check_number("leaf.lr", chain.lr(0), at_most=largest)
    for stage in chain.stages:
        if isinstance(stage, decay):
            check_number("leaf.weight_decay", stage.rate, at_most=largest)
    for rule in rules:
        if isinstance(rule.local, Proximal):
            check_number("rules", rule.local.strength, at_most=largest)


def batching(batch: int | None, sampling: str) -> tuple[int | None, Sampling]:
    """How many samples a step takes, None for all, and how they are drawn."""
    drawn: Sampling = check_choice("sampling", sampling, get_args(Sampling))
    return None if batch is None else check_integer("batch", batch, at_least=1, at_most=MOST_BATCH), drawn


def drawn(schedule: Schedule, clients: float, largest: int, batch: int | None, passes: bool = False) -> str:
    """Why a period's batches cannot be held by an engine that draws those of all clients in one go,
    if they cannot. `passes`: over a client's data, in the place of steps."""
    steps, places = schedule.periods[-1], largest if batch is None else min(batch, largest)
    steps *= steps_of_pass(largest, batch) if passes else 1
    if clients * steps * places <= MOST_DRAWN:
        return ""
    each = f"{steps:,} steps of {round(clients):,} clients with batches of {places:,}"
    return f"at most {MOST_DRAWN:,} samples between two meetings, not {each}; the loop engine has no such limit"
