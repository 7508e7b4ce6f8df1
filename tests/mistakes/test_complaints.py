"""Error messages are one short printable line, whatever value they show."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from stratafl import InvalidInput
from stratafl.base.errors import describe_exception, format_value, unknown_name
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
    """The odd value may be in any part of the message."""
    words = odd if isinstance(odd, str) else "words"
    for message in (
        str(InvalidInput("field", odd, "allowed")),
        str(InvalidInput(f"field {words}", 1, f"allowed {words}")),
        str(unknown_name("field", odd, ["known", *[words] * 100])),
    ):
        assert message.isprintable()
        assert len(message) <= 620
    assert len(format_value(odd)) <= 200


def test_of_a_long_path_the_end_is_shown() -> None:
    assert format_value(ODD["a path"]).endswith("deep/end.toml'")


def test_what_an_exception_says_is_one_short_printable_line() -> None:
    class Mute(Exception):
        def __str__(self) -> str:
            raise ValueError

    assert describe_exception(ValueError("first\nsecond")) == "ValueError: first"
    assert describe_exception(ValueError("\x1b[31m")) == "ValueError: \\x1b[31m"
    assert describe_exception(ValueError()) == "ValueError"
    assert describe_exception(Mute()) == "Mute"
    assert len(describe_exception(ValueError("a" * 10_000))) < 220


def test_where_nothing_is_known_a_complaint_says_so() -> None:
    assert str(unknown_name("model key", "hiden", [])) == "model key = 'hiden': unknown; there are none"
