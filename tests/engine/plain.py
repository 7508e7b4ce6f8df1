"""A training loop as one writes it in plain PyTorch, and an engine's training of the same clients
beside it.

The loop knows nothing of the package but which samples a client uses in a step and where a module's
own random numbers come from.
"""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from stratafl import leaf
from stratafl.core.client_training import ClientTraining, TrainRequest
from stratafl.core.flat_module import FlatModule
from stratafl.core.rows import IndexedRows
from stratafl.data.batches import batch_indices
from stratafl.data.dataset import ClientIndex, InMemorySamples
from stratafl.data.inputs import Inputs, NamedInputs, as_type, map_tensors, tensors_of
from stratafl.engine.factory import EngineName, make_engine
from stratafl.engine.random_streams import ClientStream, client_rng
from tests.engine.zoo.entry import Entry

SEED, LR, STEPS, BATCH = 7, 0.05, 3, 3
SIZES, PAIRED_SIZES = (5, 3, 4), (5, 3, 6)
"""Samples of each client: batches of three, two, one or (paired) never one."""


class Problem(NamedTuple):
    """What the clients have: one module, values of their own for it, samples."""

    entry: Entry
    module: nn.Module
    clients: list[nn.Module]
    inputs: Inputs
    targets: Tensor
    partition: list[Tensor]


class Trained(NamedTuple):
    """A client's values by name after its steps, and its gradient at the first."""

    values: dict[str, Tensor]
    gradient: dict[str, Tensor]


def problem(entry: Entry, device: str | torch.device = "cpu", zeros: bool = False) -> Problem:
    """The clients' modules differ in every trained value and in every buffer that is not zero or
    infinite.

    zeros: the module that is given has zeros for parameters, at which nearly every way to compute
        gradients agrees.
    """
    random = torch.Generator().manual_seed(1)
    sizes = PAIRED_SIZES if entry.pairs else SIZES
    inputs, targets = entry.inputs(sum(sizes), random), entry.targets(sum(sizes), random)
    partition = list(torch.randperm(sum(sizes), generator=random).split(list(sizes)))
    clients = [entry.module() for _ in sizes]
    with torch.no_grad():
        for client in clients:
            for parameter in trainable(client).values():
                parameter += 0.1 * torch.randn(parameter.shape, generator=random, dtype=parameter.dtype)
            for buffer in floating(client).values():
                buffer *= 1 + 0.1 * torch.rand(buffer.shape, generator=random, dtype=buffer.dtype)
    clients = [client.to(device) for client in clients]
    module = entry.module()
    if zeros:
        with torch.no_grad():
            for parameter in trainable(module).values():
                parameter.zero_()
    inputs = map_tensors(lambda each: each.to(device), inputs)
    return Problem(entry, module.to(device), clients, inputs, targets.to(device), partition)


def _copy(source: nn.Module, to: nn.Module) -> None:
    """Values of parameters and of all buffers, also of those that a state dict leaves out."""
    with torch.no_grad():
        theirs = {**dict(source.named_parameters()), **dict(source.named_buffers())}
        for name, own in {**dict(to.named_parameters()), **dict(to.named_buffers())}.items():
            own.copy_(theirs[name])


def trainable(module: nn.Module) -> dict[str, Tensor]:
    return {name: parameter for name, parameter in module.named_parameters() if parameter.requires_grad}


def floating(module: nn.Module) -> dict[str, Tensor]:
    return {name: buffer for name, buffer in module.named_buffers() if buffer.is_floating_point()}


