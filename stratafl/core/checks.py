"""What a user's partition, model and settings must be, said in one line when they are not."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import torch
from torch import Tensor, nn

from stratafl.base.errors import InvalidInput, MissingExtra, guarded
from stratafl.base.rng import Purpose, seed_of, seeded
from stratafl.base.validation import check_integer, check_number, plain
from stratafl.core.flat import Flat
from stratafl.core.leaf import Leaf, LearningRate, decay, leaf
from stratafl.core.rule import Proximal, Rule
from stratafl.core.schedule import Schedule
from stratafl.data.batches import steps_of_pass
from stratafl.data.inputs import peculiar, tensor

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


def drawn(schedule: Schedule, clients: float, largest: int, batch: int | None, passes: bool = False) -> str:
    """Why a period's batches cannot be held by an engine that draws those of all clients in one go,
    if they cannot. `passes`: over a client's data, in the place of steps."""
    steps, places = schedule.periods[-1], largest if batch is None else min(batch, largest)
    steps *= steps_of_pass(largest, batch) if passes else 1
    if clients * steps * places <= MOST_DRAWN:
        return ""
    each = f"{steps:,} steps of {round(clients):,} clients with batches of {places:,}"
    return f"at most {MOST_DRAWN:,} samples between two meetings, not {each}; the loop engine has no such limit"
