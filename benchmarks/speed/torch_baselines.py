"""Baselines of the speed benchmark: the same training, written in plain PyTorch.

Each baseline trains every client `steps` steps from its own stream of batches, with corrections and
clipping, and then averages the clients: all the work that the engines do. Data and models are on
the device. The loops train the module as a user would write it, with PyTorch's fused layers.

Shape suffixes: C clients, B batch.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import functional_call, grad, vmap

from stratafl.core.client_training import Augment
from stratafl.engine.cuda_graphs import garbage_collection_paused

Round = Callable[[], None]
"""Train all clients for one round, then aggregate."""


class TrainingJob(NamedTuple):
    """Training task: module, data, partition and hyperparameters."""

    module: nn.Module
    inputs: Tensor
    targets: Tensor
    partition: list[Tensor]
    batch: int
    steps: int
    lr: float
    clip: float
    augment: Augment | None
    seed: int


def loop_baseline(job: TrainingJob) -> Round:
    """Train one client after another; an update of all parameters takes a few `foreach` calls."""
    clients = _clients(job)

    def round() -> None:
        for client in clients:
            for index_B in _shuffled(job, client.samples):
                client.step(index_B)
        _average(clients)

    return round


def graphed_loop_baseline(job: TrainingJob) -> Round:
    """Train in a loop in which each client's step is a CUDA graph, so that it does not wait for
    the host."""
    clients = _clients(job)
    index_B = clients[0].samples[: job.batch].clone()
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for client in clients:
            client.step(index_B)
    torch.cuda.current_stream().wait_stream(side)
    graphs: list[torch.cuda.CUDAGraph] = []
    with garbage_collection_paused():
        for client in clients:
            graph = torch.cuda.CUDAGraph()
            # one graph runs at a time, so they may share their memory
            with torch.cuda.graph(graph, pool=graphs[0].pool() if graphs else None):
                client.step(index_B)
            graphs.append(graph)

    def round() -> None:
        for client, graph in zip(clients, graphs, strict=True):
            for chosen_B in _shuffled(job, client.samples):
                if len(chosen_B) == len(index_B):
                    index_B.copy_(chosen_B)
                    graph.replay()
                else:
                    client.step(chosen_B)
        _average(clients)

    return round


def vmap_baseline(job: TrainingJob, graphed: bool = False, compiled: bool = False) -> Round:
    """Train all clients at once by `torch.func.vmap` over the gradient function of one client.

    With `graphed` a step is captured as a CUDA graph; with `compiled` the gradients are compiled by
    `torch.compile`.
    """
    clients = len(job.partition)
    weights = {
        name: value.detach().expand(clients, *value.shape).clone() for name, value in job.module.named_parameters()
    }
    corrections = {name: torch.zeros_like(value) for name, value in weights.items()}
    size = len(job.partition[0])
    samples_CS = torch.stack(job.partition)
    client_C = torch.arange(clients, device=job.inputs.device)
    step = torch.zeros((), dtype=torch.long, device=job.inputs.device)

    def loss(weights: dict[str, Tensor], inputs: Tensor, targets: Tensor) -> Tensor:
        return F.cross_entropy(functional_call(job.module, weights, (inputs,)), targets)

    gradients: Callable[..., dict[str, Tensor]] = vmap(grad(loss), randomness="different")
    if compiled:
        # two sizes of batches, not one program for any size
        gradients = torch.compile(gradients, dynamic=False)

    def step_batch(index_CB: Tensor) -> None:
        inputs_CB = job.inputs[index_CB]
        if job.augment is not None:
            inputs_CB = job.augment(inputs_CB, job.seed, client_C, step)
        step.add_(1)
        gradient = gradients(weights, inputs_CB, job.targets[index_CB])
        rows = [gradient[name].add_(corrections[name]) for name in weights]
        lengths = torch.stack([torch.linalg.vector_norm(row.flatten(1), dim=1) for row in rows])
        shrink_C = job.clip / torch.linalg.vector_norm(lengths, dim=0).clamp(min=job.clip)
        for row, weight in zip(rows, weights.values(), strict=True):
            weight.sub_(row * shrink_C.view(-1, *[1] * (row.dim() - 1)), alpha=job.lr)

    full_batch_step = _replayed(step_batch, samples_CS[:, : job.batch].clone()) if graphed else step_batch

    def round() -> None:
        done = 0
        while done < job.steps:
            order_CS = torch.rand(clients, size, device=job.inputs.device).argsort(dim=1)
            for place_CB in order_CS.split(job.batch, dim=1)[: job.steps - done]:
                index_CB = samples_CS.gather(1, place_CB)
                (full_batch_step if index_CB.shape[1] == job.batch else step_batch)(index_CB)
                done += 1
        for weight in weights.values():
            weight.copy_(weight.mean(dim=0, keepdim=True).expand_as(weight))

    return round


def _replayed(take: Callable[[Tensor], None], index_CB: Tensor) -> Callable[[Tensor], None]:
    """Capture a step as a CUDA graph for batches of the size of `index_CB`."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(2):
            take(index_CB)
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with garbage_collection_paused(), torch.cuda.graph(graph):
        take(index_CB)

    def replay(chosen_CB: Tensor) -> None:
        index_CB.copy_(chosen_CB)
        graph.replay()

    return replay


def _clients(job: TrainingJob) -> list[_Client]:
    return [_Client(job, number) for number in range(len(job.partition))]


class _Client:
    """Model, correction and training step of a client."""

    def __init__(self, job: TrainingJob, number: int):
        self.job, self.number, self.samples = job, number, job.partition[number]
        self.module = copy.deepcopy(job.module)
        for layer in self.module.modules():
            if isinstance(layer, nn.RNNBase):
                layer.flatten_parameters()  # weights in one block of memory, or each call would copy them
        self.weights: list[Tensor] = list(self.module.parameters())
        self.corrections = [torch.zeros_like(weight) for weight in self.weights]
        self.done = torch.zeros((), dtype=torch.long, device=job.inputs.device)

    def step(self, index_B: Tensor) -> None:
        job = self.job
        inputs_B = job.inputs[index_B]
        if job.augment is not None:
            inputs_B = job.augment(inputs_B, job.seed, self.number, self.done)
        self.done.add_(1)
        loss = F.cross_entropy(self.module(inputs_B), job.targets[index_B])
        gradients = list(torch.autograd.grad(loss, self.weights))
        with torch.no_grad():
            torch._foreach_add_(gradients, self.corrections)
            length = torch.linalg.vector_norm(torch.stack(list(torch._foreach_norm(gradients))))
            torch._foreach_mul_(gradients, job.clip / length.clamp(min=job.clip))
            torch._foreach_add_(self.weights, gradients, alpha=-job.lr)


def _shuffled(job: TrainingJob, samples: Tensor) -> Iterator[Tensor]:
    done = 0
    while done < job.steps:
        order = samples[torch.randperm(len(samples), device=samples.device)]
        for index_B in order.split(job.batch)[: job.steps - done]:
            yield index_B
            done += 1


@torch.no_grad()
def _average(clients: list[_Client]) -> None:
    means = [torch.stack(same).mean(dim=0) for same in zip(*(client.weights for client in clients), strict=True)]
    for client in clients:
        torch._foreach_copy_(client.weights, means)
