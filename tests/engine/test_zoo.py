"""Every engine trains what plain PyTorch trains, on a zoo of modules and on modules put together at random."""

from __future__ import annotations

import functools

import pytest

from stratafl.engine.choose import Name
from tests.engine.plain import Trained, difference, engine, plain, problem
from tests.engine.zoo import ZOO

CLOSE = 1e-10


@functools.cache
def expected(name: str) -> list[Trained]:
    return plain(problem(ZOO[name]))


@pytest.mark.parametrize("name", ZOO)
@pytest.mark.parametrize("engine_name", ["loop", "vmap", "stacked"])
def test_every_engine_trains_what_plain_pytorch_trains(engine_name: Name, name: str) -> None:
    ran = engine(engine_name, problem(ZOO[name]))
    off = {what: by for what, by in difference(expected(name), ran.clients).items() if not by < CLOSE}
    assert not off, f"as {ran.how!r}"
