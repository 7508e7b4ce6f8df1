"""The stacked engine on a GPU: it agrees with the loop, and gives the same bits whenever and
however it is run."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from stratafl import feddyn
from stratafl.core.client_update import ClientUpdate, CorrectionFn
from stratafl.core.optimizer import SGD, constant
from stratafl.data.transforms import flip_and_crop
from stratafl.engine.factory import EngineName, make_engine
from stratafl.models.networks import lstm, mlp
from stratafl.rules.registry import entries
from stratafl.simulation.result import Result
from stratafl.simulation.simulation import Simulation
from tests.engine.plain import difference, engine, plain, problem
from tests.engine.zoo import ZOO
from tests.flat import client_options, simulate

if not torch.cuda.is_available():
    pytest.skip("no GPU", allow_module_level=True)

DEVICE = "cuda"
SHAPES = {1: 4, 2: [2, 3], 3: [[2, 1], [1, 2]]}
PERIODS = {1: [3], 2: [2, 3], 3: [2, 1, 3]}


def convolutional() -> nn.Module:
    layers = [nn.Conv2d(3, 16, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(16, 24, 3), nn.GroupNorm(4, 24)]
    return nn.Sequential(*layers, nn.ReLU(), nn.Flatten(), nn.Linear(24 * 9, 3))


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(9, 32), nn.Linear(32, 3)
        self.layer = nn.TransformerEncoderLayer(32, 4, 64, dropout=0.1, batch_first=True)

    def forward(self, codes: Tensor) -> Tensor:
        return self.head(self.layer(self.embed(codes)).mean(dim=1))


MODELS = {
    "perceptron": (lambda: mlp((3, 10, 10), 3, (30, 20)), (3, 10, 10)),
    "convolutional": (convolutional, (3, 10, 10)),
    "lstm": (lambda: lstm((6,), 3, vocabulary=9, embedding=3, hidden=4), (6,)),
    "attention": (Attention, (6,)),
}


def federation(model: str = "perceptron", rules="mtgc", depth: int = 2, **more) -> Simulation:
    make, shape = MODELS[model]
    leaves = {1: 4, 2: 5, 3: 6}[depth]
    random = torch.Generator().manual_seed(1)
    count = leaves * 12
    images, texts = torch.randn(count, *shape, generator=random), torch.randint(9, (count, *shape), generator=random)
    inputs = images if len(shape) > 1 else texts
    inputs = inputs * more.pop("inputs_times", 1)
    targets = more.pop("targets", torch.randint(3, (count,), generator=random))
    parts = [np.arange(leaf * 12, leaf * 12 + 3 + 4 * leaf % 9) for leaf in range(leaves)]
    settings = {"batch": 4, "rounds": 2, "seed": 4, "periods": PERIODS[depth], "weights": "samples", "device": DEVICE}
    settings |= {"leaf": client_options(0.1, clip_norm=2.0, weight_decay=1e-3, momentum=0.5), **more}
    return simulate(make, (inputs, targets), parts, SHAPES[depth], rules, **settings)


def apart(expected: Result, got: Result) -> float:
    """The largest distance of two runs' rows, as a share of how far the models are from the
    first."""
    rows = [*zip(expected.models, got.models, strict=True)]
    rows += [(a, b) for a, b in zip(expected.corrections, got.corrections, strict=True) if a is not None]
    return max(float((a - b).norm() / a.norm().clamp(min=1e-3)) for a, b in rows)


@pytest.mark.parametrize("depth", [1, 2, 3])
@pytest.mark.parametrize("rule", [entry.name for entry in entries()])
def test_every_rule_on_uneven_trees_with_ragged_clients(rule: str, depth: int) -> None:
    settings = {"rules": [rule] * depth, "depth": depth}
    stacked = federation(**settings, engine="stacked")
    assert stacked.engine.how == "stacked"
    # server optimisers divide by a square root of what is nearly zero at first, which makes
    # rounding large
    limit = 1e-2 if rule in ("adam", "yogi") else 1e-4
    assert apart(federation(**settings, engine="loop").run(), stacked.run()) < limit


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("participation", [None, [1, 2]])
def test_every_kind_of_layer_agrees_with_the_loop(model: str, participation: list | None) -> None:
    settings = {"model": model, "participation": participation}
    assert apart(federation(**settings, engine="loop").run(), federation(**settings, engine="stacked").run()) < 1e-4


def test_a_proximal_term_behind_the_clip() -> None:
    rule = feddyn(0.5, pull="after_clip")
    settings = {"model": "convolutional", "rules": ["fedprox", rule], "leaf": client_options(0.1, clip_norm=0.5)}
    expected = federation(**settings, engine="loop").run()
    assert apart(expected, federation(**settings, engine="stacked").run()) < 1e-4


def test_a_stage_that_treats_one_parameter_unlike_another() -> None:
    def slowed(direction: torch.Tensor, x: torch.Tensor, correct: CorrectionFn) -> torch.Tensor:
        return correct(x, direction) * torch.linspace(0, 1, x.shape[-1], device=x.device)

    settings = {"model": "convolutional", "leaf": ClientUpdate(constant(0.1), (slowed,), SGD(0.5))}
    assert apart(federation(**settings, engine="loop").run(), federation(**settings, engine="stacked").run()) < 1e-4


@pytest.mark.parametrize("state", ["reset", "keep"])
@pytest.mark.parametrize(
    "optimizer",
    [{"name": "sgd", "momentum": 0.9, "nesterov": True}, {"name": "adam", "eps": 1e-2}, {"name": "adamw", "eps": 1e-2}],
    ids=str,
)
def test_every_optimiser(optimizer: dict, state: str) -> None:
    chain = client_options(0.01, clip_norm=2.0, optimizer=optimizer, optimizer_state=state)
    settings = {"model": "convolutional", "leaf": chain, "participation": [1.0, 0.7]}
    assert apart(federation(**settings, engine="loop").run(), federation(**settings, engine="stacked").run()) < 1e-3


def test_clients_that_count_epochs() -> None:
    settings = {"leaf": client_options(0.05, epochs=2), "periods": [2]}
    assert apart(federation(**settings, engine="loop").run(), federation(**settings, engine="stacked").run()) < 1e-3


def test_flips_and_crops() -> None:
    settings = {"model": "convolutional", "augment": flip_and_crop}
    assert apart(federation(**settings, engine="loop").run(), federation(**settings, engine="stacked").run()) < 1e-4


@pytest.mark.parametrize("precision", ["tf32", "bf16", "fp16"])
def test_lower_precisions_are_close(precision: str) -> None:
    settings = {"model": "convolutional", "rounds": 1, "rules": "hfedavg"}
    exact = federation(**settings, engine="loop").run()
    assert 0 < apart(exact, federation(**settings, engine="stacked", precision=precision).run()) < 0.1


def gradients(engine_name: EngineName, precision: str = "fp32", **settings) -> Tensor:
    """First gradients of all clients."""
    simulation = federation(**settings, engine=engine_name, precision=precision)
    assert simulation.engine.how == engine_name
    simulation.federation.begin_round()
    return simulation.engine.gradients(simulation.federation.train_request(0, 1, 0))


@pytest.mark.parametrize("inputs_times", [1, 1e5])
@pytest.mark.parametrize("gradients_times", [1, 1e4])
@pytest.mark.parametrize("model", ["perceptron", "convolutional"])
def test_tf32_multiplies_values_of_any_size(model: str, gradients_times: float, inputs_times: float) -> None:
    def loss(scores: Tensor, labels: Tensor) -> Tensor:
        return gradients_times * F.cross_entropy(scores / inputs_times, labels)

    settings = {"model": model, "inputs_times": inputs_times, "loss": loss}
    exact, got = gradients("loop", **settings), gradients("stacked", "tf32", **settings)
    off = (got - exact).norm(dim=1) / exact.norm(dim=1)
    # rounding decides which of two nearly equal pixels a pool takes, and a client has few images;
    # what is cut off at a largest number is off by nearly 1
    assert float(off.median()) < 0.02 and float(off.max()) < 0.1


@pytest.mark.parametrize("value", [float("inf"), float("nan")])
@pytest.mark.parametrize("precision", ["tf32", "bf16", "fp16"])
@pytest.mark.parametrize("model", ["perceptron", "convolutional"])
def test_a_non_finite_gradient_affects_its_client_only(model: str, precision: str, value: float) -> None:
    def loss(scores: Tensor, labels: Tensor) -> Tensor:
        return F.cross_entropy(scores, labels) * torch.where((labels == 2).any(), value, 1.0)

    targets = torch.arange(60) % 2
    targets[48:] = 2  # the last client's
    settings = {"model": model, "loss": loss, "targets": targets}
    exact, got = gradients("loop", **settings), gradients("stacked", precision, **settings)
    assert got.isfinite().all(dim=1).tolist() == exact.isfinite().all(dim=1).tolist() == [True] * 4 + [False]
    assert not bool((got.isfinite() & ~exact.isfinite()).any())


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
@pytest.mark.parametrize("engine_name", ["loop", "vmap"])
def test_autocast_is_close_and_repeats_bits(engine_name: EngineName, precision: str) -> None:
    settings = {"model": "convolutional", "rounds": 1, "rules": "hfedavg"}
    exact = federation(**settings, engine="loop").run()
    simulations = [federation(**settings, engine=engine_name, precision=precision) for _ in range(2)]
    assert [simulation.engine.precision for simulation in simulations] == [precision] * 2
    first, second = (simulation.run() for simulation in simulations)
    assert 0 < apart(exact, first) < 0.1 and apart(first, second) == 0


@pytest.mark.parametrize("precision", ["fp32", "tf32", "bf16", "fp16"])
@pytest.mark.parametrize("model", ["perceptron", "convolutional", "attention"])
def test_same_bits_every_time_captured_or_not_and_for_any_chunk_size(model: str, precision: str) -> None:
    """Batches have unequal lengths. Chunks may change the last bits where torch's own operations
    compute."""

    def bits(chunk: int | None, capture: bool = True) -> list[bytes]:
        sim = federation(model, augment=None if model == "attention" else flip_and_crop, engine="loop")
        options = {"chunk_size": chunk, "precision": precision, "cuda_graphs": capture}
        sim.engine = make_engine("stacked", sim.engine.training, **options)
        assert sim.engine.how == "stacked"
        result = sim.run()
        return [rows.cpu().numpy().tobytes() for rows in (*result.models, *result.corrections) if rows is not None]

    first = bits(None)
    assert bits(None) == first
    assert bits(None, capture=False) == first
    if model != "attention":
        assert all(bits(chunk) == first for chunk in (1, 2, 3))


@pytest.fixture
def poisoned(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Memory that nobody has written to holds NaN, and single precision is meant."""
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", False)
    torch.use_deterministic_algorithms(True, warn_only=True)
    yield
    torch.use_deterministic_algorithms(False)


