"""Training all clients by a recording of what their module executes: what the zoo does not show."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from stratafl import leaf, simulate
from stratafl.core.flat_module import FlatModule
from stratafl.core.losses import LossOnScores
from stratafl.engine.batches import ClientBatches
from stratafl.engine.compiler import graph, program
from stratafl.engine.gradients import CompiledGradients
from stratafl.engine.random_streams import ClientStream
from tests.engine.selected import select

RANDOM = torch.Generator().manual_seed(0)
TABLE, LABELS = torch.randn(6, 4, generator=RANDOM), torch.tensor([0, 1, 2, 1, 0, 2])


def chosen(module: nn.Module, inputs: Any = TABLE) -> tuple[Any, str]:
    return select(FlatModule(module), LossOnScores(F.cross_entropy), inputs, LABELS, class_indices=True)


def batch(lengths: list[int]) -> ClientBatches:
    mask_CB = torch.arange(max(lengths)) < torch.tensor(lengths)[:, None]
    inputs_CB = torch.randn(len(lengths), max(lengths), 4, generator=RANDOM)
    stream = ClientStream(0, torch.arange(len(lengths)), 0)
    return ClientBatches(inputs_CB, torch.zeros(mask_CB.shape, dtype=torch.long), mask_CB, np.array(lengths), stream)


def trained(method: CompiledGradients, lengths: list[int]) -> Tensor:
    x_P, b_Z = method.flat.flatten_module(method.flat.module)
    return method(x_P.repeat(len(lengths), 1), b_Z.repeat(len(lengths), 1), batch(lengths)).grads_CP


def test_batches_are_padded_where_that_changes_nothing() -> None:
    method, how = chosen(nn.Sequential(nn.AlphaDropout(0.5), nn.Linear(4, 3)))
    assert how == "stacked" and method.pads and not method.reads_lengths
    trained(method, [5, 3, 5, 1])
    assert len(method._programs) == 1


@pytest.mark.parametrize(
    "module",
    [
        nn.Sequential(nn.BatchNorm1d(4), nn.Linear(4, 3)),
        nn.Sequential(nn.Linear(4, 3), nn.Softmax(dim=0)),
    ],
)
def test_clients_go_by_the_length_of_their_batches_where_samples_are_mixed(module: nn.Module) -> None:
    method, how = chosen(module)
    assert how == "stacked" and not method.pads and method.reads_lengths
    trained(method, [5, 3, 5, 2])
    trained(method, [5, 5, 5, 3])
    assert len(method._programs) == 3, "one for each length, recorded once"


def test_a_form_that_forgets_the_statistics_is_not_believed(monkeypatch: pytest.MonkeyPatch) -> None:
    right = program.RULES["batch_norm"]

    def forgetful(context: Any, op: Any, x: Any, w: Any, b: Any, mean: Any, var: Any, *more: Any) -> Any:
        return right(context, op, x, w, b, None, None, *more)

    monkeypatch.setitem(program.RULES, "batch_norm", forgetful)
    _, how = chosen(nn.Sequential(nn.BatchNorm1d(4), nn.Linear(4, 3)))
    assert how == "loop: stacked does not give the module's own gradient; training changes the module's buffers"


def test_a_form_that_draws_otherwise_is_not_believed(monkeypatch: pytest.MonkeyPatch) -> None:
    right = program.RULES["alpha_dropout"]

    def other(context: Any, op: Any, *args: Any) -> Any:
        context.random_source().number()
        return right(context, op, *args)

    monkeypatch.setitem(program.RULES, "alpha_dropout", other)
    _, how = chosen(nn.Sequential(nn.AlphaDropout(0.5), nn.Linear(4, 3)))
    assert how.startswith("loop: stacked does not give the module's own gradient")


def test_frozen_weights_are_shared_by_all_clients(monkeypatch: pytest.MonkeyPatch) -> None:
    base = nn.Linear(4, 5).requires_grad_(False)
    method, how = chosen(nn.Sequential(base, nn.Linear(5, 3)))
    shapes: list[tuple[int, ...]] = []

    def noted(x: Tensor, w: Tensor, b: Tensor | None = None) -> Tensor:
        shapes.append((*x.shape, *w.shape))
        return torch.nn.functional._linear(x, w, b)

    monkeypatch.setattr(torch.nn.functional, "_linear", torch.nn.functional.linear, raising=False)
    monkeypatch.setattr(torch.nn.functional, "linear", noted)
    trained(method, [5, 5, 5])
    assert how == "stacked" and (3, 5, 4, 5, 4) in shapes


class Several(nn.Module):
    """Takes a text and its mask by name, and returns a table."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.drop, self.out = nn.Embedding(9, 4), nn.Dropout(0.3), nn.Linear(4, 3)

    def forward(self, codes: Tensor, mask: Tensor) -> dict[str, Tensor]:
        hidden = self.drop(self.embed(codes)) * mask[..., None]
        return {"hidden": hidden, "logits": self.out(hidden.sum(1) / mask.sum(1, keepdim=True))}


def test_several_inputs_and_outputs() -> None:
    torch.manual_seed(0)
    module = Several().double()
    codes, mask = torch.randint(9, (24, 5), generator=RANDOM), torch.ones(24, 5, dtype=torch.float64)
    mask[::3, 3:] = 0
    targets = torch.randint(3, (24,), generator=RANDOM)
    parts = [np.arange(0, 7), np.arange(7, 15), np.arange(15, 24)]
    found = {}
    for engine in ("loop", "stacked"):
        sim = simulate(
            lambda: module, ({"codes": codes, "mask": mask}, targets), parts, 3, "mtgc",
            rounds=2, periods=[3], batch=4, seed=5, leaf=leaf(0.1), engine=engine,
        )  # fmt: skip
        assert sim.engine.how == engine
        found[engine] = sim.run().models[1]
    assert float((found["loop"] - found["stacked"]).abs().max()) < 1e-10
    assert float((found["loop"][0] - found["loop"][1]).abs().max()) > 1e-3


class Windowed(nn.Module):
    """Makes a mask on the host and moves it, and a tensor that it goes on to write into."""

    def __init__(self) -> None:
        super().__init__()
        self.out = nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        mask = (torch.arange(4) < torch.tensor(3)).to(x.device)
        held = torch.zeros(4, device=x.device)
        held += 1
        held += x.mean(0)
        x = x.where(mask, held)
        return self.out(x * ~mask)  # of a mask that another step needs before


def test_what_no_step_changes_is_computed_once_and_where_the_inputs_are() -> None:
    captured = program.BatchedProgram(FlatModule(Windowed().to("meta")), TABLE.to("meta"))
    assert {value.dtype for value in captured._constants.values()} == {torch.bool}
    assert {value.device.type for value in captured._constants.values()} == {"meta"}
    names = {str(graph.op_name(instruction.node)) for instruction in captured._instructions}
    assert not {"arange", "lt", "to", "bitwise_not"} & names
    assert chosen(Windowed())[1] == "stacked"
