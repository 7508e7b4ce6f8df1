"""Runs on two and four ranks, as real processes, give the results of one rank."""

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
    folder = tmp_path_factory.mktemp("ranks")
    for count in (2, 4):
        on_ranks(count, "-m", "tests.distributed.worker", folder)
    return folder


@pytest.fixture(scope="module")
def results(folder: Path) -> dict[int, dict[str, Any]]:
    return {count: torch.load(folder / f"found{count}.pt", weights_only=False) for count in (2, 4)}


@pytest.fixture(scope="module")
def alone() -> dict[str, Any]:
    return {}


def run_alone(alone: dict[str, Any], name: str) -> Any:
    if name not in alone:
        alone[name] = finished(CASES[name](None))
    return alone[name]


def differences(one: Any, other: Any, where: str = "", close: float = CLOSE) -> Iterator[str]:
    """Differences between two states; floating-point numbers may differ in their last digits."""
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
            # the time of a round and the chunk of clients that a rank's engine chooses may differ
            yield from (
                difference
                for key in one
                if key not in ("seconds", "chunk")
                for difference in differences(one[key], other[key], f"{where}.{key}", close)
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
def test_states_equal_those_of_one_rank(
    results: dict[int, dict[str, Any]], alone: dict[str, Any], name: str, count: int
) -> None:
    assert not list(differences(run_alone(alone, name), results[count][name]))


def test_cases_include_rejected_clients(results: dict[int, dict[str, Any]]) -> None:
    refused = [record["refused"] for record in results[4]["NaN in a client, uneven, depth 3"]["state"]["history"]]
    assert refused == [("1/0/1",) * 4] * 2


def test_cases_include_updates_that_are_too_large(results: dict[int, dict[str, Any]]) -> None:
    """All clients of the large group but the first are on other ranks."""
    history = results[4]["a huge client, one large group"]["state"]["history"]
    assert [record["refused"] for record in history] == [("0/1", "0/4") * 2] * 2
    assert [record["too_large"] for record in history] == [("0/1",) * 2] * 2


@pytest.mark.parametrize("within", ["", WITHIN])
@pytest.mark.parametrize("name", IN_TWO_GOES)
def test_four_ranks_resume_a_state_of_two(
    results: dict[int, dict[str, Any]], alone: dict[str, Any], name: str, within: str
) -> None:
    assert not list(differences(run_alone(alone, name), results[4][f"{name}{within}, after halves2"]))


@pytest.mark.parametrize("count", [2, 4])
@pytest.mark.parametrize("name", IN_TWO_GOES)
def test_resuming_within_a_round_keeps_the_bits(results: dict[int, dict[str, Any]], name: str, count: int) -> None:
    assert not list(differences(results[count][name], results[count][f"{name}, in two goes"], close=0.0))


@pytest.mark.parametrize("within", ["", WITHIN])
@pytest.mark.parametrize("count", [2, 4])
@pytest.mark.parametrize("name", IN_TWO_GOES)
def test_one_rank_resumes_a_state_of_several(
    folder: Path, alone: dict[str, Any], name: str, count: int, within: str
) -> None:
    simulation = CASES[name](None)
    simulation.restore(torch.load(folder / f"halves{count}.pt", weights_only=False)[name + within])
    assert not list(differences(run_alone(alone, name), finished(simulation)))
