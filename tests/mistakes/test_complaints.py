"""A complaint is one short printable line, whatever it complains of."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from stratafl import InvalidInput
from stratafl.base.errors import reason, shown, unknown
from tests.mistakes.studies import deep, parts, study


def test_a_long_value_is_cut_short() -> None:
    with pytest.raises(InvalidInput) as caught:
        study(partition=parts(list(np.arange(500) / 2)))
    assert len(str(caught.value)) < 160
    assert "..." in str(caught.value)


ODD = {
    "a huge number": 10**5000,
    "a list of them": [10**5000] * 50,
    "depth": deep(10_000),
    "text": "long " * 1_000,
    "codes of a terminal": "\x1b[31m" * 100,
    "lines": "first\nsecond\r\nthird\u2028fourth",
    "half a letter": "\ud800",
    "a tensor": torch.zeros(300, 300),
    "an array": np.array([10**5000, "a"], dtype=object),
    "a table": {"k" * 500: {"b": [1] * 1_000}},
    "a path": Path("/" + "deep/" * 100 + "end.toml"),
}


@pytest.mark.parametrize("odd", ODD.values(), ids=ODD.keys())
def test_a_complaint_is_one_short_printable_line(odd: object) -> None:
    """Wherever the odd value stands in it."""
    words = odd if isinstance(odd, str) else "words"
    for message in (
        str(InvalidInput("field", odd, "allowed")),
        str(InvalidInput(f"field {words}", 1, f"allowed {words}")),
        str(unknown("field", odd, ["known", *[words] * 100])),
    ):
        assert message.isprintable()
        assert len(message) <= 620
    assert len(shown(odd)) <= 200


def test_of_a_long_path_the_end_is_shown() -> None:
    assert shown(ODD["a path"]).endswith("deep/end.toml'")


def test_what_an_exception_says_is_one_short_printable_line() -> None:
    class Mute(Exception):
        def __str__(self) -> str:
            raise ValueError

    assert reason(ValueError("first\nsecond")) == "ValueError: first"
    assert reason(ValueError("\x1b[31m")) == "ValueError: \\x1b[31m"
    assert reason(ValueError()) == "ValueError"
    assert reason(Mute()) == "Mute"
    assert len(reason(ValueError("a" * 10_000))) < 220


def test_where_nothing_is_known_a_complaint_says_so() -> None:
    assert str(unknown("model key", "hiden", [])) == "model key = 'hiden': unknown; known: none at all"