# PyTorch's matrix exponential waits for the host, so that its step runs without a CUDA graph
WAITS = pytest.param("orthogonal", marks=pytest.mark.filterwarnings("ignore:a step could not be captured as a CUDA"))


# numbers are drawn differently in another precision
@pytest.mark.parametrize(
    "name", [WAITS if name == "orthogonal" else name for name, entry in ZOO.items() if not entry.draws]
)
@pytest.mark.parametrize("engine_name", ["loop", "vmap", "stacked"])
@pytest.mark.filterwarnings("ignore:.*eterministic", "ignore:Using padding='same' with even kernel lengths")
@pytest.mark.usefixtures("poisoned")
def test_the_zoo_in_single_precision(engine_name: EngineName, name: str) -> None:
    """Against plain PyTorch in double precision on the same device."""
    ran = engine(engine_name, problem(ZOO[name], "cuda"), torch.float32)
    off = difference(plain(problem(ZOO[name], "cuda")), ran.clients)
    # a deep network with batch norms over two samples doubles its errors layer by layer
    tolerance = 1e-2 if ran.how.endswith("changes the module's buffers") or name == "ShuffleNetV2" else 2e-4
    assert not {what: by for what, by in off.items() if not by < tolerance}, ran.how


class Computed(nn.Module):
    """Looks up codes that it computes, so that nobody can know them before it runs."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.out = nn.Embedding(10, 3), nn.Linear(3, 3)

    def forward(self, codes: Tensor) -> Tensor:
        return self.out(self.embed(codes * (9 - codes)).mean(dim=1))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_an_out_of_range_code_affects_its_client_only(dtype: torch.dtype) -> None:
    values, random = torch.tensor([0, 1, 8, 9]), torch.Generator().manual_seed(0)
    codes, labels = values[torch.randint(4, (24, 5), generator=random)], torch.arange(24) % 3
    parts = [range(8 * client, 8 * client + 8) for client in range(3)]

    def trained(codes: Tensor) -> Result:
        torch.manual_seed(0)
        settings = {"periods": [2], "rounds": 2, "batch": None, "device": "cuda", "engine": "stacked"}
        simulation = simulate(Computed().to(dtype), (codes, labels), parts, 3, "hfedavg", **settings)
        assert simulation.engine.how == "stacked"
        return simulation.run()

    broken = codes.clone()
    broken[12, 3], broken[13, 0] = 3, 6
    result, healthy = trained(broken), trained(codes)
    assert set(result.refused) == {"1"} and not healthy.refused
    assert bool(result.models[0].isfinite().all())
