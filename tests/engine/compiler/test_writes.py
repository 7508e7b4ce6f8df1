"""Writes of a module to its tensors are found, whatever argument names the target."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from stratafl import InvalidInput
from stratafl.core.client_training import ClientTraining
from stratafl.core.flat_module import FlatModule
from stratafl.data.dataset import ClientIndex, InMemorySamples
from stratafl.engine.module_profile import profile_module
from tests.engine.zoo.entry import Net
from tests.flat import client_options, update_of
from tests.simulation.module_profiles import data, furthest, run

WAYS: dict[str, Callable[[Tensor, Tensor], object]] = {
    "in place": lambda kept, seen: kept.add_(seen),
    "out": lambda kept, seen: torch.add(kept, seen, out=kept),
    "out behind a default": lambda kept, seen: torch.addmv(kept, torch.eye(4).to(seen), seen, out=kept),
    "several outs": lambda kept, seen: torch.sort(seen, out=(kept, torch.empty(4, dtype=torch.long))),
    "a list in place": lambda kept, seen: torch._foreach_add_([kept], [seen]),
    "an index": lambda kept, seen: kept.index_copy_(0, torch.arange(4), seen),
}


def writing(way: Callable[[Tensor, Tensor], object], kept: Tensor) -> nn.Module:
    def forward(m: nn.Module, x: Tensor) -> Tensor:
        with torch.no_grad():
            way(m.kept, x.mean(0))
        return m.linear(x * m.kept)

    return Net(forward, linear=nn.Linear(4, 3), kept=kept)


@pytest.mark.parametrize("way", WAYS.values(), ids=WAYS)
@pytest.mark.parametrize("whose", ["frozen weights", "buffers"])
def test_the_profile_names_what_is_written(whose: str, way: Callable[[Tensor, Tensor], object]) -> None:
    kept = torch.ones(4)
    flat = FlatModule(writing(way, nn.Parameter(kept, requires_grad=False) if whose == "frozen weights" else kept))
    samples = InMemorySamples(torch.randn(4, 4), torch.tensor([0, 1, 2, 1]))
    training = ClientTraining(
        flat=flat, loss=F.cross_entropy, samples=samples, clients=ClientIndex.from_lists([torch.arange(4)]),
        client_update=update_of(client_options()), batch_size=None, sampling="shuffle", seed=0,
    )  # fmt: skip
    assert profile_module(training).mutates == (whose,)


def test_a_run_that_writes_to_frozen_weights_is_refused() -> None:
    with pytest.raises(InvalidInput, match="writes to parameters that are not trained"):
        run(writing(WAYS["out"], nn.Parameter(torch.ones(4), requires_grad=False)).double(), data())


@pytest.mark.parametrize("engine", ["stacked", "vmap"])
@pytest.mark.parametrize(
    "way",
    [
        *WAYS.values(),
        # an operation without a rule whose result is not its first argument
        lambda kept, seen: torch.renorm(seen[None], 2, 0, 0.5, out=kept[None]),
    ],
    ids=[*WAYS, "mapped"],
)
def test_engines_agree_on_written_buffers(way: Callable[[Tensor, Tensor], object], engine: str) -> None:
    module = writing(way, torch.ones(4)).double()
    got, expected = (run(module, data(), name).run().module for name in (engine, "loop"))
    assert furthest(got, expected) < 1e-9
