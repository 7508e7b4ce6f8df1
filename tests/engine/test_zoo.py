"""Engines against plain PyTorch, on a zoo of modules and on modules put together at random."""

from __future__ import annotations

import functools
from collections.abc import Iterator

import pytest
import torch
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

from stratafl.engine.factory import EngineName
from tests.engine.compose import Plan, entries
from tests.engine.plain import Trained, difference, engine, plain, problem
from tests.engine.zoo import ZOO
from tests.engine.zoo.entry import Entry
from tests.engine.zoo.families import ZOO as FAMILIES
from tests.engine.zoo.library import ZOO as LIBRARY
from tests.slow import slow, slow_unless

CLOSE = 1e-10
ENGINES: tuple[EngineName, ...] = ("loop", "vmap", "stacked")
BY_VALUES = "loop: what it does depends on values"
OTHERWISE = {
    # one operation has no rule
    "embedding bag with a padding code": "stacked: embedding_bag mapped over the clients",
    "spectra of a series": "stacked: stft mapped over the clients",
    "product of two inputs": "stacked: bilinear mapped over the clients",
    "a gradient of its own": "stacked: Reversed mapped over the clients",
    "gradients turned round for a second head": "stacked: Reversed mapped over the clients",
    # not visible in a captured graph
    "hooks on an output": "vmap: stacked does not give the module's own gradient",
    "gradient of its own output": "loop: stacked",
    **dict.fromkeys(
        ("recomputed with batch norm", "DenseNet, recomputed"), "loop: stacked does not give the module's own gradient"
    ),
    "hooks backward": "loop: hooks on the gradients",
    "hooks on a parameter": "loop: hooks on the parameters' gradients",
    # decisions by values
    **dict.fromkeys(
        (
            "norm, batch, cumulative", "experts that see their own samples", "decided by a value",
            "decided by a weight", "as often as the data say", "early exit", "stochastic depth",
        ),
        BY_VALUES,
    ),
    "packed sequences": "loop: cannot be recorded",
    # the forward pass changes tensors that clients share
    **dict.fromkeys(
        ("embedding of bounded norm", "weight bounded in the forward pass", "weight normalised through its data"),
        "loop: training changes the module's weights",
    ),
    "buffer that counts": "loop: step, which training changes and which is in no row",
}  # fmt: skip
"""Beginning of `how` for the modules that are not wholly stacked."""

TAKING_LONG = LIBRARY.entries.keys() | {
    *(name for name in FAMILIES.entries if "dropping" not in name),
    "encoder and decoder", "decoder with masks", "encoder", "encoder with a padding mask", "vision transformer",
    "recurrent LSTM, both ways, two layers", "recurrent RNN, both ways, two layers", "recurrent with dropout",
}  # fmt: skip
"""Published models of a library, and stacks of layers: other entries have each of their layers."""

# torch's own word on a kernel of even length
pytestmark = pytest.mark.filterwarnings("ignore:Using padding='same' with even kernel lengths")


@pytest.fixture(autouse=True, scope="module")
def poisoned() -> Iterator[None]:
    """Memory that nobody has written to holds NaN."""
    before = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(before)


def test_unwritten_memory_holds_nan() -> None:
    assert torch.ones(3).new_empty(1000).isnan().all()


def test_few_modules_are_not_stacked() -> None:
    assert ZOO.keys() >= OTHERWISE.keys()
    assert len(OTHERWISE) < len(ZOO) / 10


def apart(expected: list[Trained], got: list[Trained]) -> dict[str, float]:
    return {what: by for what, by in difference(expected, got).items() if not by < CLOSE}


@functools.cache
def expected(name: str) -> list[Trained]:
    return plain(problem(ZOO[name]))


@pytest.mark.parametrize("name", slow_unless(lambda name: name not in TAKING_LONG, ZOO))
@pytest.mark.parametrize("engine_name", slow_unless(lambda name: name == "stacked", ENGINES))
def test_every_engine_trains_what_plain_pytorch_trains(name: str, engine_name: EngineName) -> None:
    ran = engine(engine_name, problem(ZOO[name]))
    assert not apart(expected(name), ran.clients), ran.how
    if engine_name == "stacked":
        how = OTHERWISE.get(name, "stacked")
        assert ran.how.startswith(how) and (ran.how == how or not how.startswith("stacked")), ran.how


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in FAMILIES.entries if "dropping" in name])
def test_the_same_bits_twice_and_in_other_chunks(name: str) -> None:
    one, again, together = (engine("stacked", problem(ZOO[name]), chunk=chunk).clients for chunk in (2, 2, 3))
    assert not any(difference(one, again).values()) and not any(difference(one, together).values())


@pytest.mark.slow
@pytest.mark.parametrize("name", ZOO)
def test_zero_parameters_hide_no_error_from_the_trial(name: str) -> None:
    """Zeros hide nearly every mistake from a look at the module's own gradients."""
    ran = engine("stacked", problem(ZOO[name], zeros=True))
    assert not apart(expected(name), ran.clients), ran.how


@pytest.mark.parametrize("examples", [6, slow(40)])
def test_random_compositions_of_modules(examples: int) -> None:
    options = settings(max_examples=examples, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
    options(given(entries(), st.booleans())(check_agreement))()


def check_agreement(example: tuple[Plan, Entry], zeros: bool) -> None:
    _, entry = example
    try:
        right = plain(problem(entry))
    except RuntimeError:
        # the module overwrites tensors that its gradient needs
        assume(False)
    for name in ENGINES:
        ran = engine(name, problem(entry, zeros=zeros))
        assert not apart(right, ran.clients), ran.how
