"""The engine of a CPU where none is named: a function of the model and its clients alone."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from stratafl import Simulation, simulate
from stratafl.core import schedule
from stratafl.core.client_training import ClientTraining
from stratafl.core.client_update import Leaf, corrections, leaf
from stratafl.core.flat_module import FlatModule
from stratafl.data.dataset import ClientIndex, InMemorySamples
from stratafl.engine import factory
from stratafl.engine.factory import MIN_CLIENTS, default_engine_name, make_default_engine, mean_distinct_batch_lengths
from stratafl.engine.module_profile import profile_module
from stratafl.engine.precision import Precision
from stratafl.models.registry import build
from stratafl.runs import read_run

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
    "large lstm": (lambda: Sequences(nn.LSTM(5, 256, batch_first=True)), (80, 5), "loop"),
}


def training(
    module: nn.Module, shape: tuple[int, ...] = IMAGE, clients: int = CLIENTS, each: int = 6, chain: Leaf | None = None
) -> ClientTraining:
    random = torch.Generator().manual_seed(0)
    data = torch.randn(clients * each, *shape, generator=random), torch.arange(clients * each) % 3
    module(data[0][:2])  # sizes that are found out
    parts = ClientIndex.from_lists(torch.arange(clients * each).split(each))
    return ClientTraining(
        flat=FlatModule(module),
        loss=F.cross_entropy,
        samples=InMemorySamples(*data),
        clients=parts,
        client_update=chain or leaf(),
        batch_size=BATCH,
        sampling="epochs",
        seed=0,
    )


def chosen(given: ClientTraining, clients: float, precision: Precision) -> str:
    return default_engine_name(given, clients, precision, profile_module(given))


@pytest.mark.parametrize("name", MODELS)
def test_by_the_operations_of_a_model(name: str) -> None:
    make, shape, expected = MODELS[name]
    given = training(make(), shape)
    before = torch.get_rng_state(), given.flat.flatten_module(given.flat.module)
    assert chosen(given, CLIENTS, "fp32") == expected
    assert make_default_engine(given, given, CLIENTS).how == expected
    assert torch.equal(torch.get_rng_state(), before[0])
    for was, now in zip(before[1], given.flat.flatten_module(given.flat.module), strict=True):
        assert torch.equal(was, now), "looking at a module changes nothing"


def test_seven_gradients_before_the_first_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two of the module's profile, one of the checks, four of the trial in float64: three clients
    with full batches, and one of them with a shorter batch."""
    count, gradient = [], FlatModule.gradient

    def counted(self: FlatModule, *args: object, **kwargs: object) -> Tensor:
        count.append(self)
        return gradient(self, *args, **kwargs)  # type: ignore[arg-type]

    monkeypatch.setattr(FlatModule, "gradient", counted)
    assert run().engine.how == "stacked"
    assert len(count) == 7


def test_neither_threads_nor_samples_matter() -> None:
    threads, found = torch.get_num_threads(), set()
    given = training(build("mlp", IMAGE, 3))
    try:
        for count in (1, 2):
            torch.set_num_threads(count)
            found |= {chosen(given, CLIENTS, "fp32")}
        huge = replace(
            given, samples=InMemorySamples(torch.full_like(given.samples.head(60), 1e30), given.samples.targets_N)
        )
        found |= {chosen(huge, CLIENTS, "fp32")}
    finally:
        torch.set_num_threads(threads)
    assert found == {"stacked"}


def own_stage(direction: Tensor, x: Tensor, correct: object) -> Tensor:
    return direction / direction.norm()  # of all rows it is given


def test_what_is_left_to_the_loop() -> None:
    module = build("mlp", IMAGE, 3)
    given = training(module)
    assert chosen(given, MIN_CLIENTS, "fp32") == "stacked"
    assert chosen(given, MIN_CLIENTS - 0.5, "fp32") == "loop", "few take part"
    assert chosen(given, CLIENTS, "bf16") == "loop", "16 bits"
    chain = Leaf(leaf().lr, (corrections, own_stage))
    assert chosen(replace(given, client_update=chain), CLIENTS, "fp32") == "loop", "a stage of one's own"
    first, *others = given.clients
    uneven = ClientIndex.from_lists([first, *(part[:1] for part in others)])
    assert chosen(replace(given, clients=uneven), CLIENTS, "fp32") == "loop", "batches would be padded"
    deciding = training(Deciding(64, 3))
    assert chosen(deciding, CLIENTS, "fp32") == "stacked"
    assert make_default_engine(deciding, deciding, CLIENTS).how == "loop", (
        "what cannot be stacked, without a reason told"
    )


