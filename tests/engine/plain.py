"""Training by a plain PyTorch loop, and training of the same clients by an engine.

From the package the plain loop uses only the sample indices of a client's steps and the random
numbers of modules.
"""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from stratafl.core.client_training import ClientTraining, TrainRequest
from stratafl.core.flat_module import FlatModule
from stratafl.core.rows import IndexedRows
from stratafl.data.batches import batch_indices
from stratafl.data.dataset import ClientIndex, InMemorySamples
from stratafl.data.inputs import Inputs, NamedInputs, as_type, map_tensors, tensors_of
from stratafl.engine.factory import EngineName, make_engine
from stratafl.engine.random_streams import ClientStream, client_rng
from tests.engine.zoo.entry import Entry
from tests.flat import update_of

SEED, LR, STEPS, BATCH = 7, 0.05, 3, 3
SIZES, PAIRED_SIZES = (5, 3, 4), (5, 3, 6)
"""Samples of each client: batches of three, two, one or (paired) never one sample."""


class Problem(NamedTuple):
    """Module to train, each client's own values for it, and the clients' samples."""

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
    """Clients whose modules differ in every trained value and in every buffer that is not zero or
    infinite.

    zeros: whether the parameters of the engine's module are zero, where wrong gradients often equal
        the right ones.
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
    inputs = map_tensors(lambda samples: samples.to(device), inputs)
    return Problem(entry, module.to(device), clients, inputs, targets.to(device), partition)


def _copy(source: nn.Module, to: nn.Module) -> None:
    """Copy parameters and all buffers, also those that a state dict leaves out."""
    with torch.no_grad():
        values = {**dict(source.named_parameters()), **dict(source.named_buffers())}
        for name, tensor in {**dict(to.named_parameters()), **dict(to.named_buffers())}.items():
            tensor.copy_(values[name])


def trainable(module: nn.Module) -> dict[str, Tensor]:
    return {name: parameter for name, parameter in module.named_parameters() if parameter.requires_grad}


def floating(module: nn.Module) -> dict[str, Tensor]:
    return {name: buffer for name, buffer in module.named_buffers() if buffer.is_floating_point()}


def plain(problem: Problem, steps: int = STEPS) -> list[Trained]:
    """Train one client after another."""
    trained = []
    for number, (client, part) in enumerate(zip(problem.clients, problem.partition, strict=True)):
        # not a copy: that would lack hooks on parameters
        module, first = problem.entry.module().to(problem.inputs.device), {}
        _copy(client, module)
        if not module.training:
            module.train()
        with torch.random.fork_rng():
            for step, positions in enumerate(batch_indices(SEED, number, len(part), 0, steps, BATCH)):
                batch = part[positions]
                # a module's random numbers are a function of seed, client and step in every engine
                draws = (
                    client_rng(ClientStream(SEED, number, step), problem.inputs.device)
                    if problem.entry.draws
                    else nullcontext()
                )
                with draws:
                    problem.entry.loss(_called(module, problem.inputs[batch]), problem.targets[batch]).backward()
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


def engine(name: EngineName, problem: Problem, dtype: torch.dtype = torch.float64, chunk: int = 2) -> Ran:
    """Train the clients by an engine, which must not change a byte of the user's tensors."""
    module, clients = problem.module.to(dtype), [client.to(dtype) for client in problem.clients]
    inputs, targets = (as_type(samples.clone(), dtype) for samples in (problem.inputs, problem.targets))
    flat = FlatModule(module)
    rows = [flat.flatten_module(client) for client in clients]
    x, b = (IndexedRows(torch.stack(parts).to(inputs.device)) for parts in zip(*rows, strict=True))
    work = TrainRequest(model=x, buffers=b, clients=list(range(len(clients))), steps=STEPS)
    user_tensors = [*tensors_of(inputs).values(), targets, x.rows_MP, b.rows_MP, *problem.partition]
    user_tensors += [*module.parameters(), *module.buffers()]
    before = [_bytes(tensor) for tensor in user_tensors]
    training = ClientTraining(
        flat=flat,
        loss=problem.entry.loss,
        samples=InMemorySamples(inputs, targets),
        clients=ClientIndex.from_lists(problem.partition),
        client_update=update_of(LR),
        batch_size=BATCH,
        sampling="shuffle",
        seed=SEED,
    )
    trainer = make_engine(name, training, chunk_size=chunk)
    g_NP = trainer.gradients(work)
    result = trainer.train(work)
    assert [_bytes(tensor) for tensor in user_tensors] == before, "a tensor of the user has changed"
    trained = []
    for g_P, x_P, b_B in zip(g_NP, result.model_AP, result.buffers_AB, strict=True):
        gradient = {name: value for name, value in flat.unflatten(g_P, b_B).items() if name in flat.names}
        trained.append(Trained(flat.unflatten(x_P, b_B), gradient))
    return Ran(trainer.how, trained)


def _bytes(tensor: Tensor) -> bytes:
    return tensor.detach().cpu().contiguous().numpy().tobytes()


def difference(expected: list[Trained], actual: list[Trained]) -> dict[str, float]:
    """Largest error of each gradient and trained value, relative to values above one."""
    assert len(expected) == len(actual)
    errors: dict[str, float] = {}
    for one, other in zip(expected, actual, strict=True):
        for prefix, right, values in (
            ("gradient of ", one.gradient, other.gradient),
            ("", one.values, other.values),
        ):
            assert right.keys() == values.keys()
            for name, value in right.items():
                error = (values[name].to(value.dtype) - value) / value.abs().clamp(min=1)
                # equal infinities are no error, and a NaN is an infinite one
                error = torch.where(values[name] == value, torch.zeros_like(error), error)
                error = error.abs().nan_to_num(nan=torch.inf)
                if error.numel():
                    errors[prefix + name] = max(errors.get(prefix + name, 0.0), float(error.max()))
    return errors
