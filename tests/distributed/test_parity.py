"""A run on two and four ranks, real processes, ends like the same run on one."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.distributed.cases import CASES, IN_TWO_GOES, WITHIN
from tests.distributed.conftest import on_ranks
from tests.distributed.worker import finished

CLOSE = 1e-9
pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("ranks")
    for count in (2, 4):
        on_ranks(count, "-m", "tests.distributed.worker", made)
    return made


@pytest.fixture(scope="module")
def found(folder: Path) -> dict[int, dict[str, Any]]:
    return {count: torch.load(folder / f"found{count}.pt", weights_only=False) for count in (2, 4)}


@pytest.fixture(scope="module")
def alone() -> dict[str, Any]:
    return {}


def run_alone(alone: dict[str, Any], name: str) -> Any:
    if name not in alone:
        alone[name] = finished(CASES[name](None))
    return alone[name]


def differences(one: Any, other: Any, where: str = "", close: float = CLOSE) -> Iterator[str]:
    """Where two states differ: numbers of the machine may in their last digits, everything else
    must not."""
    if isinstance(one, torch.Tensor):
        one, other = one.numpy(), other.numpy()
    if isinstance(one, np.ndarray):
        same = one.shape == other.shape and one.dtype == other.dtype
        if not same or not np.allclose(one, other, rtol=close, atol=close, equal_nan=True):
            yield f"{where}: {one} != {other}"
    elif isinstance(one, dict):
        if list(one) != list(other):
            yield f"{where}: {list(one)} != {list(other)}"
        else:
            # rounds take their time, and a rank's engine chooses how many of its own clients it
            # takes at once
            yield from (
                each
                for key in one
                if key not in ("seconds", "chunk")
                for each in differences(one[key], other[key], f"{where}.{key}", close)
            )
    elif isinstance(one, list | tuple):
        if len(one) != len(other):
            yield f"{where}: {one} != {other}"
        else:
            for number, pair in enumerate(zip(one, other, strict=True)):
                yield from differences(*pair, f"{where}.{number}", close)
    elif isinstance(one, float):
        if not np.isclose(one, other, rtol=close, atol=close, equal_nan=True):
            yield f"{where}: {one} != {other}"
    elif one != other:
        yield f"{where}: {one} != {other}"


@pytest.mark.parametrize("count", [2, 4])
@pytest.mark.parametrize("name", list(CASES))
def test_any_number_of_ranks(found: dict[int, dict[str, Any]], alone: dict[str, Any], name: str, count: int) -> None:
    assert not list(differences(run_alone(alone, name), found[count][name]))


def test_refusals_are_there_to_compare(found: dict[int, dict[str, Any]]) -> None:
    refused = [each["refused"] for each in found[4]["NaN in a client, uneven, depth 3"]["state"]["history"]]
    assert refused == [("1/0/1",) * 4] * 2


def test_huge_clients_are_there_to_compare(found: dict[int, dict[str, Any]]) -> None:
    """Of the large group all but its first client lie on other ranks."""
    history = found[4]["a huge client, one large group"]["state"]["history"]
    assert [each["refused"] for each in history] == [("0/1", "0/4") * 2] * 2
    assert [each["too_large"] for each in history] == [("0/1",) * 2] * 2


@pytest.mark.parametrize("within", ["", WITHIN])
@pytest.mark.parametrize("name", IN_TWO_GOES)
def test_four_ranks_go_on_where_two_stopped(
    found: dict[int, dict[str, Any]], alone: dict[str, Any], name: str, within: str
) -> None:
    assert not list(differences(run_alone(alone, name), found[4][f"{name}{within}, after halves2"]))


@pytest.mark.parametrize("count", [2, 4])
@pytest.mark.parametrize("name", IN_TWO_GOES)
def test_a_round_in_two_goes_has_the_same_bits(found: dict[int, dict[str, Any]], name: str, count: int) -> None:
    assert not list(differences(found[count][name], found[count][f"{name}, in two goes"], close=0.0))


@pytest.mark.parametrize("within", ["", WITHIN])
@pytest.mark.parametrize("count", [2, 4])
@pytest.mark.parametrize("name", IN_TWO_GOES)
def test_one_goes_on_where_several_stopped(
    folder: Path, alone: dict[str, Any], name: str, count: int, within: str
) -> None:
    simulation = CASES[name](None)
    simulation.restore(torch.load(folder / f"halves{count}.pt", weights_only=False)[name + within])
    assert not list(differences(run_alone(alone, name), finished(simulation)))
