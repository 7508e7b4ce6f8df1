"""Every engine trains what plain PyTorch trains: on a zoo of modules, and on modules put together at random."""

from __future__ import annotations

import functools
from collections.abc import Iterator

import pytest
import torch
from hypothesis import HealthCheck, assume, given, settings

from stratafl.engine.choose import Name
from tests.engine.compose import Plan, entries
from tests.engine.plain import Trained, difference, engine, plain, problem
from tests.engine.zoo import ZOO
from tests.engine.zoo.entry import Entry

CLOSE = 1e-10
ENGINES: tuple[Name, ...] = ("loop", "vmap", "stacked")

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


@pytest.mark.parametrize("name", ZOO)
def test_whatever_values_the_module_itself_has(name: str) -> None:
    """Zeros hide nearly every mistake from a look at the module's own gradients."""
    ran = engine("stacked", problem(ZOO[name], zeros=True))
    assert not apart(expected(name), ran.clients), ran.how


@settings(max_examples=40, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
@given(entries())
def test_modules_put_together_at_random(found: tuple[Plan, Entry]) -> None:
    _, entry = found
    try:
        wanted = plain(problem(entry))
    except RuntimeError:
        # it changes in place what its own gradient needs
        assume(False)
    for name in ENGINES:
        ran = engine(name, problem(entry))
        assert not apart(wanted, ran.clients), ran.how
