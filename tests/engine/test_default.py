"""Default engine on a CPU, which depends on the model and its clients only."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from stratafl import Simulation
from stratafl.core import schedule
from stratafl.core.client_training import ClientTraining
from stratafl.core.client_update import ClientUpdate, corrections
from stratafl.core.flat_module import FlatModule
from stratafl.data.dataset import ClientIndex, InMemorySamples
from stratafl.engine import factory
from stratafl.engine.factory import MIN_CLIENTS, default_engine_name, make_default_engine, mean_distinct_batch_lengths
from stratafl.engine.module_profile import profile_module
from stratafl.engine.precision import Precision
from stratafl.models.registry import build
from stratafl.runs import read_run
from tests.flat import simulate, update_of

CLIENTS, BATCH = 10, 4


class Sequences(nn.Module):
    def __init__(self, layers: nn.RNNBase):
        super().__init__()
        self.layers, self.out = layers, nn.Linear(layers.hidden_size, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(self.layers(x)[0][:, -1])


class Deciding(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.flatten(1) if x.sum() > 0 else -x.flatten(1))


def images(*between: nn.Module, wide: int = 8) -> nn.Module:
    return nn.Sequential(nn.Conv2d(1, wide, 3, padding=1), *between, nn.Flatten(), nn.LazyLinear(3))


IMAGE, LARGE = (1, 8, 8), (1, 48, 48)
MODELS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...], str]] = {
    "logistic": (lambda: build("logistic", IMAGE, 3), IMAGE, "stacked"),
    "mlp": (lambda: build("mlp", IMAGE, 3), IMAGE, "stacked"),
    "small images": (lambda: images(nn.ReLU()), IMAGE, "stacked"),
    "dropout": (lambda: images(nn.ReLU(), nn.Dropout(0.3)), IMAGE, "stacked"),
    "gru": (lambda: Sequences(nn.GRU(5, 6, batch_first=True)), (7, 5), "stacked"),
    "small lstm": (lambda: Sequences(nn.LSTM(5, 6, batch_first=True)), (7, 5), "stacked"),
    "attention": (
        lambda: nn.Sequential(nn.TransformerEncoderLayer(8, 2, 16, batch_first=True), nn.Flatten(), nn.Linear(56, 3)),
        (7, 8),
        "stacked",
    ),
    "large images": (lambda: images(nn.ReLU(), wide=64), LARGE, "loop"),
    "large images, pooled": (lambda: images(nn.ReLU(), nn.MaxPool2d(2), wide=64), LARGE, "stacked"),
    "large images, batch norm, pooled": (
        lambda: images(nn.BatchNorm2d(64), nn.ReLU(), nn.MaxPool2d(2), wide=64),
        LARGE,
        "stacked",
    ),
    "large layers": (lambda: nn.Sequential(nn.Linear(64, 60_000), nn.ReLU(), nn.Linear(60_000, 3)), (64,), "loop"),
    "large lstm": (lambda: Sequences(nn.LSTM(5, 256, batch_first=True)), (80, 5), "stacked"),
}


def client_training(
    module: nn.Module,
    shape: tuple[int, ...] = IMAGE,
    clients: int = CLIENTS,
    samples: int = 6,
    chain: ClientUpdate | None = None,
) -> ClientTraining:
    random = torch.Generator().manual_seed(0)
    data = torch.randn(clients * samples, *shape, generator=random), torch.arange(clients * samples) % 3
    module(data[0][:2])  # sizes that are found out
    parts = ClientIndex.from_lists(torch.arange(clients * samples).split(samples))
    return ClientTraining(
        flat=FlatModule(module),
        loss=F.cross_entropy,
        samples=InMemorySamples(*data),
        clients=parts,
        client_update=chain or update_of(0.1),
        batch_size=BATCH,
        sampling="shuffle",
        seed=0,
    )


def chosen(training: ClientTraining, clients: float, precision: Precision) -> str:
    return default_engine_name(training, clients, precision, profile_module(training))


@pytest.mark.parametrize("name", MODELS)
def test_default_follows_from_the_models_operations(name: str) -> None:
    make, shape, expected = MODELS[name]
    training = client_training(make(), shape)
    before = torch.get_rng_state(), training.flat.flatten_module(training.flat.module)
    assert chosen(training, CLIENTS, "fp32") == expected
    assert make_default_engine(training, training, CLIENTS).how == expected
    assert torch.equal(torch.get_rng_state(), before[0])
    for row, row_after in zip(before[1], training.flat.flatten_module(training.flat.module), strict=True):
        assert torch.equal(row, row_after), "profiling a module changes nothing"


@pytest.fixture
def gradients(monkeypatch: pytest.MonkeyPatch) -> list[FlatModule]:
    """Module of every gradient that is computed by the module itself."""
    modules, gradient = [], FlatModule.gradient

    def counted(self: FlatModule, *args: object, **kwargs: object) -> Tensor:
        modules.append(self)
        return gradient(self, *args, **kwargs)  # type: ignore[arg-type]

    monkeypatch.setattr(FlatModule, "gradient", counted)
    return modules


def test_seven_gradients_before_the_first_step(gradients: list[FlatModule]) -> None:
    """Two of the module's profile, one of the checks, four of the trial in float64: three clients
    with full batches, and one of them with a shorter batch."""
    assert run().engine.how == "stacked"
    assert len(gradients) == 7


def test_default_depends_on_neither_threads_nor_values() -> None:
    threads, names = torch.get_num_threads(), set()
    training = client_training(build("mlp", IMAGE, 3))
    try:
        for count in (1, 2):
            torch.set_num_threads(count)
            names |= {chosen(training, CLIENTS, "fp32")}
        huge = replace(
            training,
            samples=InMemorySamples(torch.full_like(training.samples.head(60), 1e30), training.samples.targets_N),
        )
        names |= {chosen(huge, CLIENTS, "fp32")}
    finally:
        torch.set_num_threads(threads)
    assert names == {"stacked"}


def own_stage(direction: Tensor, x: Tensor, correct: object) -> Tensor:
    return direction / direction.norm()  # depends on all rows at once


def test_cases_where_the_default_is_the_loop() -> None:
    module = build("mlp", IMAGE, 3)
    training = client_training(module)
    assert chosen(training, MIN_CLIENTS, "fp32") == "stacked"
    assert chosen(training, MIN_CLIENTS - 0.5, "fp32") == "loop", "few take part"
    assert chosen(training, CLIENTS, "bf16") == "loop", "16 bits"
    chain = ClientUpdate(update_of(0.1).lr, (corrections, own_stage))
    assert chosen(replace(training, client_update=chain), CLIENTS, "fp32") == "loop", "a stage of one's own"
    first, *others = training.clients
    uneven = ClientIndex.from_lists([first, *(part[:1] for part in others)])
    assert chosen(replace(training, clients=uneven), CLIENTS, "fp32") == "loop", "batches would be padded"
    deciding = client_training(Deciding(64, 3))
    assert chosen(deciding, CLIENTS, "fp32") == "stacked"
    assert make_default_engine(deciding, deciding, CLIENTS).how == "loop", (
        "what cannot be stacked, without a reason told"
    )


def test_unpaddable_batches_need_enough_clients_per_length() -> None:
    training = client_training(images(nn.BatchNorm2d(8), nn.ReLU()), clients=MIN_CLIENTS * 2, samples=8)
    ragged = replace(
        training, clients=ClientIndex.from_lists([part[: 7 + n % 2] for n, part in enumerate(training.clients)])
    )
    assert make_default_engine(training, training, 2 * MIN_CLIENTS).how == "stacked"
    assert mean_distinct_batch_lengths(ragged) == 1.5, "all of a pass's first batches are full, half of the second"
    assert make_default_engine(ragged, ragged, 1.5 * MIN_CLIENTS).how == "stacked"
    assert make_default_engine(ragged, ragged, 1.5 * MIN_CLIENTS - 1).how == "loop"
    full_batches = replace(ragged, batch_size=None)
    assert mean_distinct_batch_lengths(full_batches) == 2
    assert make_default_engine(full_batches, full_batches, 1.5 * MIN_CLIENTS).how == "loop"
    padded = replace(ragged, flat=client_training(images(nn.ReLU())).flat)
    assert make_default_engine(padded, padded, MIN_CLIENTS).how == "stacked"


def test_a_process_chooses_by_the_whole_tree(gradients: list[FlatModule]) -> None:
    full_training = client_training(build("mlp", IMAGE, 3))
    part = replace(full_training, clients=full_training.clients.part(0, 3))
    assert chosen(part, 3, "fp32") == "loop"
    gradients.clear()
    engine = make_default_engine(part, full_training, CLIENTS)
    assert engine.name == "stacked" and engine.training is part
    assert len(gradients) == 6, "one profile and one trial"


def run(model: Callable[[], nn.Module] = lambda: build("mlp", IMAGE, 3), **more: object) -> Simulation:
    random = torch.Generator().manual_seed(0)
    data = torch.randn(80, *IMAGE, generator=random), torch.arange(80) % 3
    settings = {"periods": [2, 2], "rounds": 3, "batch": BATCH, **more}
    return simulate(model, data, torch.arange(80).chunk(8), "2x4", **settings)


def test_default_repeats_bits_and_agrees_with_the_loop(capsys: pytest.CaptureFixture[str]) -> None:
    first, second, loop = run(), run(), run(engine="loop")
    assert (first.engine.name, loop.engine.name) == ("stacked", "loop") and first.notes == ()
    models = [simulation.run().models[0] for simulation in (first, second, loop)]
    assert torch.equal(models[0], models[1])
    assert torch.allclose(models[0], models[2], atol=1e-5)
    assert capsys.readouterr().err == ""


def test_a_default_that_falls_back_is_not_reported(capsys: pytest.CaptureFixture[str]) -> None:
    simulation = run(lambda: Deciding(64, 3))
    assert simulation.engine.how == "loop" and simulation.notes == ()
    assert "asked for" not in capsys.readouterr().err
    assert any("asked for" in note for note in run(lambda: Deciding(64, 3), engine="stacked").notes)


def test_default_is_the_loop_for_too_many_samples_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(schedule, "MOST_DRAWN", 2 * 8 * BATCH)
    assert run(periods=[2, 2]).engine.name == "stacked"
    assert run(periods=[2, 3]).engine.name == "loop"


@pytest.mark.parametrize("first", ["loop", "stacked"])
def test_a_run_is_resumed_with_its_first_engine(first: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Even if the default has changed since."""

    def chooses(engine: str) -> None:
        monkeypatch.setattr(factory, "MIN_CLIENTS", MIN_CLIENTS if engine == "stacked" else 1000)

    uninterrupted = run(engine=first).run().models[0]
    chooses(first)
    begun = run()
    begun.save(tmp_path / "run", checkpoint_every=1)
    next(begun)
    chooses("stacked" if first == "loop" else "loop")
    assert run().engine.name != first
    going_on = run()
    going_on.save(tmp_path / "run", checkpoint_every=1)
    assert going_on.engine.name == first and len(going_on.history) == 1
    assert torch.equal(going_on.run().models[0], uninterrupted)
    assert read_run(tmp_path / "run").engine == first
