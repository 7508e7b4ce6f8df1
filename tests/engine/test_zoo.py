"""Every engine trains what plain PyTorch trains: on a zoo of modules, and on modules put together
at random."""

from __future__ import annotations

import functools
from collections.abc import Iterator

import pytest
import torch
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

from stratafl.engine.choose import Name
from tests.engine.compose import Plan, entries
from tests.engine.plain import Trained, difference, engine, plain, problem
from tests.engine.zoo import ZOO
from tests.engine.zoo.entry import Entry

CLOSE = 1e-10
ENGINES: tuple[Name, ...] = ("loop", "vmap", "stacked")
STACKED = {
    "linear", "perceptron", "no bias", "linear on many places", "embedding", "convolution, plain",
    "convolution, with stride and padding", "convolution, grouped", "convolution, depthwise separable",
    "convolution, ReLU, halved", "image, max", "image, adaptive mean", "norm, group", "norm, layer",
    "activation GELU", "activation softmax", "in place, ReLU", "our logistic regression", "our perceptron",
    "our LSTM", "residual with group norm", "densely connected", "inception", "regression", "siamese",
    "frozen first layer", "tied weights", "embedding tied to the output", "convolution used in a loop",
    "scale and shift", "head of zeros", "layer that is never called", "lists of parts", "loss smoothed",
    "loss with ignored labels",
}  # fmt: skip
"""Those that must not be left to a slower way."""

# torch's own word on a kernel of even length
pytestmark = pytest.mark.filterwarnings("ignore:Using padding='same' with even kernel lengths")


@pytest.fixture(autouse=True, scope="module")
def poisoned() -> Iterator[None]:
    """Memory that nobody has written to holds NaN."""
    before = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(before)


def test_memory_is_poisoned() -> None:
    assert torch.ones(3).new_empty(1000).isnan().all()


def test_what_must_be_stacked_is_in_the_zoo() -> None:
    assert ZOO.keys() >= STACKED


def apart(expected: list[Trained], got: list[Trained]) -> dict[str, float]:
    return {what: by for what, by in difference(expected, got).items() if not by < CLOSE}


@functools.cache
def expected(name: str) -> list[Trained]:
    return plain(problem(ZOO[name]))


@pytest.mark.parametrize("name", ZOO)
@pytest.mark.parametrize("engine_name", ENGINES)
def test_every_engine_trains_what_plain_pytorch_trains(engine_name: Name, name: str) -> None:
    ran = engine(engine_name, problem(ZOO[name]))
    assert not apart(expected(name), ran.clients), ran.how
    if engine_name == "stacked" and name in STACKED:
        assert ran.how == "stacked"


@pytest.mark.slow
@pytest.mark.parametrize("name", ZOO)
def test_whatever_values_the_module_itself_has(name: str) -> None:
    """Zeros hide nearly every mistake from a look at the module's own gradients."""
    ran = engine("stacked", problem(ZOO[name], zeros=True))
    assert not apart(expected(name), ran.clients), ran.how


@settings(max_examples=40, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
@given(entries(), st.booleans())
def test_modules_put_together_at_random(found: tuple[Plan, Entry], zeros: bool) -> None:
    _, entry = found
    try:
        wanted = plain(problem(entry))
    except RuntimeError:
        # it changes in place what its own gradient needs
        assume(False)
    for name in ENGINES:
        ran = engine(name, problem(entry, zeros=zeros))
        assert not apart(wanted, ran.clients), ran.how