def test_what_cannot_be_padded_needs_enough_clients_of_a_length() -> None:
    given = training(images(nn.BatchNorm2d(8), nn.ReLU()), clients=MIN_CLIENTS * 2, each=8)
    ragged = replace(given, clients=ClientIndex.from_lists([part[: 7 + n % 2] for n, part in enumerate(given.clients)]))
    assert make_default_engine(given, given, 2 * MIN_CLIENTS).how == "stacked"
    assert mean_distinct_batch_lengths(ragged) == 1.5, "all of a pass's first batches are full, half of the second"
    assert make_default_engine(ragged, ragged, 1.5 * MIN_CLIENTS).how == "stacked"
    assert make_default_engine(ragged, ragged, 1.5 * MIN_CLIENTS - 1).how == "loop"
    whole = replace(ragged, batch_size=None)
    assert mean_distinct_batch_lengths(whole) == 2
    assert make_default_engine(whole, whole, 1.5 * MIN_CLIENTS).how == "loop"
    padded = replace(ragged, flat=training(images(nn.ReLU())).flat)
    assert make_default_engine(padded, padded, MIN_CLIENTS).how == "stacked"


def test_a_rank_chooses_by_the_whole_tree() -> None:
    whole = training(build("mlp", IMAGE, 3))
    part = replace(whole, clients=whole.clients.part(0, 3))
    assert chosen(part, 3, "fp32") == "loop"
    engine = make_default_engine(part, whole, CLIENTS)
    assert engine.name == "stacked" and engine.training is part


def run(model: Callable[[], nn.Module] = lambda: build("mlp", IMAGE, 3), **more: object) -> Simulation:
    random = torch.Generator().manual_seed(0)
    data = torch.randn(80, *IMAGE, generator=random), torch.arange(80) % 3
    settings = {"periods": [2, 2], "rounds": 3, "batch": BATCH, **more}
    return simulate(model, data, torch.arange(80).chunk(8), "2x4", **settings)


def test_the_same_bits_twice_and_the_loop_s_up_to_rounding(capsys: pytest.CaptureFixture[str]) -> None:
    first, second, loop = run(), run(), run(engine="loop")
    assert (first.engine.name, loop.engine.name) == ("stacked", "loop") and first.notes == ()
    models = [each.run().models[0] for each in (first, second, loop)]
    assert torch.equal(models[0], models[1])
    assert torch.allclose(models[0], models[2], atol=1e-5)
    assert capsys.readouterr().err == ""


def test_nobody_is_told_of_an_engine_that_nobody_asked_for(capsys: pytest.CaptureFixture[str]) -> None:
    simulation = run(lambda: Deciding(64, 3))
    assert simulation.engine.how == "loop" and simulation.notes == ()
    assert "asked for" not in capsys.readouterr().err
    assert any("asked for" in note for note in run(lambda: Deciding(64, 3), engine="stacked").notes)


def test_more_samples_than_can_be_drawn_at_once_are_the_loop_s(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(schedule, "MOST_DRAWN", 2 * 8 * BATCH)
    assert run(periods=[2, 2]).engine.name == "stacked"
    assert run(periods=[2, 3]).engine.name == "loop"


@pytest.mark.parametrize("first", ["loop", "stacked"])
def test_a_run_goes_on_with_the_engine_it_began_with(
    first: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where another version would begin it with another one."""

    def chooses(engine: str) -> None:
        monkeypatch.setattr(factory, "MIN_CLIENTS", MIN_CLIENTS if engine == "stacked" else 1000)

    whole = run(engine=first).run().models[0]
    chooses(first)
    begun = run()
    begun.save(tmp_path / "run", checkpoint_every=1)
    next(begun)
    chooses("stacked" if first == "loop" else "loop")
    assert run().engine.name != first
    going_on = run()
    going_on.save(tmp_path / "run", checkpoint_every=1)
    assert going_on.engine.name == first and len(going_on.history) == 1
    assert torch.equal(going_on.run().models[0], whole)
    assert read_run(tmp_path / "run").engine == first
