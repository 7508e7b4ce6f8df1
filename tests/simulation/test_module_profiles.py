"""Modules with habits of their own: each run is held against plain PyTorch."""

from __future__ import annotations

import warnings

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from stratafl import InvalidInput
from tests.simulation.module_profiles import ENGINES, data, furthest, made, plain_rounds, run


class Changing(nn.Module):
    """Writes into what it is given."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.LeakyReLU(0.1, inplace=True)
        self.out = nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        x -= 1
        return self.out(self.first(x))


class Recomputed(nn.Module):
    def __init__(self, reentrant: bool) -> None:
        super().__init__()
        self.reentrant = reentrant
        self.inner, self.middle, self.out = nn.Linear(4, 5), nn.Linear(5, 5), nn.Linear(5, 3)

    def forward(self, x: Tensor) -> Tensor:
        h = checkpoint(lambda h: self.middle(h).tanh(), self.inner(x), use_reentrant=self.reentrant)
        return self.out(h)


def cumulative() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 5), nn.BatchNorm1d(5, momentum=None), nn.Linear(5, 3))


def partly_evaluating() -> nn.Module:
    module = nn.Sequential(nn.Linear(4, 5), nn.BatchNorm1d(5), nn.Dropout(0.5), nn.Linear(5, 3))
    module[1].eval()
    module[2].eval()
    return module


MODULES = {
    "changes its input": Changing,
    "recomputed": lambda: Recomputed(reentrant=False),
    "recomputed, re-entrant": lambda: Recomputed(reentrant=True),
    "cumulative batch norm": cumulative,
}


@pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad")  # the library's, in an evaluation
@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("name", MODULES)
def test_rounds_are_those_of_plain_pytorch(name: str, engine: str) -> None:
    module, pair = made(MODULES[name]), data()
    before = [tensor.clone() for tensor in pair]
    result = run(module, pair, engine, test=pair).run()
    assert all(torch.equal(after, copied) for after, copied in zip(pair, before, strict=True))
    expected = plain_rounds(module, before, 2, 3, 5)
    assert furthest(result.module, expected) < 1e-12
    expected.eval()
    with torch.no_grad():
        loss = F.cross_entropy(expected(before[0].clone()), before[1])
    assert result.history[-1].metrics["loss"] == pytest.approx(float(loss), abs=1e-12)


def test_the_user_s_arrays_are_not_changed() -> None:
    inputs, targets = (tensor.numpy().copy() for tensor in data())
    before = inputs.copy(), targets.copy()

    def greedy(outputs: Tensor, targets: Tensor) -> Tensor:
        value = F.cross_entropy(outputs.clone(), targets.clone())
        outputs.zero_()
        targets.fill_(0)
        return value

    losses = [r.metrics["loss"] for r in run(made(Changing), (inputs, targets), test=(inputs, targets), loss=greedy)]
    assert (inputs == before[0]).all() and (targets == before[1]).all()
    expected = [r.metrics for r in run(made(Changing), before, test=before)]
    assert losses == pytest.approx([tensor["loss"] for tensor in expected], abs=1e-12)


@pytest.mark.parametrize("engine", ENGINES)
def test_parts_given_in_evaluation_mode_stay_in_it(engine: str) -> None:
    module, pair = made(partly_evaluating), data()
    result = run(module, pair, engine).run()
    for part in (module[1], module[2]):
        part.train = lambda mode=True, part=part: part  # in the plain loop, too
    assert furthest(result.module, plain_rounds(module, pair, 2, 3, 5)) < 1e-12
    assert torch.equal(result.module[1].running_mean, module[1].running_mean)


def test_a_module_handed_out_in_evaluation_mode_is_trained() -> None:
    module = made(lambda: nn.Sequential(nn.Linear(4, 5), nn.BatchNorm1d(5), nn.Linear(5, 3))).eval()
    assert not torch.equal(run(module, data()).run().module[1].running_mean, module[1].running_mean)
    assert not module.training


@pytest.mark.parametrize("engine", ENGINES)
def test_the_older_weight_norm(engine: str) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        module = made(lambda: nn.Sequential(nn.utils.weight_norm(nn.Linear(4, 5)), nn.Tanh(), nn.Linear(5, 3)))
    newer = made(
        lambda: nn.Sequential(nn.utils.parametrizations.weight_norm(nn.Linear(4, 5)), nn.Tanh(), nn.Linear(5, 3))
    )
    result, expected = run(module, data(), engine, test=data()).run(), run(newer, data(), engine, test=data()).run()
    old, new = (result.module(data()[0]), expected.module(data()[0]))
    torch.testing.assert_close(old, new, rtol=0, atol=1e-12)


# -- initial values --------------------------------------------------------------------------------


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.again, self.out = nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 3)
        self.again.weight = self.first.weight
        self.register_buffer("scale", torch.ones(4), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(self.again(self.first(x).tanh() * self.scale))


def test_a_state_dict_of_a_tied_module_is_one_to_start_from() -> None:
    start, other = made(Tied), made(Tied)
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.mul_(0.5)
    expected = run(other, data()).run()
    state = other.state_dict()
    assert {"first.weight", "again.weight"} <= set(state) and "scale" not in state
    under_one_name = {name: value for name, value in state.items() if name != "first.weight"}
    for initial in (state, under_one_name, {**state, "scale": torch.ones(4).double()}):
        assert torch.equal(run(start, data(), initial=initial).run().models[0], expected.models[0])
    with pytest.raises(InvalidInput, match=r"initial.again.weight.*same tensor as 'first.weight'"):
        run(start, data(), initial={**state, "again.weight": state["again.weight"] + 1})
    with pytest.raises(InvalidInput, match=r"lacks 'first\.weight'"):
        run(start, data(), initial={"out.weight": state["out.weight"]})


# -- what a trial alone would not show -------------------------------------------------------------


class Clamped(nn.Linear):
    """Bounds its weights behind autograd's back, where they do not come near the bound at first."""

    def forward(self, x: Tensor) -> Tensor:
        self.weight.data.clamp_(-0.7, 0.7)
        return super().forward(x)


class Replaced(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        self.weight.data = self.weight.data.clamp(-0.7, 0.7)
        return super().forward(x)


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("kind", [Clamped, Replaced])
def test_weights_bounded_in_the_forward_pass_stay_so(kind: type[nn.Linear], engine: str) -> None:
    module, (inputs, labels) = made(lambda: kind(4, 3)), data()
    pair = 30 * inputs, labels
    result = run(module, pair, engine).run()
    expected = plain_rounds(module, pair, 2, 3, 5)
    assert furthest(result.module, expected) < 1e-12
    assert furthest(result.module, plain_rounds(made(lambda: nn.Linear(4, 3)), pair, 2, 3, 5)) > 0.05


class Autocast(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner, self.out = nn.Linear(4, 8), nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return self.out(self.inner(x).relu()).float()


def test_a_precision_of_the_module_s_own_is_kept() -> None:
    torch.manual_seed(0)
    module, (inputs, labels) = Autocast(), data()
    pair = inputs.float(), labels
    assert run(module, pair, "stacked").engine.name != "stacked"
    assert furthest(run(module, pair).run().module, plain_rounds(module, pair, 2, 3, 5)) < 1e-6
