"""Bounds of numbers, arrays on a device, rows of a checkpoint, and signals."""

from __future__ import annotations

import signal

import numpy as np
import pytest
import torch

from stratafl.base import errors
from stratafl.base.device import DeviceCache
from stratafl.base.errors import InvalidInput
from stratafl.base.signals import InterruptHandler
from stratafl.base.state_dict import to_json_and_tensors
from stratafl.base.validation import check_number


def test_a_cache_keeps_each_type_of_an_array_apart() -> None:
    cache, values = DeviceCache(torch.device("cpu")), np.array([1.0, 2.0])
    single = cache("a", values, torch.float32)
    assert single.dtype == torch.float32 and cache("a", values, torch.float64).dtype == torch.float64
    assert cache("a", values.copy(), torch.float32) is single
    assert cache("a", values + 1, torch.float32).tolist() == [2.0, 3.0]


def test_a_number_that_is_right_is_not_written_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(errors, "format_value")
    assert check_number("lr", 0.1, above=0, at_most=1) == 0.1
    with pytest.raises(NameError):
        check_number("lr", 2, above=0, at_most=1)


@pytest.mark.parametrize("value", [0, 10**400, float("nan"), float("inf"), True, "1", 1.5])
def test_a_number_out_of_bounds_is_refused(value: object) -> None:
    with pytest.raises(InvalidInput, match=r"must be a finite number above 0 and at most 1$"):
        check_number("lr", value, above=0, at_most=1)


@pytest.mark.parametrize("at_once", [1, 7, 1 << 26])
def test_rows_of_the_same_bits_are_stored_once(at_once: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("stratafl.base.state_dict.AT_ONCE", at_once)
    row = torch.tensor([1.0, float("nan"), -0.0])
    for rows in (row.expand(5, 3), row.repeat(5, 1)):
        stored, tensors = to_json_and_tensors({"x": rows})
        assert stored == {"x": ["tensor", "x", 5]} and tensors["x"].shape == (1, 3)
    assert to_json_and_tensors({"x": torch.empty(5, 0)})[0] == {"x": ["tensor", "x", 5]}
    for place in range(5):
        rows = row.repeat(5, 1)
        rows[place, 2] = 0.0  # equal as a number
        assert to_json_and_tensors({"x": rows})[0] == {"x": ["tensor", "x", 0]}


def test_a_handler_that_is_not_pythons_is_left_in_place(monkeypatch: pytest.MonkeyPatch) -> None:
    before = signal.getsignal(signal.SIGTERM)
    monkeypatch.setattr(signal, "getsignal", lambda number: None)  # as for one of a program around Python
    with InterruptHandler():
        assert signal.signal(signal.SIGTERM, before) is before
