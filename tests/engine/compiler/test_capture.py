"""Training by captured programs: padding, wrong rules, shared weights, and constants."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from stratafl.core.flat_module import FlatModule
from stratafl.core.losses import LossOnScores
from stratafl.engine.batches import ClientBatches
from stratafl.engine.compiler import graph, program
from stratafl.engine.gradients import CompiledGradients
from stratafl.engine.random_streams import ClientStream
from tests.engine.selected import select
from tests.flat import client_options, simulate

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


def test_batches_are_padded_if_samples_are_independent() -> None:
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
def test_one_program_per_length_if_samples_mix(module: nn.Module) -> None:
    method, how = chosen(module)
    assert how == "stacked" and not method.pads and method.reads_lengths
    trained(method, [5, 3, 5, 2])
    trained(method, [5, 5, 5, 3])
    assert len(method._programs) == 3, "one for each length, captured once"


def test_a_rule_that_skips_the_statistics_fails_the_trial(monkeypatch: pytest.MonkeyPatch) -> None:
    right = program.RULES["batch_norm"]

    def skipping_statistics(context: Any, op: Any, x: Any, w: Any, b: Any, mean: Any, var: Any, *more: Any) -> Any:
        return right(context, op, x, w, b, None, None, *more)

    monkeypatch.setitem(program.RULES, "batch_norm", skipping_statistics)
    _, how = chosen(nn.Sequential(nn.BatchNorm1d(4), nn.Linear(4, 3)))
    assert how == "loop: stacked does not give the module's own gradient; training changes the module's buffers"


def test_a_rule_with_other_random_numbers_fails_the_trial(monkeypatch: pytest.MonkeyPatch) -> None:
    right = program.RULES["alpha_dropout"]

    def with_one_number_more(context: Any, op: Any, *args: Any) -> Any:
        context.random_source().number()
        return right(context, op, *args)

    monkeypatch.setitem(program.RULES, "alpha_dropout", with_one_number_more)
    _, how = chosen(nn.Sequential(nn.AlphaDropout(0.5), nn.Linear(4, 3)))
    assert how.startswith("loop: stacked does not give the module's own gradient")


def test_frozen_weights_are_shared_by_all_clients(monkeypatch: pytest.MonkeyPatch) -> None:
    base = nn.Linear(4, 5).requires_grad_(False)
    method, how = chosen(nn.Sequential(base, nn.Linear(5, 3)))
    shapes: list[tuple[int, ...]] = []

    def recorded(x: Tensor, w: Tensor, b: Tensor | None = None) -> Tensor:
        shapes.append((*x.shape, *w.shape))
        return torch.nn.functional._linear(x, w, b)

    monkeypatch.setattr(torch.nn.functional, "_linear", torch.nn.functional.linear, raising=False)
    monkeypatch.setattr(torch.nn.functional, "linear", recorded)
    trained(method, [5, 5, 5])
    assert how == "stacked" and (3, 5, 4, 5, 4) in shapes


class Several(nn.Module):
    """A module with two named inputs, a text and its mask, that returns a dict."""

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
    models = {}
    for engine in ("loop", "stacked"):
        sim = simulate(
            lambda: module, ({"codes": codes, "mask": mask}, targets), parts, 3, "mtgc",
            rounds=2, periods=[3], batch=4, seed=5, leaf=client_options(0.1), engine=engine,
        )  # fmt: skip
        assert sim.engine.how == engine
        models[engine] = sim.run().models[1]
    assert float((models["loop"] - models["stacked"]).abs().max()) < 1e-10
    assert float((models["loop"][0] - models["loop"][1]).abs().max()) > 1e-3


class Windowed(nn.Module):
    """A module that moves a mask from the host, and changes a tensor it creates in place."""

    def __init__(self) -> None:
        super().__init__()
        self.out = nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        mask = (torch.arange(4) < torch.tensor(3)).to(x.device)
        held = torch.zeros(4, device=x.device)
        held += 1
        held += x.mean(0)
        x = x.where(mask, held)
        return self.out(x * ~mask)  # computed from a mask that an earlier operation uses, too


def test_constants_are_computed_once_on_the_inputs_device() -> None:
    captured = program.BatchedProgram(FlatModule(Windowed().to("meta")), TABLE.to("meta"))
    assert {value.dtype for value in captured._constants.values()} == {torch.bool}
    assert {value.device.type for value in captured._constants.values()} == {"meta"}
    names = {str(graph.op_name(instruction.node)) for instruction in captured._instructions}
    assert not {"arange", "lt", "to", "bitwise_not"} & names
    assert chosen(Windowed())[1] == "stacked"