def plain(given: Problem, steps: int = STEPS) -> list[Trained]:
    """Each client's training, one step after another."""
    trained = []
    for number, (client, mine) in enumerate(zip(given.clients, given.partition, strict=True)):
        # not a copy: that would lack hooks on parameters
        module, first = given.entry.module().to(given.inputs.device), {}
        _copy(client, module)
        if not module.training:
            module.train()
        with torch.random.fork_rng():
            for step, chosen in enumerate(batch_indices(SEED, number, len(mine), 0, steps, BATCH)):
                batch = mine[chosen]
                # a module's own random numbers are a function of these, whoever trains it
                draws = (
                    client_rng(ClientStream(SEED, number, step), given.inputs.device)
                    if given.entry.draws
                    else nullcontext()
                )
                with draws:
                    given.entry.loss(_called(module, given.inputs[batch]), given.targets[batch]).backward()
                gradients = {
                    name: torch.zeros_like(parameter) if parameter.grad is None else parameter.grad.to_dense()
                    for name, parameter in trainable(module).items()
                }
                first = first or gradients
                with torch.no_grad():
                    for name, parameter in trainable(module).items():
                        parameter -= LR * gradients[name]
                module.zero_grad()
        values = {**trainable(module), **floating(module)}
        trained.append(Trained({name: value.detach() for name, value in values.items()}, first))
    return trained


def _called(module: nn.Module, inputs: Inputs) -> Any:
    return module(**inputs.named) if isinstance(inputs, NamedInputs) else module(inputs)


class Ran(NamedTuple):
    how: str
    clients: list[Trained]


def engine(name: EngineName, given: Problem, dtype: torch.dtype = torch.float64, chunk: int = 2) -> Ran:
    """The same by an engine, which must leave everything that is the user's as it was, to the
    byte."""
    module, clients = given.module.to(dtype), [client.to(dtype) for client in given.clients]
    inputs, targets = (as_type(each.clone(), dtype) for each in (given.inputs, given.targets))
    flat = FlatModule(module)
    rows = [flat.flatten_module(client) for client in clients]
    x, b = (IndexedRows(torch.stack(parts).to(inputs.device)) for parts in zip(*rows, strict=True))
    work = TrainRequest(model=x, buffers=b, clients=list(range(len(clients))), steps=STEPS)
    theirs = [*tensors_of(inputs).values(), targets, x.rows_MP, b.rows_MP, *given.partition]
    theirs += [*module.parameters(), *module.buffers()]
    before = [_bytes(each) for each in theirs]
    training = ClientTraining(
        flat=flat,
        loss=given.entry.loss,
        samples=InMemorySamples(inputs, targets),
        clients=ClientIndex.from_lists(given.partition),
        client_update=leaf(LR),
        batch_size=BATCH,
        sampling="epochs",
        seed=SEED,
    )
    trainer = make_engine(name, training, chunk_size=chunk)
    g_NP = trainer.gradients(work)
    result = trainer.train(work)
    assert [_bytes(each) for each in theirs] == before, "what is the user's has changed"
    found = []
    for g_P, x_P, b_B in zip(g_NP, result.model_AP, result.buffers_AB, strict=True):
        gradient = {name: value for name, value in flat.unflatten(g_P, b_B).items() if name in flat.names}
        found.append(Trained(flat.unflatten(x_P, b_B), gradient))
    return Ran(trainer.how, found)


def _bytes(tensor: Tensor) -> bytes:
    return tensor.detach().cpu().contiguous().numpy().tobytes()


def difference(expected: list[Trained], got: list[Trained]) -> dict[str, float]:
    """How far apart values are at most, as a share of those above one: first gradients, then what
    was trained."""
    assert len(expected) == len(got)
    found: dict[str, float] = {}
    for one, other in zip(expected, got, strict=True):
        for what, wanted, have in (
            ("gradient of ", one.gradient, other.gradient),
            ("", one.values, other.values),
        ):
            assert wanted.keys() == have.keys()
            for name, value in wanted.items():
                off = (have[name].to(value.dtype) - value) / value.abs().clamp(min=1)
                # infinities that agree are no difference, and a NaN is an infinite one
                off = torch.where(have[name] == value, torch.zeros_like(off), off).abs().nan_to_num(nan=torch.inf)
                if off.numel():
                    found[what + name] = max(found.get(what + name, 0.0), float(off.max()))
    return found
