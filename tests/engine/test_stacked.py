"""The stacked engine gives the loop engine's result."""

from __future__ import annotations

import gc
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from stratafl.core.client_update import ClientUpdate, clip, corrections, decay
from stratafl.core.rule import average
from stratafl.data.transforms import flip_and_crop
from stratafl.engine import cuda_graphs, kernels
from stratafl.engine.cuda_graphs import CapturePolicy
from stratafl.engine.kernels.reference import REFERENCE_OPS
from stratafl.models.networks import cnn, logistic, lstm, mlp
from stratafl.models.registry import build
from stratafl.rules.registry import entries
from tests.engine.pairs import CLOSE, compare, federation, perceptron, stacked
from tests.flat import client_options, update_of
from tests.slow import slow


@pytest.mark.parametrize("depth", [slow(1), slow(2), 3])
@pytest.mark.parametrize("rule", [entry.name for entry in entries()])
def test_every_rule_on_uneven_trees_with_ragged_clients(rule: str, depth: int) -> None:
    assert compare(rules=[rule] * depth, depth=depth) < CLOSE


@pytest.mark.parametrize("others", [["fedprox", "feddyn"], ["mtgc", "mtgc"], []])
def test_local_terms_of_custom_rules(others: list[str]) -> None:
    """Neither a sum nor in the order of what the engine knows."""
    shrinks = average()._replace(local=lambda x, g, edge: 0.5 * g * (1 + (x - edge.model).abs()))
    assert compare(rules=[shrinks, *others], depth=1 + len(others)) < CLOSE
    assert compare(rules=[*others, shrinks], depth=1 + len(others), chunk=2) < CLOSE


@pytest.mark.parametrize("sampling", ["shuffle", "replacement"])
@pytest.mark.parametrize("batch", [1, slow(3), 5, slow(50), None])
def test_sampling(batch: int | None, sampling: str) -> None:
    assert compare(batch=batch, sampling=sampling) < CLOSE


@pytest.mark.parametrize(
    "chain",
    [
        update_of(client_options(0.3, momentum=0.9)),
        update_of(client_options(0.3, clip_norm=0.05)),
        update_of(client_options(0.3, weight_decay=0.1)),
        update_of(client_options(lambda round: 0.2 / (1 + round), clip_norm=0.2, weight_decay=0.01, momentum=0.5)),
        ClientUpdate(lambda round: 0.1, (clip(0.1), corrections, decay(0.1))),
    ],
)
@pytest.mark.parametrize("rules", ["mtgc", slow("feddyn")])
def test_client_update_chains(rules: str, chain: ClientUpdate) -> None:
    assert compare(rules=rules, leaf=chain) < CLOSE


def test_the_chain_may_change_between_rounds() -> None:
    results = []
    for sim in (federation(rounds=3), stacked(federation(rounds=3))):
        next(sim)
        sim.client_update = update_of(client_options(0.5, momentum=0.3))
        results.append(sim.run().models[0])
    assert torch.allclose(*results, rtol=0, atol=CLOSE)


@pytest.mark.parametrize("participation", [[1, 1], [0.5, 2]])
@pytest.mark.parametrize("chunk", [1, None])
def test_partial_participation(participation: list, chunk: int | None) -> None:
    assert compare(participation=participation, rounds=4, chunk=chunk) < CLOSE


@pytest.mark.parametrize("restart", ["gradient", "keep"])
def test_corrections_from_gradients(restart: str) -> None:
    assert compare(rules={"name": "mtgc", "restart": restart}, rounds=3) < CLOSE


@pytest.mark.parametrize("engine", ["loop", "stacked"])
def test_only_participating_clients_are_trained(engine: str) -> None:
    sim = federation(participation=[1, 1], engine=engine)
    sim.federation.begin_round()
    work = sim.federation.train_request(0, 2, 0)
    everyone = replace(work, clients=list(range(5)))
    assert 0 < len(work.clients) < 5
    for few, all_of_them in (
        (sim.engine.train(work).model_AP, sim.engine.train(everyone).model_AP),
        (sim.engine.gradients(work), sim.engine.gradients(everyone)),
    ):
        torch.testing.assert_close(few, all_of_them[work.clients], rtol=0, atol=CLOSE)
    nobody = replace(work, clients=[])
    assert sim.engine.train(nobody).model_AP.shape == sim.engine.gradients(nobody).shape == (0, sim.flat.parameters)


