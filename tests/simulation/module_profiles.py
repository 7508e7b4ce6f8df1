"""Three clients with a module of a user's own, and the same rounds written out in plain PyTorch."""

from __future__ import annotations

import copy

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from stratafl.data.batches import batch_indices
from tests.flat import simulate

ENGINES = ["loop", "vmap", "stacked"]
PARTS = [list(range(0, 7)), list(range(7, 15)), list(range(15, 24))]


def data(features: int = 4) -> tuple[Tensor, Tensor]:
    random = torch.Generator().manual_seed(1)
    return torch.randn(24, features, generator=random, dtype=torch.float64), torch.arange(24) % 3


def plain_rounds(
    module: nn.Module, pair: tuple[Tensor, Tensor], rounds: int, steps: int, batch: int, loss=F.cross_entropy
):
    """Averaging of three clients, written out: everything in a state dict goes along."""
    module = copy.deepcopy(module).train()
    for round in range(rounds):
        trained = []
        for client, part in enumerate(PARTS):
            copied = copy.deepcopy(module)
            for chosen in batch_indices(0, client, len(part), round * steps, steps, batch):
                numbers = torch.tensor(part)[chosen]
                copied.zero_grad()
                loss(copied(pair[0][numbers].clone()), pair[1][numbers]).backward()
                with torch.no_grad():
                    for parameter in copied.parameters():
                        if parameter.grad is not None:
                            parameter -= 0.1 * parameter.grad
            trained.append(copied.state_dict())
        mean = {
            name: sum(state[name] for state in trained) / 3 if value.is_floating_point() else value
            for name, value in trained[0].items()
        }
        module.load_state_dict(mean)
    return module


def run(module, pair, engine: str = "loop", rounds: int = 2, steps: int = 3, batch: int = 5, **more):
    return simulate(
        module, pair, PARTS, 3, "hfedavg", periods=[steps], rounds=rounds, batch=batch, engine=engine, **more
    )


def furthest(module: nn.Module, other: nn.Module) -> float:
    pairs = zip(module.state_dict().values(), other.state_dict().values(), strict=True)
    return max(float((a - b).abs().max()) for a, b in pairs if a.is_floating_point())


def made(make) -> nn.Module:
    torch.manual_seed(0)
    return make().double()