def test_a_failing_client_affects_no_other() -> None:
    inputs = torch.randn(60, 4, dtype=torch.float64)
    inputs[13] = torch.nan
    assert federation(inputs=inputs).run().refused == stacked(federation(inputs=inputs)).run().refused != {}


# -- models ----------------------------------------------------------------------------------------


class Residual(nn.Module):
    """Module as users write it: views, residuals, functions, a parameter outside layers."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(2, 4, 3, padding=1)
        self.norm = nn.GroupNorm(2, 4)
        self.again = nn.Conv2d(4, 4, 3, padding="same", groups=2)
        self.scale = nn.Parameter(torch.ones(4, 1, 1))
        self.register_buffer("shift", torch.full((1,), 0.1))
        self.out = nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        y = F.relu(self.norm(self.conv(x)))
        z = self.again(y * self.scale) + self.shift
        z += y
        y = F.max_pool2d(torch.sigmoid(z), 2)
        return self.out(y.mean(dim=(2, 3)).view(x.size(0), -1))


class Turning(nn.Module):
    """Decides by the shape of the data, which fx tracing cannot follow."""

    def __init__(self) -> None:
        super().__init__()
        self.out = nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(x if x.shape[0] > 2 else 2 * x)


class Centred(nn.Module):
    """Mixes the samples of a batch, so that padding would show."""

    def __init__(self) -> None:
        super().__init__()
        self.out = nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(x - x.mean(dim=0))


def seeded(make):
    def model() -> nn.Module:
        torch.manual_seed(0)
        return make().double()

    return model


MODELS = {
    "logistic": ("stacked", lambda: logistic((2, 4, 4), 3), (2, 4, 4)),
    "mlp": ("stacked", lambda: mlp((2, 4, 4), 3, (7, 5)), (2, 4, 4)),
    "cnn": ("stacked", lambda: cnn((1, 16, 16), 3), (1, 16, 16)),
    "residual": ("stacked", Residual, (2, 6, 6)),
    "no bias": ("stacked", lambda: nn.Sequential(nn.Linear(4, 5, bias=False), nn.ReLU(), nn.Linear(5, 3)), (4,)),
    "layer norm": ("stacked", lambda: nn.Sequential(nn.LayerNorm(4), nn.Dropout(0.0), nn.Linear(4, 3)), (4,)),
    "untraceable": ("stacked", Turning, (4,)),
    "mixes samples": ("stacked", Centred, (4,)),
    "dropout": ("stacked", lambda: nn.Sequential(nn.Dropout(0.5), nn.Linear(4, 3)), (4,)),
    "batch norm": ("stacked", lambda: nn.Sequential(nn.BatchNorm1d(4), nn.Linear(4, 3)), (4,)),
    "library's lstm": ("stacked", lambda: nn.Sequential(nn.LSTM(4, 3, batch_first=True), Last()), (5, 4)),
}


class Last(nn.Module):
    def forward(self, outputs: tuple[Tensor, object]) -> Tensor:
        return outputs[0][:, -1]


@pytest.mark.parametrize("name", MODELS)
def test_models(name: str) -> None:
    how, make, shape = MODELS[name]
    # sizes of at least two in every batch: a batch norm needs them
    batch = None if name == "batch norm" else 4
    assert compare(how, model=seeded(make), shape=shape, depth=1, rounds=1, batch=batch) < CLOSE


def test_lstm() -> None:
    codes = torch.randint(9, (60, 6))
    model = seeded(lambda: lstm((6,), 3, vocabulary=9, embedding=3, hidden=4))
    assert compare(model=model, inputs=codes, rounds=1) < CLOSE


def tied() -> nn.Module:
    first, second = nn.Linear(4, 4), nn.Linear(4, 4)
    second.weight = first.weight
    frozen = nn.Linear(4, 3)
    frozen.weight.requires_grad_(False)
    return nn.Sequential(first, nn.Tanh(), second, nn.ReLU(), frozen)


def test_frozen_and_tied_parameters() -> None:
    assert compare(model=seeded(tied)) < CLOSE


# -- losses and transforms -------------------------------------------------------------------------


def squares(outputs: Tensor, targets: Tensor) -> Tensor:
    return (outputs - torch.eye(3)[targets]).square().sum() / len(targets) ** 0.5


def weighing(outputs: Tensor, targets: Tensor) -> Tensor:
    """Looks at values, which only a loop over clients can."""
    return F.cross_entropy(outputs, targets) * (2.0 if targets[0].item() == 0 else 1.0)


@pytest.mark.parametrize("loss", [squares, weighing])
@pytest.mark.parametrize("model", [perceptron, seeded(Turning)])
def test_own_losses_see_no_padding(loss, model) -> None:
    assert compare(model=model, loss=loss) < CLOSE


def test_a_custom_cross_entropy_with_ignored_labels() -> None:
    targets = torch.randint(3, (60,))
    targets[::12] = 0
    targets[2::12] = -100
    assert compare(loss=F.cross_entropy, targets=targets, batch=None) < CLOSE


def test_one_label_per_position() -> None:
    model = seeded(lambda: nn.Conv2d(1, 3, 3, padding=1))
    assert compare(model=model, shape=(1, 4, 4), targets=torch.randint(3, (60, 4, 4))) < CLOSE


def noisy(inputs: Tensor, seed: int, client, step) -> Tensor:
    """A transform that knows one client at a time and the length of its batch."""
    return inputs * (1 + 0.1 * int(client) + 0.01 * int(step)) / len(inputs)


@pytest.mark.parametrize("augment", [flip_and_crop, noisy])
def test_transforms(augment) -> None:
    model = seeded(lambda: mlp((1, 6, 6), 3, (5,)))
    assert compare(model=model, shape=(1, 6, 6), augment=augment) < CLOSE


# -- bits ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("name", "shape"), [slow("mlp", (1, 4, 4)), ("cnn", (1, 16, 16))])
@pytest.mark.parametrize("dtype", [torch.float32, slow(torch.float64)])
def test_same_bits_twice_and_in_any_chunks(name: str, shape: tuple[int, ...], dtype: torch.dtype) -> None:
    def run(chunk: int | None) -> bytes:
        model = seeded(lambda: build(name, shape, 3))
        chain = update_of(client_options(0.1, clip_norm=0.5, momentum=0.5, weight_decay=0.01))
        settings = {"model": lambda: model().to(dtype), "shape": shape, "rounds": 1, "leaf": chain}
        result = stacked(federation(**settings), chunk_size=chunk).run()
        return result.models[-1].numpy().tobytes()

    assert run(None) == run(None) == run(1) == run(2) == run(3)


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_half_precision_is_near(precision: str) -> None:
    model = seeded(lambda: mlp((4,), 3, (8,)))
    settings = {"model": lambda: model().float(), "rounds": 1}
    exact = federation(**settings).run().models[0]
    near = stacked(federation(**settings), precision=precision).run().models[0]
    assert near.dtype == torch.float32
    assert 0 < float((near - exact).norm() / exact.norm()) < 0.02


# -- what a GPU does, on a CPU ---------------------------------------------------------------------


class _Caught(torch.autograd.Function):
    """Passes a parameter on, and writes its gradient plus correction, and the squared norm, to the
    buffers, as a kernel does."""

    @staticmethod
    def forward(ctx, value: Tensor, *plan) -> Tensor:
        ctx.plan = plan
        return value.clone()

    @staticmethod
    def backward(ctx, *gradients: Tensor):
        place, correction, squares, scale = ctx.plan
        place.copy_(gradients[0] / scale + (0 if correction is None else correction))
        if squares is not None:
            squares.append(place.flatten(1).square().sum(dim=1, keepdim=True))
        return None, None, None, None, None


def writing_gradients(function):
    def caught(x, *arguments, gradient_buffers=None, loss_scale: float = 1.0) -> Tensor:
        if gradient_buffers is None:
            return function(x, *arguments)
        buffers = gradient_buffers
        views = [view for view in (buffers.weight, buffers.bias) if view is not None]
        parameters = iter(zip(views, (buffers.add_weight, buffers.add_bias), strict=False))
        caught_arguments = [
            _Caught.apply(argument, *next(parameters), buffers.squared_norms, loss_scale)
            if isinstance(argument, Tensor) and argument.requires_grad
            else argument
            for argument in arguments
        ]
        assert next(parameters, None) is None
        return function(x, *caught_arguments)

    return caught


@pytest.mark.parametrize("name", ["cnn", "residual", "lstm", "layer norm", "tied"])
def test_kernels_that_write_gradients_to_the_rows(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    names = ("linear", "conv2d", "conv2d_relu_pool", "group_norm", "layer_norm", "embedding")
    ops = {**REFERENCE_OPS, **{name: writing_gradients(REFERENCE_OPS[name]) for name in names}}
    backend = kernels.TORCH_BACKEND._replace(ops=ops, writes_gradients=frozenset(names), collects_squared_norms=True)
    monkeypatch.setattr(kernels, "TORCH_BACKEND", backend)
    settings = {"leaf": client_options(0.1, clip_norm=0.5), "rounds": 2}
    if name == "lstm":
        model = seeded(lambda: lstm((6,), 3, vocabulary=9, embedding=3, hidden=4))
        assert compare(model=model, inputs=torch.randint(9, (60, 6)), **settings) < CLOSE
    elif name == "tied":
        assert compare(model=seeded(tied), **settings) < CLOSE
    else:
        _, make, shape = MODELS[name]
        assert compare(model=seeded(make), shape=shape, depth=1, **settings) < CLOSE


@pytest.mark.parametrize("rules", ["mtgc", "feddyn", "hfedavg"])
@pytest.mark.parametrize("momentum", [slow(0.0), 0.5])
def test_a_captured_step_reads_only_its_inputs(rules: str, momentum: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """The function itself stands in for its graph, with the graph's memory, steps and learning
    rates."""
    captured = []

    def capture(once, device):
        once()
        once()
        captured.append(once)
        return once

    monkeypatch.setattr(cuda_graphs, "_capture", capture)
    model = seeded(lambda: mlp((1, 6, 6), 3, (5,)))
    chain = update_of(client_options(lambda round: 0.2 / (1 + round), momentum=momentum, clip_norm=0.5))
    settings = {
        "rules": rules,
        "model": model,
        "shape": (1, 6, 6),
        "augment": flip_and_crop,
        "leaf": chain,
        "rounds": 3,
    }
    expected = federation(**settings).run()
    sim = stacked(federation(**settings), chunk_size=2)
    sim.engine._uses_cuda_graphs = True
    got = sim.run()
    assert max(float((a - b).abs().max()) for a, b in zip(expected.models, got.models, strict=True)) < CLOSE
    assert len(captured) == 2, "once for chunks of two, once for the last"


def test_a_step_leaves_no_tensors_behind() -> None:
    """Activations that are part of a cycle would stay until somebody looks for those: gigabytes, on
    a GPU."""
    sim = stacked(federation(model=seeded(Residual), shape=(2, 6, 6)))
    sim.federation.begin_round()
    work = sim.federation.train_request(0, 3, 0)

    def tensors_after_training() -> int:
        sim.engine.train(work)
        return sum(issubclass(type(item), Tensor) for item in gc.get_objects())

    tensors_after_training()
    gc.collect()
    gc.disable()
    try:
        assert tensors_after_training() == tensors_after_training()
    finally:
        gc.enable()


def test_frequent_kinds_of_step_are_captured() -> None:
    policy = CapturePolicy()
    # another number of clients at every synchronisation, then two sizes of chunk in turn
    assert not any(policy.should_capture(size) for size in (71, 64, 80, 77, 71, 64, 80, 77))
    assert [policy.should_capture(size) for size in (50, 49, 50, 49, 50, 49)] == [False] * 4 + [True] * 2
